"""Parts of error messages. It imports nothing slow, as the command line needs it before it starts to work."""

import difflib
from collections.abc import Iterable


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, without its full stop, to be quoted in another message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'nearest'?" for the end of an error, or nothing where no known name is similar.

    Args:
        name: The unknown name.
        known: The names that exist.
    """
    similar = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {similar[0]!r}?" if similar else ""
