"""Marks of tests that not every machine can run."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("tc") is None, reason="needs Linux, root and iproute2"
)
