"""Kernels decode any bytes: they give a value, and they write nowhere else.

Bytes that no rank sends may stand for other values in other kernels. `tests/unit/test_kernels.py` has those that ranks
send.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs.top_k.sparsifier import Sparsifier
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.choosing import codec_of
from lightning_gqsgd.kernels import cpu, reference
from lightning_gqsgd.kernels.layout import Layout, Segment, cut, place
from lightning_gqsgd.kernels.protocol import Coding, Quantiser
from lightning_gqsgd.kernels.wire import scale_format
from tests.reliability.knobs import chance, scaled
from tests.unit.test_kernels import new_codecs

KERNELS = (reference, cpu)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
#: Numbers on either side of a tensor, which no kernel may touch.
GUARD, GUARD_BYTE, GUARD_NUMEL = 123.0, 0xA5, 256

CODECS: dict[str, dict[str, object]] = {
    **{f"linear {bits} {dither}": {"codec": "linear", "bits": bits, "dither": dither}
       for bits in (2, 3, 5, 8) for dither in ("adaptive", "subtractive", "stochastic")},
    "linear 1": {"codec": "linear", "bits": 1, "dither": "subtractive"},
    "linear levels": {"codec": "linear", "bits": 4, "dither": "stochastic", "levels": 3},
    "linear nearest": {"codec": "linear", "bits": 4, "dither": "nearest", "memory": "ef"},
    **{f"companded {bits}": {"codec": "companded", "bits": bits} for bits in (2, 3, 4, 8)},
    **{f"{codec} {bits}": {"codec": codec, "bits": bits} for codec in ("eden", "trellis") for bits in (1, 2, 3, 4)},
    **{f"exponential {bits} {mantissa}": {"codec": "exponential", "bits": bits, "mantissa": mantissa}
       for bits, mantissa in ((2, 0), (4, 0), (5, 3), (8, 0), (8, 2))},
    "exponential levels": {"codec": "exponential", "bits": 5, "levels": 5},
    "sign": {"codec": "sign", "memory": "ef"},
    "top_k": {"codec": "top_k", "memory": "ef", "density": 0.05},
    **{f"top_k {bits}": {"codec": "top_k", "memory": "ef", "density": 0.05, "bits": bits} for bits in (2, 3, 4)},
    "dct_top_k": {"codec": "dct_top_k", "memory": "ef", "density": 0.05, "block_size": 256},
    "top_k all": {"codec": "top_k", "memory": "ef", "density": 1.0},
    **{codec.name: {"codec": codec.name, "memory": "ef" if codec.biased_by else "none"} for codec in new_codecs()},
}  # fmt: skip


def guarded(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor of zeros, and the larger tensor that it is the middle of."""
    whole = torch.full((numel + 2 * GUARD_NUMEL,), GUARD, dtype=dtype)
    middle = whole[GUARD_NUMEL : GUARD_NUMEL + numel]
    middle.zero_()
    return middle, whole


def is_intact(whole: Tensor) -> bool:
    """Whether nothing has touched the numbers on either side."""
    sides = torch.cat([whole[:GUARD_NUMEL], whole[-GUARD_NUMEL:]])
    return bool((sides == GUARD).all())


def drawn_layout(numbers: random.Random, q: Quantiser, dtype: torch.dtype) -> tuple[list[Segment], Layout]:
    """A random piece."""
    segments = [
        Segment(numbers.randrange(1000), numbers.choice([0, 1, 7, 31, 64, 127, 300]), numbers.random() < 0.2)
        for _ in range(numbers.randrange(1, 5))
    ]
    form = scale_format(dtype)
    sizes = {"scale_bytes": 0 if isinstance(q, Sparsifier) else form.nbytes, "raw_bytes": form.raw_bytes}
    return segments, place(cut(segments, q.block_size), q, shards=1, **sizes)


def drawn_messages(numbers: random.Random, nbytes: int, valid: list[Tensor]) -> Tensor:
    """Messages of random bytes, or valid ones of which some bytes are replaced."""
    generator = torch.Generator().manual_seed(numbers.randrange(2**31))
    kind = numbers.randrange(3)
    if kind == 0:
        return torch.randint(0, 256, (len(valid), nbytes), generator=generator).to(torch.uint8)
    wires = torch.stack(valid)
    if kind == 1:
        wires.fill_(numbers.choice([0, 0x7F, 0x80, 0xFF]))
    for _ in range(numbers.randrange(1, 20) if nbytes else 0):
        wires[numbers.randrange(len(valid)), numbers.randrange(nbytes)] = numbers.choice([0, 1, 0x7F, 0x80, 0xFE, 0xFF])
    return wires


def check_message(numbers: random.Random, fields: dict[str, object], dtypes: Sequence[torch.dtype] = DTYPES) -> None:
    """Decode one random message by all kernels, in all the ways that there are."""
    dtype = numbers.choice(dtypes)
    config = GQSGDConfig(**{"block_size": numbers.choice([128, 256]), **fields})  # type: ignore[arg-type]
    q = codec_of(config).quantiser(config.block_size)
    segments, layout = drawn_layout(numbers, q, dtype)
    numel, sources = sum(segment.numel for segment in segments), numbers.randrange(1, 4)
    generator = torch.Generator().manual_seed(numbers.randrange(2**31))
    x = torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    keys = [(numbers.getrandbits(32), numbers.getrandbits(32)) for _ in range(sources)]
    valid = []
    for key in keys:
        wire = torch.zeros(layout.message_bytes, dtype=torch.uint8)
        cpu.encode(x, Coding(layout.blocks, q), wire, key)
        valid.append(wire)
    wires = drawn_messages(numbers, layout.message_bytes, valid)
    for kernels in KERNELS:
        decoded, whole = guarded(numel, dtype)
        kernels.decode(wires, Coding(layout.blocks, q), decoded, keys)
        assert is_intact(whole)
        own, whole = guarded(numel, dtype)
        own.copy_(x)
        kernels.decode(wires, Coding(layout.blocks, q), own, keys, own=sources - 1)
        assert is_intact(whole)
        out = torch.full((layout.message_bytes + 2 * GUARD_NUMEL,), GUARD_BYTE, dtype=torch.uint8)
        message = out[GUARD_NUMEL : GUARD_NUMEL + layout.message_bytes]
        kernels.reduce(wires, Coding(layout.blocks, q), x, keys, 0, message, keys[0])
        assert (out[:GUARD_NUMEL] == GUARD_BYTE).all()
        assert (out[GUARD_NUMEL + layout.message_bytes :] == GUARD_BYTE).all()


@pytest.mark.parametrize("name", CODECS)
def test_any_bytes_decode_to_a_value_and_touch_nothing_else(name: str) -> None:
    numbers, fields = chance("messages", name), CODECS[name]
    # Trellis codes of each width have a kernel of their own for fp64, which takes long to compile. One is enough here.
    has_kernels = fields["codec"] != "trellis" or fields["bits"] == 2
    dtypes = DTYPES if has_kernels else [dtype for dtype in DTYPES if dtype != torch.float64]
    for _ in range(scaled(15)):
        check_message(numbers, fields, dtypes)


@pytest.mark.reliability
@pytest.mark.parametrize("name", CODECS)
def test_many_random_messages_decode_to_a_value_and_touch_nothing_else(name: str) -> None:
    numbers = chance("many messages", name)
    for _ in range(scaled(400)):
        check_message(numbers, CODECS[name])
