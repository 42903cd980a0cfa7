"""The parts of a model that are averaged at different steps: their tensors, and the anchor of each tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.local_steps.sharding import own_part


class AnchorOptions(Protocol):
    """The options of `options.LocalOptions` that concern fragments.

    Attributes:
        fragments: number of parts.
        anchor_dtype: dtype of the parameters' anchors; None means their compute dtype.
        anchor_device: device of the anchor; None means the device of the parameters.
    """

    @property
    def fragments(self) -> int: ...
    @property
    def anchor_dtype(self) -> torch.dtype | None: ...
    @property
    def anchor_device(self) -> torch.device | str | None: ...


class Entry(NamedTuple):
    """A tensor of the model that is averaged.

    Attributes:
        segment: its number, the size of this rank's part, and whether it is sent uncompressed.
        name: its name in the model, as in one that is not compiled.
        whole: a parameter or a buffer. Every rank has its own values.
        is_buffer: whether it is a buffer. The anchor of a buffer becomes the mean, without the outer optimizer.
    """

    segment: Segment
    name: str
    whole: Tensor
    is_buffer: bool

    @property
    def tensor(self) -> Tensor:
        """The part of the tensor that this rank has, see `sharding`."""
        return own_part(self.whole)


class Bundle:
    """Tensors of one fragment that are sent as one flat tensor, and their anchors.

    The anchor is the common starting point of all ranks, with the same bits on all of them.

    Attributes:
        entries: the tensors, in order, with one device and one compute dtype.
        segments: their places in the flat tensor.
        anchors: the anchor of each tensor, with the tensor's shape.
    """

    def __init__(self, entries: Sequence[Entry], options: AnchorOptions) -> None:
        self.entries = tuple(entries)
        self.segments = tuple(entry.segment for entry in entries)
        self._numel = sum(segment.numel for segment in self.segments)
        self._dtype = COMPUTE_DTYPES[entries[0].tensor.dtype]
        self._device = entries[0].tensor.device
        device = options.anchor_device or self._device
        with torch.inference_mode(False):  # each average changes them, and may be outside of that mode
            self.anchors = [
                torch.empty(entry.tensor.shape, dtype=self._anchor_dtype(entry, options), device=device)
                for entry in self.entries
            ]
        self.take_anchors()
        self._check_range()

    def _anchor_dtype(self, entry: Entry, options: AnchorOptions) -> torch.dtype:
        """Returns the dtype of a tensor's anchor.

        A buffer has no fewer bits than its compute dtype, because it may be a constant, such as a table of positions,
        which the model would get back rounded.
        """
        chosen = options.anchor_dtype or self._dtype
        return torch.promote_types(chosen, self._dtype) if entry.is_buffer else chosen

    def take_anchors(self) -> None:
        """Set the anchors to the current values of the tensors."""
        for entry, anchor in zip(self.entries, self.anchors, strict=True):
            anchor.copy_(entry.tensor.detach())

    def _check_range(self) -> None:
        """Raise ConfigError if a tensor's value exceeds the range of the anchors' dtype, because it would stay
        infinite."""
        for entry, anchor in self._pairs():
            limit = torch.finfo(anchor.dtype).max
            if limit >= torch.finfo(self._dtype).max:
                continue  # the usual case
            lost = torch.isinf(anchor).to(entry.tensor.device) & torch.isfinite(entry.tensor.detach())
            if lost.any():
                largest = entry.tensor.detach().abs()[lost].max().item()
                raise ConfigError(
                    f"anchor_dtype={anchor.dtype} holds numbers up to {limit:g}, and {entry.name} has {largest:g}; "
                    "take torch.bfloat16 or torch.float32"
                )

    def flat_anchors(self) -> Tensor:
        """Returns a copy of the anchors as one flat tensor on the tensors' device, in the compute dtype, [numel]."""
        return torch.cat([anchor.flatten().to(self._device, self._dtype) for anchor in self.anchors])

    def zeros(self) -> Tensor:
        """Returns zeros for all tensors, in the compute dtype, [numel]."""
        return torch.zeros(self._numel, dtype=self._dtype, device=self._device)

    def flat_starts(self) -> Tensor:
        """Returns the values of tensors that start from the anchors, in the compute dtype, [numel].

        For 16-bit parameters, the anchor's values are rounded, as they were when the rank started from them.
        """
        starts = (_like(anchor, entry.tensor).flatten().to(self._dtype) for entry, anchor in self._pairs())
        return torch.cat(list(starts))

    def flat_tensors(self) -> Tensor:
        """Returns a copy of the tensors' current values, in the compute dtype, [numel]."""
        return torch.cat([entry.tensor.detach().flatten().to(self._dtype) for entry in self.entries])

    def put(self, flat: Tensor) -> None:
        """Copy a flat tensor, [numel], to the tensors."""
        for entry, part in zip(self.entries, self.split(flat), strict=True):
            entry.tensor.copy_(part)

    def change(self) -> Tensor:
        """Returns the change of this rank since the anchor: the values at the anchor minus the current values, [numel].

        A buffer may hold infinities, such as an attention mask, or NaN, as a sign that it has no value yet; the
        difference of two equal infinities, and of NaN and NaN, is set to 0.
        """
        flat = torch.empty(self._numel, dtype=self._dtype, device=self._device)
        for (entry, anchor), part in zip(self._pairs(), self.split(flat), strict=True):
            start = _like(anchor, entry.tensor)
            torch.sub(start.to(self._dtype), entry.tensor.to(self._dtype), out=part)
            if entry.is_buffer:
                part.masked_fill_(is_same(start, entry.tensor), 0.0)
        return flat

    def has_changed(self, buffers: bool, tolerance: float) -> bool:
        """Returns whether a tensor has left its anchor. Waits for a GPU.

        Args:
            buffers: whether to check buffers.
            tolerance: the largest change of a tensor that is ignored, relative to the norm of its anchor.
        """
        for (entry, anchor), part in zip(self._pairs(), self.split(self.change()), strict=True):
            if (entry.is_buffer and not buffers) or not bool(part.any()):
                continue
            if not float(part.norm()) <= tolerance * float(anchor.norm()):  # also of NaN
                return True
        return False

    def split(self, flat: Tensor) -> Iterator[Tensor]:
        """Returns the part of each tensor in a flat tensor, as a view with the tensor's shape."""
        parts = flat.split([entry.segment.numel for entry in self.entries])
        return (part.view(entry.tensor.shape) for entry, part in zip(self.entries, parts, strict=True))

    def _pairs(self) -> Iterator[tuple[Entry, Tensor]]:
        return zip(self.entries, self.anchors, strict=True)


class Fragment:
    """A part of the model whose tensors are averaged together.

    Attributes:
        bundles: the bundles, each of which has the tensors of one compute dtype, and is sent as one flat tensor.
        settled_after: the step after which all ranks had the same bits in its tensors, as they do at the start; None if
            a rank has changed them since.
        is_kept: whether its tensors will get their previous values back, see `kept`.
    """

    def __init__(self, entries: Sequence[Entry], options: AnchorOptions) -> None:
        dtypes = dict.fromkeys(COMPUTE_DTYPES[entry.tensor.dtype] for entry in entries)
        together = ([entry for entry in entries if COMPUTE_DTYPES[entry.tensor.dtype] == dtype] for dtype in dtypes)
        self.bundles = [Bundle(group, options) for group in together]
        self.settled_after: int | None = 0
        self.is_kept = False

    def move_anchors(
        self, means: Sequence[Tensor], outer: Optimizer, *, plain: bool = False, frozen: Collection[str] = ()
    ) -> None:
        """Make a step of the outer optimizer by the mean changes.

        Args:
            means: the mean change of each bundle, [numel].
            outer: the outer optimizer of the anchors. Anchors of other fragments have no gradient, and do not change.
            plain: subtract the changes from the anchors instead, which become the mean of the ranks' parameters.
            frozen: names of parameters that did not require a gradient when the average was started. If the mean change
                of such a parameter is zero, the outer optimizer leaves its anchor out, because its momentum would still
                move it. The change is not zero if the parameter was frozen within the round, or if it was frozen for a
                moment only, as other optimizers' parameters are by Lightning's ``toggle_optimizer``.
        """
        changes = (part for bundle, mean in zip(self.bundles, means, strict=True) for part in bundle.split(mean))
        for (entry, anchor), change in zip(self.entries(), changes, strict=True):
            if entry.is_buffer or plain:
                anchor.sub_(_like(change, anchor))
            elif entry.name not in frozen or bool(change.any()):
                anchor.grad = _like(change, anchor)
        outer.step()
        for _, anchor in self.entries():
            anchor.grad = None

    def set_tensors(self, weight: float = 0.0) -> None:
        """Move the tensors to their anchors: x ← weight x + (1 − weight) anchor."""
        for entry, anchor in self.entries():
            start = _like(anchor, entry.tensor)
            if weight and entry.is_buffer:  # see `Bundle.change` of infinities
                entry.tensor.copy_(torch.where(entry.tensor == start, start, entry.tensor.lerp(start, 1 - weight)))
            elif weight:
                entry.tensor.lerp_(start, 1 - weight)
            else:
                entry.tensor.copy_(anchor)

    def entries(self) -> Iterator[tuple[Entry, Tensor]]:
        """Returns each tensor with its anchor."""
        return ((entry, anchor) for bundle in self.bundles for entry, anchor in bundle._pairs())


@contextmanager
def kept(fragments: Sequence[Fragment]) -> Iterator[None]:
    """Returns a context after which the tensors of fragments get their previous values back. No step may be made in
    it."""
    tensors = [entry.tensor for fragment in fragments for entry, _ in fragment.entries()]
    own = [tensor.detach().clone() for tensor in tensors]
    for fragment in fragments:
        fragment.is_kept = True
    try:
        yield
    finally:
        for fragment in fragments:
            fragment.is_kept = False
        with torch.no_grad():
            for tensor, value in zip(tensors, own, strict=True):
                tensor.copy_(value)


def refuse_kept(fragments: Iterable[Fragment]) -> None:
    """Raise ConfigError if a step is made, or training ends, inside of `kept`."""
    if any(fragment.is_kept for fragment in fragments):
        raise ConfigError(
            "step() and finish() inside of at_anchor() change values that its end takes back; leave the context first"
        )


def fragments_of(parameters: Sequence[Entry], buffers: Sequence[Entry], options: AnchorOptions) -> list[Fragment]:
    """Returns fragments of consecutive parameters, about equal in size. The buffers are added to the last fragment.

    Raises:
        ConfigError: if there are more fragments than parameters.
    """
    count = options.fragments
    if count > len(parameters):
        raise ConfigError(
            f"fragments={count} is more than the {counted(len(parameters), 'trained parameter')} of the model; take "
            f"fragments={len(parameters)} or less"
        )
    ends = list(accumulate(entry.segment.numel for entry in parameters))
    cuts = [0]
    for part in range(1, count):
        # At least one parameter for this part, and for each of the following parts.
        choices = range(cuts[-1] + 1, len(parameters) - (count - part) + 1)
        cuts.append(min(choices, key=lambda cut: abs(ends[cut - 1] * count - ends[-1] * part)))
    cuts.append(len(parameters))
    parts = [list(parameters[start:end]) for start, end in zip(cuts, cuts[1:], strict=False)]
    parts[-1] += buffers
    return [Fragment(part, options) for part in parts]


def is_same(first: Tensor, second: Tensor) -> Tensor:
    """Returns where two tensors are equal, as booleans; NaN is equal to NaN."""
    return (first == second) | (first.isnan() & second.isnan())


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """Returns the tensor in the dtype and on the device of another tensor."""
    return tensor.to(other.device, other.dtype)
