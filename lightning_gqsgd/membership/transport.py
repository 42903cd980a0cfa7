"""A member's state on its way to one that joins, without pickles that could run code."""

from __future__ import annotations

import urllib.request
import warnings
from datetime import timedelta
from typing import Any

from torch.distributed._serialization import _streaming_load
from torchft.checkpointing.http_transport import HTTPTransport


class PlainTransport(HTTPTransport[Any]):
    """torchft's transport over HTTP, which takes plain values and tensors only.

    Args:
        timeout: of each transfer.
        host: the address under which others reach this process.
    """

    def __init__(self, timeout: timedelta, host: str) -> None:
        self._host = f"[{host}]" if ":" in host else host  # before the line below, which asks for the address
        super().__init__(timeout=timeout, num_chunks=0)
        # The standard library's handler writes a line to standard error for each request.
        self._server.RequestHandlerClass.log_message = lambda *_: None

    def address(self) -> str:
        """Returns where others fetch the state from, without the step at the end."""
        return f"http://{self._host}:{self._server.socket.getsockname()[1]}/checkpoint/"

    @classmethod
    def _load_from_address(cls, address: str, timeout: timedelta) -> object:
        """Fetch a state. torchft's own method unpickles whatever comes."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(address, timeout=timeout.total_seconds()) as file, warnings.catch_warnings():
            # Of memory that is read only, which nobody writes to: what is loaded is copied to where it belongs.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return _streaming_load(file, weights_only=True)
