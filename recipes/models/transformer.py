"""A decoder-only transformer for language modelling."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.errors import RecipeError


def check_shape(vocabulary_size: int, max_length: int, dropout: float, **sizes: int) -> None:
    """Check the settings of a transformer; ``sizes`` are those of its node `model`, ``width`` and ``heads`` among them.

    Raises:
        RecipeError: a setting is out of range, or ``heads`` does not divide ``width``.
    """
    if min(vocabulary_size, max_length, *sizes.values()) < 1:
        named = ", ".join(f"model.{name}={size}" for name, size in sizes.items())
        raise RecipeError(
            f"vocabulary_size={vocabulary_size}, max_length={max_length}, {named}: each must be at least 1"
        )
    width, heads = sizes["width"], sizes["heads"]
    if width % heads:
        raise RecipeError(f"model.width={width} is not divisible by model.heads={heads}; change one of them")
    if not 0 <= dropout < 1:
        raise RecipeError(f"model.dropout={dropout} is out of range: 0 to less than 1")


class Transformer(nn.Module):
    """Predicts each next token. Normalisations are in front of each part of a block, and positions are learnt.

    The embedding of the input is the matrix of the output as well (Press, Wolf, arXiv 1608.05859).

    Args:
        vocabulary_size: number of different tokens, V.
        max_length: number of positions, which is the length of the longest sequence.
        layers: number of blocks.
        width: length of a token's vector.
        heads: number of attention heads; divides ``width``.
        inner: width inside a block's feed-forward part.
        dropout: probability of dropout, 0 to less than 1.

    Raises:
        RecipeError: a setting is out of range.
    """

    def __init__(
        self,
        vocabulary_size: int,
        max_length: int,
        layers: int,
        width: int,
        heads: int,
        inner: int,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_shape(vocabulary_size, max_length, dropout, layers=layers, width=width, heads=heads, inner=inner)
        self.max_length = max_length
        self.tokens = nn.Embedding(vocabulary_size, width)
        self.positions = nn.Embedding(max_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(width, heads, inner, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self._initialise(layers)

    def forward(self, ids: Tensor) -> Tensor:
        """Predict the token after each token.

        Args:
            ids: numbers of the tokens, int64 (N, T).

        Returns:
            Logits (N, T, V).

        Raises:
            ValueError: the sequences are longer than ``max_length``.
        """
        length = ids.shape[1]
        if length > self.max_length:
            raise ValueError(
                f"a sequence of {length} tokens is longer than model.max_length={self.max_length}; raise the latter, "
                "or lower data.sequence_length"
            )
        hidden = self.tokens(ids) + self.positions(torch.arange(length, device=ids.device))
        hidden = self.dropout(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.tokens.weight)

    def _initialise(self, layers: int) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        # Every block adds to the same sum twice; without this, the sum would grow with the number of blocks.
        for name, parameter in self.named_parameters():
            if name.endswith(("project.weight", "shrink.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)


class _Block(nn.Module):
    """Attention to earlier tokens, then two layers on each token by itself; both add to their input."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self._heads, self._dropout = heads, dropout
        self.norm_attention, self.norm_inner = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.shrink = nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.project(self._attention(self.norm_attention(hidden))))
        return hidden + self.dropout(self.shrink(F.gelu(self.widen(self.norm_inner(hidden)))))

    def _attention(self, hidden: Tensor) -> Tensor:
        n, length, width = hidden.shape
        split = self.attend(hidden).view(n, length, 3, self._heads, width // self._heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self._dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).reshape(n, length, width)
