"""Parts of error messages, and what errors say.

It imports nothing slow, as the command line needs it before it starts to work.
"""

import difflib
import errno
import re
import sys
from collections.abc import Iterable

# What messages of an exhausted memory contain: PyTorch's allocator's and C++'s.
OUT_OF_MEMORY = ("DefaultCPUAllocator", "allocate memory", "not enough memory", "bad_alloc", "out of memory")

NAMES_PER_ERROR = 5

# Control characters, except tab and line feed -> how they are shown, in JSON too.
CONTROLS = {code: f"\\u{code:04x}" for code in (*range(9), *range(11, 32), *range(127, 160))}


class CheckpointError(ValueError):
    """A checkpoint can't be used; the message names the file or the tensors, and why."""


def named(names: Iterable[str], most: int = NAMES_PER_ERROR) -> str:
    """Returns names for an error, in order: all of them, or the first `most` and the number of the others."""
    names = sorted(names)
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, without its full stop, to be quoted in another message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def printable(text: str) -> str:
    """Returns text from a file as a terminal can safely show it: escape sequences in it take no effect."""
    return text.translate(CONTROLS)


def install(extra: str) -> str:
    """Returns how packages of an extra are installed: from a checkout, as no index has this project."""
    return f"run pip install '.[{extra}]' in a checkout of hf_vanilla_transformer"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'nearest'?" for the end of an error, or nothing where no known name is similar."""
    word = name.lstrip("-")
    opposite = re.sub("source|target", lambda part: "target" if part[0] == "source" else "source", word)
    plain = {one.lstrip("-"): one for one in known}  # with their dashes, unlike names would be similar
    plain.pop(opposite, None)
    longer = [one for one in plain if one.startswith(word) and len(word) > 1]  # an abbreviation
    similar = sorted(longer, key=len) or difflib.get_close_matches(word, list(plain), n=1)
    return f"; did you mean {plain[similar[0]]!r}?" if similar else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an error says that the memory of the machine or of a GPU is exhausted."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)
