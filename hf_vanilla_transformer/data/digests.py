"""Digests of files."""

import hashlib
from pathlib import Path

import xxhash


def digest_of(file: str | Path) -> str:
    """Returns the XXH3 digest of a file's content, 128 bits in hexadecimal."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
