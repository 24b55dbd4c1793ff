"""Conversion of other systems' models, and export to other formats; each system has a file with a table of names."""

# The systems that `convert` opens: the module with `load`, and what is said of them.
SYSTEMS = {
    "marian": ("marian", "Marian as in transformers, such as Helsinki-NLP/opus-mt-en-de"),
    "marian-npz": ("marian_npz", "Marian's own model.npz, with --vocab"),
    "fairseq": ("fairseq", "fairseq's transformer, a checkpoint or its folder"),
    "opennmt": ("opennmt", "OpenNMT-py 3, a .pt file"),
    "eole": ("eole", "Eole, a folder with config.json and vocab.json"),
    "joeynmt": ("joeynmt", "JoeyNMT, a folder with config.yaml and best.ckpt"),
    "ctranslate2": ("ctranslate2_folder", "a folder in CTranslate2's format, or an Argos package (.argosmodel)"),
    "mapping": ("state_dict", "a state dict of any encoder-decoder in PyTorch, by --mapping"),
}
ON_HUB = ("marian", "ctranslate2")  # systems whose models have names there
# The formats of `export`, each a module with `write_FORMAT`, and what is said of them.
FORMATS = {
    "ctranslate2": "CTranslate2's engine",
    "onnx": "ONNX graphs for onnxruntime",
    "stock": "a class of transformers' own, which opens without this package",
    "transformers_js": "stock's, with graphs for the browser",
}
STOCK = ("stock", "transformers_js")
# Types of weights that "ctranslate2" has.
QUANTIZATIONS = ("int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16", "float32")
