"""model_card.md is what the script makes of the recipe and docs/results.md, and says what these say."""

import pytest
import yaml

from hf_vanilla_transformer.hub.model_card import fill_model_card
from scripts import multi30k_card


def test_the_card_is_in_step_with_the_results():
    text = (multi30k_card.ROOT / "model_card.md").read_text(encoding="utf-8")
    assert text == str(fill_model_card(multi30k_card.facts())), "run python -m scripts.multi30k_card"
    validation, test = (one["metrics"] for one in yaml.safe_load(text.split("---\n")[1])["model-index"][0]["results"])
    assert [score["value"] for score in validation] == [44.15, 44.15, 44.23, 66.21]
    assert [score["value"] for score in test] == [42.42, 42.42, 42.53, 66.49]
    assert test[0]["args"]["signature"] == "nrefs:1|case:lc|eff:no|tok:none|smooth:none|version:2.6.0"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("took 19,000 updates", "took 18,000 updates", "3658240, 18000.* the recipe has .3658240, 19000"),
        ("last ten checkpoints", "last five checkpoints", "have changed; adapt MEASURED"),
    ],
)
def test_results_that_say_something_else_are_refused(monkeypatch, tmp_path, old, new, problem):
    text = multi30k_card.RESULTS.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "results.md").write_text(text.replace(old, new), encoding="utf-8")
    monkeypatch.setattr(multi30k_card, "RESULTS", tmp_path / "results.md")
    with pytest.raises(ValueError, match=problem):
        multi30k_card.facts()
