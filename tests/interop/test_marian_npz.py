"""Marian's .npz files beside plain formulas in float64, and Marian itself."""

import json
import random
import re
import shutil
import subprocess

import numpy as np
import pytest
import sentencepiece
import torch
import torch.nn.functional as F
import yaml
from plain_reference import Reference

from hf_vanilla_transformer import Translator, cli
from hf_vanilla_transformer.interop import marian_npz
from hf_vanilla_transformer.interop.convert import recognise
from hf_vanilla_transformer.interop.interface import ConversionError, ConversionOptions
from hf_vanilla_transformer.translation.scoring import score_pairs

DIM, INNER, HEADS, WORDS = 8, 12, 2, ["</s>", "<unk>", "a", "b", '"', "no", "1.0", "d"]
LAYERS = {"encoder": 2, "decoder": 1}
OPTIONS = {
    "type": "transformer", "enc-depth": 2, "dec-depth": 1, "dim-emb": DIM, "transformer-heads": HEADS,
    "transformer-dim-ffn": INNER, "transformer-ffn-activation": "swish", "transformer-preprocess": "",
    "transformer-postprocess": "dan", "transformer-postprocess-top": "", "transformer-dropout": 0.1,
}  # fmt: skip
PRE = {"transformer-preprocess": "n", "transformer-postprocess": "da", "transformer-postprocess-top": "n"}
TYINGS = {
    "all": ["Wemb"],
    "src": ["Wemb", "decoder_ff_logit_out_Wt"],
    "target": ["encoder_Wemb", "decoder_Wemb"],
    "none": ["encoder_Wemb", "decoder_Wemb", "decoder_ff_logit_out_Wt"],
    "old": ["encoder_Wemb", "decoder_Wemb", "decoder_ff_logit_out_W"],
}


def arrays(tying: str = "all", bias: bool = True, **options) -> dict[str, np.ndarray]:
    """Random weights by Marian's names and shapes."""
    draw, found = np.random.default_rng(1), {}
    suffix = "_pre" if options.get("transformer-preprocess") == "n" else ""

    def put(name: str, *shape: int, mean: float = 0.0) -> None:
        found[name] = (mean + 0.5 * draw.standard_normal(shape)).astype(np.float32)

    def norm(name: str, suffix: str) -> None:
        put(f"{name}_scale{suffix}", 1, DIM, mean=1.0)
        put(f"{name}_bias{suffix}", 1, DIM)

    for stack, number in LAYERS.items():
        for layer in (f"{stack}_l{n}" for n in range(1, number + 1)):
            for part in ("self", "context")[: 1 + (stack == "decoder")]:
                for letter in "qkvo":
                    put(f"{layer}_{part}_W{letter}", DIM, DIM)
                    put(f"{layer}_{part}_b{letter}", 1, DIM)
                norm(f"{layer}_{part}_Wo_ln", suffix)
            put(f"{layer}_ffn_W1", DIM, INNER)
            put(f"{layer}_ffn_b1", 1, INNER)
            put(f"{layer}_ffn_W2", INNER, DIM)
            put(f"{layer}_ffn_b2", 1, DIM)
            norm(f"{layer}_ffn_ffn_ln", suffix)
        if suffix:
            norm(f"{stack}_top_ln", "")
    for name in TYINGS[tying]:
        put(name, *((DIM, len(WORDS)) if name.endswith("_W") else (len(WORDS), DIM)))
    if bias:
        put("decoder_ff_logit_out_b", 1, len(WORDS))
    ties = {f"tied-embeddings{end}": tying == kind for end, kind in (("-all", "all"), ("-src", "src"), ("", "target"))}
    text = yaml.safe_dump({**OPTIONS, "dim-vocabs": [len(WORDS)] * 2, **ties, **options}).encode() + b"\0"
    text += b"\0" * (-len(text) % 256)
    return found | {"special:model.yml": np.frombuffer(text, dtype=np.int8)}


ROLES = {
    "source": "source", "target": "target", "output": "output", "encoder": "encoder.{}", "decoder": "decoder.{}",
    "own": ("self", "self"), "cross": "context", "attention": "qkvo", "feed_forward": ("ffn.1", "ffn.2"),
    "encoder_norms": ("self_Wo_ln", "ffn_ffn_ln"), "decoder_norms": ("self_Wo_ln", "context_Wo_ln", "ffn_ffn_ln"),
    "last": "{}.top_ln",
}  # fmt: skip


def as_modules(name: str) -> str:
    """What a parameter is called in `ROLES`."""
    kinds = {"W": "weight", "scale": "weight", "b": "bias", "bias": "bias"}
    name = re.sub(r"_l(\d)", lambda found: f".{int(found[1]) - 1}", name)
    name = re.sub(r"_(self|context|ffn)_([Wb])(.)$", lambda found: f".{found[1]}.{found[3]}.{kinds[found[2]]}", name)
    ends = r"_(self_Wo|context_Wo|ffn_ffn|top)_ln_(scale|bias)(_pre)?$"
    return re.sub(ends, lambda found: f".{found[1]}_ln.{kinds[found[2]]}", name)


def score(weights: dict[str, np.ndarray], options: dict, source: list[int], target: list[int]) -> float:
    """A log-probability in float64; sources and targets are ids with their end, and it begins with zeros."""
    tensors = {name: torch.tensor(one).double() for name, one in weights.items() if ":" not in name}
    words = {side: tensors.get("Wemb", tensors.get(f"{side}_Wemb")) for side in LAYERS}
    found = {as_modules(name): one[0] if len(one) == 1 else one.mT for name, one in tensors.items()}
    output = tensors.get("decoder_ff_logit_out_Wt", tensors.get("decoder_ff_logit_out_W", words["decoder"].mT).mT)
    found |= {"source.weight": words["encoder"], "target.weight": F.pad(words["decoder"], (0, 0, 0, 1))}
    found |= {"output.weight": output, "output.bias": tensors.get("decoder_ff_logit_out_b", torch.zeros(1))[0]}
    options = {**OPTIONS, **options}
    activation = F.silu if options["transformer-ffn-activation"] == "swish" else F.relu
    model = Reference(
        *(found, ROLES, (HEADS, HEADS), options["transformer-preprocess"] == "n"),
        activation=activation,
        concatenated=True,
    )
    ids = torch.tensor([source])
    logits = model.logits(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([[len(WORDS), *target[:-1]]]))
    return logits[0].log_softmax(-1)[range(len(target)), target].sum().item()


def write(folder, weights: dict[str, np.ndarray]) -> ConversionOptions:
    """Writes a model with a vocabulary in Marian's own YAML, and returns the options of its conversion."""
    np.savez(folder / "model.npz", **weights)
    quoted = {'"': r'"\""', "no": '"no"'}
    (folder / "vocab.yml").write_text("".join(f"{quoted.get(word, word)}: {n}\n" for n, word in enumerate(WORDS)))
    return ConversionOptions(vocab=(folder / "vocab.yml",))


@pytest.mark.parametrize("tying", TYINGS)
@pytest.mark.parametrize(("options", "bias"), [({}, True), (PRE | {"transformer-ffn-activation": "relu"}, False)])
def test_log_probabilities_are_marians(tying, options, bias, tmp_path):
    weights = arrays(tying, bias, **options)
    found = marian_npz.load(tmp_path / "model.npz", write(tmp_path, weights))
    assert found.tokenizer("a no 1.0 x")["input_ids"] == [2, 5, 6, 1, 0]
    assert found.tokenizer.pad_token_id == len(WORDS) == found.model.config.decoder_start_token_id
    sources, targets = ["a b", 'b " d no a', "d"], ["d d 1.0", "a", ""]
    scores = score_pairs(found.model, found.tokenizer, sources, targets)
    for source, target, found in zip(sources, targets, scores, strict=True):
        ids = [[*map(WORDS.index, text.split()), 0] for text in (source, target)]
        assert found.log_probability == pytest.approx(score(weights, options, *ids), abs=1e-5)


def test_the_command(tmp_path, capsys):
    write(tmp_path, arrays())
    command = ["convert", str(tmp_path / "model.npz"), "--output", str(tmp_path / "ours")]
    assert recognise(tmp_path / "model.npz") == "marian-npz"
    assert cli.main(command) == 2
    assert "has no vocabulary in it; give --vocab FILE" in capsys.readouterr().err
    assert cli.main([*command, "--vocab", str(tmp_path / "vocab.yml")]) == 0
    assert "note: Marian has no start token" in capsys.readouterr().out
    (translation,) = Translator(tmp_path / "ours")(["a b d"], num_beams=2, max_new_tokens=12)
    assert set(translation.split()) <= set(WORDS)  # the added token is never chosen
    assert cli.main(["convert", str(tmp_path / "ours"), "--vocab", "x", "--output", str(tmp_path / "no")]) == 2


def test_pieces_of_sentencepiece(tmp_path):
    (tmp_path / "text").write_text("ab abc bc cab\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), vocab_size=8, bos_id=-1, eos_id=0, unk_id=1,
        minloglevel=2,
    )  # fmt: skip
    shutil.move(tmp_path / "m.model", tmp_path / "vocab.spm")
    write(tmp_path, arrays())
    found = marian_npz.load(tmp_path / "model.npz", ConversionOptions(vocab=(tmp_path / "vocab.spm",)))
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "vocab.spm"))
    assert found.tokenizer("ab cab")["input_ids"] == [*model.encode("ab cab"), 0]
    assert found.tokenizer.decode(model.encode("ab cab")) == "ab cab"


SYMBOLS = [
    *"ab:#-?'\"\\\0\x07\x7f\x85\x93\xa0\u2028\u2029\ufeff\ufffe漢🙂{}[],&*!|>%@`=~",
    *("yes", "1.0", "null", "<<", "---"),
]
COMPLEX = "".join(f"? {json.dumps(word)}\n: {n}\n" for n, word in enumerate(WORDS)).replace('"b"', "|-\n  b")


def in_cpp(token: str) -> str:
    """A token in quotes as yaml-cpp, Marian's library, writes it: ends of lines of YAML 1.1 are characters to it."""
    escaped = {'"': r"\"", "\\": r"\\", "\ufeff": r"\ufeff"}
    return "".join(escaped.get(c, c) if c >= " " and not "\x80" <= c <= "\xa0" else f"\\x{ord(c):02x}" for c in token)


WRITERS = {
    "PyYAML": lambda ids: yaml.safe_dump(ids),
    "PyYAML, one line": lambda ids: yaml.safe_dump(ids, default_flow_style=True, width=10**9),
    "PyYAML, Unicode": lambda ids: yaml.safe_dump(ids, allow_unicode=True, sort_keys=False),
    "yaml-cpp": lambda ids: "".join(f'"{in_cpp(token)}": {n}\n' for token, n in ids.items()),
    "json": json.dumps,
    "json, Unicode": lambda ids: json.dumps(ids, ensure_ascii=False, indent=2),
    "json, raw": lambda ids: json.dumps(ids, ensure_ascii=False).replace(r"\u0007", "\a").replace(r"\u0000", "\0"),
}


@pytest.mark.parametrize("loader", ["CBaseLoader", "BaseLoader"])
@pytest.mark.parametrize("writer", WRITERS)
def test_vocabularies_are_read_as_they_are_written(writer, loader, tmp_path, monkeypatch):
    if loader == "BaseLoader":  # PyYAML without libyaml
        monkeypatch.delattr(yaml, "CBaseLoader")
    draw, file = random.Random(1), tmp_path / f"vocab.{'json' if 'json' in writer else 'yml'}"
    for _ in range(5):
        words = {"".join(draw.choices(SYMBOLS, k=draw.randint(1, 3))): None for _ in range(40)}
        tokens = ["</s>", "<unk>", *SYMBOLS, *(word for word in words if word not in SYMBOLS)]
        file.write_bytes(WRITERS[writer]({token: n for n, token in enumerate(tokens)}).encode())
        assert marian_npz._tokens(file) == tokens


def test_other_vocabularies(tmp_path):
    file = tmp_path / "vocab.yml"
    file.write_text(COMPLEX)
    assert marian_npz._tokens(file) == WORDS
    file.write_text("</s>: 0\n\u2028: 1\n\u2029: 2\n", encoding="utf-8")  # without quotes, as yaml-cpp writes them
    assert marian_npz._tokens(file) == ["</s>", "\u2028", "\u2029"]
    for text, message in (
        ("a: 0\na: 1\n", "'a' is there twice"),
        ("a: 0\nb: one\n", "invalid literal"),
        ("a: 0\nb: [1]\n", "it isn't a mapping"),
        ("- a\n", "it isn't a mapping"),
        ('"a: 0\n', "while scanning a quoted scalar"),
        ('{"a": 0, "a": 1}', "'a' is there twice"),
    ):
        file.write_text(text)
        with pytest.raises(ConversionError, match=rf"vocab\.yml .*{message}"):
            marian_npz._tokens(file)
    (tmp_path / "vocab.txt").write_bytes("</s>\r\n\u2028\n\x85\n".encode())
    assert marian_npz._tokens(tmp_path / "vocab.txt") == ["</s>", "\u2028", "\x85"]


@pytest.mark.peers
@pytest.mark.skipif(shutil.which("pymarian") is None, reason="pymarian isn't installed (600 MB)")
@pytest.mark.parametrize("tying", ["all", "none"])
@pytest.mark.parametrize("options", [{}, PRE])
def test_marians_own_scorer(tying, options, tmp_path):
    found = marian_npz.load(tmp_path / "model.npz", write(tmp_path, arrays(tying, **options)))
    sources, targets = ["a b", "b d no a", "d"], ["d d 1.0", "a", "b b b b"]
    for name, lines in (("source", sources), ("target", targets)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    vocabulary, texts = str(tmp_path / "vocab.yml"), [str(tmp_path / name) for name in ("source", "target")]
    command = ["pymarian", "score", "-m", str(tmp_path / "model.npz"), "-v", vocabulary, vocabulary, "-t", *texts]
    done = subprocess.run([*command, "--cpu-threads", "1", "--quiet"], capture_output=True, text=True, check=True)
    scores = score_pairs(found.model, found.tokenizer, sources, targets)
    assert [one.log_probability for one in scores] == pytest.approx(list(map(float, done.stdout.split())), abs=1e-4)
