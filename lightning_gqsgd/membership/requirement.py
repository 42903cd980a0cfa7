"""The optional dependency torchft: the error without it, and the level of its own logging."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_gqsgd.errors import ConfigError


@contextmanager
def torchft_for(what: str) -> Iterator[None]:
    """A context in which torchft is imported.

    torchft reads RUST_LOG when it is imported. Without one, its log has several lines for each merge.

    Args:
        what: needs it, for the error.

    Raises:
        ConfigError: it is not installed.
    """
    os.environ.setdefault("RUST_LOG", "warn")
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchft":
            raise
        raise ConfigError(f"{what} needs torchft, which is not installed: pip install 'torchft>=0.2'") from error
