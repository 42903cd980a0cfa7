"""The lab of network namespaces. Most tests need root and iproute2."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import netlab.lab
from netlab import machine
from netlab.lab import NetLab, NetLabError, parse_rate
from netlab.ranks import run_everywhere

needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("tc") is None, reason="needs Linux, root and iproute2"
)


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout  # noqa: S607


def _leftovers() -> list[str]:
    """Namespaces of labs whose process has ended; other labs of this machine are none of these tests' business."""
    labs = re.findall(rf"^{netlab.lab.PREFIX}-(\d+)-\S+", _namespaces(), re.MULTILINE)
    return [pid for pid in labs if not os.path.exists(f"/proc/{pid}")]


def _cli(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "netlab", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def test_rates() -> None:
    assert parse_rate("1gbit") == 10**9
    assert parse_rate("2.5Gbit") == 2_500_000_000
    assert parse_rate("100mbit") == 10**8
    assert parse_rate("none") is None
    for bad in ("1", "fast", "1 gbit", "-1gbit", "1gbps", ""):
        with pytest.raises(NetLabError, match="write e.g. 100mbit"):
            parse_rate(bad)
    with pytest.raises(NetLabError, match="1mbit to 100gbit"):
        parse_rate("10kbit")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for hosts in (0, 65):
        with pytest.raises(NetLabError, match=f"hosts={hosts} is out of range: 1 to 64"):
            NetLab(hosts)
    monkeypatch.setattr(netlab.lab.shutil, "which", lambda _: None)
    with pytest.raises(NetLabError, match="apt-get install iproute2"), NetLab(2):
        pass
    monkeypatch.setattr(netlab.lab.shutil, "which", lambda name: name)
    monkeypatch.setattr(netlab.lab.os, "geteuid", lambda: 1000)
    with pytest.raises(NetLabError, match="needs root; run the same command with sudo"), NetLab(2):
        pass


def test_command_line_wants_a_command() -> None:
    assert "give a command after --, or --check" in _cli("--hosts", "2").stderr
    done = _cli("--rate", "quick", "--", "true")
    assert done.returncode == 2
    assert "write e.g. 100mbit" in done.stderr


ALLREDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(x)
print("sum", x[0].item(), os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"])
dist.destroy_process_group()
"""


@needs_root
@pytest.mark.slow
def test_hosts_reach_each_other_in_torchruns_environment() -> None:
    done = _cli("--hosts", "2", "--rate", "100mbit", "--", sys.executable, "-c", ALLREDUCE)
    assert done.returncode == 0, done.stdout + done.stderr
    for host in range(2):
        assert f"[host{host}] sum 3.0 {host} 0 2" in done.stdout
    done = _cli("--hosts", "3", "--ranks-per-host", "2", "--", "sh", "-c", "echo $RANK $LOCAL_RANK $WORLD_SIZE")
    for rank in range(6):
        assert f"[host{rank // 2}.{rank % 2}] {rank} {rank % 2} 6" in done.stdout
    assert not _leftovers()


@needs_root
@pytest.mark.slow
def test_two_labs_of_one_process_stand_side_by_side() -> None:
    with NetLab(hosts=1, rate="none") as one, NetLab(hosts=1, rate="none") as other:
        assert one.namespace(0) != other.namespace(0)
        with pytest.raises(NetLabError, match="hosts=1 has no link to measure"):
            one.measure()


@needs_root
@pytest.mark.slow
def test_several_ranks_of_several_hosts_reach_each_other() -> None:
    done = _cli("--hosts", "3", "--ranks-per-host", "2", "--", sys.executable, "-c", ALLREDUCE)
    for rank in range(6):
        assert f"[host{rank // 2}.{rank % 2}] sum 21.0 {rank} {rank % 2} 6" in done.stdout


@needs_root
def test_one_ranks_output_can_go_without_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    with NetLab(2) as lab:
        assert run_everywhere(lab, ["sh", "-c", "echo epoch $RANK"], plain_rank=0) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["[host1] epoch 1", "epoch 0"]


def test_hosts_share_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert NetLab(4).environment(0)["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert NetLab(4).environment(0)["OMP_NUM_THREADS"] == "5"


def test_the_processor_has_its_models_name_or_its_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text("processor\t: 0\nmodel name\t: AMD EPYC 7B13\n\nprocessor\t: 1\nmodel name\t: other\n")
    monkeypatch.setattr(machine, "_CPU_FACTS", facts)
    assert machine.device_name(on_cuda=False) == machine.processor_name() == "AMD EPYC 7B13"
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    for contents in ("processor\t: 0\nBogoMIPS\t: 50.00\n", "model name\t:\n"):
        facts.write_text(contents)
        assert machine.processor_name() == "aarch64"
    facts.unlink()
    assert machine.processor_name() == "aarch64"


@pytest.mark.slow
@needs_root
def test_a_failing_host_ends_the_others() -> None:
    # The other rank is ended by a signal; the exit code is that of the rank that failed by itself.
    code = "import os, sys, time; time.sleep(60) if os.environ['RANK'] == '0' else sys.exit(3)"
    begun = time.monotonic()
    done = _cli("--", sys.executable, "-c", code)
    assert done.returncode == 3
    assert time.monotonic() - begun < 55  # not the 60 of the other host
    assert not _leftovers()


@needs_root
def test_timeout() -> None:
    done = _cli("--timeout", "1", "--", "sleep", "60")
    assert done.returncode == 124
    assert "stopped after 1 s" in done.stdout


@needs_root
def test_links_are_shaped_in_both_directions() -> None:
    with NetLab(2, "20mbit") as lab:
        assert 0.5 * 20e6 < lab.measure(2_000_000) < 1.5 * 20e6


@needs_root
def test_a_cut_link_loses_everything_until_it_is_mended() -> None:
    def answer(lab: NetLab) -> int:
        """What becomes of a connection from host 1 to a port of host 0 that nobody listens to."""
        connect = f"import socket; s = socket.socket(); s.settimeout(1); print(s.connect_ex(('{lab.address(0)}', 9)))"
        process = lab.popen(1, [sys.executable, "-c", connect], stdout=subprocess.PIPE)
        return int(process.communicate(timeout=60)[0])

    with NetLab(2, "none") as lab:
        assert answer(lab) == errno.ECONNREFUSED
        lab.cut(0)
        assert answer(lab) != errno.ECONNREFUSED
        lab.mend(0)
        assert answer(lab) == errno.ECONNREFUSED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--timeout", "-1", "--", "true"], "netlab: --timeout -1 is out of range: a finite number of seconds above 0"),
        (["--timeout", "0", "--", "true"], "netlab: --timeout 0 is out of range"),
        (["--timeout", "nan", "--", "true"], "netlab: --timeout nan is out of range"),
        (["--timeout", "inf", "--", "true"], "netlab: --timeout inf is out of range"),
        (
            ["--check", "--hosts", "1"],
            "netlab: --check measures between two hosts, and --hosts 1 is fewer; take --hosts 2",
        ),
    ],
)
def test_options_that_no_lab_can_follow_are_one_line(options: list[str], message: str) -> None:
    finished = _cli(*options)
    assert finished.returncode == 2
    assert finished.stderr.startswith(message)
    assert finished.stderr.count("\n") == 1


@needs_root
def test_a_command_that_does_not_exist() -> None:
    with NetLab(1) as lab, pytest.raises(NetLabError, match="command 'trian.py' was not found"):
        lab.popen(0, ["trian.py"])


def test_a_process_that_ends_before_it_is_killed_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        output = {"list": "gqsgd-1-h0\n", "pids": "12345\n", "delete": ""}[command[2]]
        return subprocess.CompletedProcess(command, 0, output, "")

    def kill(pid: int, number: int) -> None:
        raise ProcessLookupError(pid)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(os, "kill", kill)
    netlab.lab._remove_namespaces("gqsgd-1")
    assert commands[-1] == ["ip", "netns", "delete", "gqsgd-1-h0"]


@needs_root
def test_nothing_is_left_after_an_exception() -> None:
    processes = []

    def fail() -> None:
        with NetLab(2) as lab:
            processes.append(lab.popen(0, ["sleep", "60"]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    (process,) = processes
    assert process.poll() is not None
    assert f"{netlab.lab.PREFIX}-{os.getpid()}" not in _namespaces()


@needs_root
def test_nothing_is_left_after_a_failure_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlab.lab, "_shape", lambda *_: netlab.lab._run("tc", "nonsense"))
    with pytest.raises(NetLabError, match="'tc nonsense' failed"), NetLab(2):
        pass
    assert f"{netlab.lab.PREFIX}-{os.getpid()}" not in _namespaces()


@needs_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    command = [
        "--",
        sys.executable,
        "-c",
        f"open(r'{tmp_path}/pid', 'w').write(str(__import__('os').getpid()));input()",
    ]
    driver = subprocess.Popen(
        [sys.executable, "-m", "netlab", "--hosts", "1", *command],
        stdin=subprocess.PIPE,
        # A shell that runs the tests in the background has switched SIGINT off for all below.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    file = tmp_path / "pid"
    deadline = time.monotonic() + 30
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    driver.send_signal(number)
    driver.wait(30)
    if number == signal.SIGKILL:
        assert f"{netlab.lab.PREFIX}-{driver.pid}-" in _namespaces()
        netlab.lab.remove_leftovers()  # the next lab does it
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{file.read_text()}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{file.read_text()}")
    assert f"{netlab.lab.PREFIX}-{driver.pid}-" not in _namespaces()
