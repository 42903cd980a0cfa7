"""`Link`: one direction of a reducer, with rotation, scales, codes, and the memory at both ends.

A sender with input x, error memory e and reference h sends the codes of u = x + α e - h. A receiver decodes the
messages and adds its mean of the senders' references. A reference that all ranks share moves by the reduced gradient,
which all ranks have at the end. Memories change only at coordinates whose reduced gradient is finite, so an overflow on
one rank does not change the memory of any rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_gqsgd.codecs.scales import kernels_find_scales, over_ranks, rounded_up, scales_of
from lightning_gqsgd.kernels.layout import Layout, Part
from lightning_gqsgd.kernels.protocol import Coding, Count
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, Key
from lightning_gqsgd.reducers.base import Exchange, Setting
from lightning_gqsgd.reducers.memory import UP, Direction, Keeps, MemoryStore
from lightning_gqsgd.spec.memories import Memory

#: Changes a sender's memory after the step, at the coordinates whose result is finite. The argument is the result, a
#: flat tensor as long as the input.
Remember = Callable[[Tensor], None]


def remember_nothing(result: Tensor) -> None:
    """Do nothing, because there is no memory."""


class Link:
    """One direction of a reducer: up, to the ranks that average messages, or down, back from these ranks.

    Args:
        setting: the setting, with resolved numbers of memories.
        direction: up or down.
        adds: whether the codes of all ranks are added. Scales are not part of the messages then.

    Attributes:
        shares: whether all ranks share one reference. No rank has an error memory then.
        plain: whether kernels compute the scales, and there is no memory. There may be a rotation.
        fuses: whether kernels rotate while they encode and decode.
        rotates_apart: whether the rotation is a separate pass over the coordinates.
        needs_copy: whether a sender changes its input in place, so that it needs a copy in the compute dtype.
    """

    def __init__(self, setting: Setting, direction: Direction, *, adds: bool = False) -> None:
        self.quantiser = setting.codec.quantiser(setting.block_size, summed=setting.ranks if adds else None)
        self.direction = direction
        self.adds = adds
        self.memory = setting.up if direction is UP else setting.down
        if self.memory is not None and None in (self.memory.alpha, self.memory.rho):
            raise RuntimeError(f"the numbers of {self.memory} have to be resolved first")
        self.sent, self.received = direction.references(self.memory)
        self.codec = setting.codec
        self.scale_rule = setting.scale_rule
        self.ranks = setting.ranks
        self.shares_scales = adds or setting.global_scales
        self.shares = self.memory is not None and self.memory.shared
        self.kernels_find_scales = kernels_find_scales(self.codec, self.scale_rule)
        self.plain = self.memory is None and self.kernels_find_scales
        self.rotates = setting.rotates
        # Nothing else needs the rotated coordinates then.
        self.fuses = self.rotates and self.plain and not self.shares_scales
        self.rotates_apart = self.rotates and not self.fuses
        self.needs_copy = self.memory is not None or self.rotates_apart

    def part_for_owners(self, layout: Layout, rank: int) -> Part:
        """Returns the blocks that a rank encodes for the owners of shards.

        Every rank is an owner, too. It has its own coordinates exactly, so it need not encode its own shard. But scales
        of whole parameters, a rotation in place and a memory need all blocks.
        """
        return layout.others(rank) if self.plain and not self.rotates_apart else layout.whole

    def coding(self, part: Part, rotation: Key) -> Coding:
        """Returns how kernels code the blocks of messages; see `outgoing` for the arguments."""
        return Coding(part.blocks, self.quantiser, rotation if self.fuses else None, part.origin)

    def outgoing(self, x: Tensor, part: Part, rotation: Key, store: MemoryStore) -> Outgoing:
        """Returns the message of one sender in one step, ready to be encoded.

        Args:
            x: flat input. If the rotation is a separate pass and there is no memory, it is rotated in place.
            part: the blocks to send, counting from ``x``.
            rotation: key of the rotation's signs, equal on all ranks.
            store: the memories of this rank.
        """
        if self.memory is None:
            return Outgoing(self, x, part, rotation)
        return _Remembering(self, self.memory, x, part, rotation, store)

    def decode(
        self,
        wires: Tensor,
        part: Part,
        x: Tensor,
        keys: Sequence[Key],
        rotation: Key,
        store: MemoryStore,
        own: int | None = None,
    ) -> Count:
        """Decode messages, and write their mean into ``x``. Returns the number of blocks that are not finite.

        Args:
            wires: one message of each source, uint8 [sources, bytes].
            part: the blocks in the messages, counting from ``x``.
            x: flat output.
            keys: dither keys of the sources.
            rotation, store: see `outgoing`.
            own: number of the source whose coordinates are in ``x``: as `outgoing` left them, or as they were given if
                there is a memory. They are exact, so they are used instead of the source's message. If the source has
                an error memory or its own reference, its message is used all the same. None: all messages are decoded.
        """
        # The memory of this sender has the error of its message. If its exact coordinates were averaged instead of the
        # message, the error would be compensated twice.
        if self.memory is not None and not self.shares:
            own = None
        if own is not None and self.shares:
            # Messages are rotated differences from the reference, so `x` has to be one, too.
            x -= store.load(self.received, part.runs, x)
            if self.rotates_apart:
                part.kernels.rotate(x, part.blocks, rotation, self.quantiser.block_size, origin=part.origin)
        bad = part.kernels.decode(wires, self.coding(part, rotation), x, keys, own)
        if not self.fuses:
            self.restore(x, part, rotation, store)
        return bad

    def restore(self, decoded: Tensor, part: Part, rotation: Key, store: MemoryStore) -> None:
        """Finish decoded coordinates: rotate them back, add the mean of the references, and move this mean."""
        self.rotate_back(decoded, part, rotation)
        memory = self.memory
        if memory is None or not memory.rho:
            return
        reference = store.load(self.received, part.runs, decoded)
        if memory.shared:
            decoded += reference
            return
        # The reference moves by the decoded difference alone, so `moved` is computed before `decoded` becomes the sum.
        moved = torch.add(reference, decoded, alpha=memory.rho)
        decoded += reference
        store.store(self.received, part.runs, _where_finite(decoded, moved, reference))

    def rotate_back(self, decoded: Tensor, part: Part, rotation: Key) -> None:
        """Undo the rotation, if there is one."""
        if self.rotates:
            size = self.quantiser.block_size
            part.kernels.rotate(decoded, part.blocks, rotation, size, inverse=True, origin=part.origin)


class Outgoing:
    """The message of one sender in one step, before it is encoded; see `Link.outgoing`."""

    def __init__(self, link: Link, x: Tensor, part: Part, rotation: Key) -> None:
        self._link = link
        self._input = x
        self._part = part
        self._rotation = rotation
        if link.rotates_apart:
            part.kernels.rotate(x, part.blocks, rotation, link.quantiser.block_size, origin=part.origin)
        self._scales = None if link.kernels_find_scales else scales_of(x, part.blocks, link.codec, link.scale_rule)

    def find_scales(self) -> Tensor:
        """Returns the scales of the blocks, as bits that are not rounded for the wire. If kernels would compute them,
        they are computed here instead.

        `encode` uses the returned tensor, so changes to it matter: `share_scales` overwrites it before `encode`.
        """
        if self._scales is None:
            self._scales = self._part.kernels.block_maxima(self._input, self._part.blocks)
        return self._scales

    def share_scales(self) -> Generator[Sequence[Exchange], None, Tensor]:
        """Replace the scales of the blocks by their norm over ranks, in one exchange. Returns them in the form of
        `find_scales`."""
        rule = self._link.scale_rule
        scales = self.find_scales()
        # All blocks of a bucket have one scale, which is sent once.
        own = scales[:1].clone() if rule.per == "bucket" else scales
        if rule.over_ranks == "max":
            yield (Exchange.in_place("max", own),)
        else:
            # The backend adds floats in an order that depends on the place in the message, so results would depend on
            # buckets. Therefore every rank adds all ranks' scales itself, in rank order.
            everyone = torch.empty(self._link.ranks, len(own), dtype=own.dtype, device=own.device)
            yield (Exchange("all_gather", everyone, own),)
            own = over_ranks(everyone, rule.over_ranks)
        return scales if own is scales else scales.copy_(own)

    def encode(self, wire: Tensor, key: Key) -> Remember:
        """Write the message, uint8 [bytes], with dither from ``key``. Returns a function that changes the memory after
        the step."""
        link = self._link
        scales = self._scales
        # The sender has to encode with the scale that receivers will read, which has fewer bits. The scale is rounded
        # up, so that no coordinate exceeds it.
        if scales is not None and not link.adds:
            scales = rounded_up(scales, self._input.dtype)
        self._part.kernels.encode(self._input, link.coding(self._part, self._rotation), wire, key, scales)
        return remember_nothing


class _Remembering(Outgoing):
    """The message of a sender with a memory: u = x + α e - h.

    The message has its own tensor, because the result of the step overwrites ``x``.
    """

    def __init__(self, link: Link, memory: Memory, x: Tensor, part: Part, rotation: Key, store: MemoryStore) -> None:
        self.memory = memory
        self.store = store
        self.runs = part.runs
        self.target = x.clone()  # x - h
        self.reference = store.load(link.sent, part.runs, x) if memory.rho else None
        self.error = store.load(link.direction.error, part.runs, x) if memory.alpha else None
        if self.reference is not None:
            self.target -= self.reference
        u = self.target.clone() if self.error is None else self.target.add(self.error, alpha=memory.alpha)
        super().__init__(link, u, part, rotation)

    def encode(self, wire: Tensor, key: Key) -> Remember:
        """Write the message; see `Outgoing.encode`.

        A sender with an error memory or its own reference also decodes the message, to compute the message's error.
        """
        super().encode(wire, key)
        if self.memory.shared:
            return self._remember_result if self._link.direction is UP else remember_nothing
        link = self._link
        part = self._part
        decoded = torch.zeros_like(self._input)
        how = link.coding(part, self._rotation)
        # Messages whose codes are added contain no scales. The scales, which are already the norms over ranks, are
        # passed separately.
        if link.quantiser.summable:
            part.kernels.decode_sum(wire, how, decoded, (key,), self.find_scales())
        else:
            part.kernels.decode(wire.view(1, -1), how, decoded, (key,))
        link.rotate_back(decoded, part, self._rotation)
        return partial(self._remember_lost, decoded)

    def _remember_result(self, result: Tensor) -> None:
        """Move a shared reference by the reduced gradient. The way back uses the same reference, and does not move
        it."""
        if self.reference is None:
            return
        old = self.reference * self.memory.beta
        moved = old.add_(result.to(self.reference.dtype), alpha=self.memory.rho)
        self.store.store(Keeps.SHARED, self.runs, _where_finite(result, moved, self.reference))

    def _remember_lost(self, decoded: Tensor, result: Tensor) -> None:
        """Update the error memory and the reference after a message. ``decoded`` is Q(u), a tensor like the input."""
        kinds = self._link.direction
        if self.error is not None:
            error = (self.error * self.memory.beta).add_(self.target).sub_(decoded)
            self.store.store(kinds.error, self.runs, _where_finite(result, error, self.error))
        # The reference of the way back moves in `restore`, when messages are decoded. The sender decodes them, too.
        if self.reference is not None and kinds.sent != kinds.received:
            reference = torch.add(self.reference, decoded, alpha=self.memory.rho)
            self.store.store(kinds.sent, self.runs, _where_finite(result, reference, self.reference))


def _where_finite(result: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Returns the new values of a memory at coordinates where the result is finite, and the old values elsewhere: an
    overflow must not stay in a memory for ever."""
    # One sum is much faster, but on a GPU, the host would have to wait for it. Tensors without data stand for a CPU's.
    if not result.is_cuda:
        total = result.sum(dtype=COMPUTE_DTYPES[result.dtype])
        if result.is_meta or total.isfinite():
            return new
    return torch.where(result.isfinite(), new, old)
