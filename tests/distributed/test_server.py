"""The server that ranks are forked from leaves them little to do."""

from __future__ import annotations

import gc
from pathlib import Path

from tests.distributed.ranks import run


def _objects(rank: int) -> tuple[int, int]:
    """How many objects the collector of garbage looks at in a rank, and how many it leaves alone."""
    return len(gc.get_objects()), gc.get_freeze_count()


def test_a_rank_collects_no_garbage_among_what_the_server_has_imported(tmp_path: Path) -> None:
    [(looked_at, frozen)] = run(_objects, 1, tmp_path)
    assert looked_at < frozen / 10
