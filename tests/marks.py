"""Marks of tests that not every machine can run."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from lightning_gqsgd.membership.requirement import torch_is_new_enough

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("tc") is None, reason="needs Linux, root and iproute2"
)


def skip_without_torchft() -> None:
    """Skip a module whose tests need torchft, and a torch with which torchft can connect ranks."""
    pytest.importorskip("torchft", reason="the extra torchft is not installed")
    if not torch_is_new_enough():
        pytest.skip("torchft cannot connect ranks with this torch", allow_module_level=True)
