"""`gqsgd doctor --nodes` on real processes; the figures are nobody's business here."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_gqsgd.cli import doctor_nodes
from tests.marks import needs_root
from tests.ports import free_port
from tests.processes import ended_well

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "lightning_gqsgd.cli", "doctor", "--nodes"]


def _start(rank: int, size: int, port: int, arguments: Sequence[str] = COMMAND, **more: str) -> subprocess.Popen[str]:
    place = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(size)}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        arguments,
        env={**environment, **place, "OMP_NUM_THREADS": "1", **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.slow
def test_ranks_of_srun_are_asked_and_one_of_them_answers() -> None:
    port = free_port()
    ranks = [_start(rank, 3, port) for rank in range(3)]
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], outputs
    first, *others = (out for out, _ in outputs)
    assert first.startswith(f"3 ranks on 1 host, started by srun; they met at 127.0.0.1:{port}\n")
    for pair in ("0 - 1", "0 - 2", "1 - 2"):
        assert pair in first
    assert "WARN" not in first
    assert others == ["", ""]


@pytest.mark.slow
def test_ranks_of_srun_are_measured_together_and_not_each_with_ranks_of_its_own() -> None:
    port = free_port()
    bench = [*COMMAND[:3], "bench", "reducers", "--megabytes", "1", "--rounds", "3", "--json"]
    ranks = [_start(rank, 2, port, bench, SLURM_LOCALID=str(rank)) for rank in range(2)]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert json.loads(outputs[0][0])["ranks"] == 2
    assert outputs[1][0] == ""


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_by_all_that_wait() -> None:
    port = free_port()
    ranks = [_start(rank, 3, port, **{doctor_nodes.WAIT_VARIABLE: "12"}) for rank in (0, 2)]
    outputs = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], outputs
    for (_, errors), number in zip(outputs, (0, 2), strict=True):
        assert f"rank {number} on " in errors
        assert "s for rank 1 of 3; look at the output of their hosts" in errors


@needs_root
@pytest.mark.slow
def test_hosts_of_a_lab_are_told_apart_by_their_interfaces() -> None:
    lab = ["-m", "netlab", "--hosts", "2", "--rate", "100mbit", "--ranks-per-host", "2", "--"]
    shown = ended_well(*lab, *COMMAND, timeout=250, cwd=ROOT).stdout
    assert "4 ranks on 2 hosts" in shown
    assert "0 - 2" in shown
    assert "0 - 1" not in shown


@needs_root
@pytest.mark.slow
def test_hosts_that_do_not_reach_each_other_all_say_so_within_the_wait() -> None:
    # Each host listens at its own 127.0.0.1, as Gloo does where a host's name resolves to that address.
    wait_s = 6
    waiting = [f"{doctor_nodes.WAIT_VARIABLE}={wait_s}", "GLOO_SOCKET_IFNAME=lo"]
    each = ["sh", "-c", f"{shlex.join(['env', *waiting, *COMMAND])}; echo ended $? at $(date +%s)"]
    lab = subprocess.run(
        [sys.executable, "-m", "netlab", "--hosts", "2", "--rate", "100mbit", "--", *each],
        capture_output=True, text=True, timeout=100, cwd=ROOT,
    )  # fmt: skip
    shown = lab.stdout + lab.stderr
    assert shown.count("set GLOO_SOCKET_IFNAME (here: lo)") == 2, shown
    # One of them is refused at once, and the other one waits.
    ends = [int(end) for end in re.findall(r"ended 2 at (\d+)", shown)]
    assert len(ends) == 2, shown
    assert max(ends) - min(ends) < 2 * wait_s, shown
