"""The number of processors that a process may use, as Linux's control groups limit it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_gqsgd.wire.processors import Place, own_place, processors, share_of


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def limited(tmp_path: Path, membership: str, **limits: str) -> int:
    """The number where this process is a member of these groups, and files have these texts."""
    (tmp_path / "membership").write_text(membership)
    for name, text in limits.items():
        file = tmp_path / name.replace("__", "/").replace("cpu_", "cpu.")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return processors(tmp_path, tmp_path / "membership")


@pytest.mark.parametrize(
    ("limit", "number"),
    [("max 100000\n", 8), ("200000 100000\n", 2), ("150000 100000\n", 2), ("10000 100000\n", 1), ("9900000 100000", 8)],
)
def test_a_container_has_the_processors_of_its_limit(tmp_path: Path, limit: str, number: int) -> None:
    assert limited(tmp_path, "0::/\n", cpu_max=limit) == number


def test_the_least_of_the_limits_of_all_groups_counts(tmp_path: Path) -> None:
    limits = {"a__cpu_max": "300000 100000\n", "a__b__cpu_max": "max 100000\n", "other__cpu_max": "100000 100000\n"}
    assert limited(tmp_path, "0::/a/b\n", **limits) == 3


@pytest.mark.parametrize("folder", ["", "docker/c0ffee/"])  # a container may have its own group at the top
def test_control_groups_of_version_1_have_limits_too(tmp_path: Path, folder: str) -> None:
    membership = "4:memory:/docker/c0ffee\n3:cpu,cpuacct:/docker/c0ffee\n0::/system.slice\n"
    place = f"cpu/{folder}".replace("/", "__")
    period = {f"{place}cpu_cfs_period_us": "100000\n"}
    assert limited(tmp_path, membership, **{f"{place}cpu_cfs_quota_us": "-1\n"}, **period) == 8
    assert limited(tmp_path, membership, **{f"{place}cpu_cfs_quota_us": "400000\n"}) == 4


def test_systems_without_control_groups_have_no_limit(tmp_path: Path) -> None:
    assert processors(tmp_path, tmp_path / "nothing") == 8


@pytest.mark.parametrize(
    ("tasks", "each", "ranks", "share"),
    [
        ("16", "8", 16, 8),  # bound to the eight processors of its own
        ("16", "4", 16, 4),  # not bound: the eight are those of two tasks
        ("2", "8", 16, 1),  # torchrun has started eight ranks in each task
        ("16", "", 16, 1),
        ("1", "8", 2, 1),  # a shell in an allocation
    ],
)
def test_a_task_of_srun_has_processors_of_its_own(tasks: str, each: str, ranks: int, share: int) -> None:
    environment = {"SLURM_STEP_NUM_TASKS": tasks, "SLURM_CPUS_PER_TASK": each}
    assert share_of(ranks, 8, environment) == share


def bound_to(*cores: int, container: str | None = None, machine: str | None = None) -> Place:
    """The place of a rank of this machine, or of another one."""
    own = own_place()
    mask = f"{sum(1 << core for core in cores):x}"
    return Place(machine or own.machine, container or own.container, mask)


@pytest.mark.parametrize(
    ("places", "ranks", "local", "share"),
    [
        ([bound_to(*range(8)), bound_to(*range(8, 16))], 2, 2, 8),  # bound to cores of their own
        ([bound_to(*range(8))] * 2, 2, 2, 4),
        ([bound_to(*range(8))] * 2 + [bound_to(*range(8, 16))] * 2, 4, 4, 4),  # two for each socket
        ([bound_to(*range(8)), bound_to(*range(4, 12))], 2, None, 6),
        ([bound_to(*range(8)), bound_to(*range(8), machine="b")], 2, None, 8),  # nobody said where ranks are
        ([bound_to(*range(8)), bound_to(*range(8), machine="b")], 16, 8, 1),  # seven here are not of the group
        ([bound_to(*range(8)), bound_to(*range(8), machine="b")], 16, None, 0),
        ([], 2, 2, 4),
        ([], 2, None, 4),
    ],
)
def test_a_processor_is_divided_among_the_ranks_that_may_use_it(
    places: list[Place], ranks: int, local: int | None, share: int
) -> None:
    assert share_of(ranks, local, {}, places) == share


def test_ranks_of_one_container_share_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gqsgd.wire.processors._limits", lambda: [6])
    own = bound_to(*range(8))
    assert share_of(2, 2, {}, [own, bound_to(*range(8, 16))]) == 3
    assert share_of(2, 2, {}, [own, bound_to(*range(8, 16), container="another")]) == 6
