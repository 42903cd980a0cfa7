"""From text to numbers, by tokenizers that need no download."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from recipes.errors import RecipeError

TOKENIZERS = ("word", "char")
UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"

Ids = NDArray[np.integer]

#: Tokens of text in which punctuation sticks to the words: words and numbers, and every other sign by itself.
_RAW_WORDS = re.compile(rf"{END_OF_LINE}|\w+|[^\w\s]")


def unknown_tokenizer(tokenizer: str) -> RecipeError:
    """The error for a tokenizer that is neither a name nor a file."""
    return RecipeError(f"data.tokenizer={tokenizer!r} is not one of {', '.join(TOKENIZERS)}, nor a file tokenizer.json")


def splitter(tokenizer: str, raw: bool) -> Callable[[str], list[str]]:
    """The function that splits whole lines of text into tokens; every newline becomes the token ``<eos>``.

    Args:
        tokenizer: ``"word"`` or ``"char"``.
        raw: of ``"word"``: whether punctuation still sticks to the words, and has to be split off; otherwise words are
            what whitespace separates.
    """
    if tokenizer not in TOKENIZERS:
        raise unknown_tokenizer(tokenizer)
    if tokenizer == "char":
        return lambda text: [END_OF_LINE if sign == "\n" else sign for sign in text]
    if raw:
        return lambda text: _RAW_WORDS.findall(text.replace("\n", f" {END_OF_LINE} "))
    return lambda text: text.replace("\n", f" {END_OF_LINE} ").split()


class Vocabulary:
    """Numbers of tokens: 0 is ``<unk>``, 1 is ``<eos>``, and the most frequent tokens of the text follow in order.

    Args:
        counts: number of times that each token occurs in the training text.
        size: largest number of tokens, ``<unk>`` and ``<eos>`` included; at least 3.

    Attributes:
        tokens: the tokens in the order of their numbers.

    Raises:
        RecipeError: the size leaves no room for a token of the text.
    """

    def __init__(self, counts: Counter[str], size: int) -> None:
        if size < 3:
            raise RecipeError(f"data.vocabulary_size={size} must be at least 3")
        special = (UNKNOWN, END_OF_LINE)
        # Equally frequent tokens are sorted by name, so that the order of counting does not matter.
        ranked = sorted((token for token in counts if token not in special), key=lambda token: (-counts[token], token))
        self.tokens = (*special, *ranked[: size - len(special)])
        self._ids = {token: number for number, token in enumerate(self.tokens)}
        self._dtype = np.uint16 if size <= 2**16 else np.int32

    def encode(self, tokens: Sequence[str]) -> Ids:
        """Numbers (N,) of N tokens, 0 for those outside the vocabulary: uint16, or int32 for a size above 65,536."""
        numbers = map(self._ids.get, tokens, itertools.repeat(0))
        return np.fromiter(numbers, dtype=self._dtype, count=len(tokens))
