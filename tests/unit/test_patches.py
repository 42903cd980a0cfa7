"""PULSE: receivers have the sender's bits after every message, and refuse what would give them others."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.research.patches import Receiver, Sender

SHAPES = [(40, 30), (7,), ()]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def weights(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def bits(tensors: list[Tensor], dtype: torch.dtype) -> list[bytes]:
    return [tensor.to(dtype).reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES)
def test_receivers_have_the_senders_bits_after_every_message(dtype: torch.dtype) -> None:
    source, target = weights(0), weights(1, dtype)
    sender, receiver = Sender(source, dtype), Receiver(target)
    receiver.apply(sender.message())
    generator = torch.Generator().manual_seed(2)
    for size in (1e-6, 0.0, 1e-3, 10.0):  # hardly any change, none, some, and all
        for tensor in source:
            tensor += size * torch.randn(tensor.shape, generator=generator)
        receiver.apply(sender.message())
        assert bits(target, dtype) == bits(source, dtype)


def test_a_patch_has_the_weights_whose_bits_changed_and_no_others() -> None:
    source = weights(0)
    sender = Sender(source)
    whole = len(sender.message())
    empty = len(sender.message())
    assert empty < 64
    source[0] += 1e-9  # less than half of the distance of bf16 numbers, everywhere but near zero
    assert len(sender.message()) == empty
    source[0][3, 4] += 1.0
    assert empty < len(sender.message()) < empty + 8
    source[0] += 1.0
    assert len(sender.message()) < whole + 64
    assert len(sender.message(whole=True)) < 2 * 1208
    assert len(sender.message()) == empty


def test_every_bit_counts_also_those_of_zero_and_nan() -> None:
    source, target = [torch.zeros(4)], [torch.ones(4, dtype=torch.bfloat16)]
    sender, receiver = Sender(source), Receiver(target)
    receiver.apply(sender.message())
    source[0][1], source[0][2] = -0.0, torch.nan
    receiver.apply(sender.message())
    assert bits(target, torch.bfloat16) == bits(source, torch.bfloat16)


def test_a_missing_message_is_noticed_and_a_whole_one_helps() -> None:
    source, target = weights(0), weights(1, torch.bfloat16)
    sender, receiver = Sender(source), Receiver(target)
    receiver.apply(sender.message())
    source[0][0, :3] += 1
    sender.message()  # lost
    source[0][1, :3] += 1
    before = bits(target, torch.bfloat16)
    with pytest.raises(ValueError, match="message 2 is a patch, and 1 is the next one here"):
        receiver.apply(sender.message())
    assert bits(target, torch.bfloat16) == before
    receiver.apply(sender.message(whole=True))
    assert bits(target, torch.bfloat16) == bits(source, torch.bfloat16)


def test_a_receiver_whose_weights_were_changed_refuses_a_patch() -> None:
    source, target = weights(0), weights(1, torch.bfloat16)
    sender, receiver = Sender(source), Receiver(target)
    receiver.apply(sender.message())
    target[0][5, 5] += 1
    source[0][0, 0] += 1
    before = bits(target, torch.bfloat16)
    with pytest.raises(ValueError, match="SHA-256 of the weights is not the sender's"):
        receiver.apply(sender.message())
    assert bits(target, torch.bfloat16) == before


def test_no_damaged_message_changes_anything() -> None:
    source, target = weights(0), weights(1, torch.bfloat16)
    sender, receiver = Sender(source), Receiver(target)
    receiver.apply(sender.message())
    source[0][::7] += 1
    message = sender.message()
    before = bits(target, torch.bfloat16)
    random = np.random.default_rng(0)
    for number in range(500):
        damaged = bytearray(message)
        for place in random.integers(0, len(message), 1 + number % 3):
            damaged[place] ^= random.integers(1, 256)
        if number % 5 == 0:
            damaged = damaged[: random.integers(0, len(message))]
        with contextlib.suppress(ValueError):
            receiver.apply(bytes(damaged))
            # The number of a message is no part of the weights: only its damage may pass.
            assert bits(target, torch.bfloat16) == bits(source, torch.bfloat16)
            break
        assert bits(target, torch.bfloat16) == before, number


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"weights of {dtype} cannot be followed"):
        Sender(weights(0), dtype)
    with pytest.raises(ConfigError, match="there are no weights"):
        Sender([])
    with pytest.raises(ConfigError, match="a receiver's weights have one dtype"):
        Receiver([torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)])
