"""Lossless averages: every bit arrives, the mean is rounded once, and messages from the network are not trusted."""

from __future__ import annotations

import contextlib
import math
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict.profile import bucket_profiles
from lightning_gqsgd.reducers.lossless import Lossless, pack, unpack
from lightning_gqsgd.research.simulation import VirtualRanks, average

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> list[int]:
    return x.view(INTEGERS[x.dtype.itemsize]).tolist()


def normal(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def every_number(dtype: torch.dtype) -> Tensor:
    """All 65,536 numbers of two bytes, with every NaN; of wider dtypes, numbers with as many first bits."""
    first = torch.arange(-(2**15), 2**15, dtype=torch.int64) << 8 * (dtype.itemsize - 2)
    return first.to(INTEGERS[dtype.itemsize]).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_comes_back_with_all_its_bits(dtype: torch.dtype) -> None:
    for x in (every_number(dtype), normal(0, 10_001, dtype), torch.zeros(300, dtype=dtype), normal(0, 1, dtype)[:0]):
        assert bits(unpack(pack(x), len(x), dtype)) == bits(x)


def entropy(symbols: Tensor) -> float:
    shares = symbols.bincount().double() / len(symbols)
    return float(-(shares * shares.clamp(min=1e-300).log2()).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_message_takes_the_entropy_of_exponents_and_all_other_bits(dtype: torch.dtype) -> None:
    x = normal(1, 1 << 18, dtype)
    exponents = (x.view(INTEGERS[dtype.itemsize]).long() >> 8 * dtype.itemsize - 9) & 0xFF
    expected = entropy(exponents) + 8 * dtype.itemsize - 8
    assert entropy(exponents) == pytest.approx(2.54, abs=0.01)
    assert expected <= 8 * len(pack(x)) / len(x) < expected + 0.06


def test_what_the_code_would_not_shorten_travels_as_it_is() -> None:
    x = torch.from_numpy(np.random.default_rng(0).integers(-(2**15), 2**15, 5000, np.int16)).view(torch.bfloat16)
    assert len(pack(x)) == 1 + x.nbytes
    assert bits(unpack(pack(x), len(x), x.dtype)) == bits(x)


def damaged(message: bytes) -> list[bytes]:
    """Messages that are none of as many numbers."""
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    large = bomb.compress(bytes(1 << 24)) + bomb.flush()
    return [
        b"",
        message[:1],
        message[:-1],
        message + b"\0",
        b"\0" + message,
        b"\2" + message[1:],
        message[: 1 + 1000] + large,
    ]


def test_damaged_messages_are_refused_and_take_no_more_memory_than_good_ones() -> None:
    x = normal(2, 1000, torch.bfloat16)
    messages = damaged(pack(x))
    tracemalloc.start()
    for message in messages:
        with pytest.raises(ValueError, match="corrupt message"):
            unpack(message, len(x), x.dtype)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20
    with pytest.raises(ValueError, match="corrupt message"):
        unpack(pack(x), 999, x.dtype)


def test_no_message_whatever_does_anything_but_return_or_refuse() -> None:
    random = np.random.default_rng(0)
    good = bytearray(pack(normal(3, 200, torch.bfloat16)))
    for _ in range(2000):
        message = good.copy()
        for place in random.integers(0, len(message), 3):
            message[place] = random.integers(256)
        with contextlib.suppress(ValueError):
            assert len(unpack(bytes(message), 200, torch.bfloat16)) == 200


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_mean_is_that_of_fp64_rounded_once(ranks: int, dtype: torch.dtype) -> None:
    gradients = [normal(rank, 1003, dtype) for rank in range(ranks)]
    means = average(gradients, reducer="lossless")
    exact = torch.stack([gradient.double() for gradient in gradients]).mean(0).numpy()
    half_a_step = torch.finfo(dtype).eps / 2 * (1 + 1e-6)
    for mean in means:
        assert bits(mean) == bits(means[0])
        assert mean.double().numpy() == pytest.approx(exact, rel=half_a_step, abs=1e-12)


def test_a_default_device_of_the_user_s_changes_nothing() -> None:
    gradients = [normal(rank, 1003, torch.float32) for rank in range(3)]
    expected = average(gradients, reducer="lossless")
    torch.set_default_device("meta")
    try:
        means = average(gradients, reducer="lossless")
    finally:
        torch.set_default_device(None)
    assert all(torch.equal(*pair) for pair in zip(means, expected, strict=True))


def test_the_largest_numbers_stay_finite_and_nan_reaches_all() -> None:
    for dtype in DTYPES:
        largest = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
        assert average([largest] * 3, reducer="lossless")[0].isfinite().all()
        broken = largest.clone()
        broken[7] = math.nan
        for mean in average([largest, broken, largest], reducer="lossless"):
            assert mean.isnan().nonzero().flatten().tolist() == [7]


def test_results_do_not_depend_on_pieces() -> None:
    gradients = [normal(rank, 5000, torch.bfloat16) for rank in range(3)]
    whole = average(gradients, reducer="lossless")[0]
    parts = [average([g[low : low + 1250] for g in gradients], reducer="lossless")[0] for low in range(0, 5000, 1250)]
    assert bits(torch.cat(parts)) == bits(whole)


def test_bytes_are_those_of_two_shots() -> None:
    """Of normal numbers in bf16: 10.6 bits of 16, where nothing else is sent but lengths."""
    ranks = VirtualRanks(4, [Segment(0, 1 << 16, raw=False)], torch.bfloat16, reducer="lossless")
    ranks.average([normal(rank, 1 << 16, torch.bfloat16) for rank in range(4)], 0)
    assert ranks.wire_bits == pytest.approx(10.6, abs=0.1)
    assert ranks.bytes_sent == pytest.approx(2 * 3 / 4 * ranks.wire_bits / 8 * (1 << 16), rel=1e-3)
    alone = VirtualRanks(1, [Segment(0, 100, raw=False)], torch.bfloat16, reducer="lossless")
    alone.average([normal(0, 100, torch.bfloat16)], 0)
    assert (alone.wire_bits, alone.bytes_sent) == (16, 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bits": 8}, "reducer='lossless' is for bits=32"),
        ({"bits": 16}, "bits=16 is averaged by the backend's own all-reduce, not by reducer='lossless'"),
        ({"auto": True}, "reducer='lossless' leaves auto=True nothing to choose"),
        ({"memory": "ef"}, "a memory works with the reducers .*; take one of these, or memory='none'"),
        ({"scale": "global"}, "has no scale that ranks could share"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GQSGDConfig(reducer="lossless", **fields)


def test_the_configuration_says_what_it_is_and_where_it_cannot_be() -> None:
    config = resolve(GQSGDConfig(reducer="lossless"), 4)
    assert config == resolve(GQSGDConfig(reducer="lossless", bits=32), 4)
    assert config.describe() == "32 bits (as they are, exponents entropy-coded)"
    setting = setting_of(config, 4, torch.float32)
    with pytest.raises(ConfigError, match="is for tensors on the CPU, not on cuda"):
        Lossless.check_device(setting, torch.device("cuda"))
    with pytest.raises(ConfigError, match="length depends on the gradients; predict reducer='native'"):
        bucket_profiles(setting, (Segment(0, 5000, raw=False),))
