"""What the tests of averaging and of checkpoints share."""

from pathlib import Path

import pytest
from finished_runs import checkpoint, finished, recipe, train, trained_once  # noqa: F401  # fixtures
from trainer_runs import stock_trainer


@pytest.fixture(scope="session")
def trained(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints 1 to 4, whose weights differ; copy it to change it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    stock_trainer(tiny_checkpoint, run).train()
    return run
