"""PULSE: sends the bf16 weights that have changed, without loss, to processes that follow a training (arXiv
2602.03839).

Workers that only compute with a model, such as those that generate text in reinforcement learning, hold its weights in
bf16. A step of Adam moves a weight by about its learning rate, which at 1e-6 is less than half of the distance between
neighbouring bf16 numbers for most weights. So most bf16 weights keep their bits from step to step, although all fp32
weights change. With the bits w of all weights after a step and v after the one before, a patch has

    the places i where w_i ≠ v_i, as gaps;   w_i at these places;   SHA-256 of all of w.

The values are sent, and not their differences, so no rounding adds up. If a receiver's weights have another hash, it
refuses the patch, and keeps its weights unchanged. Gaps are written like those of row numbers (`sparse.row_numbers`),
and values with entropy-coded exponents (`reducers.lossless`). If a patch would be longer than all weights, the message
has all weights.

PULSELoCo, which sends the changes of local steps in the same way, is left out.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.reducers.lossless import pack, unpack
from lightning_gqsgd.sparse import row_numbers

#: The header of a message: 1 for a patch and 0 for all weights; the number of the message; its number of weights; the
#: number of bytes of their places; and the digest of all weights.
_HEADER = struct.Struct("<BQQQ32s")
#: The integer dtype for the bits of weights, by their number of bytes.
_INTEGERS = {2: torch.int16, 4: torch.int32}


class Sender:
    """Follows the weights of a model in training, and writes messages with the changes since the previous message.

    Args:
        parameters: the weights, e.g. ``model.parameters()``, in the same order as on the receivers.
        dtype: dtype of the receivers' weights: bf16, fp16 or fp32.

    Raises:
        ConfigError: if the dtype is another one, or if there are no weights.
    """

    def __init__(self, parameters: Iterable[Tensor], dtype: torch.dtype = torch.bfloat16) -> None:
        self._parameters = _checked(parameters, dtype)
        self._dtype = dtype
        self._sent: Tensor | None = None
        self._number = 0

    def message(self, *, whole: bool = False) -> bytes:
        """Returns a message with the changes since the previous message. The first message has all weights.

        Args:
            whole: send all weights, e.g. for a receiver that starts later.
        """
        weights = _flat(self._parameters, self._dtype)
        bits = _bits(weights)
        everything = pack(weights)
        changed = None if self._sent is None else (bits != self._sent).nonzero().flatten()
        patch = b"" if changed is None else row_numbers.write(changed.numpy()).tobytes()
        values = b"" if changed is None else pack(weights[changed])
        is_patch = changed is not None and not whole and len(patch) + len(values) < len(everything)
        count = len(changed) if is_patch and changed is not None else len(weights)
        header = _HEADER.pack(is_patch, self._number, count, len(patch) if is_patch else 0, digest(weights))
        self._sent = bits.clone()
        self._number += 1
        return header + (patch + values if is_patch else everything)


class Receiver:
    """Keeps weights bit-identical to a `Sender`'s weights in the receivers' dtype.

    Args:
        parameters: the weights, of one dtype, which messages change in place.

    Raises:
        ConfigError: if weights have several dtypes, or another dtype than bf16, fp16 and fp32, or if there are none.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        listed = list(parameters)
        self._dtype = listed[0].dtype if listed else torch.bfloat16
        self._parameters = _checked(listed, self._dtype)
        if any(parameter.dtype != self._dtype for parameter in listed):
            dtypes = ", ".join(sorted({str(parameter.dtype) for parameter in listed}))
            raise ConfigError(f"a receiver's weights have one dtype, that of its sender, not {dtypes}; cast them")
        self._next: int | None = None

    @torch.no_grad()
    def apply(self, message: bytes) -> None:
        """Load the weights of a message. The contents of the message are checked.

        Raises:
            ValueError: if the message is damaged, if it is a patch of other weights, or if an earlier message is
                missing. The weights are unchanged then; ask for a message with ``whole=True``.
        """
        if len(message) < _HEADER.size:
            raise ValueError(f"corrupt message: {len(message)} bytes")
        is_patch, number, count, places_bytes, expected = _HEADER.unpack_from(message)
        if is_patch and number != self._next:
            raise ValueError(
                f"message {number} is a patch, and {self._next} is the next one here; ask for a message with whole=True"
            )
        weights = _flat(self._parameters, self._dtype)
        body = memoryview(message)[_HEADER.size :]
        if is_patch:
            if count > len(weights):
                raise ValueError(f"corrupt message: {count:,} places of {len(weights):,} weights")
            try:
                places = row_numbers.read(np.frombuffer(body[:places_bytes], np.uint8), count, len(weights))
            except RuntimeError as error:
                raise ValueError(f"corrupt message: {error}") from error
            weights[torch.from_numpy(places)] = unpack(bytes(body[places_bytes:]), count, self._dtype)
        else:
            weights = unpack(bytes(body), len(weights), self._dtype)
        if digest(weights) != expected:
            raise ValueError(
                "the SHA-256 of the weights is not the sender's; the message is damaged, or a patch of other weights: "
                "ask for a message with whole=True"
            )
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, part in zip(self._parameters, weights.split(sizes), strict=True):
            parameter.copy_(part.view_as(parameter))
        self._next = number + 1


def digest(weights: Tensor) -> bytes:
    """Returns the SHA-256 of the bits of weights on the CPU, [numel]."""
    return hashlib.sha256(_bits(weights).numpy().tobytes()).digest()


def broadcast(end: Sender | Receiver, source: int = 0, group: dist.ProcessGroup | None = None) -> int:
    """Send the changes from one rank to all others. A collective: the source passes a `Sender`, the others a
    `Receiver`.

    Args:
        end: the sender or receiver of this rank.
        source: the global rank of the sender.
        group: process group for tensors on the CPU; None is the default group.

    Returns:
        Bytes of the message, on every rank.

    Raises:
        ValueError: for the reasons of `Receiver.apply`, only on the ranks concerned.
    """
    message = end.message() if isinstance(end, Sender) else b""
    length = torch.tensor([len(message)], device="cpu")
    dist.broadcast(length, source, group)
    data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    if isinstance(end, Sender):
        data.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    dist.broadcast(data, source, group)
    if isinstance(end, Receiver):
        end.apply(data.numpy().tobytes())
    return len(data)


def _checked(parameters: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
    listed = list(parameters)
    if not listed:
        raise ConfigError("there are no weights to follow; give e.g. model.parameters()")
    if not dtype.is_floating_point or dtype.itemsize not in _INTEGERS:
        raise ConfigError(f"weights of {dtype} cannot be followed; take torch.bfloat16, torch.float16 or torch.float32")
    return listed


def _flat(parameters: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns a copy of all weights in a dtype on the CPU, [numel]."""
    return torch.cat([parameter.detach().to("cpu", dtype).flatten() for parameter in parameters])


def _bits(weights: Tensor) -> Tensor:
    return weights.view(_INTEGERS[weights.dtype.itemsize])
