"""Fingerprints of files and of a corpus, by which a resumed run finds out that its data has changed."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from .formats import Corpus, is_table
from .hub_names import revision_of

BLOCK = 64 * 1024  # bytes
BLOCKS = 256  # of a larger file: 16 MiB, read in seconds from any disk


@dataclass(frozen=True)
class Fingerprint:
    """What is remembered of a file.

    Attributes:
        size: Bytes.
        modified: Modification time, in nanoseconds since 1970.
        sample: Digest of blocks all over the file, of all of it up to 16 MiB.
        digest: Digest of all of it, or "" if it wasn't asked for.
    """

    size: int
    modified: int
    sample: str
    digest: str = ""

    def difference(self, now: "Fingerprint") -> str | None:
        """Returns what has changed since this fingerprint was taken, or None if nothing has, as far as one can see."""
        if self.size != now.size:
            return f"had {self.size:,} bytes and has {now.size:,}"
        if self.sample != now.sample or (self.digest and now.digest and self.digest != now.digest):
            return "has the same size and another content"
        same = self.size <= BLOCK * BLOCKS or (self.digest and now.digest) or self.modified == now.modified
        # A copy has another time, too; only reading all of it can tell.
        return None if same else "has the same size, and was written since"


def fingerprint(path: str | Path, *, complete: bool = False) -> Fingerprint:
    """Reads a file's fingerprint.

    Args:
        path: The file.
        complete: Whether to read all of it, however large it is.
    """
    path = Path(path)
    status = path.stat()
    with path.open("rb") as file:
        sample = xxhash.xxh3_128()
        for start in _starts(status.st_size):
            file.seek(start)
            sample.update(file.read(BLOCK))
        digest = xxhash.xxh3_128()
        file.seek(0)
        while complete and (block := file.read(1 << 20)):
            digest.update(block)
    return Fingerprint(status.st_size, status.st_mtime_ns, sample.hexdigest(), digest.hexdigest() if complete else "")


def _starts(size: int) -> Iterator[int]:
    """Where the sampled blocks begin: all blocks of a small file; of a large one, evenly from the first to the last."""
    if size <= BLOCK * BLOCKS:
        yield from range(0, size, BLOCK)
    else:
        yield from (number * (size - BLOCK) // (BLOCKS - 1) for number in range(BLOCKS))


def fingerprints(corpus: Corpus, *, complete: bool = False) -> dict[str, Any]:
    """Takes the fingerprints of all that a corpus is read from.

    Args:
        corpus: The corpus; its files exist.
        complete: Whether to read all of every file.

    Returns:
        The role of each source, such as "source 1", -> the fields of its `Fingerprint`. For a data set on the Hub:
        {"revision": its commit, or None if the Hub can't be reached}.

    Raises:
        HubError: The Hub has no such data set.
    """
    files = [(f"source {number}", path) for number, path in enumerate(corpus.source, start=1)]
    files += [(f"target {number}", path) for number, path in enumerate(corpus.target, start=1)]
    taken: dict[str, Any] = {}
    for number, table in enumerate(corpus.tables, start=1):
        if is_table(table):
            files.append((f"data {number}", table))
        elif Path(table).is_dir():  # a data set in a folder
            inside = sorted(path for path in Path(table).rglob("*") if path.is_file())
            files += [(f"data {number}, {path.relative_to(table)}", str(path)) for path in inside]
        else:
            taken[f"data {number}"] = {"revision": revision_of(table, "dataset")}
    return taken | {role: asdict(fingerprint(path, complete=complete)) for role, path in files}


def changes(before: Any, now: dict[str, Any]) -> list[str]:
    """Compares two results of `fingerprints`.

    Args:
        before: As it was saved; what isn't such a result counts as changed.
        now: As it is.

    Returns:
        A description of each source that differs, such as "source 1 had 12 bytes and has 13". A revision that couldn't
        be asked for either time is not compared.
    """
    if not isinstance(before, dict):
        return ["the saved fingerprints are damaged"]
    differences = {role: _change(before.get(role), now.get(role)) for role in sorted(before.keys() | now.keys())}
    return [f"{role} {difference}" for role, difference in differences.items() if difference]


def _change(old: Any, new: Any) -> str | None:
    if old is None or new is None:
        return "is new" if old is None else "is missing"
    try:
        if "revision" in old or "revision" in new:
            pair = (old.get("revision"), new.get("revision"))
            return f"was at revision {pair[0]} and is at {pair[1]}" if None not in pair and pair[0] != pair[1] else None
        return Fingerprint(**old).difference(Fingerprint(**new))
    except (TypeError, ValueError, AttributeError):  # recipe.json was edited
        return "has a damaged fingerprint"
