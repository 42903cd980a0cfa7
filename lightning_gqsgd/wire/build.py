"""Says which build of the package a process runs. Two builds of one version may send different messages."""

from __future__ import annotations

from lightning_gqsgd.kernels.wire import VERSION
from lightning_gqsgd.version import __version__, digest_of_sources

#: Digits of the digest of the sources that tell builds apart.
_DIGITS = 12


def this_build() -> str:
    """Returns the version of the package, the version of the format of messages, and a digest of the sources. It
    consists of letters, digits, dots and hyphens."""
    return f"{__version__}-wire{VERSION}-{digest_of_sources()[:_DIGITS]}"
