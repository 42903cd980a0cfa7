"""Downloads of files whose SHA-256 is known."""

from __future__ import annotations

import hashlib
import os
import urllib.request
import uuid
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from recipes.data.sources import USER_AGENT
from recipes.errors import DataError


def download(url: str, sha256: str, target: Path, timeout: float) -> None:
    """Download a file whole and verified, or not at all; with a progress bar on standard error.

    Args:
        url: where the file is.
        sha256: its SHA-256, in hexadecimal digits.
        target: where it is written.
        timeout: seconds without an answer after which the download is given up.

    Raises:
        DataError: the file has another SHA-256.
        OSError: the network or the disk fails.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Not the number of the process: containers on two machines often have the same one.
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    digest = hashlib.sha256()
    request = urllib.request.Request(url, headers={"User-Agent": USER_AGENT})  # noqa: S310  (callers pass constants)
    try:
        with (
            urllib.request.urlopen(request, timeout=timeout) as answer,  # noqa: S310
            open(temporary, "wb") as file,
            Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        ):
            length = answer.headers.get("Content-Length")
            task = progress.add_task(f"downloading {target.name} (once)", total=int(length) if length else None)
            while part := answer.read(2**18):
                file.write(part)
                digest.update(part)
                progress.advance(task, len(part))
        if digest.hexdigest() != sha256:
            raise DataError(f"{url} has SHA-256 {digest.hexdigest()}, not {sha256}: it is incomplete or another file")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
