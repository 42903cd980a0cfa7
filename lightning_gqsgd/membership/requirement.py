"""The optional dependency torchft: the error without it, the torch that it needs, and the level of its own logging."""

from __future__ import annotations

import importlib
import os
from typing import Any

from lightning_gqsgd.errors import PackageError, lack_of


def check_torchft(what: str) -> None:
    """Import torchft, to be called before the first import of a module that needs it.

    torchft reads RUST_LOG when it is imported. If the variable is unset, torchft logs several lines for each merge.

    Args:
        what: the feature that needs torchft, for the error message.

    Raises:
        PackageError: if torchft is not installed, or cannot be loaded.
    """
    os.environ.setdefault("RUST_LOG", "warn")
    try:
        importlib.import_module("torchft")
    except Exception as error:  # e.g. an AttributeError of torchft next to a torch that it does not know
        raise PackageError(
            f"{what} needs torchft, which {lack_of('torchft', error)} 'torchft>=0.2'; version 0.2 has wheels for Linux "
            "on x86-64 and Python 3.10 to 3.13"
        ) from error


def torch_is_new_enough() -> bool:
    """Returns whether torchft can connect ranks with this torch. It may be installed beside one with which it fails
    each time."""
    import torch.distributed as dist  # here, because the lighthouse needs torchft alone

    gloo: Any = dist.ProcessGroupGloo
    return hasattr(gloo._Options, "global_ranks_in_group")
