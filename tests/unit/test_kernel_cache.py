"""Compiled kernels are kept on disk, and compiled anew if anything that they include has changed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gqsgd import version
from lightning_gqsgd.kernels.cpu import cache
from lightning_gqsgd.kernels.cpu.cache import Compilation
from lightning_gqsgd.kernels.cpu.jit import kernel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of the cache, which is empty."""
    monkeypatch.setattr(cache, "folders", lambda: [tmp_path])
    return tmp_path


@pytest.fixture
def told() -> Iterator[list[Compilation]]:
    """What watchers are told."""
    compilations: list[Compilation] = []
    with cache.watching(compilations.append):
        yield compilations


def doubling() -> Callable[[float], Any]:
    """A kernel as a new process would have it: nothing of it is in memory."""

    @kernel("doubling_of_a_test")
    def doubling(x):  # type: ignore[no-untyped-def]
        return 2 * x

    return doubling


def test_a_kernel_is_compiled_once_for_each_type(folder: Path, told: list[Compilation]) -> None:
    assert doubling()(1.5) == 3.0
    assert doubling()(2.5) == 5.0
    assert [compilation.folder for compilation in told] == [folder]
    assert "not been compiled" in told[0].reason
    assert doubling()(7) == 14
    assert len(told) == len(list(folder.iterdir())) == 2


def test_sources_that_have_changed_are_compiled_anew_and_old_files_go(
    folder: Path, told: list[Compilation], monkeypatch: pytest.MonkeyPatch
) -> None:
    doubling()(1.5)
    (old,) = folder.iterdir()
    monkeypatch.setattr(cache, "_source_digest", lambda: "0" * 64)
    assert doubling()(1.5) == 3.0
    assert "has changed" in told[1].reason
    (new,) = folder.iterdir()
    assert new != old


@pytest.mark.parametrize(
    ("of", "attribute", "other"), [("sys", "version_info", (3, 99)), ("numba", "__version__", "0.1")]
)
def test_environments_that_share_a_folder_keep_their_kernels(
    of: str, attribute: str, other: Any, folder: Path, told: list[Compilation]
) -> None:
    doubling()(1.5)
    with pytest.MonkeyPatch.context() as another_environment:
        another_environment.setattr(cache, of, SimpleNamespace(**{**vars(getattr(cache, of)), attribute: other}))
        assert doubling()(1.5) == 3.0
    assert doubling()(1.5) == 3.0
    assert len(told) == len(list(folder.iterdir())) == 2


def test_every_file_that_kernels_include_is_part_of_the_digest(tmp_path: Path) -> None:
    package = Path(cache.__file__).parent.parent
    files = cache.included_files()
    for needed in (
        "wire.py",
        "cpu/loops.py",
        "cpu/dither.py",
        "cpu/packing.py",
        "layout.py",
        "../codecs/linear/cpu.py",
    ):
        assert (package / needed).resolve() in [file.resolve() for file in files]
    compiled = [file for file in package.parent.rglob("*.py") if "kernels.cpu.jit import" in file.read_text()]
    assert package.parent / "codecs/linear/cpu.py" in compiled
    assert set(compiled) <= set(files)
    copies = []
    for number, file in enumerate(files):
        copies.append(tmp_path / f"{number}" / file.name)
        copies[-1].parent.mkdir()
        copies[-1].write_bytes(file.read_bytes())
    digest = version.digest_of(copies)
    assert digest == version.digest_of(files)
    for copy in copies:
        content = copy.read_bytes()
        copy.write_bytes(content + b"#")
        assert version.digest_of(copies) != digest
        copy.write_bytes(content)


def test_another_version_in_a_zip_archive_has_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    before = version.digest_of([])
    monkeypatch.setattr(version, "__version__", "0.0.1")
    assert version.digest_of([]) != before


def test_a_damaged_file_is_replaced(folder: Path, told: list[Compilation]) -> None:
    doubling()(1.5)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for content in (b"", whole[:-1], whole[:40] + b"?" + whole[41:]):
        file.write_bytes(content)
        assert doubling()(1.5) == 3.0
        assert told[-1].reason == f"{file} is damaged or cannot be read"
        told.clear()
        doubling()(1.5)
        assert told == []


def test_a_folder_that_is_only_readable_is_read_and_the_next_one_written(
    tmp_path: Path, told: list[Compilation], monkeypatch: pytest.MonkeyPatch
) -> None:
    image, user = tmp_path / "image", tmp_path / "user"
    monkeypatch.setattr(cache, "folders", lambda: [image, user])
    doubling()(1.5)
    assert told.pop().folder == image

    temporary_file = tempfile.TemporaryFile

    def refuse(*, dir: Path) -> Any:
        if dir == image:
            raise PermissionError(f"{dir} is not writable")
        return temporary_file(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert doubling()(1.5) == 3.0
    assert told == []
    assert doubling()(7) == 14
    assert told.pop().folder == user
    assert len(list(image.iterdir())) == len(list(user.iterdir())) == 1


def test_kernels_work_where_no_folder_is_writable(
    tmp_path: Path, told: list[Compilation], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(cache, "folders", lambda: [tmp_path / "file" / "folder"])
    assert doubling()(1.5) == 3.0
    assert doubling()(1.5) == 3.0
    assert [compilation.folder for compilation in told] == [None, None]
    assert f"{tmp_path}/file/folder is writable" in told[0].reason


def test_a_full_disk_is_told_and_leaves_no_part_of_a_file(
    folder: Path, told: list[Compilation], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    assert doubling()(1.5) == 3.0
    assert [compilation.folder for compilation in told] == [folder, None]
    assert told[1].reason == f"a file in {folder} could not be written (no space left on device)"
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_searched_has_no_kernels(
    folder: Path, told: list[Compilation], monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = folder / ("n" * 300)  # the system refuses to look there, as into another user's home
    monkeypatch.setattr(cache, "folders", lambda: [nowhere, folder])
    assert doubling()(1.5) == 3.0
    assert [compilation.folder for compilation in told] == [folder]
    monkeypatch.setattr(cache, "folders", lambda: [nowhere])
    assert doubling()(7) == 14
    assert "is writable" in told[-1].reason


def test_a_user_without_a_home_has_no_folder_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.AppDirs, "user_cache_dir", "~/.cache/numba")  # what `expanduser` leaves as it is
    assert all(folder.is_absolute() for folder in cache.folders())


def test_the_environment_names_the_first_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.numba.config, "CACHE_DIR", "")
    beside, user = cache.folders()
    assert beside.parent == Path(cache.__file__).parent
    monkeypatch.setattr(cache.numba.config, "CACHE_DIR", str(tmp_path))
    named, *others = cache.folders()
    assert named.parent == tmp_path
    assert others == [beside, user]


#: Holds the lock of a kernel's file while a line is awaited; then the file is there. Arguments: the file, and a copy.
_HOLDER = """
import fcntl, os, sys
file, copy = sys.argv[1:]
lock = open(file.removesuffix("nbc") + "lock", "wb")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("locked", flush=True)
input()
os.replace(copy, file)
"""


@contextmanager
def another_process_that_compiles(file: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun to compile a kernel, and keeps it when it reads a line."""
    copy = file.rename(file.with_suffix(".copy"))
    pipe = subprocess.PIPE
    command = [sys.executable, "-S", "-c", _HOLDER, str(file), str(copy)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_kernel_that_another_process_compiles_is_waited_for(
    folder: Path, told: list[Compilation], monkeypatch: pytest.MonkeyPatch
) -> None:
    doubling()(1.5)
    told.clear()
    (file,) = folder.iterdir()
    with another_process_that_compiles(file) as process:
        assert process.stdin is not None
        waits: list[float] = []

        def wait(seconds: float) -> None:
            if not waits:
                process.stdin.write("\n")
                process.stdin.flush()
            waits.append(seconds)
            process.wait(timeout=60)  # its lock ends with it

        monkeypatch.setattr(cache, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
        assert doubling()(1.5) == 3.0
    assert waits
    assert told == []
    assert list(folder.iterdir()) == [file]


def test_a_process_that_compiles_for_ever_is_not_waited_for(
    folder: Path, told: list[Compilation], monkeypatch: pytest.MonkeyPatch
) -> None:
    doubling()(1.5)
    (file,) = folder.iterdir()
    monkeypatch.setattr(cache, "_LONGEST_WAIT_S", 0.1)
    with another_process_that_compiles(file):
        assert doubling()(1.5) == 3.0
    assert len(told) == 2
    assert file.exists()


#: Prints the number of compilations; argument: a dtype.
_PROCESS = """
import sys
import torch
from lightning_gqsgd.kernels import cpu
from lightning_gqsgd.kernels.cpu import cache
from lightning_gqsgd.kernels.layout import Segment, cut

named = cache.folders()[:1]  # beside the sources, the kernels may lie already
cache.folders = lambda: named
x = torch.arange(8, dtype=getattr(torch, sys.argv[1]))
blocks = torch.from_numpy(cut([Segment(0, 8, False)], 16))
compilations = []
print("ready", flush=True)
input()
with cache.watching(compilations.append):
    assert cpu.block_moments(x, blocks).tolist() == [[28, 140]]
print(len(compilations))
"""


@pytest.mark.slow
def test_processes_that_compile_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    def counts(*dtypes: str) -> list[int]:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        pipe = subprocess.PIPE
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", _PROCESS, dtype], env=environment, stdin=pipe, stdout=pipe, text=True
            )
            for dtype in dtypes
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return [int(process.communicate(timeout=200)[0]) for process in processes]

    assert sorted(counts("float32", "float64", "float32")) == [0, 1, 1]
    assert counts("float32", "float64") == [0, 0]
