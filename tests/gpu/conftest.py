"""Where there is no GPU, a processor stands in for it, so that continuous integration runs what it can of these tests.

The kernels for GPUs run in Triton's interpreter, streams are none, and Gloo takes NCCL's place. What needs a card is
marked `card.needs_card`. Of the cases of a test, only the first runs there, since the interpreter is slow, and
`tests/unit/test_cuda_kernels.py` runs the kernels of all codecs in it.
"""

from __future__ import annotations

import sys

import pytest
import torch

from lightning_gqsgd import kernels
from lightning_gqsgd.kernels import cpu
from tests.gpu.card import STANDS_IN
from tests.unit.interpreter import fast, rounds_like_a_gpu  # noqa: F401


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the first case of each test, where a processor stands in for a GPU."""
    if not STANDS_IN:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.parent.name == "gpu":
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = {item for same in cases.values() for item in same[1:]}
    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]


@pytest.fixture
def triton_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors on the CPU take the kernels for GPUs, where a processor stands in for a GPU."""
    if STANDS_IN:
        pytest.importorskip("triton", minversion=".".join(map(str, kernels.MIN_TRITON)))
        from lightning_gqsgd.kernels import cuda

        for name in ("rounds_like_a_gpu", "fast"):
            request.getfixturevalue(name)
        monkeypatch.setitem(sys.modules, cpu.__name__, cuda)
        # The host's memory is not pinned for a card that is not there.
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
