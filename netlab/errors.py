"""The one error of netlab."""

from __future__ import annotations


class NetLabError(RuntimeError):
    """A lab that cannot be built, or a command that cannot be started; the message names the reason and the remedy."""
