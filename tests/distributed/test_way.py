"""The files of the package that a step passes, which docs/design.md lists."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType

import lightning_gqsgd
from tests.distributed.models import train, wrapped
from tests.distributed.ranks import run

ROOT = Path(lightning_gqsgd.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "design.md"

#: Files of which a step calls compiled functions alone. Numba tells a profiler of them up to Python 3.11.
UNSEEN = {"kernels/cpu/blocks"} if sys.version_info >= (3, 12) else set()


def _passed(rank: int) -> list[str]:
    """Files with functions that run in a later step: by then, all that can be done once has been done."""
    files = set()
    is_on = threading.Event()

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and is_on.is_set() and path.is_relative_to(ROOT):
            files.add(str(path.relative_to(ROOT).with_suffix("")))

    threading.setprofile(note)  # for the threads that the hook starts
    model, state = wrapped({}, {"bits": 8, "sample_every": 0})
    train(model, rank, range(6))
    sys.setprofile(note)
    is_on.set()
    train(model, rank, range(6, 7))
    is_on.clear()
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]  # of typeshed
    state.close()
    return sorted(files)


def test_a_step_passes_the_files_that_the_page_lists(tmp_path: Path) -> None:
    sentence = PAGE.read_text().split("A later step runs code of these files:")[1].partition(".\n")[0]
    for files in run(_passed, 2, tmp_path):
        assert {*files, *UNSEEN} == {*re.findall(r"`([\w/]+)`", sentence)}
