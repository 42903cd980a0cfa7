"""What Hydra itself is told for words of a command line that it reads otherwise, or not at all."""

from __future__ import annotations

from collections.abc import Sequence

#: The group whose choices go over everything else: Hydra lets the last entry of the list of defaults win.
DEBUG = "debug"
#: Always written, and no entry of its own.
CSV = "csv"


def for_hydra(overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra has to get them. What has been changed already stays as it is.

    ``debug=NAME`` comes last, so that it goes over ``+exp=NAME`` as well. ``logger=[wandb,tensorboard]`` gives each
    logger a node of its own, ``logger.wandb`` and ``logger.tensorboard``; Hydra would merge the files into one.

    Args:
        overrides: the command line, without the name of the script.
    """
    made: list[str] = []
    debug: list[str] = []
    for word in overrides:
        key, _, value = word.partition("=")
        if key.lstrip("+") == DEBUG:
            debug.append(f"+{DEBUG}={value}")
        elif key == "logger" and value.startswith("[") and value.endswith("]"):
            made += _nested(value[1:-1].replace(" ", "").split(","))
        else:
            made.append(word)
    return made + debug


def _nested(names: Sequence[str]) -> list[str]:
    """Overrides that choose several loggers."""
    others = [name for name in dict.fromkeys(names) if name and name != CSV]
    if not others:
        return [f"logger={CSV}"]
    return ["~logger", *(f"+logger@logger.{name}={name}" for name in others)]
