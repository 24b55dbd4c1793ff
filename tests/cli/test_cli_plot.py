"""`vanilla-transformer plot`: a picture of each kind, and one line for each mistake, before a model is loaded."""

import json
import sys
from functools import partial

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer.cli import plot

LOG = [
    {"step": 1, "loss": 5.0, "learning_rate": 0.0},
    {"step": 2, "loss": 4.0, "learning_rate": 0.5},
    {"step": 2, "eval_bleu": 7.5, "eval_perplexity": 30.0},
]


@pytest.fixture
def run(monkeypatch, vanilla_transformer, tmp_path):
    """Runs `plot` in a folder of its own, without a screen: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISPLAY", raising=False)
    return partial(vanilla_transformer, "plot")


@pytest.fixture
def training(tmp_path):
    """The folder of a run."""
    folder = tmp_path / "a_run"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": LOG}))
    return folder


@pytest.fixture
def titles(monkeypatch):
    """The titles of what is drawn, in place of files."""
    seen = []
    monkeypatch.setattr(
        "hf_vanilla_transformer.plots.curves.save_figure",
        lambda figure, _: seen.append(figure.get_suptitle().replace("\n", " ")),
    )
    return seen


@pytest.mark.parametrize(
    "arguments",
    [
        ("positions", "--d-model", 16, "--positions", 9),
        ("schedule",),
        ("masks", "--source", "a b", "--target", "c", "--padding", 0),
        ("curves", "a_run"),
    ],
)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_kinds_without_a_model_write_a_picture(run, training, tmp_path, arguments, suffix):
    assert run(*arguments, "--output", f"plot.{suffix}") == (0, f"wrote plot.{suffix}\n", "")
    start = (tmp_path / f"plot.{suffix}").read_bytes()[:6]
    assert start.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


ATTENTION = ("attention", "--source", "half past nine", "--device", "cpu")


@pytest.mark.parametrize(
    ("options", "title"),
    [
        ((), "Cross-attention, layer 2 of 2:"),
        (("--part", "encoder", "--layer", 1, "--head", 4), "Encoder self-attention, layer 1 of 2:"),
        (
            ("--part", "decoder", "--layer", "all", "--heads", "mean"),
            "Decoder self-attention by layer, mean of 4 heads:",
        ),
    ],
)
def test_attention_of_each_part(run, titles, tiny_checkpoint, options, title):
    code, out, err = run(*ATTENTION, "--model", tiny_checkpoint, "--target", "halb zehn", *options, "--output", "a.png")
    assert (code, out, err) == (0, "", "")
    assert titles[0].startswith(title)


def test_attention_as_picture_and_page_of_the_models_own_translation(run, tiny_checkpoint, tmp_path):
    for name in ("a.png", "a.html"):
        assert run(*ATTENTION, "--model", tiny_checkpoint, "--output", name) == (0, f"wrote {name}\n", "")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<title>Attention: half past nine</title>" in page
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    sequence = model.generate(**tokenizer("half past nine", return_tensors="pt"))[0]
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert len(data["attention"]["targets"]) == len(sequence) - 1


def test_schedules_of_recipes_runs_and_the_paper(run, titles, training, monkeypatch):
    from hf_vanilla_transformer.plots import curves as plotting

    seen = []
    draw = plotting.plot_schedule
    monkeypatch.setattr(plotting, "plot_schedule", lambda *a, **k: seen.append((*a, k["logged"])) or draw(*a, **k))
    assert run("schedule", "wmt14_base", training, "--output", "a.png")[0] == 0
    schedules, updates, logged = seen[0]
    assert (schedules["wmt14_base"].peak, schedules["wmt14_base"].warmup) == (pytest.approx(6.987e-4, rel=1e-3), 4000)
    assert logged == {"a_run": [(1, 0.0), (2, 0.5)]}
    assert (len(schedules), updates) == (1, None)
    assert run("schedule", "--updates", 9, "--output", "a.png")[0] == 0
    assert [name.partition(" (")[2] for name in seen[1][0]] == ["base)", "big)", ""]
    assert seen[1][1] == 9


def test_a_recipe_with_another_schedule_is_refused(run, tmp_path):
    for text in (
        "lr_scheduler_type: cosine",
        "lr_scheduler_kwargs: {timescale: 1000}",
        "{warmup_steps: 0, learning_rate: 1e-4}",
    ):
        (tmp_path / "mine.yaml").write_text(text)
        code, _, err = run("schedule", "mine.yaml", "--output", "a.png")
        assert (code, err.count("\n")) == (2, 1)
        assert "another schedule than the paper's" in err


def test_curves_name_runs(run, titles, training):
    assert run("curves", training, "--output", "a.png")[0] == 0
    assert run("curves", training / "trainer_state.json", "--output", "a.png")[0] == 0
    training.rename(training.with_name("model"))
    assert run("curves", training.with_name("model"), "--output", "a.png")[0] == 0
    assert titles == ["Training of a_run, by updates"] * 2 + [f"Training of {training.parent.name}, by updates"]


def test_files_are_not_replaced_unasked(run, tmp_path):
    (tmp_path / "plot.png").write_text("mine")
    code, _, err = run("masks", "--output", "plot.png")
    assert (code, "--overwrite" in err) == (2, True)
    assert (tmp_path / "plot.png").read_text() == "mine"
    assert run("masks", "--output", "plot.png", "--overwrite")[0] == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


MODEL = ("--model", "CHECKPOINT")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: KIND (see vanilla-transformer plot --help)"),
        (("atention",), "did you mean 'attention'?"),
        (("positions", "--output", "a.png", "--d-modle", 3), "did you mean '--d-model'?"),
        (("positions", "--output", "a.gif"), "--output a.gif has to end with .png or .svg"),
        (("positions", "--output", "a.html"), ".html is for attention"),
        (("positions", "--output", "nowhere/a.png"), "there is no folder nowhere"),
        (("positions", "--output", "a.png", "--positions", 1), "positions is 1; give a number from 2"),
        (("masks", "--output", "a.png", "--source", " "), "the text is empty; give a sentence"),
        (("masks", "--output", "a.png", "--padding", "-3"), "'-3' is not an integer of at least 0"),
        (("schedule", "nothing", "--output", "a.png"), "nothing can't be read"),
        (
            ("curves", "nowhere", "--output", "a.png"),
            "nowhere/trainer_state.json is missing; give the",
        ),
        (("curves", ".", "--output", "a.png"), "trainer_state.json is missing"),
        (("curves", "a_run", "a_run", "--output", "a.png"), "two runs are called a_run; rename a folder"),
        (("curves", "bad.json", "--output", "a.png"), "bad.json is cut short or not JSON"),
        (("curves", "empty.json", "--output", "a.png"), "no log has a loss, a perplexity or a BLEU score"),
        ((*ATTENTION, "--output", "a.png"), "required: --model"),
        ((*ATTENTION, *MODEL, "--layer", 1, "--output", "a.html"), "leave out --part, --layer and --heads"),
        ((*ATTENTION, "--model", "./nowhere", "--output", "a.png"), "'./nowhere' is neither a folder here nor a name"),
    ],
)
def test_mistakes_are_one_line_before_a_model_is_loaded(run, training, tiny_checkpoint, tmp_path, arguments, message):
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "empty.json").write_text('{"log_history": []}')
    before = sorted(tmp_path.iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot, "load_translator", lambda *_: pytest.fail("the model was loaded"))
        code, out, err = run(*(tiny_checkpoint if one == "CHECKPOINT" else one for one in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err
    assert err.startswith("vanilla-transformer: error: ")
    assert sorted(tmp_path.iterdir()) == before


def test_too_long_a_sentence_and_a_diverged_model_are_one_line(run, tiny_checkpoint, tmp_path):
    code, _, err = run(*ATTENTION[:1], "--model", tiny_checkpoint, "--source", "it " * 600, "--output", "a.png")
    assert (code, "source has more than 512 tokens" in err, err.count("\n")) == (2, True, 1)
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    with torch.no_grad():
        model.model.encoder.layers[0].self_attn.q_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    AutoTokenizer.from_pretrained(tiny_checkpoint).save_pretrained(tmp_path / "nan")
    code, _, err = run(*ATTENTION, "--model", tmp_path / "nan", "--output", "a.png")
    assert (code, "NaN or infinity; the training diverged" in err, err.count("\n")) == (2, True, 1)
    assert not (tmp_path / "a.png").exists()


def test_without_matplotlib_the_extra_is_named_and_pages_are_written(run, monkeypatch, tiny_checkpoint):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(*ATTENTION, "--model", tiny_checkpoint, "--output", "a.png")
    assert (code, err.count("\n")) == (2, 1)
    assert "run pip install '.[plot]' in a checkout" in err
    assert run(*ATTENTION, "--model", tiny_checkpoint, "--output", "a.html")[0] == 0
