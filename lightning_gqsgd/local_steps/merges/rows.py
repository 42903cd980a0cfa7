"""The numbers that each member announces at the start of a merge, and the conclusions that all members draw."""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import IntFlag

import torch
from torch import Tensor

#: Bytes of a member's name that are sent.
_NAME_BYTES = 40


class Flag(IntFlag):
    """Properties of a member in a merge.

    Attributes:
        HAS_CHANGE: it sends a change in this merge.
        IS_FINITE: that change has no NaN and no infinity.
        HAS_FINISHED: it makes no more steps, and all of its changes are in this merge or in earlier ones.
        IS_IDLE: it has not finished, and has made no step for so long that those that have finished wait no longer.
    """

    HAS_CHANGE = 1
    IS_FINITE = 2
    HAS_FINISHED = 4
    IS_IDLE = 8


@dataclass(frozen=True)
class Row:
    """The numbers that a member sends about itself.

    Attributes:
        identity: a number that no other member has.
        name: for errors, e.g. ``host-3:4711``.
        merges: number of merges that it has made.
        checksum: checksum of its anchors' bits.
        outer: digest of its outer optimizer and the hyperparameters, with which it moves its anchors.
        contribution: number of its change, counted from 1; 0 if it sends none.
        samples: number of samples that the steps of its change have used, which is its weight. The weight of a change
            without steps is that of the round before.
        steps: number of those steps.
        step_s: seconds that one of its steps takes.
        norm: l2 norm of its change, of the parameters only: running statistics soon stop changing, so their change for
            each step is much larger on a member that has made few steps.
        rate: largest learning rate of those steps; 0 if it is not known.
        peak: largest learning rate that the member has had so far.
        flags: see `Flag`.
    """

    identity: int
    name: str
    merges: int
    checksum: int
    outer: int = 0
    contribution: int = 0
    samples: int = 0
    steps: int = 0
    step_s: float = 0.0
    norm: float = 0.0
    rate: float = 0.0
    peak: float = 0.0
    flags: Flag = Flag(0)

    def tensor(self) -> Tensor:
        """Returns the row as int64 numbers, [numel]."""
        identity, name, *numbers = astuple(self)
        packed = _LAYOUT.pack(identity, *numbers, name.encode()[:_NAME_BYTES])
        return torch.frombuffer(bytearray(packed), dtype=torch.int64)

    @classmethod
    def of(cls, tensor: Tensor) -> Row:
        """Returns the row from the result of `tensor`."""
        identity, *numbers, flags, name = _LAYOUT.unpack(tensor.cpu().contiguous().numpy().tobytes())
        fields = (identity, name.rstrip(b"\0").decode(errors="replace"), *numbers, Flag(flags))
        return cls(*fields)

    @property
    def known(self) -> tuple[int, int, int]:
        """What has to be equal on all members, so that they remain equal: the number of merges, the anchors, and the
        outer optimizer."""
        return self.merges, self.checksum, self.outer


#: The fields of a row, in order, except that the name is at the end.
_LAYOUT = struct.Struct(f"<qqqqqqqddddq{_NAME_BYTES}s")


@dataclass(frozen=True)
class Shares:
    """The share of each member's change in the mean change.

    Attributes:
        of_members: the weight of each member's change, in order; they add up to 1, or all are 0.
        left_out: numbers of the members whose changes are not used, with the reason.
    """

    of_members: tuple[float, ...]
    left_out: dict[int, str]


def shares_of(rows: Sequence[Row], outlier: float) -> Shares:
    """Returns the shares, in proportion to samples. They are equal on all members.

    A change that is not finite is left out. So is one whose norm is more than ``outlier`` times the usual one, see
    `_usual_norms`. A change without steps has no usual size.

    Args:
        rows: the rows of all members, in order.
        outlier: the limit; infinity means no limit.
    """
    senders = [number for number, row in enumerate(rows) if Flag.HAS_CHANGE in row.flags and row.samples > 0]
    left_out = {number: "is not finite" for number in senders if Flag.IS_FINITE not in rows[number].flags}
    finite = [number for number in senders if number not in left_out]
    learnt = [number for number in finite if rows[number].steps]
    for number, usual in zip(learnt, _usual_norms([rows[number] for number in learnt]), strict=True):
        if usual > 0 and rows[number].norm > outlier * usual:
            left_out[number] = (
                f"is {rows[number].norm / usual:.3g} times as large as the members' median, also for each step and at "
                "its learning rate"
            )
    used = [number for number in finite if number not in left_out]
    total = sum(rows[number].samples for number in used)
    shares = tuple(rows[number].samples / total if number in used else 0.0 for number in range(len(rows)))
    return Shares(shares, left_out)


def _usual_norms(rows: Sequence[Row]) -> list[float]:
    """Returns the norm that each member's change would have if it were like the members' median: the largest of four
    medians, of norms, of norms per step, and of both per learning rate.

    A fast member makes many steps, so its change may be much larger than those of others, but not for each step. A slow
    member makes few steps, and its change may be much larger for each step, because the changes of many steps partly
    cancel, but not as a whole. A member that is at an earlier place of its schedule, or has handed over late, has
    larger learning rates than the others, whose changes become arbitrarily small at the end of theirs. A learning rate
    counts only up to the median of the members' largest ones so far, so a wrong one is no excuse.
    """
    if not rows:
        return []
    most = statistics.median_low(row.peak for row in rows)
    rates = [min(row.rate, most) for row in rows]
    scales = [(1.0, row.steps, rate, rate * row.steps) for row, rate in zip(rows, rates, strict=True)]
    # The lower of the two middle values: of two members, the one with the smaller change is trusted.
    medians = [
        statistics.median_low(row.norm / scale if scale > 0 else 0.0 for row, scale in zip(rows, column, strict=True))
        for column in zip(*scales, strict=True)
    ]
    return [max(median * scale for median, scale in zip(medians, own, strict=True)) for own in scales]


def majority(rows: Sequence[Row]) -> tuple[int, int, int]:
    """Returns what most members have of `Row.known`. All members get the same result.

    Anchors differ only if members were cut off from each other after one of them had made a merge that failed on the
    others. Outer optimizers differ only if a member has changed its own. If two groups have the same size, the group
    with the smallest identity wins.
    """
    groups: dict[tuple[int, int, int], list[int]] = {}
    for row in rows:
        groups.setdefault(row.known, []).append(row.identity)
    return min(groups, key=lambda group: (-len(groups[group]), min(groups[group])))


def are_last(rows: Sequence[Row]) -> bool:
    """Returns whether a merge is the last one, because some members have finished, and the others are idle. All members
    get the same result."""
    ends = Flag.HAS_FINISHED | Flag.IS_IDLE
    return any(Flag.HAS_FINISHED in row.flags for row in rows) and all(row.flags & ends for row in rows)


def fastest_step_s(rows: Sequence[Row]) -> float:
    """Returns the seconds of the fastest member's step; 0 if no member knows its own."""
    known = [row.step_s for row in rows if row.step_s > 0 and math.isfinite(row.step_s)]
    return min(known, default=0.0)
