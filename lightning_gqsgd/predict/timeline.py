"""The computation of one rank in a step: the buckets of DDP, and the times at which the backward pass completes
them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError, check_one_of
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.kernels.wire import DTYPES_BY_NAME
from lightning_gqsgd.predict import files
from lightning_gqsgd.session.parameters import number_parameters

#: Sizes of DDP's first bucket and of its other buckets, in bytes (torch.distributed, ``bucket_cap_mb=25``).
FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES if dist.is_available() else 1 << 20
BUCKET_BYTES = 25 * 2**20
#: The largest numbers of buckets, and of pieces, of a step in which each of them is predicted by itself.
MOST = 2048
#: Number of buckets, or of pieces, from an end of a larger step at which bunches have two of them; see `bunch_length`.
FINE = 128
#: Coordinates of a bucket of an average of local steps, at least, if the step has more than `MOST` buckets. That is
#: several pieces on any device.
_AT_ONCE_NUMEL = 1 << 26
#: In larger steps, buckets and pieces of equal sizes count as equal if the numbers of their parameters are equal modulo
#: this number. These decide which ranks own the blocks that cannot be divided evenly.
NUMBERS = 16


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        segments: the parameters, in order.
        ready_s: seconds from the start of the backward pass until the last gradient is ready.
    """

    segments: tuple[Segment, ...]
    ready_s: float

    @property
    def numel(self) -> int:
        """Number of coordinates."""
        return sum(segment.numel for segment in self.segments)


class Bunch(NamedTuple):
    """Neighbouring buckets that are reduced together.

    Attributes:
        alike: the parameters of the buckets, and for each the number of equal ones.
        ready_s: see `Bucket`.
    """

    alike: tuple[tuple[tuple[Segment, ...], int], ...]
    ready_s: float


@dataclass(frozen=True)
class Timeline:
    """The computation of a step on one rank, without communication.

    Attributes:
        buckets: the buckets, in the order in which they are ready.
        backward_s: seconds of the backward pass.
        forward_s: seconds from the start of the step to the backward pass.
        update_s: seconds of the optimizer.
        dtype: dtype of the gradients.
        name: name of the model.
        batch: number of samples of the rank in this step; None if not given.
    """

    buckets: tuple[Bucket, ...]
    backward_s: float
    forward_s: float = 0.0
    update_s: float = 0.0
    dtype: torch.dtype = torch.float32
    name: str = ""
    batch: int | None = None

    def __post_init__(self) -> None:
        times = [bucket.ready_s for bucket in self.buckets]
        if not times or sorted(times) != times or times[0] < 0 or times[-1] > self.backward_s * (1 + 1e-9):
            raise ConfigError(
                f"ready times {times} of a backward pass of {self.backward_s} s have to rise from 0 to its end; give "
                "at least one bucket, in the order of their ready times"
            )

    @property
    def numel(self) -> int:
        """Number of coordinates of all buckets."""
        return sum(bucket.numel for bucket in self.buckets)

    @property
    def compute_s(self) -> float:
        """Seconds of the step without any communication."""
        return self.forward_s + self.backward_s + self.update_s

    @cached_property
    def bunches(self) -> tuple[Bunch, ...]:
        """The buckets; in bunches if there are more than `MOST`."""
        total = len(self.buckets)
        if total <= MOST:
            return tuple(Bunch(((bucket.segments, 1),), bucket.ready_s) for bucket in self.buckets)
        made = []
        before = 0
        while before < total:
            several = self.buckets[before : before + bunch_length(before, total)]
            alike = Counter(_with_small_numbers(bucket.segments) for bucket in several)
            made.append(Bunch(tuple(alike.items()), several[-1].ready_s))
            before += len(several)
        return tuple(made)

    @property
    def is_bunched(self) -> bool:
        """Whether there are so many buckets that they are in bunches."""
        return len(self.buckets) > MOST

    def at_once(self) -> Timeline:
        """Returns a step that computes nothing and reduces all buckets together, as an average of local steps does."""
        least = _AT_ONCE_NUMEL if self.is_bunched else math.inf
        buckets = tuple(Bucket(segments, 0.0) for segments in _joined(self.buckets, least))
        return replace(self, buckets=buckets, backward_s=0.0, forward_s=0.0, update_s=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns the timeline as plain values. A batch of None is left out."""
        return {
            "name": self.name,
            **({} if self.batch is None else {"batch": self.batch}),
            "dtype": str(self.dtype).removeprefix("torch."),
            "forward_s": self.forward_s,
            "backward_s": self.backward_s,
            "update_s": self.update_s,
            # Without the segments' choices, because a step has one configuration here.
            "buckets": [
                [bucket.ready_s, [list(segment[:3]) for segment in bucket.segments]] for bucket in self.buckets
            ],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Timeline:
        """Returns the timeline of `to_dict`.

        Raises:
            ConfigError: if ``values`` is not a result of `to_dict`. The message names the entry.
        """
        names = ("name", "dtype", "forward_s", "backward_s", "update_s", "buckets")
        has_batch = "batch" in files.entries(values, "a timeline")  # earlier files do not have it
        given = files.entries(values, "a timeline", (*names, "batch") if has_batch else names)
        dtype = files.text(given["dtype"], "the timeline's dtype")
        check_one_of("the timeline's dtype", dtype, DTYPES_BY_NAME)
        backward_s, forward_s, update_s = (
            files.number(given[name], f"the timeline's {name}") for name in ("backward_s", "forward_s", "update_s")
        )
        buckets = tuple(_bucket(row) for row in files.rows(given["buckets"], "the timeline's buckets"))
        name = files.text(given["name"], "the timeline's name")
        batch = files.integer(given["batch"], "the timeline's batch", 1) if has_batch else None
        return cls(buckets, backward_s, forward_s, update_s, DTYPES_BY_NAME[dtype], name, batch)


def bunch_length(before: int, total: int, fine: int = FINE) -> int:
    """Returns the number of things in the next bunch.

    Args:
        before: number of things before it.
        total: number of all things.
        fine: distance from an end from which on bunches have two of them; at twice the distance, they have three.
    """
    return 1 + min(before, total - 1 - before) // fine


def _with_small_numbers(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Returns the segments of a bucket that stands for all that are alike, see `NUMBERS`."""
    least = min(segment.parameter for segment in segments)
    return tuple(segment._replace(parameter=segment.parameter - least + least % NUMBERS) for segment in segments)


def _joined(buckets: Sequence[Bucket], least: float) -> Iterator[tuple[Segment, ...]]:
    """Yield the segments of consecutive buckets together, at least ``least`` coordinates at a time."""
    segments: list[Segment] = []
    numel = 0
    for bucket in buckets:
        segments += bucket.segments
        numel += bucket.numel
        if numel >= least:
            yield tuple(segments)
            segments = []
            numel = 0
    if segments:
        yield tuple(segments)


def _bucket(row: object) -> Bucket:
    """Returns the bucket of a row of `Timeline.to_dict`; raises ConfigError if it is no such row."""
    ready_s, segments = files.rows(row, "a bucket of the timeline", 2)
    made = []
    for segment in files.rows(segments, "the segments of a bucket"):
        parameter, numel, raw = files.rows(segment, "a segment of a bucket", 3)
        made.append(
            Segment(
                files.integer(parameter, "the parameter of a segment"),
                files.integer(numel, "the numel of a segment"),
                files.flag(raw, "the raw flag of a segment"),
            )
        )
    return Bucket(tuple(made), files.number(ready_s, "the ready time of a bucket"))


def estimated(
    model: nn.Module, backward_s: float, *, forward_s: float | None = None, weights: Sequence[float] | None = None
) -> Timeline:
    """Estimate the timeline of a model, which may be on the device "meta", from the duration of its backward pass.

    It assumes that gradients become ready in the reverse order of the parameters.

    Args:
        model: the model; DDP's default bucket sizes are used.
        backward_s: seconds of the backward pass.
        forward_s: seconds of the forward pass; None means half of the backward pass, which has twice the operations.
        weights: for each trained parameter, its share of the backward pass, e.g. its operations; None means its number
            of coordinates.

    Raises:
        ConfigError: if no parameter is trained, if parameters have several dtypes, or if there is not one weight for
            each parameter.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    dtypes = {p.dtype for p in named.values()}
    if not dtypes:
        raise ConfigError("the model has no parameter that is trained; give one that has, or set requires_grad")
    if len(dtypes) != 1:
        words = ", ".join(sorted(map(str, dtypes)))
        raise ConfigError(f"parameters have the dtypes {words}; give a model whose parameters have one dtype")
    entries = number_parameters(named, GQSGDConfig())[::-1]
    weights = weights_of([p.numel() for p in named.values()], weights)[::-1]
    (dtype,) = dtypes
    total = max(sum(weights), 1e-300)
    done = [backward_s * share / total for share in accumulate(weights)]
    buckets: list[Bucket] = []
    segments: list[Segment] = []
    numel = 0
    for number, entry in enumerate(entries):
        segments.append(Segment(entry.number, entry.numel, entry.raw))
        numel += entry.numel
        limit = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
        if numel * dtype.itemsize >= limit or number == len(entries) - 1:
            buckets.append(Bucket(tuple(segments), min(done[number], backward_s)))
            segments = []
            numel = 0
    forward = backward_s / 2 if forward_s is None else forward_s
    return Timeline(tuple(buckets), backward_s, forward, dtype=dtype, name=type(model).__name__)


def weights_of(numels: Sequence[int], weights: Sequence[float] | None) -> list[float]:
    """Returns the weights of parameters; if there are none, their numbers of coordinates.

    Raises:
        ConfigError: if there is not one weight for each parameter.
    """
    chosen = [float(weight) for weight in (numels if weights is None else weights)]
    if len(chosen) != len(numels):
        raise ConfigError(f"{len(chosen)} weights for {len(numels)} parameters that are trained; give one for each")
    return chosen
