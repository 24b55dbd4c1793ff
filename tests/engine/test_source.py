"""Digests of the paper's files, and the warning where a checkpoint has other code than the package."""

import logging
import shutil
from pathlib import Path

import pytest
from transformers import AutoModel, AutoModelForSeq2SeqLM

import hf_vanilla_transformer
from hf_vanilla_transformer.engine import source

PACKAGE = Path(hf_vanilla_transformer.__file__).parent
CODE = """
# A comment.
class A:
    \"\"\"A docstring.\"\"\"

    def f(self, x: int = 1) -> int:
        \"\"\"Another.\"\"\"
        return 2 * x
"""


def test_the_engine_mirrors_the_papers_files():
    """Fails where a formula was changed: change the engine as well, and its tests; then renew `MIRRORED`."""
    texts = {name: (PACKAGE / f"{name}.py").read_text(encoding="utf-8") for name in source.FILES}
    assert {name: source.digest(text) for name, text in texts.items()} == source.MIRRORED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# A comment.", "# Another."),
        ("A docstring.", "An edited one."),
        ("Another.", "One more."),
        ("2 * x", "(2  *  x)"),
    ],
)
def test_comments_docstrings_and_layout_are_no_formulas(old, new):
    assert old in CODE
    assert source.digest(CODE.replace(old, new)) == source.digest(CODE)


@pytest.mark.parametrize(
    ("old", "new"), [("2 * x", "2 + x"), ("2 * x", "3 * x"), ("= 1", "= 2"), ("class A", "class B")]
)
def test_an_edit_is_another_formula(old, new):
    assert old in CODE
    assert source.digest(CODE.replace(old, new)) != source.digest(CODE)


def test_a_docstring_is_not_told_from_no_docstring():
    assert source.digest(CODE.replace('        """Another."""\n', "")) == source.digest(CODE)


@pytest.fixture
def edited(tiny_checkpoint, tmp_path, monkeypatch):
    """A checkpoint whose own modeling file has another formula."""
    monkeypatch.setattr(source, "_warned", set())
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "edited")
    file = folder / "modeling_vanilla_transformer.py"
    text = file.read_text(encoding="utf-8")
    assert "x + self.dropout(sublayer(x))" in text
    file.write_text(text.replace("x + self.dropout(sublayer(x))", "sublayer(x)"), encoding="utf-8")
    return folder


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if "code of its own" in record.getMessage()]


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForSeq2SeqLM])
@pytest.mark.parametrize("trust", [False, True])
def test_code_that_does_not_run_is_warned_of_once(edited, warnings, auto, trust):
    for _ in range(2):
        auto.from_pretrained(edited, trust_remote_code=trust)
    (said,) = warnings()
    assert said.startswith(f"{edited} has code of its own that differs")
    assert "modeling_vanilla_transformer.py. The package is imported" in said
    assert "configuration_vanilla_transformer.py" not in said
    assert "trust_remote_code=True" in said
    assert "get_class_from_dynamic_module" in said


def test_the_way_that_the_warning_names_runs_the_checkpoints_own_code(edited, tiny_checkpoint):
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    name = "modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration"
    own = get_class_from_dynamic_module(name, str(edited)).from_pretrained(edited).eval()
    usual = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint).eval()
    assert type(own) is not type(usual)
    assert own.engine is None
    source_ids = usual.dummy_inputs["input_ids"][:1]
    states = [model.get_encoder()(source_ids).last_hidden_state for model in (own, usual)]
    assert not states[0].allclose(states[1])


@pytest.mark.parametrize("change", ["none", "comment", "no code", "unreadable"])
def test_what_is_warned_of_otherwise(tiny_checkpoint, tmp_path, warnings, monkeypatch, change):
    monkeypatch.setattr(source, "_warned", set())
    folder = shutil.copytree(tiny_checkpoint, tmp_path / change.replace(" ", "_"))
    file = folder / "modeling_vanilla_transformer.py"
    if change == "comment":
        file.write_text("# Mine.\n" + file.read_text(encoding="utf-8"), encoding="utf-8")
    elif change == "no code":
        for path in folder.glob("*.py"):
            path.unlink()
    elif change == "unreadable":
        file.write_text("def (", encoding="utf-8")
    AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert len(warnings()) == (change == "unreadable")


def test_a_checkpoint_on_the_hub(edited, tiny_checkpoint, warnings, monkeypatch):
    """Its files are asked for where its configuration says that there is code, with the caller's revision."""
    asked = []

    def cached_file(name, file, **options):
        asked.append((name, file, options.get("revision")))
        return str(edited / file)

    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    monkeypatch.setattr(source, "cached_file", cached_file)
    source.warn_of_other_code("someone/model", model, revision="v1", torch_dtype=None)
    assert {file for _, file, _ in asked} == {f"{name}.py" for name in source.FILES}
    assert {(name, revision) for name, _, revision in asked} == {("someone/model", "v1")}
    assert len(warnings()) == 1
    model.config.auto_map = None
    asked.clear()
    source.warn_of_other_code("someone/other", model)
    assert asked == []


def test_weights_that_come_from_nowhere(tiny_checkpoint, warnings):
    """`from_pretrained(None, ...)` takes a configuration and weights of the caller's."""
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    assert model.config.auto_map
    type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict())
    source.warn_of_other_code("no/such-repository", model)
    assert warnings() == []
