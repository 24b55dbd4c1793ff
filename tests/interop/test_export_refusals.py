"""What `export` refuses: models and tokenizers that a format almost has, in one table, and what is said of each."""

import pytest
import torch
from torch import nn
from unlike import PRE, UNSHARED, small_model

from hf_vanilla_transformer import DictionaryTokenizer, Translator, VanillaTransformerTokenizerFast
from hf_vanilla_transformer.data.symbols import train_tokenizer
from hf_vanilla_transformer.errors import CheckpointError
from hf_vanilla_transformer.interop import FORMATS
from hf_vanilla_transformer.interop.export import export, writer_of

PAIRS = [{"source": "a b", "target": "x"}]


class Int8Tensor(torch.Tensor):
    """A class of its own for a parameter, as torchao's and quanto's."""


# ---- Changes of a model: each returns the changed one ----
def own_class(model):
    linear = model.model.encoder.layers[0].self_attn.q_proj
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Int8Tensor))
    return model


def dynamic(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def torchao(model):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao isn't installed")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def quanto(model):
    library = pytest.importorskip("optimum.quanto", reason="optimum-quanto isn't installed")
    library.quantize(model, weights=library.qint8)
    library.freeze(model)
    return model


def adapted(model):
    peft = pytest.importorskip("peft", reason="peft isn't installed")
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False), model)
    return model


def hooked(model):
    model.model.decoder.layers[1].register_forward_hook(lambda module, args, output: output)
    return model


def edited(model):
    return type("Edited", (type(model),), {})(model.config)


def without_a_start(model):
    model.generation_config.decoder_start_token_id = None
    return model


def large(model):
    model.num_parameters = lambda: 400_000_000
    return model


QUANTIZED = r"its weights are quantized \({}\); export the model as it was before"
ADAPTED, HOOKED = r"Linear is not .*; merge adapters", "DecoderLayer has hooks"
ODD = {"d_model": 15, "encoder_attention_heads": 1, "decoder_attention_heads": 1}
MODELS = [  # format, fields of the configuration or a change, message
    *((to, own_class, QUANTIZED.format("Int8Tensor")) for to in FORMATS),
    ("stock", dynamic, QUANTIZED.format("Linear, LinearPackedParams")),
    ("stock", torchao, QUANTIZED.format("Int8Tensor")),
    ("stock", quanto, QUANTIZED.format("QLinear, WeightQBytesTensor")),
    *((to, adapted, ADAPTED) for to in ("ctranslate2", "stock")),
    *((to, hooked, HOOKED) for to in ("ctranslate2", "stock")),
    ("ctranslate2", edited, "the model can't be exported: Edited is not VanillaTransformerForCond"),
    ("ctranslate2", without_a_start, "decoder_start_token_id is None in the generation config"),
    ("ctranslate2", nn.Module.double, "CTranslate2 has no float64: save the model in float32 first"),
    ("ctranslate2", {"activation_function": "mish"}, "CTranslate2 has no activation_function 'mish'; it has relu, ge"),
    ("ctranslate2", {"head_dim": 5, "value_head_dim": 7}, "one width for queries, keys and values; here it is 5 and 7"),
    ("ctranslate2", {"head_dim": 12}, "one width for queries, keys and values; here it is 12 and 6"),  # in the decoder
    ("stock", {"position_encoding": "learned"}, "no class of .* has norm_position 'post' without final norms and"),
    ("stock", {"norm_position": "pre"}, "norm_position 'pre' without final norms"),
    ("stock", {"final_layer_norm": True}, "norm_position 'post' with final norms"),
    ("stock", {"head_dim": 4}, "MarianMTModel has no place for head_dim or value_head_dim other than d_model / heads"),
    ("stock", {**PRE, "position_encoding": "fairseq", "output_bias": True}, "M2M100.* has no place for output_bias"),
    ("stock", {**PRE, **UNSHARED}, "Pegasus.* share_encoder_decoder_embeddings false"),
    ("stock", {"position_encoding": "fairseq", "decoder_start_token_id": 0}, "FSMT.* a decoder that starts with padd"),
    ("stock", ODD, "an odd d_model"),
    ("stock", {"layer_norm_eps": 1e-2}, r"differ by .*, as layer_norm_eps is 0\.01 and a MarianMTModel's 1e-05"),
    ("transformers_js", {"position_encoding": "fairseq"}, "transformers.js has no FSMT"),
    ("transformers_js", large, "its weights have more than 1,500,000,000 bytes"),
    ("torch", {}, "there is no format 'torch'; give one of ctranslate2, onnx, stock, transform"),
]


def assert_refused(to, model, tokenizer, message, folder):
    """It is named, and nothing is written."""
    try:
        writer_of(to)
    except ImportError as error:
        pytest.skip(f"{error.name} isn't installed")
    except ValueError:  # there is no such format
        pass
    with pytest.raises(ValueError, match=message):
        export(model, folder / "out", to=to, tokenizer=tokenizer)
    assert not any(folder.iterdir())


@pytest.mark.parametrize(("to", "change", "message"), MODELS, ids=[f"{to}: {said}" for to, _, said in MODELS])
def test_models(to, change, message, tmp_path):
    tokenizer = train_tokenizer(PAIRS, ["bytes"])
    fields = change if isinstance(change, dict) else {}
    model = small_model(len(tokenizer), **fields)
    assert_refused(to, model if fields == change else change(model), tokenizer, message, tmp_path)


def tagged():
    tokenizer = VanillaTransformerTokenizerFast.train_from_iterator(["a b"], vocab_size=300, show_progress=False)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<2de>"]})
    return tokenizer


def words():
    tokens, names = ["<s>", "<pad>", "</s>", "<unk>", "a"], ("bos_token", "pad_token", "eos_token", "unk_token")
    content = {side: {"tokens": tokens, "level": "word"} for side in ("source", "target")}
    return DictionaryTokenizer(segmentation=content, **dict(zip(names, tokens, strict=False)))


TOKENIZERS = {
    "two kinds": ("stock", lambda: train_tokenizer(PAIRS, ["characters", "words"])),
    "dictionaries": ("stock", words),
    "graphemes": ("transformers_js", lambda: train_tokenizer(PAIRS, ["graphemes"])),
    "added tokens": ("transformers_js", tagged),
    "features": (
        "transformers_js",
        lambda: train_tokenizer([{"source": "a\tV;PST", "target": "b"}], ["words", "words"], features=True),
    ),
}
SAID = {
    "stock": "its tokenizer, {}, is code of this package",
    "transformers_js": "transformers.js would have other ids than its tokenizer, {}:",
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers(kind, tmp_path):
    to, make = TOKENIZERS[kind]
    tokenizer = make()
    model = small_model(len(tokenizer))
    assert_refused(to, model, tokenizer, SAID[to].format(type(tokenizer).__name__), tmp_path)


def test_a_translator_that_converts_refuses_quantized_models():
    pytest.importorskip("ctranslate2")
    tokenizer = train_tokenizer(PAIRS, ["bytes"])
    with pytest.raises(CheckpointError, match="its weights are quantized"):
        Translator(own_class(small_model(len(tokenizer))), tokenizer=tokenizer, backend="ctranslate2")
