"""GPT-2, as the transformers library has it."""

from __future__ import annotations

from torch import Tensor, nn

from recipes.errors import check_installed
from recipes.models.transformer import check_shape


class GPT2(nn.Module):
    """Predicts each next token; the weights are drawn at random, and nothing is downloaded.

    Args:
        vocabulary_size, max_length, layers, width, heads, dropout: see `recipes.models.transformer.Transformer`.

    Raises:
        RecipeError: the library is not installed, or a setting is out of range.
    """

    def __init__(
        self, vocabulary_size: int, max_length: int, layers: int, width: int, heads: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        check_installed("transformers", "model=gpt2", "transformers", "transformers")
        from transformers import GPT2Config, GPT2LMHeadModel

        check_shape(vocabulary_size, max_length, dropout, layers=layers, width=width, heads=heads)
        config = GPT2Config(
            vocab_size=vocabulary_size,
            n_positions=max_length,
            n_layer=layers,
            n_embd=width,
            n_head=heads,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        self.network = GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns logits of the token after each token, (N, T, V), for numbers of tokens, int64 (N, T)."""
        logits: Tensor = self.network(input_ids=ids).logits
        return logits
