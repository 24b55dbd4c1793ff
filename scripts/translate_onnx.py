"""Translates standard input, line by line and greedily, with what `export --to onnx` wrote; torch isn't needed.

pip install numpy onnxruntime tokenizers sentencepiece
python translate_onnx.py FOLDER < source.txt > target.txt
"""

import json
import sys
from io import TextIOWrapper
from pathlib import Path

import numpy as np
from onnxruntime import InferenceSession
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer

UNUSED = "_from_model_config bos_token_id compute_type pad_token_id transformers_version use_cache "  # in greedy search
UNUSED += "coverage_penalty early_stopping gnmt_length_penalty length_penalty num_beams renormalize_logits"

folder = Path(sys.argv[1])
settings, config = (json.loads((folder / name).read_text()) for name in ("generation_config.json", "config.json"))
settings = {name: value for name, value in settings.items() if value is not None and name not in UNUSED.split()}
token, end = settings.pop("decoder_start_token_id"), settings.pop("eos_token_id")
barred, forced = settings.pop("bad_words_ids", []), settings.pop("forced_eos_token_id", None)
limit, most, extra = (settings.pop(name, None) for name in ("max_new_tokens", "max_length", "max_extra_length"))
barred = [words for words in barred if words not in [[int(one)] for one in np.atleast_1d(end)]]  # no end is barred
if settings or any(len(words) > 1 for words in barred) or not (limit or most or extra is not None):
    sys.exit(f"generation_config.json has no limit of the length, or what isn't known here: {[*settings]}, {barred}")
if (folder / "source.spm").is_file():  # a converted OPUS-MT model
    spm, target = SentencePieceProcessor(str(folder / "source.spm")), folder / "target_vocab.json"
    numbers = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    targets = json.loads(target.read_text(encoding="utf-8")) if target.is_file() else numbers
    spelled = {number: name for name, number in targets.items() if name not in ("</s>", "<unk>", "<pad>")}
    if any(name.startswith(">>") and name.endswith("<<") for name in numbers):
        sys.exit("the model has several target languages, whose codes can't be read here")
elif (folder / "tokenizer.json").is_file():
    spm, tokenizer = None, Tokenizer.from_file(str(folder / "tokenizer.json"))  # type: ignore[assignment]
    tokenizer.encode_special_tokens = True  # "</s>" in a text is plain text
else:
    sys.exit(f"{folder} has neither tokenizer.json nor source.spm, without which texts can't be read here")
encoder, decoder = (InferenceSession(folder / f"{name}.onnx") for name in ("encoder_model", "decoder_model_merged"))
names = [output.name for output in decoder.get_outputs()]
sizes = {one.name: one.shape for one in decoder.get_inputs() if one.name.startswith("past_key_values")}
# Unread at the first step: (1, heads, 1, d_k) each.
empty = {name: np.zeros([one if isinstance(one, int) else 1 for one in shape], "f4") for name, shape in sizes.items()}

for line in (line.rstrip("\n") for line in TextIOWrapper(sys.stdin.buffer, "utf-8-sig")):
    pieces = [*spm.encode(line, out_type=str), "</s>"] if spm else []
    source = np.array([[numbers.get(one, numbers["<unk>"]) for one in pieces] or tokenizer.encode(line).ids])
    mask, ids = np.ones_like(source), [token]
    memory, past = encoder.run(None, {"input_ids": source, "attention_mask": mask})[0], empty
    longest = limit or (source.size + extra if extra is not None and most in (None, 20) else most - 1)
    if config["position_encoding"] == "learned":
        longest = min(longest, config["max_position_embeddings"] - 1)
    while line.strip() and len(ids) <= longest and ids[-1] not in np.atleast_1d(end):
        inputs = {"encoder_hidden_states": memory, "encoder_attention_mask": mask, "input_ids": np.array([ids[-1:]])}
        inputs["use_cache_branch"] = np.array([len(ids) > 1])
        output = dict(zip(names, decoder.run(names, inputs | past), strict=True))
        past = {name.replace("present", "past_key_values"): output[name] for name in names[1:]}
        output["logits"][..., [words[0] for words in barred]] = -np.inf
        ids.append(int(output["logits"][0, -1].argmax()) if forced is None or len(ids) < longest else forced)
    text = "".join(spelled.get(n, "") for n in ids[1:]).replace("▁", " ").strip() if spm else tokenizer.decode(ids[1:])
    print(text, flush=True)
