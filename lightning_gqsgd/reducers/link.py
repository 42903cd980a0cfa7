"""One direction of a reducer: rotation, scales and codes, and what its ends remember.

A sender with input x, error memory e and reference h sends the codes of u = x + α e - h; a receiver adds its mean of
the senders' references to what it decodes. Memories change only where the reduced gradient turns out finite: a step
that overflows on one rank leaves no trace on any.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gqsgd.codecs.scales import is_own_maximum, rounded_up, scales_of
from lightning_gqsgd.config import GQSGDConfig, Memory
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, Key, Quantiser
from lightning_gqsgd.layout import Part
from lightning_gqsgd.memory import MemoryStore
from lightning_gqsgd.reducers.base import Count


class Link:
    """A direction, ``"up"`` to where messages are averaged or ``"down"`` from there.

    Args:
        config: the configuration, with the numbers of its memories.
        quantiser: of its codec.
        side: ``"up"`` or ``"down"``.
        scales_travel: whether scales are part of the messages; if not, they are used as they are, not rounded.
    """

    def __init__(self, config: GQSGDConfig, quantiser: Quantiser, side: str, *, scales_travel: bool = True) -> None:
        self.config, self.quantiser, self.scales_travel = config, quantiser, scales_travel
        self.memory: Memory | None = config.up if side == "up" else config.down
        self.error_kind = f"{side}_error"
        # The way back has one sender, whose reference all receivers follow.
        self.sender_kind, self.receiver_kind = (
            ("up_reference", "up_mean") if side == "up" else ("down_reference", "down_reference")
        )
        self.own_maximum = is_own_maximum(config)

    @property
    def plain(self) -> bool:
        """Whether codes and scales are all there is to do, apart from a rotation."""
        return self.memory is None and self.own_maximum

    @property
    def fuses(self) -> bool:
        """Whether a rotation is part of encoding and decoding: where nothing else needs the turned coordinates."""
        return self.config.rotation and self.plain and self.scales_travel and self.config.scale != "global"

    @property
    def needs_copy(self) -> bool:
        """Whether a sender changes its input, in the compute type."""
        return self.memory is not None or (self.config.rotation and not self.fuses)

    def decode(
        self,
        wires: Tensor,
        part: Part,
        x: Tensor,
        keys: Sequence[Key],
        rotation: Key,
        store: MemoryStore | None,
        base: int = 0,
    ) -> Count:
        """Write the mean that messages stand for into ``x``; return the number of non-finite blocks.

        Args:
            wires: uint8 [sources, bytes], which start at byte ``base`` of the whole messages.
            part: the blocks in them, counting from ``x``.
            keys: dither keys of the sources.
            rotation, store: see `Outgoing`.
        """
        turn = rotation if self.fuses else None
        bad = kernels_for(x.device).decode(wires, part.blocks, x, keys, self.quantiser, base, turn)
        if not self.fuses:
            self.restore(x, part, rotation, store)
        return bad

    def restore(self, decoded: Tensor, part: Part, rotation: Key, store: MemoryStore | None) -> None:
        """Finish what the kernels decoded: turn it back, and add, and move, the mean of the references."""
        self.turn_back(decoded, part.blocks, rotation)
        if self.memory is None or not self.memory.keeps_reference:
            return
        assert store is not None
        assert self.memory.rho is not None
        reference = store.load(self.receiver_kind, part.runs, decoded)
        moved = torch.add(reference, decoded, alpha=self.memory.rho)
        decoded += reference
        store.store(self.receiver_kind, part.runs, torch.where(decoded.isfinite(), moved, reference))

    def turn_back(self, decoded: Tensor, blocks: Tensor, rotation: Key) -> None:
        """Undo the rotation, if there is one."""
        if self.config.rotation:
            kernels_for(decoded.device).rotate(decoded, blocks, rotation, self.config.block_size, inverse=True)


def working_copy(x: Tensor, *links: Link) -> Tensor:
    """What to work on: a copy in the compute type if a sender changes its input, otherwise ``x`` itself."""
    return x.to(COMPUTE_DTYPES[x.dtype], copy=True) if any(link.needs_copy for link in links) else x


class Outgoing:
    """What one sender sends in one step.

    Args:
        link: the direction.
        x: flat input; turned in place if the link has a rotation and no memory.
        part: the blocks to send, counting from ``x``.
        rotation: key of the rotation's signs, equal on all ranks.
        store: what this rank remembers; None if the link has no memory.

    Attributes:
        scales: of the blocks, as bits, not rounded for the wire; None: each block's own maximum. May be replaced, by
            the maximum over ranks, before `encode`.
    """

    def __init__(self, link: Link, x: Tensor, part: Part, rotation: Key, store: MemoryStore | None) -> None:
        self._link, self._part, self._rotation, self._store = link, part, rotation, store
        self._error = self._reference = self._target = self._decoded = x  # what a memory needs, if there is one
        self._input = self._compensated(x)
        if link.config.rotation and not link.fuses:
            kernels_for(x.device).rotate(self._input, part.blocks, rotation, link.config.block_size)
        self.scales = None if link.own_maximum else scales_of(self._input, part.blocks, link.config)

    def find_scales(self) -> Tensor:
        """The scales, even if they are the blocks' own maxima."""
        if self.scales is None:
            self.scales = kernels_for(self._input.device).block_maxima(self._input, self._part.blocks)
        return self.scales

    def encode(self, wire: Tensor, key: Key, base: int = 0) -> None:
        """Write the message."""
        link, kernels, scales = self._link, kernels_for(wire.device), self.scales
        if scales is not None and link.scales_travel:
            scales = rounded_up(scales, self._input.dtype)
        turn = self._rotation if link.fuses else None
        kernels.encode(self._input, self._part.blocks, wire, key, link.quantiser, scales, base, turn)
        if link.memory is None:
            return
        self._decoded = torch.zeros_like(self._input)
        if link.quantiser.summable:
            kernels.decode_sum(wire, self.scales, self._part.blocks, self._decoded, (key,), link.quantiser)
        else:
            kernels.decode(wire.view(1, -1), self._part.blocks, self._decoded, (key,), link.quantiser, base)
        link.turn_back(self._decoded, self._part.blocks, self._rotation)

    def commit(self, result: Tensor) -> None:
        """Remember, where the reduced gradient is finite."""
        memory, store = self._link.memory, self._store
        if memory is None:
            return
        assert store is not None
        assert memory.rho is not None
        finite = result.isfinite()
        if memory.keeps_error:
            error = (self._error * memory.beta).add_(self._target).sub_(self._decoded)
            store.store(self._link.error_kind, self._part.runs, torch.where(finite, error, self._error))
        if memory.keeps_reference and self._link.sender_kind != self._link.receiver_kind:
            reference = torch.add(self._reference, self._decoded, alpha=memory.rho)
            store.store(self._link.sender_kind, self._part.runs, torch.where(finite, reference, self._reference))

    def _compensated(self, x: Tensor) -> Tensor:
        """u = x + α e - h, and `_target` = x - h; neither is ``x`` itself, which the result overwrites."""
        memory, store = self._link.memory, self._store
        if memory is None:
            return x
        assert store is not None
        assert memory.alpha is not None
        self._target = x.clone()
        if memory.keeps_reference:
            self._reference = store.load(self._link.sender_kind, self._part.runs, x)
            self._target -= self._reference
        if memory.keeps_error:
            self._error = store.load(self._link.error_kind, self._part.runs, x)
            return torch.add(self._target, self._error, alpha=memory.alpha)
        return self._target.clone()
