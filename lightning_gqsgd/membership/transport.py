"""Sends a member's state to a joining member, without pickles that could run code.

torchft sends it within a merge, when all members know that one needs it. A member that joins between two merges fetches
the current state of another member.
"""

from __future__ import annotations

import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed._serialization import _streaming_load, _streaming_save
from torch.utils._pytree import tree_map_only
from torchft.checkpointing.http_transport import HTTPTransport

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.membership.door import in_brackets

#: Path of torchft's own states.
_CHECKPOINTS = "/checkpoint/"
#: Path of a member's current state.
_PRESENT = "/present"


class PlainTransport(HTTPTransport[Any]):
    """torchft's transport over HTTP, which accepts only plain values and tensors.

    Args:
        timeout: timeout of each transfer.
        host: the address under which others reach this process.
        state: function that returns a copy of this member's state, see `sendable`.
    """

    def __init__(self, timeout: timedelta, host: str, state: Callable[[], Mapping[str, Any]]) -> None:
        self._host = in_brackets(host)  # set before the line below, which calls `address`
        super().__init__(timeout=timeout, num_chunks=0)
        torchfts: Any = self._server.RequestHandlerClass

        class Handler(torchfts):
            def do_GET(self) -> None:
                if self.path == _PRESENT:
                    _answer(self, state)
                else:
                    super().do_GET()

            def log_message(self, *_: object) -> None:
                """Do nothing. The standard library's method prints a line to stderr for each request."""

        self._server.RequestHandlerClass = Handler

    def address(self) -> str:
        """Returns the URL from which others fetch the state, without the step at the end."""
        return f"http://{self._host}:{self._server.socket.getsockname()[1]}{_CHECKPOINTS}"

    def shutdown(self, wait: bool = True) -> None:
        """End the server, and close its socket. torchft's own method sets another flag than the one that the server
        reads.

        Args:
            wait: whether to wait until the server has ended, for half a second at most.
        """
        ending = threading.Thread(target=self._end, name="gqsgd-ending", daemon=True)
        ending.start()
        if wait:
            ending.join()

    def _end(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Fetch a member's state within a merge; see torchft's method.

        Raises:
            ConfigError: if the transfer took longer than members wait for each other, so that no merge with this member
                could succeed.
        """
        began = time.monotonic()
        state = super().recv_checkpoint(src_rank, metadata, step, timeout)
        check_time(time.monotonic() - began, timeout)
        return state

    @classmethod
    def fetch_present(cls, address: str, timeout: timedelta) -> Mapping[str, Any]:
        """Fetch a member's current state.

        Args:
            address: address of the member's transport, see `address`.
            timeout: the longest time between two packets.

        Raises:
            OSError: if the member does not answer, or if its answer is incomplete.
            ValueError: if the answer is not a state.
        """
        state = cls._load_from_address(address.removesuffix(_CHECKPOINTS) + _PRESENT, timeout)
        if not isinstance(state, Mapping):
            raise ValueError(f"{address} has answered with {type(state).__name__}, and not with a state")
        return state

    @classmethod
    def _load_from_address(cls, address: str, timeout: timedelta) -> object:
        """Fetch a state. torchft's own method would unpickle any answer."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(address, timeout=timeout.total_seconds()) as file, warnings.catch_warnings():
            # The warning is about read-only memory. No code writes to it, because loaded tensors are copied to their
            # targets.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return _streaming_load(file, weights_only=True)


def check_time(seconds: float, timeout: timedelta) -> None:
    """Raise ConfigError if the transfer of a state took longer than members wait for each other."""
    if seconds > timeout.total_seconds():
        raise ConfigError(
            f"another member's state took {seconds:.0f} s to come here, and members wait for each other for "
            f"timeout={timeout.total_seconds():g} s; give all of them a timeout of {2 * seconds:.0f} s, or this one a "
            "faster link"
        )


def _answer(handler: Any, state: Callable[[], Mapping[str, Any]]) -> None:
    """Send a member's current state. If an error occurs, the receiver notices that the answer is incomplete."""
    present = state()
    handler.send_response(200)
    handler.send_header("Content-type", "application/octet-stream")
    handler.end_headers()
    _streaming_save(present, handler.wfile)


def sendable(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a state with its tensors on the CPU, and with memory behind each of them."""
    sent: Mapping[str, Any] = tree_map_only(Tensor, _with_memory, state)
    return sent


def _with_memory(tensor: Tensor) -> Tensor:
    if tensor.numel():
        return tensor.cpu()
    # torch before 2.10 cannot receive a tensor with a storage of 0 bytes.
    return tensor.new_empty(1, device="cpu")[:0].view(tensor.shape)
