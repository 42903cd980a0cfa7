"""Coordinates beyond 2³¹: offsets in gradients and messages do not fit into 32 bits.

The memory of a large tensor is not there before it is touched, so only the last blocks take any.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.choosing import codec_of
from lightning_gqsgd.kernels import cpu
from lightning_gqsgd.kernels.layout import CODES, SCALE, START, Segment, cut, place
from lightning_gqsgd.kernels.protocol import Coding

CODECS: dict[str, dict[str, Any]] = {
    "linear": {"codec": "linear", "bits": 8},
    "companded": {"codec": "companded", "bits": 4},
    "eden": {"codec": "eden", "bits": 3},
    "exponential": {"codec": "exponential", "bits": 8},
    "top_k": {"codec": "top_k", "memory": "ef", "density": 0.05},
    "rotation": {"codec": "linear", "bits": 8, "rotation": True},
}
BLOCK, NUMEL, LAST_BLOCKS = 4096, 2**31 + 2**20 + 5, 40
KEY, ROTATION = (3, 4), (5, 6)
#: Bytes of a small message before its codes, where its scales are.
SCALES_BYTES = 65_536


def near(table: np.ndarray) -> tuple[np.ndarray, int, int]:
    """The blocks of a table, moved to the beginning of a small tensor and message; where they and their codes began."""
    small, first, codes = table.copy(), int(table[0, START]), int(table[:, CODES].min())
    small[:, START] -= first
    small[:, CODES] -= codes - SCALES_BYTES
    has_scale = small[:, SCALE] >= 0
    if has_scale.any():
        small[has_scale, SCALE] -= small[has_scale, SCALE].min()
    return small, first, codes


@pytest.mark.reliability
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_blocks_beyond_two_to_the_31_have_the_bits_of_the_same_blocks_in_a_small_tensor(
    name: str, dtype: torch.dtype
) -> None:
    config = GQSGDConfig(**{"block_size": BLOCK, **CODECS[name]})
    q, rotation = codec_of(config).quantiser(BLOCK), ROTATION if config.rotation else None
    layout = place(cut([Segment(0, NUMEL, False)], BLOCK), q, shards=1, scale_bytes=2, raw_bytes=4)
    table = layout.table[-LAST_BLOCKS:].copy()
    small, first, codes = near(table)
    values = torch.randn(NUMEL - first, generator=torch.Generator().manual_seed(1)).to(dtype)

    def sent(x: Tensor, blocks: np.ndarray, wire: Tensor) -> None:
        cpu.encode(x, Coding(torch.from_numpy(blocks), q, rotation), wire, KEY)

    def received(x: Tensor, blocks: np.ndarray, wire: Tensor) -> None:
        cpu.decode(wire[None], Coding(torch.from_numpy(blocks), q, rotation), x, [KEY])

    far, far_wire = torch.empty(NUMEL, dtype=dtype), torch.empty(layout.message_bytes, dtype=torch.uint8)
    far[first:] = values
    twin, twin_wire = values.clone(), torch.zeros(SCALES_BYTES + layout.message_bytes - codes, dtype=torch.uint8)
    sent(far, table, far_wire)
    sent(twin, small, twin_wire)
    assert first > 2**31
    assert torch.equal(far_wire[codes:], twin_wire[SCALES_BYTES:])
    received(far, table, far_wire)
    received(twin, small, twin_wire)
    assert twin.isfinite().all()
    assert twin.any()
    assert torch.equal(far[first:], twin)
