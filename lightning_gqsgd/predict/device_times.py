"""Measures what a device takes to compute: kernels of codecs, torch's bf16 hook, and copies.

On a CPU, times are seconds of the thread's own processor time, so that other programs of the machine do not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle
from statistics import median

import torch

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.parsing import codec_of
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.layout import LENGTH, Segment, cut, place_by_owner
from lightning_gqsgd.kernels.meta import codec_name
from lightning_gqsgd.kernels.protocol import Own
from lightning_gqsgd.kernels.wire import scale_format
from lightning_gqsgd.predict.costs import Gamma

#: Coordinates that kernels are timed on: a piece's on a CPU, and those of a bucket on a GPU.
CODEC_NUMEL = {"cpu": 1 << 19, "cuda": 1 << 24}
#: Coordinates of a model's gradients, which copies are timed on. Kernels take pieces of as many in turns. In training,
#: weights, activations and gradients are more than caches hold.
MODEL_NUMEL = 1 << 24
_SOURCES = 4
#: The preset ``gqsgd_trellis``: the smallest error at 2 bits, in more of the processor's time.
TRELLIS = GQSGDConfig(codec="trellis", bits=2, sample_every=0)


def codec_of_bits(bits: int) -> str:
    """Returns the name that costs have for the codes of the default configuration at a width."""
    return codec_of_config(GQSGDConfig(bits=bits))


def codec_of_config(config: GQSGDConfig) -> str:
    """Returns the name that costs have for the codes of a configuration."""
    q = codec_of(config).quantiser(config.block_size)
    return codec_name(q.kind, q.bits)


def gamma_of(device: torch.device, config: GQSGDConfig, patience_s: float) -> Gamma:
    """Returns the seconds of the kernels of a configuration's codec for each coordinate."""
    numel = CODEC_NUMEL[device.type]
    codec = CodecCase(device, config, numel, max(1, MODEL_NUMEL // numel))
    encode_s, decode_s = (_seconds(call, device, patience_s) / numel for call in (codec.encode, codec.decode))
    mean_s = _seconds(codec.encode_mean, device, patience_s) / codec.owned
    return Gamma(encode_s, decode_s, max(0.0, mean_s - encode_s) / _SOURCES)


def bf16_hook(device: torch.device, patience_s: float) -> Gamma:
    """Returns the seconds for each coordinate of what torch's ``bf16_compress_hook`` does before and after its
    all-reduce."""
    x = torch.zeros(MODEL_NUMEL, device=device)
    small = x.to(torch.bfloat16)
    narrow_s = _seconds(lambda: x.to(torch.bfloat16).div_(2), device, patience_s)  # the hook makes a new tensor, too
    widen_s = _seconds(lambda: x.copy_(small), device, patience_s)
    return Gamma(narrow_s / x.numel(), widen_s / x.numel(), 0.0)


class CodecCase:
    """Tensors, messages of several sources, and what is done with them.

    Attributes:
        owned: coordinates of the shard of one owner, of as many as there are sources.

    Args:
        device: where they are.
        config: its codec and its block size count.
        numel: coordinates of a tensor, fp32.
        pieces: number of tensors, which calls take in turns.
    """

    def __init__(self, device: torch.device, config: GQSGDConfig, numel: int, pieces: int = 1) -> None:
        self._q = codec_of(config).quantiser(config.block_size)
        form = scale_format(torch.float32)
        x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
        self._pieces = cycle(x.repeat(pieces, 1))
        table = cut([Segment(0, numel, raw=False)], config.block_size)
        sizes = {"scale_bytes": form.nbytes, "raw_bytes": form.raw_bytes}
        self._layout = place_by_owner(table, self._q, shards=_SOURCES, **sizes, striped=False).on(device)
        self._shard = self._layout.shard(0)
        self.owned = int(self._shard.table[:, LENGTH].sum())
        self._kernels = kernels_for(device)
        self._wires = torch.zeros(_SOURCES, self._layout.message_bytes, dtype=torch.uint8, device=device)
        self._keys = tuple((number, 2) for number in range(_SOURCES))
        for number in range(_SOURCES):
            self.encode(number)
        self._received = self._wires[:, : self._layout.shard_bytes].contiguous()
        self._mean = torch.zeros_like(self._received[0])

    def encode(self, source: int = 0) -> None:
        """Write the message of a source."""
        self._kernels.encode(next(self._pieces), self._layout.blocks, self._wires[source], self._q, self._keys[source])

    def decode(self) -> None:
        """Decode one message."""
        self._kernels.decode(self._wires[:1], self._layout.blocks, next(self._pieces), self._q, self._keys[:1])

    def encode_mean(self) -> None:
        """Encode the mean of a shard, as its owner does: of its own coordinates, and of others' messages."""
        own = Own(0, next(self._pieces))
        blocks = self._shard.blocks
        out_key = self._keys[0]
        self._kernels.reduce(self._received, blocks, self._mean, self._q, self._keys, out_key, own)


def copying(device: torch.device, patience_s: float) -> tuple[float, float]:
    """Returns the seconds for each byte that a copy reads or writes, and seconds to start a kernel: what one of a block
    takes."""
    x = torch.zeros(MODEL_NUMEL, device=device)
    y = torch.empty_like(x)
    config = GQSGDConfig()
    launch_s = _seconds(CodecCase(device, config, config.block_size).encode, device, patience_s)
    return max(0.0, _seconds(lambda: y.copy_(x), device, patience_s) - launch_s) / (2 * x.nbytes), launch_s


def _seconds(call: Callable[[], object], device: torch.device, patience_s: float) -> float:
    """Returns the median of the seconds that a call keeps a device busy; on a CPU, of the thread's own processor time.

    The call runs for ``patience_s`` about, and between 3 and 12 times after one that warms up.
    """
    call()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 3 or (len(times) < 12 and time.perf_counter() - began < patience_s):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            begun = time.perf_counter()
            call()
            torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begun)
        else:
            begun = time.thread_time()
            call()
            times.append(time.thread_time() - begun)
    return median(times)
