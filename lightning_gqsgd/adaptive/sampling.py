"""Computes sums over a sample of a rank's gradient and of the mean; the noise of gradients is estimated from them.

From each compressed parameter, at most `SAMPLE_NUMEL` consecutive coordinates are taken. A hash of seed, step and
parameter gives the first of them; after the parameter's last coordinate, its first one follows. So samples do not
depend on buckets, and every coordinate is in a sample with the same probability. Multiplied by the number of all
coordinates over the number of sampled ones, a sum over the sample has the sum over the whole parameter as its mean.
Blocks of a sample begin at other places than blocks of the parameter, which does not change the mean error of rounding.

No function here exchanges messages, and none except `GradientSampler.collect` waits for a GPU.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gqsgd.adaptive.noise import NoiseSums
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import setting_of
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.reducers import REDUCERS, new_store
from lightning_gqsgd.wire.compiling import current, every_tile
from lightning_gqsgd.wire.plan import PLANS_KEPT, Plan, PlanCache, PlanKey

#: Number of sampled coordinates of a parameter, at most.
SAMPLE_NUMEL = 4096


class Sample(NamedTuple):
    """The sampled coordinates of a parameter.

    Attributes:
        parameter: number of the parameter.
        parts: their places in the flat tensor, in order.
        numel: number of coordinates.
        weight: number of coordinates of the parameter, divided by the number of sampled ones.
    """

    parameter: int
    parts: tuple[slice, ...]
    numel: int
    weight: float


class Taken(NamedTuple):
    """A sample of one bucket, before the bucket is reduced.

    Attributes:
        samples: the coordinates, by parameter.
        values: the rank's own gradient at these places, one sample after the other.
        step: number of the step.
    """

    samples: tuple[Sample, ...]
    values: Tensor
    step: int


class GradientSampler:
    """Measures `NoiseSums` of this rank, bucket by bucket.

    Args:
        candidates: the configurations by their bits, widest first, with the chosen reducers.
    """

    def __init__(self, candidates: Mapping[int, GQSGDConfig]) -> None:
        self._coded = {
            # A single rank that gathers its own message decodes its own codes.
            bits: replace(config, reducer="gather", coder="fixed", node_size=0, scale="auto", sample_every=0)
            for bits, config in candidates.items()
            if REDUCERS[config.reducer].compresses and config.codec != "float"
        }
        self._plans = PlanCache()
        # By parameter: |g|² and |Q(g) - g|² at each number of bits; and <g, m>.
        self._own: dict[int, Tensor] = {}
        self._inner: dict[int, Tensor] = {}

    def take(self, x: Tensor, segments: Sequence[Segment], step: int, seed: int) -> Taken | None:
        """Copy the sample of a bucket. Returns None if no parameter of the bucket is compressed.

        Args:
            x: the bucket before it is reduced, [numel].
            segments: the parameters in it.
            step: number of the step.
            seed: seed of the dither, the same on all ranks.
        """
        samples = tuple(_samples(segments, step, seed))
        if not samples:
            return None
        return Taken(samples, _sampled(x, samples), step)

    def measure(self, taken: Taken) -> None:
        """Measure the sums that only need this rank's gradient: its square, and its rounding error at each number of
        bits."""
        numels = [sample.numel for sample in taken.samples]
        segments = tuple(Segment(sample.parameter, sample.numel, False) for sample in taken.samples)
        values = taken.values.double()  # the dtype of sums
        rows = [_squares(values, numels)]
        for config in self._coded.values():
            rounded = self._rounded(taken.values, config, segments, taken.step)
            rows.append(_squares(rounded.double() - values, numels))
        for sample, sums in zip(taken.samples, torch.stack(rows, dim=1), strict=True):
            self._own[sample.parameter] = sums * sample.weight

    def watch(self, taken: Taken) -> Callable[[Tensor], None]:
        """Returns a function that takes the bucket's mean, and adds its products with the sample to the sums."""

        def add(mean: Tensor) -> None:
            if mean.is_cuda:  # keep the memory of the other stream's sample until this stream is done
                taken.values.record_stream(torch.cuda.current_stream(mean.device))
            numels = [sample.numel for sample in taken.samples]
            products = (_sampled(mean, taken.samples).double() * taken.values).split(numels)
            for sample, product in zip(taken.samples, products, strict=True):
                self._inner[sample.parameter] = product.sum() * sample.weight

        return add

    def collect(self) -> NoiseSums | None:
        """Returns the sums measured since the last call, or None if any of them is missing. Waits for a GPU.

        Sums over parameters are exact, so they do not depend on the order of buckets.
        """
        own = self._own
        inner = self._inner
        self.drop()
        if not own or set(own) != set(inner):
            return None
        rows = torch.stack([torch.cat([own[key], inner[key].view(1)]) for key in own]).tolist()
        if not all(math.isfinite(value) for row in rows for value in row):
            return None
        square, *errors, product = (math.fsum(column) for column in zip(*rows, strict=True))
        return square, product, *errors

    def drop(self) -> None:
        """Discard the measurements since the last call of `collect`."""
        self._own = {}
        self._inner = {}

    def compile(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compile the kernels by rounding a few numbers once, so that no step waits for a compiler."""
        with current(device):
            for config in self._coded.values():
                segments = every_tile(config.block_size, 1)
                x = torch.ones(sum(segment.numel for segment in segments), dtype=dtype, device=device)
                self._rounded(x, config, segments, 0)

    def _rounded(self, x: Tensor, config: GQSGDConfig, segments: tuple[Segment, ...], step: int) -> Tensor:
        """Returns a flat tensor after encoding and decoding."""
        # The plan rounds the sample as a gather with one rank does.
        key = PlanKey((config,), segments, x.dtype, compressed=True)
        plan = self._plans.get(key, step, lambda: Plan(segments, setting_of(config, 1, x.dtype)))
        self._plans.drop_unused(step - PLANS_KEPT)  # DDP rebuilds its buckets once
        result = x.clone()
        plan.average([result], step, [new_store(plan.setting, {}, x.device)])
        return result


def _samples(segments: Sequence[Segment], step: int, seed: int) -> list[Sample]:
    """Returns the places of the samples of a bucket."""
    at = 0
    samples = []
    for segment in segments:
        end = at + segment.numel
        if not segment.raw and segment.numel:
            numel = min(segment.numel, SAMPLE_NUMEL)
            first = at + _hash(seed, step, segment.parameter) % segment.numel if numel < segment.numel else at
            beyond = max(0, first + numel - end)
            parts = (slice(first, first + numel - beyond), slice(at, at + beyond))[: 1 + (beyond > 0)]
            samples.append(Sample(segment.parameter, parts, numel, segment.numel / numel))
        at = end
    return samples


def _sampled(x: Tensor, samples: Sequence[Sample]) -> Tensor:
    """Returns a copy of the sampled coordinates of a flat tensor, one sample after the other."""
    return torch.cat([x[part] for sample in samples for part in sample.parts])


def _hash(seed: int, step: int, parameter: int) -> int:
    text = b"".join(value.to_bytes(8, "little") for value in (seed, step, parameter))
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"gqsgd-sample").digest(), "little")


def _squares(values: Tensor, numels: Sequence[int]) -> Tensor:
    """Returns sums of squares of consecutive samples, fp64 [samples]."""
    return torch.stack([sample.square().sum() for sample in values.split(list(numels))])
