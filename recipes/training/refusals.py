"""One line for a value that a class of torch, Lightning or the user refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_gqsgd.errors import ConfigError
from recipes.errors import RecipeError

#: What these classes raise for values that they do not take.
_REFUSALS = (TypeError, ValueError, AssertionError, MisconfigurationException)

#: Characters of such an error that a message has at most.
_LONGEST = 400


@contextmanager
def refused_values(where: str, *, applies: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """A context in which an error that refuses a value becomes a `RecipeError`, whose message has one line.

    Args:
        where: what has refused the value, for the message.
        applies: called after an error; the error stays as it is if this returns False.
    """
    try:
        yield
    except (RecipeError, ConfigError):  # these have one line already
        raise
    except _REFUSALS as error:
        if not applies():
            raise
        said = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise RecipeError(
            f"{where}: {said[:_LONGEST] or 'refused'} ({type(error).__name__}; HYDRA_FULL_ERROR=1 shows where)",
            of_one_process=True,  # perhaps: another one may have other data, or another environment
        ) from error
