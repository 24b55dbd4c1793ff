"""Numbers that would stall the machine are refused at once, with the limit and the reason, wherever they come from."""

import json
import os
import shutil

import pytest
from transformers import AutoModelForSeq2SeqLM, GenerationConfig

from hf_vanilla_transformer.translation import decoding, scoring
from hf_vanilla_transformer.translation.decoding import decode
from hf_vanilla_transformer.translation.engine_backend import EngineBackend

BILLION = 1_000_000_000
OPTIONS = ["--num-beams", "--beam", "--max-new-tokens", "--max-source-tokens", "--batch-size", "--batch-tokens"]


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint).eval()


def _nothing(*arguments, **options):
    raise AssertionError("work is done")


@pytest.mark.parametrize("option", [*OPTIONS, "--threads"])
def test_options_of_the_commands(vanilla_transformer, monkeypatch, tiny_checkpoint, option):
    monkeypatch.setattr(EngineBackend, "search", _nothing)
    result = vanilla_transformer("translate", "--model", tiny_checkpoint, option, BILLION, "nine")
    assert (result.code, result.out) == (2, "")
    is_threads = option == "--threads"
    reason = f"is more than this machine's {os.cpu_count()}" if is_threads else "it has to be an integer from 1 to "
    assert reason in result.error
    assert len(result.error) < 300


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": BILLION},
        {"max_new_tokens": BILLION},
        {"n_best": BILLION, "num_beams": 4},
        {"batch_tokens": BILLION},
        {"num_beams": 4.0},
        {"num_beams": -1},
        {"max_source_tokens": 0},
        {"generation_config": GenerationConfig(num_beams=BILLION)},
        {"batch_size": 0},
    ],
)
def test_options_of_library_calls(model, tokenizer, monkeypatch, options):
    monkeypatch.setattr(model, "generate", _nothing)
    name, value = next((name, value) for name, value in options.items() if value != 4 or isinstance(value, float))
    if name == "generation_config":
        name, value = "num_beams of the generation config", BILLION
    with pytest.raises(ValueError, match=rf"^{name}.* is {value!r}; it has to be an integer from [01] to \d"):
        decode(model, tokenizer, ["nine"], **options)


@pytest.mark.parametrize(
    ("name", "fields"),
    [("translate", {"num_beams": BILLION}), ("evaluate", {"max_new_tokens": BILLION}), ("translate", {"num_beams": 0})],
)
def test_a_checkpoints_generation_config(vanilla_transformer, monkeypatch, tiny_checkpoint, tmp_path, name, fields):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    for module, function in ((decoding, "translate"), (scoring, "score_targets")):
        monkeypatch.setattr(module, function, _nothing)
    files = ["--source", __file__, "--reference", __file__] if name == "evaluate" else ["nine"]
    result = vanilla_transformer(name, "--model", folder, *files)
    assert (result.code, result.out) == (2, "")
    assert any(field in result.error for field in fields)
    assert any(str(value) in result.error for value in fields.values())
