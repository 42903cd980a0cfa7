"""`MemoryStore`: the memories of a rank, which are tensors that it keeps for each parameter between steps.

No tensor is keyed by bucket or piece, because DDP rebuilds its buckets after the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import Run, first_owners, stripe
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, is_in_range
from lightning_gqsgd.spec.memories import Memory


class StabilityWarning(UserWarning):
    """Warning about a memory that may amplify errors without bound. The message has the reason and a number that
    works."""


class Keeps(str, Enum):
    """The kinds of tensors that a rank keeps. The values are their names in checkpoints.

    UP_ERROR and UP_REFERENCE are this rank's error memory e and reference h. UP_MEAN is the mean of all ranks' h; the
    rank that averages the messages keeps it. DOWN_ERROR is the e of the way back; the same rank keeps it.
    DOWN_REFERENCE is the h of the way back, which is equal on all ranks. SHARED is the shared h of both ways.
    """

    UP_ERROR = "up_error"
    UP_REFERENCE = "up_reference"
    UP_MEAN = "up_mean"
    DOWN_ERROR = "down_error"
    DOWN_REFERENCE = "down_reference"
    SHARED = "shared_reference"


#: The kinds that the rank which averages the messages keeps. If shards have owners, each owner keeps its part.
KEPT_BY_OWNERS = (Keeps.UP_MEAN, Keeps.DOWN_ERROR)


class Direction(NamedTuple):
    """The kinds of tensors for the memory of one direction of a reducer.

    Attributes:
        error: the error memory of a sender.
        sent: the reference of a sender.
        received: the reference of a receiver, or the mean of the senders' references. On the way back, there is one
            sender, and all receivers keep its reference.
    """

    error: Keeps
    sent: Keeps
    received: Keeps

    def references(self, memory: Memory | None) -> tuple[Keeps, Keeps]:
        """Returns the kinds of the sender's reference and of the receiver's reference."""
        return (Keeps.SHARED, Keeps.SHARED) if memory is not None and memory.shared else (self.sent, self.received)

    def kinds(self, memory: Memory | None) -> list[Keeps]:
        """Returns the kinds of tensors that a memory of this direction needs, in a fixed order."""
        if memory is None:
            return []
        kept = [self.error] if memory.keeps_error else []
        return [*kept, *dict.fromkeys(self.references(memory))] if memory.keeps_reference else kept


UP = Direction(Keeps.UP_ERROR, Keeps.UP_REFERENCE, Keeps.UP_MEAN)
DOWN = Direction(Keeps.DOWN_ERROR, Keeps.DOWN_REFERENCE, Keeps.DOWN_REFERENCE)


def kinds(up: Memory | None, down: Memory | None) -> list[Keeps]:
    """Returns the kinds of tensors that the memories of both directions need, in a fixed order."""
    return list(dict.fromkeys([*UP.kinds(up), *DOWN.kinds(down)]))


class MemoryStore:
    """The memories of one rank: for each parameter, a flat tensor of each kind, zero at first. A store can be empty.

    Args:
        kinds: the kinds of tensors that are kept.
        block_size: the largest number of coordinates in a block.
        owners: number of ranks among which the blocks are divided (see `layout.place_by_owner`). Each of them averages
            the messages of its own blocks, and keeps `KEPT_BY_OWNERS` for them. 1 if every rank averages all messages.
        sizes: number of coordinates of each compressed parameter, by parameter number.
        dtype: dtype of the gradients. Memories are fp32, or fp64 for fp64 gradients.
        device: device of the gradients.
    """

    def __init__(
        self,
        kinds: Sequence[Keeps],
        block_size: int,
        owners: int,
        sizes: Mapping[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.kinds = list(kinds)
        self._block_size = block_size
        self._owners = owners
        self._sizes = dict(sizes)
        self._dtype = COMPUTE_DTYPES[dtype]
        self._device = device
        #: Number of consecutive coordinates with the same owner, for each parameter.
        # Owners must not depend on buckets, so stripes depend only on the parameter's size and the number of owners.
        self._stripes = {
            parameter: int(stripe(np.array(-(-size // block_size)), owners)) * block_size
            for parameter, size in sizes.items()
        }
        self._tensors: dict[tuple[Keeps, int], Tensor] = {}

    @property
    def layout(self) -> list[int]:
        """The numbers that decide which coordinates a rank keeps: of owners, and of coordinates in a block. ``[1, 0]``
        if every rank keeps all coordinates."""
        divides = self._owners > 1 and any(kind in KEPT_BY_OWNERS for kind in self.kinds)
        return [self._owners, self._block_size] if divides else [1, 0]

    def load(self, kind: Keeps, runs: Sequence[Run], like: Tensor) -> Tensor:
        """Returns a tensor like ``like`` with the kept values at the places of runs, and zeros at other places."""
        has_all = sum(run.stretches * run.numel for run in runs) == like.numel()
        values = torch.empty_like(like) if has_all else torch.zeros_like(like)
        for run in runs:
            _stretches(values, run.start, run.stride, run).copy_(self._part(kind, run))
        return values

    def store(self, kind: Keeps, runs: Sequence[Run], values: Tensor) -> None:
        """Keep the values of a tensor at the places of runs."""
        for run in runs:
            self._part(kind, run).copy_(_stretches(values, run.start, run.stride, run))

    def row(self, kind: Keeps, parameter: int) -> Tensor:
        """Returns the tensor that this rank keeps for a parameter. It is zero at first. Its length is the same on all
        ranks."""
        key = (kind, parameter)
        if key not in self._tensors:
            size = self._sizes[parameter]
            owned = self._stripes[parameter]
            # Each owner keeps only the stripes that it averages. The last stripe may be short, but all ranks keep
            # tensors of equal length, so that a checkpoint can gather them.
            share = -(-size // (owned * self._owners_of(kind))) * owned
            with torch.inference_mode(False):  # a state may be saved in inference mode, but training changes the tensor
                self._tensors[key] = torch.zeros(min(size, share), dtype=self._dtype, device=self._device)
        return self._tensors[key]

    def rows(self, parameter: int) -> dict[Keeps, Tensor]:
        """Returns copies of all tensors that this rank keeps for a parameter, by kind."""
        return {kind: self.row(kind, parameter).clone() for kind in self.kinds}

    def errors(self, parameters: Iterable[int]) -> dict[tuple[Keeps, int], Tensor]:
        """Returns copies of the error memories of some parameters, by kind and parameter number; see `put_back`."""
        kept = [kind for kind in self.kinds if kind in (Keeps.UP_ERROR, Keeps.DOWN_ERROR)]
        return {(kind, number): self.row(kind, number).clone() for number in parameters for kind in kept}

    def put_back(self, errors: Mapping[tuple[Keeps, int], Tensor]) -> None:
        """Restore the error memories from a result of `errors`, because what was sent since is not used."""
        for (kind, number), error in errors.items():
            self.row(kind, number).copy_(error)

    def whole(self, parameter: int, rows: Tensor) -> Tensor:
        """Returns the tensor of a whole parameter from the rows of all owners, in the order of coordinates: [numel].

        Args:
            parameter: number of the parameter.
            rows: the results of `row` on all owners, for one kind in `KEPT_BY_OWNERS`: [owners, length of a row].
        """
        size = self._sizes[parameter]
        length = self._stripes[parameter]
        # Stripes go to the owners in turn. Rows are padded to whole stripes.
        turns = -(-size // (length * self._owners))
        padded = rows.new_zeros(self._owners, turns * length)
        padded[:, : rows.shape[1]] = rows
        first = int(first_owners(np.array(parameter), self._owners))
        in_turn = padded.roll(-first, 0).view(self._owners, turns, length)
        return in_turn.transpose(0, 1).reshape(-1)[:size]

    def forget(self, kind: Keeps | None = None) -> None:
        """Delete all kept tensors, or only the tensors of one kind if ``kind`` is given."""
        for key in [key for key in self._tensors if kind in (None, key[0])]:
            del self._tensors[key]

    def take(self, saved: Mapping[str, Mapping[int, Tensor]], rank: int) -> None:
        """Load saved tensors, and set all other tensors to zero.

        Args:
            saved: tensors of all ranks, [ranks, numel], by kind and parameter number.
            rank: this rank.

        Raises:
            ConfigError: if ``saved`` has other parameters, other sizes, or values beyond the range of this store's
                dtype. Nothing is loaded then.
        """
        # Everything is checked before anything changes, because a checkpoint that does not fit must not be loaded in
        # part.
        self.check(saved)
        for row in self._tensors.values():
            row.zero_()
        for kind, tensors in saved.items():
            for number, saved_rows in tensors.items():
                self.row(Keeps(kind), number).copy_(saved_rows[rank])

    def take_from(
        self, other: MemoryStore, numbers: Mapping[int, int], rank: int, gather: Callable[[Tensor], Tensor]
    ) -> None:
        """Copy the tensors of another store, for the parameters that are also in this store. A collective if parameters
        have other numbers here and owners keep tensors, because a parameter's owners follow from its number.

        Args:
            other: a store with the same configuration and the same number of ranks.
            numbers: for the number of a parameter in ``other``, its number in this store, the same on all ranks. The
                sizes have to be equal.
            rank: this rank.
            gather: returns the tensors that all ranks have passed, [ranks, numel]. A collective.
        """
        for number, here in sorted(numbers.items()):
            if here not in self._sizes or number not in other._sizes:
                continue
            first, first_here = first_owners(np.array([number, here]), self._owners)
            for kind in self.kinds:
                row = other.row(kind, number)
                if kind in KEPT_BY_OWNERS and first != first_here:
                    row = gather(row)[(rank - first_here + first) % self._owners]
                self.row(kind, here).copy_(row)

    def check(self, saved: Mapping[str, Mapping[int, Tensor]]) -> None:
        """Raise ConfigError if `take` cannot load ``saved``."""
        for kind, tensors in saved.items():
            for number, saved_rows in tensors.items():
                row = self.row(Keeps(kind), number) if number in self._sizes else None
                if row is None or saved_rows.shape[1:] != row.shape:
                    here = 0 if row is None else row.numel()
                    raise ConfigError(
                        f"the checkpoint remembers {saved_rows.shape[-1]} values of parameter {number}, the model "
                        f"compresses {here}; resume with the model and the configuration that wrote it"
                    )
                # One row at a time, because all ranks' memory may be large.
                if not all(is_in_range(rank, self._dtype) for rank in saved_rows):
                    raise ConfigError(
                        f"the checkpoint's memory {Keeps(kind).value!r} of parameter {number} is {saved_rows.dtype}, "
                        f"and has values beyond {torch.finfo(self._dtype).max:.4g}, the largest number of the "
                        f"{self._dtype} in which this run keeps it; resume with gradients of the dtype that wrote it"
                    )

    def _owners_of(self, kind: Keeps) -> int:
        """Returns the number of ranks among which the tensors of a kind are divided."""
        return self._owners if kind in KEPT_BY_OWNERS else 1

    def _part(self, kind: Keeps, run: Run) -> Tensor:
        """Returns a view of the kept values of a run, see `_stretches`. An owner keeps its stripes without gaps. A
        stretch is within one stripe."""
        first = self._place(kind, run.parameter, run.offset)
        stride = self._place(kind, run.parameter, run.offset + run.stride) - first if run.stride else 0
        return _stretches(self.row(kind, run.parameter), first, stride, run)

    def _place(self, kind: Keeps, parameter: int, offset: int) -> int:
        """Returns the number of a coordinate in the tensor that its owner keeps. ``offset`` is its number in the
        parameter."""
        length = self._stripes[parameter]
        number, rest = divmod(offset, length)
        return number // self._owners_of(kind) * length + rest


def _stretches(values: Tensor, start: int, stride: int, run: Run) -> Tensor:
    """Returns a view of the stretches of a run, [stretches, numel], in a flat tensor in which the first begins at
    ``start``, and each next one ``stride`` coordinates behind it; [numel] if there is only one."""
    if run.stretches == 1:
        return values[start : start + run.numel]
    return values.as_strided((run.stretches, run.numel), (stride, 1), values.storage_offset() + start)
