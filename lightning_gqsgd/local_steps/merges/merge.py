"""One merge: the weighted mean of the members' changes moves the anchors of all members.

Member i hands over the change Δ_i = start − x_i of its n_i samples. The anchors move by Σ_i (n_i / Σ_j n_j) Q(Δ_i).
That is unbiased, because the weights are known exactly before anything is quantised. A member that sends no change has
weight 0, and still moves its anchors.

If a member's connection breaks during a merge, the member does not know whether the others have used its change. It
continues with their state, which records the latest contribution of each member. So no change is counted twice, and no
uncounted change is lost.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.errors import CollectiveError, counted
from lightning_gqsgd.local_steps.fragments import Bundle
from lightning_gqsgd.local_steps.merges.contribution import Contribution, norm_of, parameters_in
from lightning_gqsgd.local_steps.merges.rows import Flag, Row, Shares, are_last, majority, shares_of
from lightning_gqsgd.local_steps.merges.shared import SharedState
from lightning_gqsgd.local_steps.outer import describe_outer
from lightning_gqsgd.membership.members import Commit, Meet, Quorum, Rejoin, Request, RowsOfAll, SumOfAll
from lightning_gqsgd.wire.agreement import digest_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    """The constant properties of a member.

    Attributes:
        identity: a number that no other member has.
        name: for errors.
    """

    identity: int
    name: str


@dataclass(frozen=True)
class Merge:
    """The result of a merge.

    Attributes:
        rows: the rows of its members, in order.
        shares: the shares of their changes.
        own: this member's number among them.
        is_used: whether the anchors moved.
        is_left_out: whether this member's contribution was not used.
        gathered_at: time.monotonic() when the rows of all members were gathered.
    """

    rows: Sequence[Row]
    shares: Shares
    own: int
    is_used: bool
    is_left_out: bool
    gathered_at: float

    @property
    def is_last(self) -> bool:
        """Returns whether no member makes further steps, so that all members have all changes."""
        return are_last(self.rows)

    @property
    def left_behind(self) -> dict[int, str]:
        """The names of the members that have not finished, although the merge is the last one, by their numbers."""
        idle = {number: row.name for number, row in enumerate(self.rows) if Flag.IS_IDLE in row.flags}
        return idle if self.is_last else {}


#: Yields requests, is resumed with their answers, and returns the result of the merge; None if it was not valid.
Requests = Generator[Request, Any, Merge | None]


@torch.no_grad()
def merge(
    shared: SharedState,
    member: Member,
    contribution: Contribution | None,
    *,
    step_s: float = 0.0,
    flags: int = 0,
) -> Requests:
    """Make one merge: yield all requests that it needs, and apply it.

    Args:
        shared: the state that all members share, which is changed.
        member: this member.
        contribution: its change; None if it sends none in this merge.
        step_s: seconds that one of its steps takes.
        flags: HAS_FINISHED or IS_IDLE, see `rows.Flag`.
    """
    quorum: Quorum = yield Meet()
    if quorum.state is not None:
        _take(shared, member, quorum.state)
    was_counted = contribution is not None and shared.has_settled(member.identity, contribution.number)
    sent = None if was_counted else contribution
    changes = [] if sent is None else sent.changes(shared.fragment.bundles)
    row = Row(
        member.identity,
        member.name,
        shared.merges,
        shared.checksum(),
        digest_of(describe_outer(shared.outer)),
        step_s=step_s,
        flags=Flag(flags),
    )
    if sent is not None:
        row = _with_change(row, sent, shared.fragment.bundles, changes)
    rows = [Row.of(each) for each in (yield RowsOfAll(row.tensor()))]
    gathered_at = time.monotonic()
    if len({each.known for each in rows}) > 1:
        yield from _part(shared, row, rows)
        return None
    if len({each.identity for each in rows}) < len(rows):
        raise CollectiveError("gqsgd: two members have one identity, as after a fork; make LocalSteps after the fork")
    shares = shares_of(rows, shared.options.outlier)
    means = []
    if any(shares.of_members):
        share = shares.of_members[quorum.own]
        bundles = shared.fragment.bundles
        for place, bundle in enumerate(bundles):
            # Zeros, not 0 times the change, which may be NaN.
            x = changes[place] * share if share else bundle.zeros()
            mean: Tensor = yield SumOfAll(x, bundle.segments, shared.merges * len(bundles) + place)
            means.append(mean)
    integers = shared.integers
    if means and integers.numel():
        # Use the values of the first member whose change is used.
        own = integers if sent is None else sent.integers
        integers = (yield RowsOfAll(own))[next(n for n, share in enumerate(shares.of_members) if share)]
    if not (yield Commit()):
        return None
    is_used = shared.apply(means, rows, shares, integers)
    is_left_out = sent is not None and (quorum.own in shares.left_out or (bool(means) and not is_used))
    return Merge(rows, shares, quorum.own, is_used, is_left_out, gathered_at)


def _take(shared: SharedState, member: Member, state: Mapping[str, Any]) -> None:
    """Continue from the state of members that have made more merges."""
    before = shared.merges
    lost = shared.missing_in(state)
    shared.load_state_dict(state)
    if lost:
        logger.warning(
            "gqsgd: member %s has made %d merges, and takes the state of others after %d, who were cut off from it or "
            "have begun anew: of %s, not all that was merged here is in their state",
            member.name,
            before,
            shared.merges,
            counted(lost, "member"),
        )


def _part(shared: SharedState, own: Row, rows: Sequence[Row]) -> Generator[Request, Any, None]:
    """Give up a merge of members that have different anchors or outer optimizers. The members in the minority load the
    others' state."""
    what = "anchors"
    if len({row.outer for row in rows}) > 1:
        what = f"outer optimizers (here {describe_outer(shared.outer)})"
    if own.known != majority(rows):
        yield Rejoin(f"members have different {what}")
        logger.warning(
            "gqsgd: after %d merges, members have different %s: member %s is not one of the largest group of %d "
            "members, and takes their state",
            own.merges,
            what,
            own.name,
            len(rows),
        )
        with shared.lock:
            shared.merges = 0  # so that this member loads another member's state before its next merge
    yield Commit(f"members have different {what}")


def _with_change(row: Row, sent: Contribution, bundles: Sequence[Bundle], changes: Sequence[Tensor]) -> Row:
    """Returns the row of a member that sends the change of a contribution."""
    cut = [change.tensor_split([parameters_in(bundle)]) for bundle, change in zip(bundles, changes, strict=True)]
    norm = norm_of([of_parameters for of_parameters, _ in cut])
    is_finite = math.isfinite(norm + norm_of([of_buffers for _, of_buffers in cut]))
    flags = row.flags | Flag.HAS_CHANGE | (Flag.IS_FINITE if is_finite else 0)
    return replace(
        row,
        contribution=sent.number,
        samples=sent.samples,
        steps=sent.steps,
        norm=norm,
        rate=sent.rate,
        peak=sent.peak,
        flags=flags,
    )
