"""Numbers that would stall the machine are refused at once, with the limit and the reason, wherever they come from."""

import json
import shutil

import pytest
from transformers import GenerationConfig

from hf_vanilla_transformer.translation.engine_backend import EngineBackend
from hf_vanilla_transformer.translation.translator import Translator

BILLION = 1_000_000_000
OPTIONS = ("--num-beams", "--beam", "--max-new-tokens", "--max-source-tokens", "--batch-size", "--batch-tokens")
NUMBERS = {"num_beams": (BILLION, 4.0, -1), "max_new_tokens": (BILLION,), "n_best": (BILLION,)}
NUMBERS |= {"batch_tokens": (BILLION,), "max_source_tokens": (0,), "batch_size": (0,)}


@pytest.fixture(autouse=True)
def _no_work(monkeypatch):
    monkeypatch.setattr(EngineBackend, "search", lambda *_: pytest.fail("work is done"))
    monkeypatch.setattr(EngineBackend, "log_probabilities", lambda *_: pytest.fail("work is done"))


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_commands(vanilla_transformer, tiny_checkpoint, option):
    result = vanilla_transformer("translate", "--model", tiny_checkpoint, option, BILLION, "nine")
    assert (result.code, result.out) == (2, "")
    assert "it has to be an integer from 1 to " in result.error
    assert len(result.error) < 300


def test_options_of_library_calls(tiny_checkpoint):
    translator = Translator(tiny_checkpoint, "cpu")
    options = {f"{name} is {value!r}": {name: value} for name, values in NUMBERS.items() for value in values}
    config = GenerationConfig(num_beams=BILLION)
    options[f"num_beams of the generation config is {BILLION}"] = {"generation_config": config}
    for message, given in options.items():
        with pytest.raises(ValueError, match=rf"^{message}; it has to be an integer from [01] to \d"):
            translator("nine", **given)


@pytest.mark.parametrize(
    ("command", "field", "value"),
    [("translate", "num_beams", BILLION), ("evaluate", "max_new_tokens", BILLION), ("translate", "num_beams", 0)],
)
def test_a_checkpoints_generation_config(vanilla_transformer, tiny_checkpoint, tmp_path, command, field, value):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    files = ["--source", __file__, "--reference", __file__] if command == "evaluate" else ["nine"]
    result = vanilla_transformer(command, "--model", folder, *files)
    assert (result.code, result.out) == (2, "")
    assert field in result.error
    assert str(value) in result.error
