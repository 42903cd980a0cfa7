"""Tokenizers of Hugging Face's library, from the files that it writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from recipes.data.tokenizers import Ids
from recipes.errors import RecipeError, check_installed


class FileTokenizer:
    """A tokenizer from a file ``tokenizer.json``, such as GPT-2's. It reads text as it is, newlines included.

    Raises:
        RecipeError: the file is no tokenizer, it has another number of tokens, or the library is not installed.
    """

    def __init__(self, file: Path, vocabulary_size: int) -> None:
        check_installed("tokenizers", f"data.tokenizer={file}", "tokenizers", "transformers")
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library has no class of its own for what it refuses
            raise RecipeError(
                f"data.tokenizer={file} is not a tokenizer of Hugging Face's library ({error}); name a tokenizer.json"
            ) from error
        size = self._tokenizer.get_vocab_size()
        if size != vocabulary_size:
            raise RecipeError(
                f"data.vocabulary_size={vocabulary_size} is not the {size} tokens of data.tokenizer={file}; "
                f"set data.vocabulary_size={size}"
            )
        self._dtype = np.uint16 if size <= 2**16 else np.int32

    def encode(self, text: str) -> Ids:
        """Numbers (N,) of the N tokens of a text: uint16, or int32 for more than 65,536 different tokens."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, self._dtype)
