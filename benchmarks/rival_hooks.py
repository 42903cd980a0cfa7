"""Communication hooks of other tools' 8-bit and 4-bit codes, written out from their formulas, for trainings on the CPU.

A hook packs a bucket into one message of bytes, gathers the messages of all ranks, and decodes them. The tools
themselves scatter parts of a gradient, and send the averaged parts back. Over two hosts, both ways send the same bytes.
Codes that a tool rounds again on the way back are rounded again here, which needs no message, because all ranks round
alike.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

E4M3_MAX = 448.0
#: What a hook of DDP is: takes a state and a bucket.
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]


class Codes(ABC):
    """How a tool writes a gradient.

    Attributes:
        again: whether the mean is rounded once more on its way back.
        by_parameter: whether each parameter has a message of its own; otherwise a bucket has one.
    """

    again: ClassVar[bool]
    by_parameter: ClassVar[bool]

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Bytes of a flat fp32 tensor; their number depends on its length only."""

    @abstractmethod
    def decode(self, message: Tensor, numel: int) -> Tensor:
        """What bytes stand for, [numel]."""


@dataclass(frozen=True)
class RowCodes(Codes):
    """torchft's codes: one scale for a row, and its largest magnitude at the largest number of a format.

    Attributes:
        dtype: e4m3, rounded to nearest, or int8, of which the fraction is cut off.
        row: coordinates that share a scale.
    """

    dtype: torch.dtype
    row: int = 1024
    again = True
    by_parameter = False

    def encode(self, x: Tensor) -> Tensor:
        rows = rows_of(x, self.row)
        largest = E4M3_MAX if self.dtype.is_floating_point else 127.0
        scales = (rows.abs().amax(1, keepdim=True) / largest).clamp(min=1e-12)
        return _message((rows / scales).to(self.dtype), scales)

    def decode(self, message: Tensor, numel: int) -> Tensor:
        codes, scales = _parts(message, numel, self.row)
        return (codes.view(self.dtype).float().view(-1, self.row) * scales[:, None]).flatten()[:numel]


@dataclass(frozen=True)
class UniformCodes(Codes):
    """hivemind's uniform codes: 256 equal bins over six standard deviations, and the mean of what is in each bin.

    Attributes:
        part: coordinates that share the bins: 512 KiB of fp32 numbers.
    """

    part: int = 1 << 17
    again = False
    by_parameter = True

    def encode(self, x: Tensor) -> Tensor:
        messages = []
        for part in x.split(self.part):
            centred = part - part.mean()
            width = (6 * centred.norm() / math.sqrt(max(part.numel() - 1, 1)) / 256).clamp(min=1e-30)
            codes = (torch.round(centred / width) + 128).clamp(0, 255).long()
            counts = torch.bincount(codes, minlength=256).clamp(min=1)
            means = torch.zeros(256).scatter_add_(0, codes, part) / counts
            messages.append(_message(codes.to(torch.uint8), means))
        return torch.cat(messages)

    def decode(self, message: Tensor, numel: int) -> Tensor:
        found, at = [], 0
        for begin in range(0, numel, self.part):
            length = min(self.part, numel - begin)
            codes, means = message[at : at + length], message[at + length : at + length + 1024]
            found.append(means.clone().view(torch.float32)[codes.long()])
            at += length + 1024
        return torch.cat(found)


@dataclass(frozen=True)
class BlockwiseCodes(Codes):
    """hivemind's blockwise codes: dynamic 8-bit numbers under the largest magnitude of a block (Dettmers et al. 2021,
    arXiv 2110.02861)."""

    block: int = 4096
    again = False
    by_parameter = True

    def encode(self, x: Tensor) -> Tensor:
        rows = rows_of(x, self.block)
        scales = rows.abs().amax(1, keepdim=True).clamp(min=1e-30)
        levels = dynamic_levels()
        return _message(torch.bucketize(rows / scales, (levels[1:] + levels[:-1]) / 2).to(torch.uint8), scales)

    def decode(self, message: Tensor, numel: int) -> Tensor:
        codes, scales = _parts(message, numel, self.block)
        return (dynamic_levels()[codes.long()].view(-1, self.block) * scales[:, None]).flatten()[:numel]


@dataclass(frozen=True)
class MaxMinCodes(Codes):
    """CGX's codes at 4 bits (arXiv 2210.17357): 15 equal steps between the least and the largest number of a block."""

    block: int = 512
    again = True
    by_parameter = False

    def encode(self, x: Tensor) -> Tensor:
        codes, low, step = max_min_codes(x, self.block, 4)
        return _message(codes[:, ::2] | codes[:, 1::2] << 4, torch.cat([low, step], 1))

    def decode(self, message: Tensor, numel: int) -> Tensor:
        count = -(-numel // self.block)
        packed, ends = message[: count * self.block // 2], message[count * self.block // 2 :]
        low, step = ends.clone().view(torch.float32).view(count, 2, 1).unbind(1)
        codes = torch.stack([packed & 15, packed >> 4], 1).view(count, self.block)
        return (low + codes * step).flatten()[:numel]


def gathering(codes: Codes) -> Hook:
    """A hook that gathers all ranks' messages in a code."""

    # DDP checks annotations, and those of this module are strings, which it does not take.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        x, ranks = bucket.buffer(), dist.get_world_size()
        sizes = [parameter.numel() for parameter in bucket.parameters()] if codes.by_parameter else [x.numel()]
        pieces = x.split(sizes)
        encoded = [codes.encode(piece) for piece in pieces]
        message = torch.cat(encoded)
        messages = torch.empty(ranks * message.numel(), dtype=torch.uint8)
        dist.all_gather_into_tensor(messages, message)
        of_ranks = [each.split([part.numel() for part in encoded]) for each in messages.chunk(ranks)]
        for number, piece in enumerate(pieces):
            piece.copy_(mean_of(codes, [parts[number] for parts in of_ranks], piece.numel()))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(x)
        return future

    return hook


def mean_of(codes: Codes, messages: list[Tensor], numel: int) -> Tensor:
    """The mean that all ranks have in the end, of all ranks' messages."""
    mean = codes.decode(messages[0], numel)
    for message in messages[1:]:
        mean += codes.decode(message, numel)
    mean /= len(messages)
    return codes.decode(codes.encode(mean), numel) if codes.again else mean


@cache
def dynamic_levels() -> Tensor:
    """The 256 numbers of dynamic 8-bit codes, in order: signs, seven decades, and more fractions in the upper ones."""
    positive = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        positive.append((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6))
    magnitudes = torch.cat(positive)
    return torch.cat([-magnitudes, torch.zeros(1), magnitudes, torch.ones(1)]).sort().values


def max_min_codes(x: Tensor, block: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of ``2^bits - 1`` equal steps between the least and the largest number of each block, uint8, and the least
    number and the step of each block."""
    rows = rows_of(x, block)
    low, high = rows.aminmax(dim=1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    return torch.where(step > 0, torch.round((rows - low) / step), 0).to(torch.uint8), low, step


def rows_of(x: Tensor, length: int) -> Tensor:
    """A flat tensor as rows, the last one filled up with zeros."""
    return F.pad(x, (0, -len(x) % length)).view(-1, length)


def _message(codes: Tensor, scales: Tensor) -> Tensor:
    return torch.cat([codes.flatten().view(torch.uint8), scales.flatten().view(torch.uint8)])


def _parts(message: Tensor, numel: int, row: int) -> tuple[Tensor, Tensor]:
    """Codes of whole rows, and the rows' scales."""
    padded = -(-numel // row) * row
    return message[:padded], message[padded:].clone().view(torch.float32)
