"""`vanilla-transformer info`: what it prints of checkpoints."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from opus_mt import opus_mt_folder
from trainer_runs import change_json
from transformers import GPT2Config, GPT2LMHeadModel

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, cli


@pytest.fixture
def info(vanilla_transformer):
    """Runs the command; returns code, output and errors."""
    return partial(vanilla_transformer, "info")


@pytest.fixture
def values(info):
    """What a checkpoint's JSON says."""

    def run(folder):
        code, out, err = info(folder, "--json")
        assert code == 0, err
        return json.loads(out)

    return run


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    return shutil.copytree(tiny_checkpoint, tmp_path / "model")


def section(out, title):
    """The rows below a title, as label -> value."""
    lines = out.split(f"\n{title}\n")[1].split("\n\n")[0].splitlines()
    return {label: value.strip() for label, value in (line.strip().split("  ", 1) for line in lines)}


def save(folder, **fields):
    """A model that differs from the base preset in its fields, without a tokenizer."""
    sizes = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 20, "encoder_layers": 1, "decoder_layers": 3}
    config = VanillaTransformerConfig(**{"vocab_size": 50, "d_model": 16, **sizes, **fields})
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    return folder


def test_the_architecture_is_in_the_papers_symbols(info, folder):
    code, out, err = info(folder)
    rows = section(out, "Architecture")
    assert (code, err, out.splitlines()[0]) == (0, "", str(folder))
    assert rows["layers (N), encoder + decoder"] == "2 + 2"
    assert (rows["width (d_model)"], rows["attention heads (h)"]) == ("32", "4")
    assert (rows["width of a head's queries and keys (d_k)"], rows["feed-forward width (d_ff)"]) == ("8", "64")
    assert rows["shared embeddings"] == "source, target and output"
    assert rows["layer normalisation"] == "after each sub-layer"


# Embeddings and output projection, by hand: matrices of 50 or 40 rows of width 16, a bias of 50.
KINDS = {
    "all tied": ({}, 800, 0),
    "two vocabularies": ({"decoder_vocab_size": 40, "share_encoder_decoder_embeddings": False}, 800 + 640, 0),
    "nothing tied": ({"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}, 1600, 800),
    "a bias": ({"output_bias": True}, 800, 50),
    "learned positions": ({"position_encoding": "learned", "max_position_embeddings": 9}, 800 + 2 * 9 * 16, 0),
    "pre-norm": ({"norm_position": "pre", "final_layer_norm": True}, 800, 0),
    "other heads": ({"decoder_attention_heads": 2, "head_dim": 3, "value_head_dim": 5}, 800, 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_by_part_are_those_of_the_model(values, tmp_path, kind):
    fields, embeddings, output = KINDS[kind]
    model = VanillaTransformerForConditionalGeneration.from_pretrained(save(tmp_path / "model", **fields))
    found = values(tmp_path / "model")
    parameters = found["parameters"]
    assert found["total"] == sum(one.numel() for one in model.parameters())
    assert (parameters["embeddings"], parameters.get("output projection", 0)) == (embeddings, output)
    positions = model.model.decoder.embed_positions.parameters()
    kept = sum(one.numel() for one in (*model.model.decoder.embed_tokens.parameters(), *positions))
    assert parameters["decoder"] == sum(one.numel() for one in model.model.decoder.parameters()) - kept
    model.model.save_pretrained(tmp_path / "model")  # without a projection
    parameters.pop("output projection", None)
    assert values(tmp_path / "model")["parameters"] == parameters


def test_tensors_of_another_architecture_are_others(values, tmp_path):
    config = GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2)
    (model := GPT2LMHeadModel(config)).save_pretrained(tmp_path)
    assert values(tmp_path)["parameters"] == {"others": model.num_parameters()}


def test_memory_is_that_of_the_saved_type_and_a_tokenizer_may_be_missing(values, info, tmp_path):
    model = VanillaTransformerForConditionalGeneration.from_pretrained(save(tmp_path / "float32"))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bfloat16")
    total = model.num_parameters()
    found = values(tmp_path / "bfloat16")
    assert (found["types"], found["saved_bytes"]) == (["BF16"], 2 * total)
    code, out, err = info(tmp_path / "bfloat16")
    assert section(out, "Parameters")["saved as"] == f"{2 * total:,} bytes (BF16)"
    assert (code, err, "none that can be used" in out) == (0, "", True)
    (tmp_path / "bfloat16" / "pytorch_model.bin").touch()  # an older copy, which transformers doesn't read either
    assert values(tmp_path / "bfloat16")["total"] == total
    (tmp_path / "bfloat16" / "model.safetensors").unlink()
    assert "\nParameters\n" not in info(tmp_path / "bfloat16").out  # that of a pickle isn't known
    assert values(tmp_path / "bfloat16")["total"] is None


def test_the_tokenizer_and_its_fingerprint(info, values, folder):
    tokenizer = values(folder)["tokenizer"]
    assert tokenizer["kind"] == "VanillaTransformerTokenizerFast"
    assert tokenizer["special_tokens"]["eos_token"] == "</s> (2)"
    change_json(folder / "config.json", tokenizer_fingerprint=tokenizer["fingerprint"])
    assert info(folder)[0] == 0
    change_json(folder / "config.json", tokenizer_fingerprint="0123456789abcdef")
    code, _, err = info(folder)
    assert (code, err.count("\n")) == (1, 1)
    assert "the model was trained with another tokenizer" in err


def test_the_weights_and_the_code_are_not_touched(info, folder):
    """Code that comes with a checkpoint doesn't run, even where transformers would ask."""
    for part in ("modeling", "configuration"):
        (folder / f"{part}_vanilla_transformer.py").write_text("raise SystemExit('ran')")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert info(folder)[0] == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_escape_sequences_of_a_checkpoint_do_not_reach_the_terminal(info, values, folder):
    change_json(folder / "generation_config.json", trace="\x1b]0;owned\x07\x9b2J")
    for arguments in ([folder], [folder, "--json"]):
        out = info(*arguments)[1]
        assert "\\u001b]0;owned\\u0007\\u009b2J" in out
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", out)
    assert values(folder)["decoding"]["trace"] == "\x1b]0;owned\x07\x9b2J"
    change_json(folder / "config.json", model_type="\x1b[8m")
    assert "\x1b" not in info(folder)[2]


def test_marian_models_before_and_after_they_are_converted(values, tmp_path):
    source = opus_mt_folder(tmp_path / "opus-mt-en-de")
    assert cli.main(["convert", str(source), "--output", str(tmp_path / "ours")]) == 0
    stock, found = values(source), values(tmp_path / "ours")
    assert (stock["kind"], found["kind"]) == ("MarianMTModel", "VanillaTransformerForConditionalGeneration")
    for one in (stock, found):
        assert (one["tokenizer"]["kind"], one["problems"]) == ("MarianTokenizer", [])
    assert found["config"]["position_encoding"] == "marian"
    for part in ("embeddings", "encoder", "decoder"):
        assert stock["parameters"][part] == found["parameters"][part]


@pytest.mark.parametrize(("form", "kind"), [("ctranslate2", "CTranslate2's"), ("onnx", "ONNX's"), ("stock", "Marian")])
def test_exports(vanilla_transformer, info, values, folder, tmp_path, form, kind):
    pytest.importorskip("onnx" if form == "onnx" else "ctranslate2")
    exported = tmp_path / "exported"
    assert vanilla_transformer("export", "--model", folder, "--to", form, "--output", exported).code == 0
    original, found = values(folder), values(exported)
    assert kind in found["kind"]
    rows = section(info(exported)[1], "Architecture")
    for label in ("layers (N), encoder + decoder", "width (d_model)", "attention heads (h)", "vocabulary"):
        assert rows[label] == section(info(folder)[1], "Architecture")[label]
    assert found["decoding"]["num_beams"] == 4
    assert found["tokenizer"]["size"] == original["tokenizer"]["size"]
    totals = {"ctranslate2": original["total"], "onnx": None}
    assert found["total"] == totals.get(form, found["total"])  # Marian has more biases
    assert ("\nParameters\n" in info(exported)[1]) == (form != "onnx")


# ---- Folders that are no checkpoints, and damaged ones ----
def cut(name):
    def damage(folder):
        file = folder / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return damage


def become_a_run(folder):
    for name in ("checkpoint-2", "checkpoint-4", "averaged-2"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_bytes((folder / "config.json").read_bytes())
    (folder / "config.json").unlink()


DAMAGES = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "is not a checkpoint: it has no config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    "cut weights": (cut("model.safetensors"), "model.safetensors is cut short"),
    "cut decoding": (cut("generation_config.json"), "generation_config.json is cut short or not JSON"),
    "no type": (lambda folder: change_json(folder / "config.json", model_type=None), "can't load"),
    "a run": (become_a_run, "the folder of a training.*averaged-2, checkpoint-2, checkpoint-4"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_folder_that_cannot_be_described_is_one_line_that_says_why(info, folder, kind):
    damage, words = DAMAGES[kind]
    damage(folder)
    code, out, err = info(folder)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert re.search(words, err)


def test_a_damaged_tokenizer_is_a_problem_beside_the_description(info, folder):
    cut("tokenizer.json")(folder)
    code, out, err = info(folder)
    assert (code, err.count("\n")) == (1, 1)
    assert "Architecture" in out
    assert "the tokenizer: can't load" in err
