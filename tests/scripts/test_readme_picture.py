"""scripts/readme_picture.py: README's picture, 1,000 pixels wide, of a model and of a run's log."""

import json

import pytest
from PIL import Image

from scripts import readme_picture

LOG = [{"step": step, "loss": 5.0 / step} for step in (1, 2, 3)]


@pytest.fixture
def arguments(tmp_path, tiny_checkpoint):
    def arguments(*more, score="eval_bleu"):
        log = [*LOG, {"step": 3, score: 7.5}]
        (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
        paths = ["--model", str(tiny_checkpoint), "--run", str(tmp_path), "--output", str(tmp_path / "F.png")]
        return [*paths, "--source", "half past nine", "--target", "halb zehn", *more]

    return arguments


@pytest.mark.parametrize("more", [(), ("--head", "4")])
def test_the_picture_is_1000_pixels_wide(tmp_path, arguments, more):
    readme_picture.main(arguments(*more))
    picture = Image.open(tmp_path / "F.png")
    assert picture.width == 1000
    assert len(picture.convert("RGB").getcolors(10**6)) > 20


def test_both_halves_say_what_is_seen(monkeypatch, arguments):
    seen = []
    monkeypatch.setattr(readme_picture, "save_figure", lambda figure, _: seen.append(figure))
    readme_picture.main(arguments(score="eval_perplexity"))
    attention, *curves = [panel for panel in seen[0].axes if panel.get_label() != "<colorbar>"]
    assert attention.get_title() == "Cross-attention, last layer, mean of 4 heads"
    assert [panel.get_title() for panel in curves] == ["training loss", "validation perplexity"]
    assert curves[0].get_lines()[0].get_ydata().tolist() == [5.0, 2.5, 5.0 / 3]
    smallest = min(text.get_fontsize() for panel in seen[0].axes for text in panel.get_xticklabels())
    assert smallest / 72 * 1000 / seen[0].get_size_inches()[0] >= 8


def test_what_cannot_be_drawn_is_said(arguments):
    with pytest.raises(SystemExit, match="there is no head 5; the last layer has heads 1 to 4"):
        readme_picture.main(arguments("--head", "5"))
    with pytest.raises(SystemExit, match="was not evaluated"):
        readme_picture.main(arguments(score="other"))
