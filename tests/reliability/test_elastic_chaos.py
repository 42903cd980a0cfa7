"""Members under Lightning that are killed, stopped, sent away and joined at random, on one machine.

pytest -m reliability tests/reliability/test_elastic_chaos.py -n 0

``GQSGD_EVENTS`` says how many events (default 30), ``GQSGD_SEED`` which.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_elastic import lighthouse  # noqa: F401

EVENTS = int(os.environ.get("GQSGD_EVENTS", "30"))
SEED = int(os.environ.get("GQSGD_SEED", "0"))

#: Members that are always left, and the most that there are.
LEAST, MOST = 2, 4

#: Seconds within which each member that is left has made another merge.
GRACE_S = 40.0

#: Seconds in which a process may import everything and join.
START_S = 150.0


class Members:
    """The processes of a chaos.

    Args:
        folder: of journals.
        address: of the lighthouse.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder
        self._variables = {**os.environ, "TORCHFT_LIGHTHOUSE": address, "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
        self._count = 0
        self.alive: dict[str, subprocess.Popen[bytes]] = {}

    def join(self) -> str:
        """Start a member."""
        name = f"member{self._count}"
        self._count += 1
        command = [sys.executable, "-m", "tests.reliability.elastic_member", str(self._folder), name]
        with (self._folder / f"{name}.log").open("wb") as log:
            self.alive[name] = subprocess.Popen(command, env=self._variables, stdout=log, stderr=log)
        return name

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal."""
        self.alive[name].send_signal(number)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A member's journal; the last line of one that was killed may be half."""
        file = self._folder / f"{name}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def everybody(self) -> list[str]:
        """All that ever were."""
        return [f"member{number}" for number in range(self._count)]

    def wait_for_merges(self, names: list[str], after: float, within_s: float = GRACE_S) -> None:
        """Wait until members have made merges after a time."""
        deadline = time.monotonic() + within_s
        waits = set(names)
        while waits and time.monotonic() < deadline:
            waits = {name for name in waits if not any(line.get("time", 0) > after for line in self.lines(name))}
            time.sleep(0.1)
        logs = "\n".join((self._folder / f"{name}.log").read_text()[-3000:] for name in waits)
        assert not waits, f"{waits} have made no merge within {within_s} s\n{logs}"


@pytest.mark.reliability
@pytest.mark.timeout(3600)
def test_members_go_on_whatever_happens_to_others(tmp_path: Path, lighthouse: str) -> None:  # noqa: F811
    draw = random.Random(SEED)  # noqa: S311
    members = Members(tmp_path, lighthouse)
    left = []
    happened: dict[str, int] = {}
    try:
        members.wait_for_merges([members.join() for _ in range(3)], 0.0, START_S)
        for _ in range(EVENTS):
            event = draw.choice(("kill", "stop", "notice", "join"))
            if event in ("kill", "notice") and len(members.alive) <= LEAST:
                event = "join"
            if event == "join" and len(members.alive) >= MOST:
                event = "kill"
            happened[event] = happened.get(event, 0) + 1
            now = time.time()
            if event == "join":
                members.wait_for_merges([members.join()], now, START_S)
                continue
            name = draw.choice(sorted(members.alive))
            if event == "stop":
                members.send(name, signal.SIGSTOP)
                time.sleep(draw.uniform(0.5, 6))
                members.send(name, signal.SIGCONT)
            elif event == "kill":
                members.send(name, signal.SIGKILL)
                members.alive.pop(name).wait()
            else:
                members.send(name, signal.SIGTERM)
                assert members.alive.pop(name).wait(GRACE_S) == 0, (tmp_path / f"{name}.log").read_text()[-3000:]
                left.append(name)
            members.wait_for_merges(sorted(members.alive), time.time())
        (tmp_path / "over").touch()
        for name, process in members.alive.items():
            assert process.wait(60) == 0, (tmp_path / f"{name}.log").read_text()[-3000:]
    finally:
        for process in members.alive.values():
            process.kill()
    print(f"{EVENTS} events: {happened}")
    finished = [members.lines(name)[-1] for name in members.alive]
    assert len({json.dumps([line["finished"], line["samples"]]) for line in finished}) == 1
    sums: dict[int, set[int]] = {}
    for name in members.everybody():
        for line in members.lines(name):
            if "merge" in line:
                sums.setdefault(line["merge"], set()).add(line["checksum"])
    # A merge that one member made before it was cut off, and that the others then made without it, is two merges.
    assert sum(len(found) > 1 for found in sums.values()) <= happened.get("stop", 0)
