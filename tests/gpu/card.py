"""What the tests on a GPU share: the card, or the processor that stands in for it, marks, and comparisons that say what
differs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

CPU = torch.device("cpu")
#: Whether a processor stands in for the card, see `conftest`.
STANDS_IN = not torch.cuda.is_available()
DEVICE = CPU if STANDS_IN else torch.device("cuda", 0)

marks = [] if STANDS_IN else [pytest.mark.gpu]
#: For tests of streams, of the card's memory, and of large tensors.
needs_card = pytest.mark.skipif(STANDS_IN, reason="needs a CUDA device")

#: Cycles of a kernel that does nothing, about half a second: far longer than the host needs to issue what follows it.
LONG = 1 << 30


def keep_busy() -> None:
    """Let the current stream do nothing for a while, so that all that is issued now has to wait."""
    if not STANDS_IN:
        torch.cuda._sleep(LONG)


def is_waiting() -> bool:
    """Whether the current stream has work left at this moment. A processor that stands in has none, and says so of
    no test."""
    if STANDS_IN:
        return True
    event = torch.cuda.Event()
    event.record()
    return not event.query()


def synchronise() -> None:
    """Wait for the card, where errors of its kernels come up."""
    if not STANDS_IN:
        torch.cuda.synchronize(DEVICE)


def difference(found: Tensor, expected: Tensor) -> str:
    """Where two tensors differ, in words; empty if nowhere. NaN equals NaN, and -0 equals 0."""
    found, expected = found.cpu(), expected.cpu()
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{tuple(found.shape)} {found.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
    differs = (found != expected) & ~((found != found) & (expected != expected))
    places = differs.nonzero()
    if not len(places):
        return ""
    shown = ", ".join(f"{tuple(at.tolist())}: {found[tuple(at)]} for {expected[tuple(at)]}" for at in places[:3])
    return f"{len(places)} of {found.numel()} elements differ, last at {tuple(places[-1].tolist())}, first {shown}"


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, str]:
    """By name, where tensors differ (see `difference`), or that one is missing."""
    texts = {name: difference(found[name], one) for name, one in expected.items() if name in found}
    texts |= dict.fromkeys(found.keys() ^ expected.keys(), "missing on one side")
    return {name: text for name, text in texts.items() if text}
