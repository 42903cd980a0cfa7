"""Where data come from: errors, caches, the network, and stand-ins."""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import threading
import urllib.error
import urllib.request
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_only
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape

from recipes.errors import RecipeError

#: Some servers refuse requests under the name that urllib gives itself.
USER_AGENT = "lightning-gqsgd"


def cache_folder(cache_dir: str | None) -> Path:
    """The folder ``data.cache_dir``; without that setting, ``lightning_gqsgd`` in the user's cache folder."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lightning_gqsgd"
    except RuntimeError as error:
        raise RecipeError(
            "there is no folder for data: HOME is not set, and the system does not know this user; set HOME, or "
            "data.cache_dir=FOLDER"
        ) from error


def cached_arrays(
    cache_dir: Path, name: str, identity: Iterable[str], make: Callable[[], dict[str, NDArray[Any]]]
) -> dict[str, NDArray[Any]]:
    """Arrays from the cache, or made now and put there.

    Args:
        cache_dir: folder of the cache.
        name: what the name of the cache file begins with.
        identity: everything that the arrays depend on, of files see `stamp`. The name of the cache file has its digest.
        make: makes the arrays.

    Raises:
        RecipeError: the file cannot be read or written.
    """
    digest = hashlib.blake2b("\n".join(identity).encode(), digest_size=8).hexdigest()
    cached = cache_dir / f"{name}-{digest}.npz"
    if not cached.exists():
        _store(cached, make())
    try:
        with np.load(cached, allow_pickle=False) as stored:
            return dict(stored)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise RecipeError(f"{cached} cannot be read ({error}); delete it, and the next run makes it again") from error


def stamp(file: Path) -> str:
    """Size of a file and time of its change, for `cached_arrays`."""
    status = file.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _store(cached: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write the whole file or nothing, even when two machines share the folder."""
    # Not the number of the process: containers on two machines often have the same one.
    temporary = cached.with_name(f".{cached.name}.{uuid.uuid4().hex}")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, cached)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        remedy = "set data.cache_dir to a folder with space"
        raise RecipeError(f"cannot write the cache {cached} ({error}); {remedy}") from error


@rank_zero_only
def announce_fallback(wanted: str, reason: str, stand_in: str, name: str, remedy: str) -> None:
    """Say on standard error that other data stand in, and why.

    Args:
        wanted: the data that are absent.
        reason: why the data are absent.
        stand_in: what the run trains on instead, in words.
        name: what the run calls the stand-in.
        remedy: how to get the real data.
    """
    Console(stderr=True, soft_wrap=True).print(
        f"[bold yellow]{wanted} is not here:[/] {escape(reason)}.\n"
        f"[bold yellow]Training on {stand_in} instead[/], named {name!r} in this run.\n"
        f"For {wanted}, {escape(remedy)}; data.fallback=false makes its absence an error.",
        highlight=False,
    )


def unreachable(url: str, timeout: float) -> str | None:
    """Why a URL does not answer, or None if it does.

    The request has a thread of its own: without a network, the look-up of a name may block for minutes, and the look-up
    itself takes no time limit.
    """
    outcome: list[str | None] = [f"no answer within {timeout:g} s"]

    def ask() -> None:
        try:
            headers = {"User-Agent": USER_AGENT}
            request = urllib.request.Request(url, method="HEAD", headers=headers)  # noqa: S310  (callers pass constants)
            with urllib.request.urlopen(request, timeout=timeout):  # noqa: S310
                outcome[0] = None
        except (OSError, urllib.error.URLError) as error:
            outcome[0] = str(getattr(error, "reason", error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return outcome[0]


def try_download(absent: str, wanted: bool, url: str, timeout: float, download: Callable[[], object]) -> str | None:
    """Download data that are absent, unless that is not ``wanted``. Returns why that is not possible, or None.

    ``absent`` is the clause that says so.
    """
    if not wanted:
        return f"{absent}, and data.download is off"
    problem = unreachable(url, timeout)
    if problem:
        return f"{absent}, and {url} does not answer ({problem})"
    try:
        download()
    except (OSError, RuntimeError, EOFError, http.client.HTTPException) as error:
        return f"{absent}, and the download of {url} failed ({error})"
    return None


@contextmanager
def socket_timeout(seconds: float) -> Iterator[None]:
    """Let sockets that are made inside ``with`` wait at most for so many seconds."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
