"""A text as characters, and a small transformer that predicts each next one."""

from __future__ import annotations

import os
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

import torch
from torch import Tensor, nn

#: Characters that are told apart: bytes of UTF-8.
VOCABULARY = 256

#: Files below the folder that the variable GQSGD_DATA names: the training text and the validation text.
WIKITEXT = ("wikitext2/test.txt", "wikitext2/valid.txt")


class Texts(NamedTuple):
    """A training and a validation text.

    Attributes:
        name: what reports call them.
        train, valid: bytes, uint8 [length].
    """

    name: str
    train: Tensor
    valid: Tensor


def load_texts() -> Texts:
    """WikiText-2's test text for training and its validation text; without them, the topics of Python's ``help``."""
    folder = os.environ.get("GQSGD_DATA")
    files = [Path(folder) / file for file in WIKITEXT] if folder else []
    if files and all(file.is_file() for file in files):
        train, valid = (_bytes(file.read_bytes()) for file in files)
        return Texts("WikiText-2 (trained on its test text)", train, valid)
    everything = _bytes("\n".join(text for _, text in sorted(topics.topics.items())).encode())
    cut = len(everything) * 9 // 10
    return Texts("topics of Python's help", everything[:cut], everything[cut:])


def windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows at random places of a text, and for each character the next one: int64 [count, length] each.

    The generator is the CPU's; the windows are on the device of the text.
    """
    starts = torch.randint(len(text) - length - 1, (count, 1), generator=generator)
    ids = text[(starts + torch.arange(length + 1)).to(text.device)].long()
    return ids[:, :-1], ids[:, 1:]


class CharacterTransformer(nn.Module):
    """Predicts each next character. The default has 0.62 M parameters, and no dropout.

    Args:
        length: number of characters in a window.
        layers: number of blocks.
        width: length of a character's vector.
        heads: number of attention heads.
    """

    def __init__(self, length: int = 64, layers: int = 3, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.characters.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [N, T, VOCABULARY] of the characters after int64 [N, T]."""
        length = ids.shape[1]
        hidden = self.characters(ids) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.norm(hidden) @ self.characters.weight.T


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
