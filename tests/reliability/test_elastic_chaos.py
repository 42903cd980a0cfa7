"""Members under Lightning that are killed, stopped, sent away, cut off, slowed down and joined at random.

pytest -m reliability tests/reliability/test_elastic_chaos.py -n 0

``GQSGD_EVENTS`` says how many events, ``GQSGD_RELIABILITY_SEED`` which (see `knobs`). Links need root and iproute2, see
`netlab.lab`; without them, members are on one machine, and no link is cut.
"""

from __future__ import annotations

import json
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from netlab.lab import NetLab
from tests.distributed.elastic_members import lighthouse_command
from tests.distributed.test_elastic import lighthouse  # noqa: F401
from tests.reliability.knobs import EVENTS, SEED
from tests.reliability.test_cut_links import needs_root

#: Members that are always left, and the most that there are.
LEAST, MOST = 2, 4

#: Seconds within which each member that is left has made another merge.
GRACE_S = 40.0

#: Seconds in which a process may import everything and join.
START_S = 150.0

#: Seconds that members wait for each other in a merge.
TIMEOUT_S = 15.0

#: Rate of a link, and of one that is slow.
RATE, SLOW_RATE = "10mbit", "1mbit"

#: Seconds that a newcomer waits whose link is too slow: a state takes longer over it.
SHORT_TIMEOUT_S = 4.0

#: The longest step of a member beside which another one comes. A state takes twice as long over a slow link.
STEP_S = 5.0

#: Width of the model: its messages take a slow link a second, and its state ten.
WIDTH = 350

#: Variables that a lab sets for torchrun's ranks.
TORCHRUNS = (
    "TORCHELASTIC_RUN_ID",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)

#: Seconds for which a link may be cut: in a round, for several rounds, and longer than others wait for a member.
CUTS_S = (0.5, 5.0, 20.0)


class Members:
    """The processes of a chaos.

    Args:
        folder: of journals.
        lab: the hosts, of which the first one has the lighthouse; None: all are on one machine.
    """

    def __init__(self, folder: Path, lab: NetLab | None = None) -> None:
        self._folder = folder
        self._lab = lab
        self._count = 0
        self._hosts: dict[str, int] = {}
        self.alive: dict[str, subprocess.Popen[Any]] = {}

    def free_host(self) -> int:
        """The number of the host of the next member."""
        assert self._lab is not None
        return min(set(range(1, self._lab.hosts)) - {self._hosts[other] for other in self.alive})

    def join(self, timeout_s: float = TIMEOUT_S) -> str:
        """Start a member; ``timeout_s``: how long it waits for others."""
        name = f"member{self._count}"
        self._count += 1
        module = ["-m", "tests.reliability.elastic_member", str(self._folder), name, str(WIDTH), str(timeout_s)]
        with (self._folder / f"{name}.log").open("wb") as log:
            if self._lab is None:
                self.alive[name] = subprocess.Popen([sys.executable, *module], stdout=log, stderr=log)
            else:
                self._hosts[name] = self.free_host()
                # Each member is a training of its own, and none of torchrun's ranks.
                command = ["env", *(f"--unset={variable}" for variable in TORCHRUNS), sys.executable, *module]
                self.alive[name] = self._lab.popen(self._hosts[name], command, stdout=log, stderr=log)
        return name

    def host(self, name: str) -> int:
        """The host of a member."""
        return self._hosts[name]

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal."""
        self.alive[name].send_signal(number)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A member's journal; the last line of one that was killed may be half."""
        file = self._folder / f"{name}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def failed(self, name: str) -> int:
        """Merges that had come to nothing on a member by its latest one."""
        failed: int = next(line["failed"] for line in reversed(self.lines(name)) if "failed" in line)
        return failed

    def steps(self) -> int:
        """Steps that all that ever were have begun."""
        files = [self._folder / f"{name}.steps" for name in self.everybody()]
        return sum(struct.unpack("q", file.read_bytes())[0] for file in files if file.exists() and file.stat().st_size)

    def everybody(self) -> list[str]:
        """All that ever were."""
        return [f"member{number}" for number in range(self._count)]

    def log(self, name: str) -> str:
        """The end of what a member has said."""
        return f"{name}:\n{(self._folder / f'{name}.log').read_text()[-3000:]}"

    def end(self) -> None:
        """Let all finish."""
        (self._folder / "over").touch()
        for name, process in self.alive.items():
            assert process.wait(60) == 0, self.log(name)

    def wait_for_merges(self, names: list[str], after: float, within_s: float = GRACE_S) -> None:
        """Wait until members have taken part in merges after a time."""
        deadline = time.monotonic() + within_s
        waits = set(names)
        while waits and time.monotonic() < deadline:
            waits = {name for name in waits if not any(line.get("time", 0) > after for line in self.lines(name))}
            dead = {name for name in self.alive if self.alive[name].poll() is not None}
            assert not dead, "\n".join(self.log(name) for name in dead)
            time.sleep(0.1)
        logs = "\n".join(self.log(name) for name in self.alive)
        assert not waits, f"{waits} have made no merge within {within_s} s\n{logs}"


class Chaos:
    """Events; each method but `run` is one.

    Args:
        members: to whom they happen.
        draw: what is random.
        lab: the hosts; None: all members are on one machine.
    """

    def __init__(self, members: Members, draw: random.Random, lab: NetLab | None) -> None:
        self._members = members
        self._draw = draw
        self._lab = lab
        self.happened: dict[str, int] = {}

    def run(self, events: int) -> None:
        """Make so many random events happen, one after the other, and wait after each until all have merged."""
        kinds = ["kill", "stop", "notice", "join"]
        if self._lab is not None:
            kinds += ["cut", "cut_lighthouse", "slow", "join_slowly", "join_too_slowly"]
        left: list[str] = []
        for number in range(events):
            left = left or self._draw.sample(kinds, len(kinds))  # all kinds come up, also where there are few events
            event = left.pop()
            if event in ("kill", "notice") and len(self._members.alive) <= LEAST:
                event = "join"
            if event.startswith("join") and len(self._members.alive) >= MOST:
                event = "kill"
            self.happened[event] = self.happened.get(event, 0) + 1
            began = time.monotonic()
            said = getattr(self, event)(self._draw.choice(sorted(self._members.alive)))
            print(f"{number}: {event} {said}, {time.monotonic() - began:.1f} s", flush=True)

    def kill(self, name: str) -> str:
        """A process dies."""
        self._members.send(name, signal.SIGKILL)
        self._members.alive.pop(name).wait()
        self._all_go_on()
        return name

    def stop(self, name: str) -> str:
        """A process stands still for a while."""
        seconds = self._draw.uniform(0.5, 6)
        self._members.send(name, signal.SIGSTOP)
        time.sleep(seconds)
        self._members.send(name, signal.SIGCONT)
        self._all_go_on()
        return f"{name} for {seconds:.1f} s"

    def notice(self, name: str) -> str:
        """A machine is about to be taken away."""
        self._members.send(name, signal.SIGTERM)
        assert self._members.alive.pop(name).wait(GRACE_S) == 0, self._members.log(name)
        self._all_go_on()
        return name

    def join(self, _: str) -> str:
        """A process comes."""
        now = time.time()
        name = self._members.join()
        self._members.wait_for_merges([name], now, START_S)
        return name

    def cut(self, name: str) -> str:
        """A member's packets get lost: the others go on, and so does the member once its link is mended."""
        with self._lost(self._members.host(name)) as lost_since:
            time.sleep(self._draw.choice(CUTS_S))
            self._members.wait_for_merges(sorted(set(self._members.alive) - {name}), time.time())
        seconds = time.monotonic() - lost_since
        self._all_go_on(seconds)
        return f"{name} for {seconds:.1f} s"

    def cut_lighthouse(self, _: str) -> str:
        """The lighthouse's packets get lost: members go on once its link is mended."""
        seconds = self._draw.choice(CUTS_S)
        with self._lost(0):
            time.sleep(seconds)
        self._all_go_on(seconds)
        return f"for {seconds} s"

    def slow(self, name: str) -> str:
        """A member's link is ten times slower for a while, in which all go on."""
        assert self._lab is not None
        self._lab.reshape(self._members.host(name), SLOW_RATE)
        self._all_go_on()
        self._all_go_on()
        self._lab.reshape(self._members.host(name), RATE)
        return name

    def join_slowly(self, _: str) -> str:
        """A process comes over a slow link: it trains while the state is on its way, and so do the others."""
        assert self._lab is not None
        host = self._members.free_host()
        now = time.time()
        others = sorted(self._members.alive)
        self._lab.reshape(host, SLOW_RATE)
        name = self._members.join()
        self._members.wait_for_merges([name], now, START_S)
        first = next(line for line in self._members.lines(name) if "step" in line)
        assert first["step"] > 1, f"{name} has not trained before its first merge, {first}"
        self._all_go_on()
        self._check_steps(others, now)
        self._lab.reshape(host, RATE)
        return f"{name}, {first['step']} steps before its first merge"

    def join_too_slowly(self, _: str) -> str:
        """A process comes whose state takes longer than it may: it says so and ends, and nobody else notices."""
        assert self._lab is not None
        host = self._members.free_host()
        now = time.time()
        others = sorted(self._members.alive)
        failed = {other: self._members.failed(other) for other in others}
        self._lab.reshape(host, SLOW_RATE)
        name = self._members.join(SHORT_TIMEOUT_S)
        assert self._members.alive.pop(name).wait(START_S) == 1, self._members.log(name)
        end = self._members.lines(name)[-1]
        assert end["end"] == "ConfigError", self._members.log(name)
        assert "give all of them a timeout of" in end["words"], end
        assert "\n" not in end["words"]
        self._lab.reshape(host, RATE)
        self._all_go_on()
        self._check_steps(others, now)
        assert {other: self._members.failed(other) for other in others} == failed
        return f"{name}: {end['words']}"

    def _check_steps(self, names: list[str], after: float) -> None:
        """Check that members have not waited for anybody between two of their steps."""
        for name in names:
            longest = max(line["longest"] for line in self._members.lines(name) if line.get("time", 0) > after)
            assert longest < STEP_S, f"{name} has waited {longest:.1f} s between two steps"

    @contextmanager
    def _lost(self, host: int) -> Iterator[float]:
        assert self._lab is not None
        self._lab.lose(host)
        try:
            yield time.monotonic()
        finally:
            self._lab.mend(host)

    def _all_go_on(self, cut_s: float = 0.0) -> None:
        """Wait until all members have merged again. TCP may need as long as a link was cut to try again."""
        self._members.wait_for_merges(sorted(self._members.alive), time.time(), GRACE_S + cut_s)


@contextmanager
def lighthouse_on(lab: NetLab) -> Iterator[str]:
    """A lighthouse on the first host; its address."""
    address = f"{lab.address(0)}:29510"
    process = lab.popen(0, lighthouse_command(address, "--join-timeout", "10s", "--heartbeat-timeout", "2s"))
    try:
        yield address
    finally:
        process.kill()
        process.wait()


def go_through(members: Members, chaos: Chaos) -> None:
    """Start members, make things happen, and check how all of it ends."""
    try:
        members.wait_for_merges([members.join() for _ in range(3)], 0.0, START_S)
        chaos.run(EVENTS)
        members.end()
    finally:
        for process in members.alive.values():
            process.kill()
    print(f"{EVENTS} events: {chaos.happened}")
    finished = [members.lines(name)[-1] for name in members.alive]
    assert len({json.dumps([line["finished"], line["samples"]]) for line in finished}) == 1
    assert finished[0]["samples"] <= members.steps()
    sums: dict[int, set[int]] = {}
    for name in members.everybody():
        for line in members.lines(name):
            if "merge" in line:
                sums.setdefault(line["merge"], set()).add(line["checksum"])
    # A merge that one member made before it was cut off, and that the others then made without it, is two merges.
    cuts = sum(chaos.happened.get(event, 0) for event in ("stop", "cut", "cut_lighthouse"))
    assert sum(len(found) > 1 for found in sums.values()) <= cuts


@pytest.mark.reliability
@pytest.mark.timeout(3600)
def test_members_go_on_whatever_happens_to_others(
    tmp_path: Path,
    lighthouse: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", lighthouse)
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    members = Members(tmp_path)
    go_through(members, Chaos(members, random.Random(SEED), None))  # noqa: S311


@needs_root
@pytest.mark.reliability
@pytest.mark.timeout(3600)
def test_members_go_on_whatever_happens_to_others_and_to_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with NetLab(1 + MOST, RATE) as lab, lighthouse_on(lab) as address:
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
        members = Members(tmp_path, lab)
        go_through(members, Chaos(members, random.Random(SEED), lab))  # noqa: S311
