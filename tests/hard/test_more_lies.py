"""What looks like a checkpoint, a run or a file, and isn't what it seems."""

import json
import os
import shutil
from pathlib import Path

import pytest


def change(file: Path, **fields) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


# ---- Links in a run's folder ----
@pytest.mark.parametrize("name", ["recipe.json", "scores.json", "README.md", "model.safetensors"])
def test_a_linked_file_is_not_written_through(train, finished, tmp_path, name):
    target = tmp_path / "precious"
    target.write_text("mine")
    link = Path(finished["output_dir"], name)
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    result = train(finished, "--resume", "--max-steps", "6")
    assert result.code == 2
    assert f"{name} is a link to" in result.error
    assert target.read_text() == "mine"


@pytest.mark.parametrize("name", ["checkpoint-6", "tokenizer"])
def test_a_linked_folder_is_not_written_into(train, finished, tmp_path, name):
    target = tmp_path / "precious"
    target.mkdir()
    (target / "config.json").write_text("{}")
    link = Path(finished["output_dir"], name)
    shutil.rmtree(link, ignore_errors=True)
    link.symlink_to(target)
    result = train(finished, "--resume", "--max-steps", "6")
    assert result.code == 2
    assert "is a link to" in result.error
    assert [path.name for path in target.iterdir()] == ["config.json"]


# ---- Files of the user ----


def test_notes_beside_an_average_are_kept(command, train, finished):
    folder = Path(finished["output_dir"], "averaged-2")
    (folder / "notes.md").write_text("mine")
    for result in (train(finished, "--resume"), command("average", folder.parent, "--last", "2", "--output", folder,
                                                       "--overwrite")):  # fmt: skip
        assert result.code in (1, 2)
        assert "notes.md), so it stays" in result.error
    assert (folder / "notes.md").read_text() == "mine"


# ---- Another run's ----
def test_text_that_changes_with_the_same_size_and_time(train, recipe, tmp_path):
    assert train(recipe).code == 0
    for side, word in (("en", "nine"), ("de", "neun")):
        file = tmp_path / f"train.{side}"
        status = file.stat()
        file.write_text(file.read_text().replace(word, word[::-1]))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert train({**recipe, "output_dir": str(tmp_path / "second")}).code == 0
    models = [json.loads((tmp_path / run / "tokenizer" / "tokenizer.json").read_text()) for run in ("run", "second")]
    assert models[0]["model"]["vocab"] != models[1]["model"]["vocab"]


# ---- Checkpoints ----
@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("config.json", {"is_encoder_decoder": False}, "is_encoder_decoder is false"),
        ("config.json", {"attn_implementation": "someone/kernel"}, "names code on the Hub"),
        ("generation_config.json", {"eos_token_id": 7}, "eos_token_id is 7 in generation_config.json and 2 in"),
        ("generation_config.json", {"pad_token_id": 17}, "pad_token_id is 17"),
        ("generation_config.json", {"decoder_start_token_id": 9}, "decoder_start_token_id is 9"),
        ("tokenizer_config.json", {"model_max_length": "x"}, "can't load"),
    ],
)
def test_settings_that_would_lie(command, checkpoint, file, fields, message):
    change(checkpoint / file, **fields)
    result = command("translate", "--model", checkpoint, "nine 3")
    assert (result.code, result.out) == (2, "")
    assert message in result.error


def fewer_merges(tokenizer):
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:5]


def another_word(tokenizer):
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "n"}, "content": "m"}


def random_pieces(tokenizer):
    tokenizer["model"]["dropout"] = 0.9


@pytest.mark.parametrize("edit", [fewer_merges, another_word, random_pieces])
def test_a_tokenizer_that_segments_in_another_way(command, checkpoint, edit):
    file = checkpoint / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    edit(tokenizer)
    file.write_text(json.dumps(tokenizer))
    result = command("translate", "--model", checkpoint, "nine 3")
    assert result.code == 2
    assert "trained with another tokenizer" in result.error
