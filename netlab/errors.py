"""The one error of netlab."""

from __future__ import annotations


class NetLabError(RuntimeError):
    """A lab that cannot be built, or a command in it that failed; the message names the reason."""
