"""The version of the package, which pyproject.toml reads from here, and the digest of its sources."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

__version__ = "0.1.0"


def digest_of(files: Iterable[Path]) -> str:
    """Returns the digest of the names and the contents of files, and of the version of the package."""
    # The version decides for a package in a zip archive, which has no files.
    digest = hashlib.sha256(__version__.encode())
    for file in files:
        content = file.read_bytes()
        digest.update(f"\0{file.name} {len(content)}\0".encode() + content)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def digest_of_sources() -> str:
    """Returns the digest of all sources of the package. It is computed once, because imported code does not change with
    its files."""
    return digest_of(sorted(Path(__file__).parent.rglob("[!.]*.py")))
