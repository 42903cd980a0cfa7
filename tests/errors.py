"""What tests want to know of an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


def error_text(
    kind: type[Exception] | tuple[type[Exception], ...], call: Callable[..., Any], *arguments: Any, **fields: Any
) -> str:
    """The text of the error of this kind, or of one of these kinds, that a call has to end with."""
    with pytest.raises(kind) as error:
        call(*arguments, **fields)
    return str(error.value)


def check_refused_in_one_line(
    kind: type[Exception], pattern: str, call: Callable[..., Any], *arguments: Any, **fields: Any
) -> None:
    """Check that a call ends with an error of this kind, in one line that has the pattern."""
    text = error_text(kind, call, *arguments, **fields)
    assert re.search(pattern, text), text
    assert "\n" not in text
