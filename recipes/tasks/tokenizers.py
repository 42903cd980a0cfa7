"""From text to numbers, with nothing to download."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from recipes.tasks.sources import DataError

TOKENIZERS = ("word", "char")
UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"

Ids = NDArray[np.integer]

#: In text that nobody has split into words: words and numbers, and every other sign by itself.
_RAW_WORDS = re.compile(rf"{END_OF_LINE}|\w+|[^\w\s]")


def splitter(tokenizer: str, raw: bool) -> Callable[[str], list[str]]:
    """The function that splits whole lines into tokens; every newline becomes ``<eos>``.

    Args:
        tokenizer: ``"word"`` or ``"char"``.
        raw: whether punctuation still sticks to the words; otherwise words are what whitespace separates.

    Raises:
        DataError: an unknown tokenizer.
    """
    if tokenizer not in TOKENIZERS:
        raise DataError(f"data.tokenizer={tokenizer!r} is not one of {', '.join(TOKENIZERS)}")
    if tokenizer == "char":
        return lambda text: [END_OF_LINE if sign == "\n" else sign for sign in text]
    if raw:
        return lambda text: _RAW_WORDS.findall(text.replace("\n", f" {END_OF_LINE} "))
    return lambda text: text.replace("\n", f" {END_OF_LINE} ").split()


class Vocabulary:
    """Tokens with a number each: 0 is ``<unk>``, 1 is ``<eos>``, then the most frequent first.

    Args:
        counts: how often each token occurs in the training text.
        size: upper limit of the number of tokens, ``<unk>`` and ``<eos>`` included.

    Attributes:
        tokens: by number.

    Raises:
        DataError: a size below 3 leaves no room for a token of the text.
    """

    def __init__(self, counts: Counter[str], size: int) -> None:
        if size < 3:
            raise DataError(f"data.vocabulary_size={size} must be at least 3")
        special = (UNKNOWN, END_OF_LINE)
        # Equally frequent tokens by name: the same vocabulary from the same text, whatever the order of counting.
        ranked = sorted((token for token in counts if token not in special), key=lambda token: (-counts[token], token))
        self.tokens = (*special, *ranked[: size - len(special)])
        self._ids = {token: number for number, token in enumerate(self.tokens)}
        self._dtype = np.uint16 if size <= 2**16 else np.int32

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, tokens: Sequence[str]) -> Ids:
        """Numbers of the tokens, 0 for those that are not in the vocabulary: uint16, or int32 above 65,536 tokens."""
        numbers = map(self._ids.get, tokens, itertools.repeat(0))
        return np.fromiter(numbers, dtype=self._dtype, count=len(tokens))

    def decode(self, ids: Iterable[int]) -> list[str]:
        """The tokens with these numbers."""
        return [self.tokens[number] for number in ids]
