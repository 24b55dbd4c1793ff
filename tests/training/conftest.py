"""What the tests of training share."""

from finished_runs import checkpoint, finished, recipe, train, trained_once  # noqa: F401  # fixtures
