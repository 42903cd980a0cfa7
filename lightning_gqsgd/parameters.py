"""The parameters of a model, as far as their reduction is concerned."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError


class Parameter(NamedTuple):
    """A parameter of a model.

    Attributes:
        number: its place in the model; enters its dither.
        name: its name in the model.
        numel: number of its coordinates.
        raw: whether its gradient travels uncompressed.
    """

    number: int
    name: str
    numel: int
    raw: bool


def number_parameters(parameters: Mapping[str, Tensor], config: GQSGDConfig) -> list[Parameter]:
    """The parameters of a model, by name and in order, as a configuration sees them.

    Raises:
        ConfigError: a pattern of ``exclude`` matches no parameter.
    """
    unmatched = [
        pattern for pattern in config.exclude if not any(fnmatch.fnmatchcase(name, pattern) for name in parameters)
    ]
    if unmatched:
        raise ConfigError(
            f"exclude patterns {unmatched} match no parameter; names look like {', '.join(list(parameters)[:3])}"
        )
    return [
        Parameter(number, name, tensor.numel(), tensor.numel() < config.min_numel or _is_excluded(name, config))
        for number, (name, tensor) in enumerate(parameters.items())
    ]


def digest(parameters: Iterable[object]) -> str:
    """A digest of parameters, the same on ranks whose models have the same ones."""
    text = "\n".join(map(str, parameters))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_excluded(name: str, config: GQSGDConfig) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in config.exclude)
