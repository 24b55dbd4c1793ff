"""Fixtures of tests that train by the command: a small corpus, its recipe, and a run that has been trained once."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_runs import recipe_in

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer


def quick_recipe_in(folder: Path) -> dict:
    """A recipe for a small corpus, without evaluations and with greedy decoding, which take most of the time."""
    return recipe_in(folder) | {"eval_strategy": "no", "num_beams": 1}


@pytest.fixture
def recipe(tmp_path: Path) -> dict:
    """A recipe for a small corpus in this test's folder; it is saved in `run`."""
    return quick_recipe_in(tmp_path)


@pytest.fixture
def train(vanilla_transformer: Callable[..., Any]) -> Callable[..., Any]:
    """Runs `train` with a recipe and options."""

    def run(recipe: dict, *options: object) -> Any:
        path = Path(recipe["data_dir"]) / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return vanilla_transformer("train", "--config", path, *options)

    return run


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and its finished run, not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(quick_recipe_in(folder)), encoding="utf-8")
    assert cli.main(["train", "--config", str(path)]) == 0
    return folder


@pytest.fixture
def finished(trained_once: Path, tmp_path: Path) -> dict:
    """The recipe of a finished run of four updates, copied into this test's folder."""
    recipe = quick_recipe_in(tmp_path)
    shutil.copytree(trained_once / "run", tmp_path / "run")
    for file in tmp_path.glob("*.??"):
        shutil.copystat(trained_once / file.name, file)
    return recipe


@pytest.fixture
def checkpoint(trained_once: Path, tmp_path: Path) -> Path:
    """A saved model with its tokenizer, to be damaged."""
    return Path(shutil.copytree(trained_once / "run" / "averaged-2", tmp_path / "model"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets that are trained on, in their order."""
    seen: list[str] = []
    step = VanillaTransformerTrainer.training_step

    def noted(self: VanillaTransformerTrainer, model: object, inputs: dict, *args: object, **kwargs: object) -> Any:
        numbers = inputs.get("decoder_attention_mask", inputs["labels"].ge(0).long())  # of the pairs in packed rows
        for labels, own in zip(inputs["labels"], numbers, strict=True):
            pairs = (labels[own == number] for number in range(1, int(own.max()) + 1))
            seen.extend(self.processing_class.decode(pair, skip_special_tokens=True) for pair in pairs)
        return step(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(VanillaTransformerTrainer, "training_step", noted)
    return seen
