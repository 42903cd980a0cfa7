"""Times kernels and whole all-reduces on this machine, and the operations that they replace: ``gqsgd bench``.

All cases take turns (`timing`), so that slow changes of the machine affect all of them. Every ratio is a median over
rounds of the ratios within a round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict.device_times import CODEC_NUMEL, CodecCase
from lightning_gqsgd.predict.timing import (
    Case,
    EventClock,
    Spread,
    clock_of_ranks,
    in_turns,
    name_of,
    slowest,
    thread_clock,
)
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.wire.engine import Engine, Request

#: The codecs and numbers of bits whose kernels are timed.
KERNELS = (
    ("companded", 8),
    ("companded", 4),
    ("companded", 3),
    ("companded", 2),
    ("linear", 8),
    ("linear", 4),
    ("eden", 2),
)
#: The parts of a measurement.
PARTS = KERNELS_PART, REDUCERS_PART = "kernels", "reducers"
#: The numbers of bits at which a gradient is averaged, in addition to fp32 and bf16.
WIDTHS = (8, 4)
#: Number of rounds for warm-up, which are not timed.
WARMUP = 2


@dataclass(frozen=True)
class KernelTime:
    """The kernels of one codec on one tensor of fp32 numbers.

    Attributes:
        codec: name of the codec.
        bits: bits per coordinate.
        encode_ns: nanoseconds per coordinate to encode it.
        decode_ns: nanoseconds per coordinate to decode it.
        gradient_gb_per_s: 10⁹ bytes of gradient that are encoded and decoded per second.
        times_copy: time of both, divided by the time of a copy of the tensor.
    """

    codec: str
    bits: int
    encode_ns: float
    decode_ns: float
    gradient_gb_per_s: float
    times_copy: float


@dataclass(frozen=True)
class WayTime:
    """The time of one way to average gradients over all ranks, compared with another way.

    Attributes:
        name: name of the way, e.g. ``"fp32"``, ``"ddp"``, or a number of bits.
        sent_mb: 10⁶ bytes that each rank sends.
        ms: median milliseconds of the slowest rank.
        speedup: time of the other way divided by this time, the median over rounds.
        low: the 10th percentile of this ratio over rounds.
        high: the 90th percentile of this ratio.
    """

    name: str
    sent_mb: float
    ms: float
    speedup: float
    low: float
    high: float

    @classmethod
    def all_of(cls, seconds: Mapping[str, np.ndarray], sent: Mapping[str, float], against: str) -> tuple[WayTime, ...]:
        """Returns all ways, from the seconds in each round and the bytes sent by name; ``against`` is the other way."""
        return tuple(
            cls(name, sent[name] / 1e6, 1e3 * Spread.of(values).median, *Spread.of(seconds[against] / values))
            for name, values in seconds.items()
        )


@dataclass(frozen=True)
class Bench:
    """Measurements of kernels and all-reduces.

    Attributes:
        device: the device, in words.
        backend: backend of the process group.
        ranks: number of ranks.
        numel: coordinates of the gradient that was averaged, fp32.
        rounds: number of timed rounds.
        kernels: see `KernelTime`; measured on rank 0 while the other ranks wait.
        all_reduces: see `WayTime`; compared with fp32.
    """

    device: str
    backend: str
    ranks: int
    numel: int
    rounds: int
    kernels: tuple[KernelTime, ...]
    all_reduces: tuple[WayTime, ...]


def measure(
    device: torch.device,
    numel: int,
    rounds: int,
    tick: Callable[[], object] = lambda: None,
    parts: Sequence[str] = PARTS,
) -> Bench:
    """Time kernels and all-reduces on this device and between the ranks of the default process group. A collective.

    Args:
        device: device of gradients: the CPU over Gloo, or CUDA over NCCL.
        numel: coordinates of the gradient.
        rounds: number of timed rounds.
        tick: function that is called before every run of a case, `runs` times on rank 0.
        parts: the parts of `PARTS` to time; the results of the others are empty.
    """
    kernels = _kernels(device, rounds, tick) if dist.get_rank() == 0 and KERNELS_PART in parts else ()
    dist.barrier()
    reduces = _all_reduces(device, numel, rounds, tick) if REDUCERS_PART in parts else ()
    return Bench(name_of(device), dist.get_backend(), dist.get_world_size(), numel, rounds, kernels, reduces)


def runs(rounds: int, parts: Sequence[str] = PARTS) -> int:
    """Returns how often `measure` runs a case, including rounds that are not timed."""
    cases = {KERNELS_PART: 1 + 2 * len(KERNELS), REDUCERS_PART: 2 + len(WIDTHS)}
    return (rounds + WARMUP) * sum(cases[part] for part in parts)


def _kernels(device: torch.device, rounds: int, tick: Callable[[], object]) -> tuple[KernelTime, ...]:
    """Time the encoding and decoding of a tensor, and a copy of it.

    On a CPU, all run on one thread, and its own processor time is measured, because other programs may use the
    processor.
    """
    numel = CODEC_NUMEL[device.type]
    x = torch.zeros(numel, device=device)
    cases: dict[str, Case] = {"copy": partial(torch.empty_like(x).copy_, x)}
    for codec, bits in KERNELS:
        case = CodecCase(device, GQSGDConfig(codec=codec, bits=bits), numel)
        cases |= {f"{codec} {bits} encode": case.encode, f"{codec} {bits} decode": case.decode}
    clock = EventClock() if device.type == "cuda" else thread_clock
    seconds = in_turns(cases, rounds, warmup=WARMUP, before=tick, clock=clock)
    made = []
    for codec, bits in KERNELS:
        encode, decode = (seconds[f"{codec} {bits} {way}"] for way in ("encode", "decode"))
        both = encode + decode
        made.append(
            KernelTime(
                codec,
                bits,
                encode_ns=1e9 * Spread.of(encode).median / numel,
                decode_ns=1e9 * Spread.of(decode).median / numel,
                gradient_gb_per_s=x.nbytes / Spread.of(both).median / 1e9,
                times_copy=Spread.of(both / seconds["copy"]).median,
            )
        )
    return tuple(made)


def _all_reduces(device: torch.device, numel: int, rounds: int, tick: Callable[[], object]) -> tuple[WayTime, ...]:
    """Time the averages of a gradient by the backend, and by the package's own engine."""
    assert dist.group.WORLD is not None
    ranks = dist.get_world_size()
    x = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
    engine = Engine(device, dist.group.WORLD, "gqsgd bench")
    cases: dict[str, Case] = {"fp32": partial(_mean, x, ranks), "bf16": partial(_mean_in_bf16, x, ranks)}
    sent = {"fp32": ring_bytes(x.nbytes, ranks), "bf16": ring_bytes(x.nbytes // 2, ranks)}
    try:
        for bits in WIDTHS:
            config = resolve(GQSGDConfig(bits=bits, sample_every=0), ranks)
            engine.connect(config)
            engine.compile([config], [x.dtype])
            request = Request("bench", (config,), (Segment(0, numel, raw=False),), 0)
            name = f"{bits} bits, {config.reducer}"
            cases[name] = lambda request=request: engine.reduce(x, request).wait()  # type: ignore[misc]
            sent[name] = engine.plan(x, request).sent_bytes
        seconds = on_slowest_rank(cases, device, rounds, tick)
    finally:
        engine.close()
    return WayTime.all_of(seconds, sent, against="fp32")


def on_slowest_rank(
    cases: Mapping[str, Case], device: torch.device, rounds: int, tick: Callable[[], object]
) -> dict[str, np.ndarray]:
    """Time cases that all ranks run together. A collective.

    Args:
        cases: the cases, by name.
        device: this rank's device.
        rounds: number of timed rounds.
        tick: function that is called before every run of a case.

    Returns:
        For each case, its seconds on the slowest rank, (rounds,).
    """

    def ready() -> None:
        tick()
        dist.barrier()

    seconds = in_turns(cases, rounds, warmup=WARMUP, before=ready, clock=clock_of_ranks(device))
    return {name: slowest(values, device) for name, values in seconds.items()}


def _mean(x: Tensor, ranks: int) -> None:
    dist.all_reduce(x.div_(ranks))  # DDP also divides before the all-reduce


def _mean_in_bf16(x: Tensor, ranks: int) -> None:
    """Average a tensor in bf16, as torch's ``bf16_compress_hook`` does."""
    small = x.to(torch.bfloat16).div_(ranks)
    dist.all_reduce(small)
    x.copy_(small)
