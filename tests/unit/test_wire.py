"""The wire format does not change unnoticed: ranks of two versions would not understand each other."""

from __future__ import annotations

import hashlib

import pytest
import torch

from lightning_gqsgd.codecs import LinearCodec
from lightning_gqsgd.kernels import cpu, reference
from lightning_gqsgd.kernels.layout import Segment, cut, place
from lightning_gqsgd.kernels.protocol import Coding

NUMEL = 3000


def gradient() -> torch.Tensor:
    """Values over several magnitudes, the middle third mostly zero, by integer arithmetic alone."""
    k = torch.arange(NUMEL, dtype=torch.int64)
    x = ((k * 2654435761) % 2**24 - 2**23).to(torch.float32) * 2.0**-23
    x *= 2.0 ** -(k // 500).to(torch.float32)
    x[1000:2000] *= (k[1000:2000] % 10 == 0).float()
    return x


@pytest.mark.parametrize("kernels", [reference, cpu])
@pytest.mark.parametrize(
    ("bits", "dither", "digest"),
    [
        (8, "adaptive", "e2ce40e358eecb2f"),
        (8, "stochastic", "b23f781f1ecbf471"),
        (5, "adaptive", "fa19c61750725f67"),
        (4, "adaptive", "bb84c08310e9907c"),
        (4, "subtractive", "cc4e7e0a80214f67"),
        (2, "adaptive", "b8522b0a7bdd8519"),
        (1, "subtractive", "5f1d2760f6ea9a17"),
    ],
)
def test_messages_are_those_of_version_0_1(kernels, bits: int, dither: str, digest: str) -> None:
    table = cut([Segment(7, 2900, raw=False), Segment(8, 100, raw=True)], 256)
    q = LinearCodec(bits, dither).quantiser(256)
    layout = place(table, q, shards=2, scale_bytes=2, raw_bytes=4)
    message = torch.zeros(layout.message_bytes, dtype=torch.uint8)
    kernels.encode(gradient(), Coding(layout.blocks, q), message, (0x01234567, 0x89ABCDEF))
    assert hashlib.blake2b(message.numpy().tobytes(), digest_size=8).hexdigest() == digest
