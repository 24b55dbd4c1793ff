"""`vanilla-transformer info`: what it prints of checkpoints."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from opus_mt import opus_mt_folder

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    cli,
)


@pytest.fixture
def info(vanilla_transformer):
    """Runs the command; returns code, output and errors."""
    return partial(vanilla_transformer, "info")


@pytest.fixture
def values(info):
    """What a checkpoint's JSON says."""

    def run(folder, expected_code=0):
        code, out, err = info(folder, "--json")
        assert code == expected_code, err
        return json.loads(out)

    return run


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    return shutil.copytree(tiny_checkpoint, tmp_path / "model")


def section(out, title):
    """The rows below a title, as label -> value."""
    lines = out.split(f"\n{title}\n")[1].split("\n\n")[0].splitlines()
    return dict(line.strip().split("  ", 1) for line in lines)


def edit_json(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def save(folder, **fields):
    """A model that differs from the base preset in its fields, without a tokenizer."""
    sizes = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 20, "encoder_layers": 1, "decoder_layers": 3}
    config = VanillaTransformerConfig(**{"vocab_size": 50, "d_model": 16, **sizes, **fields})
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder)
    return folder


def test_the_architecture_is_in_the_papers_symbols(info, folder):
    code, out, err = info(folder)
    rows = {label: value.strip() for label, value in section(out, "Architecture").items()}
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
    assert parameters["embeddings"] == embeddings
    assert parameters.get("output projection", 0) == output
    positions = model.model.decoder.embed_positions.parameters()
    kept = sum(one.numel() for one in (*model.model.decoder.embed_tokens.parameters(), *positions))
    assert parameters["decoder"] == sum(one.numel() for one in model.model.decoder.parameters()) - kept


def test_a_model_without_projection(values, folder):
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    parts = values(folder)["parameters"]
    model.model.save_pretrained(folder)
    assert values(folder)["parameters"] == {
        part: number for part, number in parts.items() if part != "output projection"
    }


def test_memory_is_that_of_the_saved_type(values, info, tmp_path):
    model = VanillaTransformerForConditionalGeneration.from_pretrained(save(tmp_path / "float32"))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "bfloat16")
    total = model.num_parameters()
    found = values(tmp_path / "bfloat16")
    assert (found["types"], found["saved_bytes"]) == (["BF16"], 2 * total)
    rows = section(info(tmp_path / "bfloat16")[1], "Parameters")
    assert rows["saved as"].strip() == f"{2 * total:,} bytes (BF16)"


def test_the_tokenizer_and_its_fingerprint(info, values, folder):
    tokenizer = values(folder)["tokenizer"]
    assert tokenizer["kind"] == "VanillaTransformerTokenizerFast"
    assert tokenizer["special_tokens"]["eos_token"] == "</s> (2)"
    edit_json(folder / "config.json", tokenizer_fingerprint=tokenizer["fingerprint"])
    assert info(folder)[0] == 0
    edit_json(folder / "config.json", tokenizer_fingerprint="0123456789abcdef")
    code, _, err = info(folder)
    assert (code, err.count("\n")) == (1, 1)
    assert "the model was trained with another tokenizer" in err


def test_a_model_without_a_tokenizer(info, tmp_path):
    code, out, err = info(save(tmp_path / "model"))
    assert (code, err) == (0, "")
    assert "none that can be used" in out


def test_the_folder_of_a_run_without_a_model_names_its_checkpoints(info, tiny_checkpoint, tmp_path):
    for name in ("checkpoint-2", "checkpoint-4", "averaged-2"):
        shutil.copytree(tiny_checkpoint, tmp_path / "run" / name)
    code, out, err = info(tmp_path / "run")
    assert (code, out) == (2, "")
    assert "the folder of a training" in err
    assert "averaged-2, checkpoint-2, checkpoint-4" in err


def test_the_weights_and_the_code_are_not_touched(info, folder):
    """Code that comes with a checkpoint doesn't run, even where transformers would ask."""
    (folder / "modeling_vanilla_transformer.py").write_text("raise SystemExit('ran')")
    (folder / "configuration_vanilla_transformer.py").write_text("raise SystemExit('ran')")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert info(folder)[0] == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_escape_sequences_of_a_checkpoint_do_not_reach_the_terminal(info, values, folder):
    edit_json(folder / "generation_config.json", trace="\x1b]0;owned\x07\x9b2J")
    for arguments in ([folder], [folder, "--json"]):
        out = info(*arguments)[1]
        assert "\\u001b]0;owned\\u0007\\u009b2J" in out
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", out)
    assert values(folder)["decoding"]["trace"] == "\x1b]0;owned\x07\x9b2J"
    edit_json(folder / "config.json", model_type="\x1b[8m")
    assert "\x1b" not in info(folder)[2]


# ---- Folders that are no checkpoints, and damaged ones ----
def cut(name):
    def damage(folder):
        file = folder / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    return damage


DAMAGES = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "is not a checkpoint: it has no config.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    "cut weights": (cut("model.safetensors"), "model.safetensors is cut short"),
    "cut decoding": (cut("generation_config.json"), "generation_config.json is cut short or not JSON"),
    "another type": (lambda folder: edit_json(folder / "config.json", model_type="t5"), "a model of type 't5'"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_folder_that_cannot_be_described_is_one_line_that_says_why(info, folder, kind):
    damage, words = DAMAGES[kind]
    damage(folder)
    code, out, err = info(folder)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert words in err


def test_a_damaged_tokenizer_is_a_problem_beside_the_description(info, folder):
    cut("tokenizer.json")(folder)
    code, out, err = info(folder)
    assert (code, err.count("\n")) == (1, 1)
    assert "Architecture" in out
    assert "the tokenizer: can't load" in err


def test_marian_models_are_described_when_they_are_converted(info, values, tmp_path):
    source = opus_mt_folder(tmp_path / "opus-mt-en-de")
    code, _, err = info(source)
    assert code == 2
    assert "type 'marian'" in err
    assert "vanilla-transformer convert" in err
    assert cli.main(["convert", str(source), "--output", str(tmp_path / "ours")]) == 0
    found = values(tmp_path / "ours")
    assert found["tokenizer"]["kind"] == "MarianTokenizer"
    assert found["config"]["position_encoding"] == "marian"
    assert found["problems"] == []
