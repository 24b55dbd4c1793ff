"""What the tests of training share."""

from finished_runs import checkpoint, finished, recipe, seen, train, trained_once  # noqa: F401  # fixtures
