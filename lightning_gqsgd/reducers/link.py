"""One direction of a reducer: rotation, scales, codes, and the memory at both ends.

A sender with input x, error memory e and reference h sends the codes of u = x + α e - h; a receiver adds its mean of
the senders' references to what it decodes. A reference that all ranks share moves by the reduced gradient, which all of
them have at the end. Memories change only where the reduced gradient turns out to be finite, so a
step that overflows on one rank leaves no trace on any.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_gqsgd.codecs.scales import kernels_find_scales, over_ranks, rounded_up, scales_of
from lightning_gqsgd.kernels.layout import Layout, Part
from lightning_gqsgd.kernels.protocol import Count, Quantiser
from lightning_gqsgd.kernels.wire import Key
from lightning_gqsgd.reducers.base import Exchange
from lightning_gqsgd.reducers.memory import UP, Direction, Keeps, MemoryStore
from lightning_gqsgd.spec.memories import Memory

if TYPE_CHECKING:
    from lightning_gqsgd.reducers.base import Setting

#: Changes a sender's memory once the step's result is known, where that is finite: a flat tensor as long as the input.
Remember = Callable[[Tensor], None]


def remember_nothing(result: Tensor) -> None:
    """Remember nothing."""


class Recursion(NamedTuple):
    """The numbers of a direction's memory; see `spec.memories.Memory`."""

    alpha: float
    beta: float
    rho: float
    shared: bool

    @classmethod
    def of(cls, memory: Memory) -> Recursion:
        """Returns the numbers of a memory. All of them must be given, as `config.resolving` leaves them."""
        if memory.alpha is None or memory.rho is None:
            raise RuntimeError(f"the numbers of {memory} have to be resolved first")
        return cls(memory.alpha, memory.beta, memory.rho, memory.shared)


class Link:
    """One direction of a reducer: up, to where messages are averaged, or down, from there.

    Args:
        setting: codec, scales, rotation and memories, with the numbers of the latter.
        quantiser: of its codec.
        direction: which one.
        scales_travel: whether scales are part of the messages; if not, they are used as they are, not rounded.
    """

    def __init__(
        self, setting: Setting, quantiser: Quantiser, direction: Direction, *, scales_travel: bool = True
    ) -> None:
        self.quantiser = quantiser
        self.direction = direction
        self.scales_travel = scales_travel
        memory = setting.memory_of(direction)
        self.recursion = None if memory is None else Recursion.of(memory)
        self.sent, self.received = direction.references(memory)
        self.codec = setting.codec
        self.scale_rule = setting.scale_rule
        self.ranks = setting.ranks
        self.shares_scales = setting.shares_scales
        self.kernels_find_scales = kernels_find_scales(self.codec, self.scale_rule)
        self.rotates = setting.rotates

    @cached_property
    def plain(self) -> bool:
        """Whether the link only computes scales and codes, apart from a rotation, and the kernels do both."""
        return self.recursion is None and self.kernels_find_scales

    @cached_property
    def remembers(self) -> bool:
        """Whether a sender remembers what its messages lose."""
        return self.recursion is not None

    @cached_property
    def shares(self) -> bool:
        """Whether all ranks share one reference. No rank then remembers what its own message has lost."""
        return self.recursion is not None and self.recursion.shared

    @cached_property
    def fuses(self) -> bool:
        """Whether the kernels rotate in encoding and decoding: nothing else needs the turned coordinates."""
        return self.rotates and self.plain and self.scales_travel and not self.shares_scales

    @cached_property
    def turns(self) -> bool:
        """Whether the rotation is a pass of its own over the coordinates."""
        return self.rotates and not self.fuses

    @cached_property
    def needs_copy(self) -> bool:
        """Whether a sender changes its input in place, so that it needs a copy in the compute dtype."""
        return self.remembers or self.turns

    def part_for_owners(self, layout: Layout, rank: int) -> Part:
        """Returns the blocks that a rank encodes for the owners of shards, of which it is one itself.

        An owner has its own coordinates exactly, so what it would send itself need not be encoded. Where more is done
        than that, all blocks count: for scales of whole parameters, for a rotation in place, and for a memory.
        """
        return layout.others(rank) if self.plain and not self.turns else layout.whole

    def outgoing(self, x: Tensor, part: Part, rotation: Key, store: MemoryStore) -> Outgoing:
        """Returns the message of one sender in one step, ready to be encoded.

        Args:
            x: flat input; it is turned in place if the link turns and remembers nothing.
            part: the blocks to send, counting from ``x``.
            rotation: key of the rotation's signs, equal on all ranks.
            store: what this rank remembers.
        """
        if self.recursion is None:
            return Outgoing(self, x, part, rotation)
        return _Remembering(self, self.recursion, x, part, rotation, store)

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
        """Write the mean that messages stand for into ``x``; return the number of blocks that are not finite.

        Args:
            wires: one message of each source, uint8 [sources, bytes].
            part: the blocks in them, counting from ``x``.
            x: flat output.
            keys: dither keys of the sources.
            rotation, store: see `outgoing`.
            own: number of the source whose coordinates ``x`` holds, as `outgoing` left them: they are exact, and its
                message is not. A sender that remembers takes its message all the same, because its memory holds what
                the message has lost. None: no source's.
        """
        turn = rotation if self.fuses else None
        # The memory of this sender holds what its message has lost. If its exact coordinates were averaged instead of
        # the message, the loss would be made up for twice.
        if self.remembers and not self.shares:
            own = None
        if own is not None and self.shares:  # messages stand for differences, and so has what is exact
            x -= store.load(self.received, part.runs, x)
        bad = part.kernels.decode(wires, part.blocks, x, self.quantiser, keys, turn, own)
        if not self.fuses:
            self.restore(x, part, rotation, store)
        return bad

    def restore(self, decoded: Tensor, part: Part, rotation: Key, store: MemoryStore) -> None:
        """Finish what the kernels decoded: turn it back, add the mean of the references, and move that mean."""
        self.turn_back(decoded, part, rotation)
        recursion = self.recursion
        if recursion is None or not recursion.rho:
            return
        reference = store.load(self.received, part.runs, decoded)
        if recursion.shared:
            decoded += reference
            return
        # The reference moves by the decoded difference alone, so this comes before `decoded` becomes the sum.
        moved = torch.add(reference, decoded, alpha=recursion.rho)
        decoded += reference
        # One overflow must not stay in the memory for ever, so coordinates that are not finite leave it as it was.
        store.store(self.received, part.runs, torch.where(decoded.isfinite(), moved, reference))

    def turn_back(self, decoded: Tensor, part: Part, rotation: Key) -> None:
        """Undo the rotation, if there is one."""
        if self.rotates:
            part.kernels.rotate(decoded, part.blocks, rotation, self.quantiser.block_size, inverse=True)


class Outgoing:
    """The message of one sender in one step, before it is encoded; see `Link.outgoing`."""

    def __init__(self, link: Link, x: Tensor, part: Part, rotation: Key) -> None:
        self._link = link
        self._input = x
        self._part = part
        self._rotation = rotation
        if link.turns:
            part.kernels.rotate(x, part.blocks, rotation, link.quantiser.block_size)
        self._scales = None if link.kernels_find_scales else scales_of(x, part.blocks, link.codec, link.scale_rule)

    def find_scales(self) -> Tensor:
        """Returns the scales of the blocks, as bits that are not rounded for the wire; also those that kernels would
        find.

        Changes to the tensor count: `share_scales` replaces it in place before `encode`.
        """
        if self._scales is None:
            self._scales = self._part.kernels.block_maxima(self._input, self._part.blocks)
        return self._scales

    def share_scales(self) -> Generator[Sequence[Exchange], None, Tensor]:
        """Replace the scales of the blocks by their norm over ranks, in one exchange; return them, as `find_scales`
        does."""
        rule = self._link.scale_rule
        scales = self.find_scales()
        # A bucket's blocks have one scale, which travels once.
        own = scales[:1].clone() if rule.per == "bucket" else scales
        if rule.over_ranks == "max":
            yield (Exchange.in_place("max", own),)
        else:
            # A float sum of the backend is added in an order that depends on the place in the message, so results would
            # depend on buckets. Every rank adds all ranks' scales itself, in rank order.
            everyone = torch.empty(self._link.ranks, len(own), dtype=own.dtype, device=own.device)
            yield (Exchange("all_gather", everyone, own),)
            own = over_ranks(everyone, rule.over_ranks)
        return scales if own is scales else scales.copy_(own)

    def encode(self, wire: Tensor, key: Key) -> Remember:
        """Write the message, uint8 [bytes], with dither from ``key``; return what remembers it."""
        link = self._link
        scales = self._scales
        # The sender has to encode with the scale that receivers will read, which has fewer bits. It is rounded up, so
        # that no coordinate exceeds it.
        if scales is not None and link.scales_travel:
            scales = rounded_up(scales, self._input.dtype)
        turn = self._rotation if link.fuses else None
        self._part.kernels.encode(self._input, self._part.blocks, wire, link.quantiser, key, scales, turn)
        return remember_nothing


class _Remembering(Outgoing):
    """The message of a sender with a memory: u = x + α e - h.

    It has a tensor of its own, because the result of the step overwrites ``x``.
    """

    def __init__(
        self, link: Link, recursion: Recursion, x: Tensor, part: Part, rotation: Key, store: MemoryStore
    ) -> None:
        self.recursion = recursion
        self.store = store
        self.runs = part.runs
        self.target = x.clone()  # x - h
        self.reference = store.load(link.sent, part.runs, x) if recursion.rho else None
        self.error = store.load(link.direction.error, part.runs, x) if recursion.alpha else None
        if self.reference is not None:
            self.target -= self.reference
        u = self.target.clone()
        if self.error is not None:
            u.add_(self.error, alpha=recursion.alpha)
        super().__init__(link, u, part, rotation)

    def encode(self, wire: Tensor, key: Key) -> Remember:
        """Write the message; see `Outgoing.encode`.

        A sender with an error memory or a reference of its own also decodes the message, to know what it has lost.
        """
        super().encode(wire, key)
        if self.recursion.shared:
            return self._remember_result if self._link.direction is UP else remember_nothing
        link = self._link
        part = self._part
        decoded = torch.zeros_like(self._input)
        kernels = part.kernels
        # Messages whose codes are added have no scales in them: the scales, already the maxima over ranks, are passed
        # beside them.
        if link.quantiser.summable:
            kernels.decode_sum(wire, self.find_scales(), part.blocks, decoded, link.quantiser, (key,))
        else:
            kernels.decode(wire.view(1, -1), part.blocks, decoded, link.quantiser, (key,))
        link.turn_back(decoded, part, self._rotation)
        return partial(self._remember_lost, decoded)

    def _remember_result(self, result: Tensor) -> None:
        """Move a shared reference by the reduced gradient. The way back has the same one, and leaves it there."""
        if self.reference is None:
            return
        old = self.reference * self.recursion.beta
        moved = old.add_(result.to(self.reference.dtype), alpha=self.recursion.rho)
        self.store.store(Keeps.SHARED, self.runs, torch.where(result.isfinite(), moved, self.reference))

    def _remember_lost(self, decoded: Tensor, result: Tensor) -> None:
        """Remember what the message has lost to quantisation; ``decoded``: Q(u), which counts as the input does."""
        kinds = self._link.direction
        finite = result.isfinite()
        if self.error is not None:
            error = (self.error * self.recursion.beta).add_(self.target).sub_(decoded)
            self.store.store(kinds.error, self.runs, torch.where(finite, error, self.error))
        # The reference of the way back moves where messages are decoded, which the sender does, too.
        if self.reference is not None and kinds.sent != kinds.received:
            reference = torch.add(self.reference, decoded, alpha=self.recursion.rho)
            self.store.store(kinds.sent, self.runs, torch.where(finite, reference, self.reference))
