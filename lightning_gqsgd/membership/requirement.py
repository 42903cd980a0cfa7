"""The optional dependency torchft: the error without it, the torch that it needs, and the level of its own logging."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_gqsgd.errors import ConfigError


@contextmanager
def torchft_for(what: str) -> Iterator[None]:
    """A context in which to import torchft.

    torchft reads RUST_LOG when it is imported. If the variable is unset, torchft logs several lines for each merge.

    Args:
        what: the feature that needs torchft, for the error message.

    Raises:
        ConfigError: if torchft is not installed.
    """
    os.environ.setdefault("RUST_LOG", "warn")
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torchft":
            raise
        raise ConfigError(
            f"{what} needs torchft, which is not installed: pip install 'torchft>=0.2'; version 0.2 has wheels for "
            "Linux on x86-64 and Python 3.10 to 3.13"
        ) from error


def torch_is_new_enough() -> bool:
    """Returns whether torchft can connect ranks with this torch. It may be installed beside one with which it fails
    each time."""
    import torch.distributed as dist  # here, because the lighthouse needs torchft alone

    gloo: Any = dist.ProcessGroupGloo
    return hasattr(gloo._Options, "global_ranks_in_group")
