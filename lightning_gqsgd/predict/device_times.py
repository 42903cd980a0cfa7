"""Measures computing times of a device: kernels of codecs, torch's bf16 hook, and copies.

On a CPU, times are seconds of the thread's own processor time, so other programs of the machine have no effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle
from statistics import median

import torch

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.choosing import codec_of
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.layout import LENGTH, Segment, cut, place_by_owner
from lightning_gqsgd.kernels.meta import codec_name
from lightning_gqsgd.kernels.protocol import Coding
from lightning_gqsgd.kernels.wire import scale_format
from lightning_gqsgd.predict.costs import Gamma

#: Number of coordinates on which kernels are timed: a piece on a CPU, a bucket on a GPU.
CODEC_NUMEL = {"cpu": 1 << 19, "cuda": 1 << 24}
#: Number of coordinates of a model's gradients, on which copies are timed. Kernels use pieces of this many coordinates
#: in turns, because in training, weights, activations and gradients exceed the caches.
MODEL_NUMEL = 1 << 24
_SOURCES = 4
#: The preset ``gqsgd_trellis``: the smallest error at 2 bits, for more processor time.
TRELLIS = GQSGDConfig(codec="trellis", bits=2, sample_every=0)


def codec_of_bits(bits: int) -> str:
    """Returns the name in `Costs` of the default configuration's codes at a number of bits."""
    return codec_of_config(GQSGDConfig(bits=bits))


def codec_of_config(config: GQSGDConfig) -> str:
    """Returns the name in `Costs` of a configuration's codes."""
    return codec_name(codec_of(config).quantiser(config.block_size))


def gamma_of(device: torch.device, config: GQSGDConfig, patience_s: float) -> Gamma:
    """Returns the seconds per coordinate of the kernels of a configuration's codec."""
    numel = CODEC_NUMEL[device.type]
    codec = CodecCase(device, config, numel, max(1, MODEL_NUMEL // numel))
    encode_s, decode_s = (_seconds(call, device, patience_s) / numel for call in (codec.encode, codec.decode))
    mean_s = _seconds(codec.encode_mean, device, patience_s) / codec.owned
    return Gamma(encode_s, decode_s, max(0.0, mean_s - encode_s) / _SOURCES)


def bf16_hook(device: torch.device, patience_s: float) -> Gamma:
    """Returns the seconds per coordinate of the work of torch's ``bf16_compress_hook`` before and after its
    all-reduce."""
    x = torch.zeros(MODEL_NUMEL, device=device)
    small = x.to(torch.bfloat16)
    narrow_s = _seconds(lambda: x.to(torch.bfloat16).div_(2), device, patience_s)  # the hook also creates a new tensor
    widen_s = _seconds(lambda: x.copy_(small), device, patience_s)
    return Gamma(narrow_s / x.numel(), widen_s / x.numel(), 0.0)


class CodecCase:
    """Tensors and messages of several sources, with the operations on them that are timed.

    Attributes:
        owned: number of coordinates of one owner's shard. There are as many owners as sources.

    Args:
        device: device of the tensors.
        config: the configuration, of which the codec and the block size are used.
        numel: number of coordinates of a tensor, fp32.
        pieces: number of tensors, which calls use in turns.
    """

    def __init__(self, device: torch.device, config: GQSGDConfig, numel: int, pieces: int = 1) -> None:
        q = codec_of(config).quantiser(config.block_size)
        form = scale_format(torch.float32)
        x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
        self._pieces = cycle(x.repeat(pieces, 1))
        table = cut([Segment(0, numel, raw=False)], config.block_size)
        sizes = {"scale_bytes": form.nbytes, "raw_bytes": form.raw_bytes}
        layout = place_by_owner(table, q, shards=_SOURCES, **sizes, striped=False).on(device)
        self._how = Coding(layout.blocks, q)
        self._shard = layout.shard(0)
        self.owned = int(self._shard.blocks[:, LENGTH].sum())
        self._kernels = kernels_for(device)
        self._wires = torch.zeros(_SOURCES, layout.message_bytes, dtype=torch.uint8, device=device)
        self._keys = tuple((number, 2) for number in range(_SOURCES))
        for number in range(_SOURCES):
            self.encode(number)
        self._received = self._wires[:, : layout.shard_bytes].contiguous()
        self._mean = torch.zeros_like(self._received[0])

    def encode(self, source: int = 0) -> None:
        """Write the message of a source."""
        self._kernels.encode(next(self._pieces), self._how, self._wires[source], self._keys[source])

    def decode(self) -> None:
        """Decode one message."""
        self._kernels.decode(self._wires[:1], self._how, next(self._pieces), self._keys[:1])

    def encode_mean(self) -> None:
        """Encode the mean of a shard, as its owner does: from its own coordinates and the messages of others."""
        how = self._how._replace(blocks=self._shard.blocks)
        self._kernels.reduce(self._received, how, next(self._pieces), self._keys, 0, self._mean, self._keys[0])


def copying(device: torch.device, patience_s: float) -> tuple[float, float]:
    """Returns the seconds per byte that a copy reads or writes, and the seconds to start a kernel, which are the
    duration of a kernel on one block."""
    x = torch.zeros(MODEL_NUMEL, device=device)
    y = torch.empty_like(x)
    config = GQSGDConfig()
    launch_s = _seconds(CodecCase(device, config, config.block_size).encode, device, patience_s)
    return max(0.0, _seconds(lambda: y.copy_(x), device, patience_s) - launch_s) / (2 * x.nbytes), launch_s


def _seconds(call: Callable[[], object], device: torch.device, patience_s: float) -> float:
    """Returns the median seconds for which a call keeps a device busy; on a CPU, of the thread's own processor time.

    After one call for warm-up, the call runs 3 to 12 times, for about ``patience_s`` seconds.
    """

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            return time.perf_counter()
        return time.thread_time()

    call()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or (len(times) < 12 and time.perf_counter() - began < patience_s):
        begun = now()
        call()
        times.append(now() - begun)
    return median(times)
