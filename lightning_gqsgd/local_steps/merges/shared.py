"""The state that all members of a training share, with the same bits."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.local_steps.checking import check_tensors
from lightning_gqsgd.local_steps.fragments import Fragment
from lightning_gqsgd.local_steps.merges.rows import Row, Shares, are_last
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.local_steps.outer import load_outer
from lightning_gqsgd.session.checkpoint import is_count

#: Merges after which a member that has sent no change since is forgotten. Its entry is only needed until its next
#: merge.
_REMEMBERED_MERGES = 1000

#: Words of a checksum that are weighted at once: they fit in a processor's cache, and their sum does not overflow.
_CHUNK = 1 << 16

#: Entries of the state.
_ENTRIES = {"merges": int, "samples": int, "mean_steps": float, "left_out": int, "counted": Mapping}
_ENTRIES |= {"anchors": Mapping, "outer": Mapping, "integers": Tensor}


class SharedState:
    """The anchors, the outer optimizer, and a record of the changes that they include.

    Threads hold ``lock`` while they read or change it.

    Attributes:
        fragment: the whole model, with its anchors.
        outer: the outer optimizer of the anchors.
        options: the options, which say when the outer optimizer begins, and which changes are left out.
        merges: number of merges so far.
        samples: number of samples that have entered the anchors, of all members together.
        mean_steps: number of steps that have entered the anchors, as a mean over members.
        left_out: number of changes that were not used.
        integers: the buffers that are not averaged, as int64 numbers; see `starting.IntegerBuffers`.
        version: a number that changes whenever the anchors change.
        lock: see above.
    """

    def __init__(self, fragment: Fragment, outer: Optimizer, options: LocalOptions, integers: Tensor) -> None:
        self.fragment = fragment
        self.outer = outer
        self.options = options
        self.merges = 0
        self.samples = 0
        self.mean_steps = 0.0
        self.left_out = 0
        self.version = 0
        self.integers = integers
        self.lock = threading.RLock()
        self._checked = (-1, 0)  # version and checksum
        # By member: the number of its latest settled contribution, and the merge that settled it.
        self._settled: dict[int, tuple[int, int]] = {}

    def has_settled(self, identity: int, contribution: int) -> bool:
        """Returns whether a member's contribution is in the anchors, or was finally left out."""
        return self._settled.get(identity, (0, 0))[0] >= contribution

    def checksum(self) -> int:
        """Returns a checksum of the anchors' bits. Waits for a GPU."""
        with self.lock:
            version, found = self._checked
            if version != self.version:
                found = self._sum_of_bits()
                self._checked = (self.version, found)
            return found

    def _sum_of_bits(self) -> int:
        anchors = [anchor for _, anchor in self.fragment.entries()]
        memories = [anchor.contiguous().view(-1).view(torch.uint8) for anchor in anchors]
        # Weighted by place, so that two swapped values change the sum.
        places = torch.arange(1, _CHUNK + 1, device=memories[0].device)
        sums = []
        for memory in memories:
            whole = len(memory) // 4 * 4
            chunks = memory[:whole].view(torch.int32).split(_CHUNK)
            sums += [(chunk * places[: len(chunk)]).sum() for chunk in chunks]
            if whole < len(memory):
                sums.append(memory[whole:].sum())
        total = 0
        for one in torch.stack(sums).tolist():
            total = total * 31 + one
        return (total + 2**63) % 2**64 - 2**63

    @torch.no_grad()
    def apply(self, means: Sequence[Tensor], rows: Sequence[Row], shares: Shares, integers: Tensor) -> bool:
        """Move the anchors by the mean change, and record the merge.

        Args:
            means: the mean change of each bundle, [numel]; empty if no member has sent any.
            rows: the rows of all members.
            shares: see `rows.shares_of`.
            integers: the new values of the buffers that are not averaged.

        Returns:
            Whether the mean was used. If it is not finite, no member uses it.
        """
        with self.lock:
            is_usable = bool(means) and all(bool(mean.isfinite().all()) for mean in means)
            if is_usable:
                used = [row for row, share in zip(rows, shares.of_members, strict=True) if share]
                # The weight of a change without steps is no number of samples.
                self.samples += sum(row.samples for row in used if row.steps)
                self.mean_steps += sum(row.steps for row in used) / len(used)
                # At the end, the anchor becomes the mean of the members' models, because momentum would move it too
                # far.
                plain = are_last(rows) or self.options.leaves_outer_out(int(self.mean_steps))
                self.fragment.move_anchors(means, self.outer, plain=plain)
                self.integers = integers
            self.merges += 1
            self.version += 1
            senders = [row for row in rows if row.contribution]
            self.left_out += len(shares.left_out) if is_usable or not means else len(senders)
            for row in senders:
                self._settled[row.identity] = (row.contribution, self.merges)
            latest = self.merges - _REMEMBERED_MERGES
            self._settled = {who: entry for who, entry in self._settled.items() if entry[1] >= latest}
            return is_usable

    def missing_in(self, state: Mapping[str, Any]) -> int:
        """Returns the number of members that have a contribution in these anchors that another state does not include.

        It is not 0 if the other state comes from members that were cut off from these, or that have started again.

        Args:
            state: the `state_dict` of another member.

        Raises:
            ConfigError: if it is no such state.
        """
        _check_entries(state)
        with self.lock:
            known = _settled_in(state)
            remembered = state["merges"] - _REMEMBERED_MERGES
            return sum(
                known.get(who, (0, 0))[0] < contribution
                for who, (contribution, merge) in self._settled.items()
                if merge >= remembered
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns copies of everything that a joining member needs: plain values and tensors."""
        with self.lock:
            return {
                "merges": self.merges,
                "samples": self.samples,
                "mean_steps": self.mean_steps,
                "left_out": self.left_out,
                "counted": {who: list(entry) for who, entry in self._settled.items()},
                "anchors": {entry.name: anchor.clone() for entry, anchor in self.fragment.entries()},
                "outer": tree_map_only(Tensor, Tensor.clone, self.outer.state_dict()),
                "integers": self.integers.clone(),
            }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of another member, or of a checkpoint.

        Raises:
            ConfigError: if this is no such state, or belongs to another model or outer optimizer. Nothing is changed
                then.
        """
        _check_entries(state)
        anchors = {entry.name: anchor for entry, anchor in self.fragment.entries()}
        check_tensors(anchors, state["anchors"], "anchors")
        check_tensors({"integers": self.integers}, {"integers": state["integers"]}, "buffers")
        settled = _settled_in(state)
        with self.lock:
            load_outer(self.outer, state["outer"])
            for name, anchor in anchors.items():
                anchor.copy_(state["anchors"][name])
            self.merges = state["merges"]
            self.version += 1
            self.samples = state["samples"]
            self.mean_steps = state["mean_steps"]
            self.left_out = state["left_out"]
            self.integers = state["integers"].clone()
            self._settled = settled


def _check_entries(state: Mapping[str, Any]) -> None:
    """Raise ConfigError if a mapping is no state of merges."""
    for name, kind in _ENTRIES.items():
        value = state.get(name)
        is_good = is_count(value) if kind is int else isinstance(value, kind)
        if not is_good or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(
                f"the state of merges has {name}={value!r:.50}, not {kind.__name__}; load what state_dict() has given"
            )


def _settled_in(state: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    """Returns the latest settled contribution of each member in a state, and the merge that settled it; raises
    ConfigError if the entry cannot be read."""
    try:
        return {int(who): (int(entry[0]), int(entry[1])) for who, entry in state["counted"].items()}
    except (TypeError, ValueError, LookupError) as error:
        raise ConfigError(
            f"the state of merges has counted={state['counted']!r:.50}, not two numbers for each member; load what "
            "state_dict() has given"
        ) from error
