"""Cache of the machine code of kernels on disk, so that only the first process on a machine has to compile them.

Numba's own cache cannot be used, for three reasons. It compares only the file of a kernel, so it does not notice a
change in another file that the kernel includes. It cannot find a kernel again that is composed of other compiled
functions. If two processes compile one kernel for two dtypes at the same time, it can exchange their code.

Here, each kernel has one file for every combination of argument types, processor, versions of Numba and Python, and
source text. The source text includes all files that a kernel can include. Files are written under another name first,
so that no process reads half a file. If several processes need one kernel at the same time, such as the ranks at the
first start, one of them compiles it and the others wait. On a machine with fewer processors than processes, compiling
in all of them would take longer for each.

The cache searches these folders, in this order, and writes files to the first folder that is writable:

1. the folder in the environment variable ``NUMBA_CACHE_DIR``, if it is set;
2. ``__pycache__`` beside the sources;
3. Numba's folder in the user's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import numba
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps
from numba.misc.appdirs import AppDirs

from lightning_gqsgd.version import digest_of

#: Advice for the case that no folder is writable.
REMEDY = "set the environment variable NUMBA_CACHE_DIR to a folder that is writable and has room"

#: Folders of the package that have kernels and the files that kernels include.
_FOLDERS = ("kernels", "codecs", "reducers/elias")
_SUFFIX = ".nbc"
_DIGEST_BYTES = 32
#: Seconds after which a process no longer waits for another process to compile a kernel, which may have been stopped.
_LONGEST_WAIT_S = 60.0


class Compilation(NamedTuple):
    """A kernel that has to be compiled, or that could not be kept.

    Attributes:
        kernel: name of the kernel.
        reason: the reason, as a part of a sentence.
        folder: the folder in which the machine code will be kept. None: it will not be kept.
    """

    kernel: str
    reason: str
    folder: Path | None


#: Functions that are called for every compilation, see `watching`.
_watchers: list[Callable[[Compilation], None]] = []


@contextmanager
def watching(watcher: Callable[[Compilation], None]) -> Iterator[None]:
    """Context manager that calls a function before every compilation in this process, and after every failure to keep
    machine code."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def included_files() -> list[Path]:
    """Returns all source files that a kernel can include, in a fixed order."""
    package = Path(__file__).parents[2]
    return [file for folder in _FOLDERS for file in sorted((package / folder).rglob("*.py"))]


@lru_cache(maxsize=1)
def _source_digest() -> str:
    """Returns the digest of the sources that kernels can include. It is computed once, because imported code does not
    change with its files."""
    return digest_of(included_files())


def folders() -> list[Path]:
    """Returns the folders in which the cache searches machine code, in order."""
    # One NUMBA_CACHE_DIR may serve several copies of the package.
    place = f"lightning_gqsgd_{hashlib.sha256(os.fsencode(Path(__file__).parent)).hexdigest()[:16]}"
    user = Path(AppDirs(appname="numba", appauthor=False).user_cache_dir) / place
    chosen = vars(numba.config)["CACHE_DIR"]
    named = [Path(chosen) / place] if chosen else []
    # A process without HOME, of a user whom the system does not know, has no cache: its path would begin with "~".
    return [*named, Path(__file__).parent / "__pycache__", *([user] if user.is_absolute() else [])]


def writable_folder() -> Path | None:
    """Returns the folder in which machine code is kept, or None if no folder is writable. A missing folder is
    created."""
    for folder in folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError:
            continue
        return folder
    return None


class KernelCache(_Cache):
    """The cache of one kernel, in the form that Numba's dispatchers expect.

    Args:
        name: the kernel's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        #: The lock that is held from the time when no file was found until the kernel is kept. If the compilation
        #: fails, it stays held.
        self._lock: IO[bytes] | None = None

    @property
    def cache_path(self) -> str | None:
        """The folder in which machine code is kept, or None if no folder is writable."""
        folder = writable_folder()
        return None if folder is None else str(folder)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Returns the compiled kernel for argument types, or None if it has to be compiled."""
        target_context.refresh()
        file_name = self._file_name(sig, target_context.codegen())
        found = self._found(file_name, target_context)
        if found is not None:
            return found
        folder = writable_folder()
        if folder is not None:
            self._lock = _locked(folder / file_name)
            found = self._found(file_name, target_context)  # another process may have compiled it in the meantime
            if found is not None:
                self._unlock()
                return found
        damaged = [file for folder in folders() for file in self._files(folder) if file.name == file_name]
        self._tell(f"{damaged[0]} is damaged or cannot be read" if damaged else self._reason())
        return None

    def _found(self, file_name: str, target_context: Any) -> Any:
        """Returns the compiled kernel from the first intact file with this name, or None if there is no such file."""
        for folder in folders():
            content = _content_of(folder / file_name)
            if content is not None and hashlib.sha256(content[_DIGEST_BYTES:]).digest() == content[:_DIGEST_BYTES]:
                # The file is as trustworthy as the sources, because the same users can write both.
                return CompileResult._rebuild(target_context, *pickle.loads(content[_DIGEST_BYTES:]))  # noqa: S301
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled kernel, and remove the files of the same kernel from older sources."""
        folder = writable_folder()
        if folder is None:
            return  # `load_overload` has told the watchers
        content = dumps(data._reduce())
        try:
            _write(folder / self._file_name(sig, data.codegen), hashlib.sha256(content).digest() + content)
        except OSError as error:
            self._tell(f"a file in {folder} could not be written ({error})", kept=False)
            return
        finally:
            self._unlock()
        for file in self._stale(folder):
            with suppress(OSError):  # another process may have removed the file
                file.unlink()

    def _unlock(self) -> None:
        """Release the lock, so that the next process can search the kernel."""
        if self._lock is None:
            return
        # A process that has already opened this file still finds the kernel once it holds the lock.
        with suppress(OSError):
            os.unlink(self._lock.name)
        self._lock.close()
        self._lock = None

    def enable(self) -> None:
        """Do nothing, because the cache is always used."""

    def disable(self) -> None:
        """Do nothing, because the cache is always used."""

    def flush(self) -> None:
        """Remove all files of the kernel."""
        for folder in folders():
            for file in self._files(folder):
                file.unlink()

    @property
    def _prefix(self) -> str:
        """The beginning of the names of all files of the kernel."""
        return f"gqsgd.{self._name}."

    def _file_name(self, sig: Any, codegen: Any) -> str:
        """Returns the name of the file for argument types, a processor, and the versions of Numba and Python."""
        # Not in the digest of the sources: several environments that import one clone each keep their files.
        key = repr((str(sig), codegen.magic_tuple(), numba.__version__, sys.version_info[:2]))
        return f"{self._prefix}{_source_digest()[:16]}.{hashlib.sha256(key.encode()).hexdigest()[:16]}{_SUFFIX}"

    def _stale(self, folder: Path) -> list[Path]:
        """Returns the files of the kernel that belong to other sources."""
        current = f"{self._prefix}{_source_digest()[:16]}."
        return [file for file in self._files(folder) if not file.name.startswith(current)]

    def _files(self, folder: Path) -> list[Path]:
        """Returns all files of the kernel in a folder; none if the folder cannot be searched, e.g. because it is in the
        home of another user."""
        try:
            names = os.listdir(folder)
        except OSError:
            return []
        return [folder / name for name in names if name.startswith(self._prefix) and name.endswith(_SUFFIX)]

    def _reason(self) -> str:
        """Returns the reason why the kernel has to be compiled."""
        if writable_folder() is None:
            return f"none of the folders {', '.join(map(str, folders()))} is writable"
        if any(self._stale(folder) for folder in folders()):
            return "the package has changed since they were compiled"
        return "they have not been compiled for this dtype, Numba and Python on this machine yet"

    def _tell(self, reason: str, *, kept: bool = True) -> None:
        """Tell all watchers about a compilation. ``kept`` is False if its result will not be kept."""
        for watcher in [*_watchers]:
            watcher(Compilation(self._name, reason, writable_folder() if kept else None))


def _locked(file: Path) -> IO[bytes] | None:
    """Wait until no other process compiles the kernel of a file, but at most `_LONGEST_WAIT_S`.

    Returns:
        An open file with a lock, which ends with this process, or None if there is no lock. The kernel is compiled
        without a lock then.
    """
    deadline = time.monotonic() + _LONGEST_WAIT_S
    try:
        lock = file.with_suffix(".lock").open("wb")
    except OSError:
        return None
    while time.monotonic() < deadline:
        try:
            # `flock` is not used, because a forked child would hold its lock, too.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except (BlockingIOError, PermissionError):
            time.sleep(0.05)
        except OSError:
            break  # the file system has no locks
    lock.close()
    return None


def _content_of(file: Path) -> bytes | None:
    """Returns the content of a file, or None if it does not exist or cannot be read."""
    try:
        return file.read_bytes()
    except OSError:
        return None


def _write(file: Path, content: bytes) -> None:
    """Write a file under another name, and rename it when it is complete."""
    partial = file.with_suffix(f".tmp.{os.getpid()}.{uuid.uuid4().hex[:16]}")
    try:
        partial.write_bytes(content)
        partial.replace(file)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
