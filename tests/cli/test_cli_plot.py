"""`vanilla-transformer plot`: a picture of each kind."""

import json
import sys
from functools import partial

import numpy as np
import pytest

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.translation.attention import attention_of

LOG = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}, {"step": 2, "eval_bleu": 7.5, "eval_perplexity": 30.0}]
ATTENTION = ("attention", "--source", "half past nine", "--device", "cpu")


@pytest.fixture
def run(monkeypatch, vanilla_transformer, tmp_path):
    """Runs `plot` in a folder of its own with the log of a run: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_run").mkdir()
    (tmp_path / "a_run/trainer_state.json").write_text(json.dumps({"log_history": LOG}))
    return partial(vanilla_transformer, "plot")


def test_curves_of_a_folder_and_of_a_file(run, tmp_path):
    for file, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        assert run("curves", "a_run", "a_run/trainer_state.json", "--output", file) == (0, f"wrote {file}\n", "")
        (tmp_path / file).write_text("mine")
        code, _, err = run("curves", "a_run", "--output", file)
        assert (code, "--overwrite" in err, (tmp_path / file).read_text()) == (2, True, "mine")
        assert run("curves", "a_run", "--output", file, "--overwrite")[0] == 0
        assert (tmp_path / file).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("options", "title", "names", "chosen"),
    [
        ((), "Cross-attention", [f"layer 2 of 2, head {n} of 4" for n in (1, 2, 3, 4)], lambda a: a.cross[1]),
        (("--part", "encoder", "--layer", 1, "--head", 4), "Encoder self-attention", ["layer 1 of 2, head 4 of 4"],
         lambda a: a.encoder[:1, 3]),
        (("--part", "decoder", "--layer", "all", "--heads", "mean"), "Decoder self-attention",
         ["layer 1 of 2, mean of 4 heads", "layer 2 of 2, mean of 4 heads"], lambda a: a.decoder.mean(1)),
    ],
)  # fmt: skip
def test_attention_of_each_part(run, monkeypatch, tiny_checkpoint, options, title, names, chosen):
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    run(*ATTENTION, "--model", tiny_checkpoint, "--target", "halb zehn", *options, "--output", "a.png")
    translator = Translator(tiny_checkpoint, device="cpu")
    attention = attention_of(translator.model, translator.tokenizer, "half past nine", "halb zehn")
    *panels, _ = drawn[0].axes
    assert (drawn[0].get_suptitle(), [panel.get_title() for panel in panels]) == (title, names)
    for panel, weights in zip(panels, chosen(attention), strict=True):
        assert np.allclose(panel.images[0].get_array(), weights, atol=1e-5)
    columns = attention.input_pieces if "decoder" in options else attention.source_pieces
    assert [label.get_text() for label in panels[-1].get_xticklabels()] == columns


def test_attention_of_the_models_own_translation(run, monkeypatch, tiny_checkpoint, tmp_path):
    assert run(*ATTENTION, "--model", tiny_checkpoint, "--output", "a.png") == (0, "wrote a.png\n", "")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(*ATTENTION, "--model", tiny_checkpoint, "--output", "b.png")
    assert (code, "run pip install '.[plot]' in a checkout" in err, err.count("\n")) == (2, True, 1)
    assert run(*ATTENTION, "--model", tiny_checkpoint, "--output", "a.html") == (0, "wrote a.html\n", "")
    assert "<title>Attention: half past nine</title>" in (tmp_path / "a.html").read_text(encoding="utf-8")
