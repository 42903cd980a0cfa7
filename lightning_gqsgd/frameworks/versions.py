"""The oldest versions of frameworks, which pip compares only where a framework is installed as an extra."""

from __future__ import annotations

import re
from importlib import metadata

#: Major and minor number by package, as the extras of pyproject.toml have them (a test compares). Before 5.3, a Trainer
#: of transformers replaces the handler that its Accelerator has.
OLDEST = {"accelerate": "1.10", "transformers": "5.4"}


def check_version(package: str) -> None:
    """Raise ImportError if an installed package is older than in `OLDEST`."""
    found, oldest = metadata.version(package), OLDEST[package]
    if _numbers(found) < _numbers(oldest):
        raise ImportError(
            f"lightning_gqsgd needs {package} {oldest} or newer, and {found} is installed: "
            f"pip install '{package}>={oldest}'"
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]
