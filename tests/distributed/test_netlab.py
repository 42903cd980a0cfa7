"""The lab of network namespaces. Most tests need root and iproute2."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import netlab.lab
from netlab import machine, shares
from netlab.lab import NetLab, NetLabError, parse_rate
from netlab.ranks import run_everywhere
from netlab.units import parse_cpus, parse_delays
from tests.marks import needs_root
from tests.processes import ended


def _namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout  # noqa: S607


def _leftovers() -> list[str]:
    """Namespaces of labs whose process has ended; other labs of this machine are none of these tests' business."""
    labs = re.findall(rf"^{netlab.lab.PREFIX}-(\d+)-\S+", _namespaces(), re.MULTILINE)
    return [pid for pid in labs if not os.path.exists(f"/proc/{pid}")]


_cli = partial(ended, "-m", "netlab")


def test_rates() -> None:
    assert parse_rate("1gbit") == 10**9
    assert parse_rate("2.5Gbit") == 2_500_000_000
    assert parse_rate("100mbit") == 10**8
    assert parse_rate("none") is None
    assert parse_rate("1 gbit") == 10**9
    for bad in ("1", "fast", "-1gbit", "1gbps", ""):
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


def test_delays() -> None:
    assert parse_delays("40ms", "none") == (0.04, 0.0)
    assert parse_delays("0.5s", "500us") == (0.5, 0.0005)
    assert parse_delays("none", "none") == (0.0, 0.0)
    assert parse_delays(" 40 ms", "none") == (0.04, 0.0)
    for bad in ("40", "-1ms", "1m", "", "soon"):
        with pytest.raises(NetLabError, match=f"latency {bad!r} is not a number and a unit; write e.g. 40ms"):
            parse_delays(bad, "none")
    with pytest.raises(NetLabError, match="jitter 'some' is not a number and a unit"):
        parse_delays("40ms", "some")
    for bad in ("10us", "11s"):
        with pytest.raises(NetLabError, match=f"latency {bad!r} is out of range: 500us to 10s, or none"):
            parse_delays(bad, "none")
    with pytest.raises(NetLabError, match="jitter '5ms' is longer than latency 'none'.*give at most the latency"):
        parse_delays("none", "5ms")


def test_shares_of_processors() -> None:
    assert parse_cpus("0.25", 2) == 0.25
    assert parse_cpus("none", 2) is None
    for bad in ("half", "-1", "1e3", "nan", "", "50%"):
        with pytest.raises(
            NetLabError, match=f"cpus {bad!r} is not a number of processors; write e.g. 1, 0.25 or none"
        ):
            parse_cpus(bad, 2)
    for bad in ("0", "0.01", "2.5"):
        with pytest.raises(NetLabError, match=f"cpus {bad!r} is out of range: 0.05 to 2, the processors of this mach"):
            parse_cpus(bad, 2)


def test_each_host_has_its_own_rate() -> None:
    assert NetLab(2, "1gbit").rates == [10**9, 10**9]
    assert NetLab(2, ["1gbit", "none"]).rates == [10**9, None]
    with pytest.raises(NetLabError, match="rate has 3 values, 1gbit,1gbit,1gbit, and there are 2 hosts; give one for"):
        NetLab(2, ["1gbit"] * 3)
    with pytest.raises(NetLabError, match="cpus has 1 value, 1, and there are 2 hosts"):
        NetLab(2, cpus=["1"])


@pytest.mark.parametrize(("kind", "options"), [("cgroup", "rw,cpu,cpuacct"), ("cgroup2", "rw")])
def test_both_versions_of_control_groups_get_the_limit(
    kind: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "groups"
    root.mkdir()
    (tmp_path / "mounts").write_text(f"proc /proc proc rw 0 0\ncgroup {root} {kind} {options} 0 0\n")
    monkeypatch.setattr(shares, "_MOUNTS", tmp_path / "mounts")
    if kind == "cgroup2":
        (root / "cgroup.controllers").write_text("cpu memory\n")
        (root / "cgroup.subtree_control").write_text("memory\n")
    share = shares.Share("one", 0.25)
    written = {file.name: file.read_text() for file in (root / "one").iterdir()}
    if kind == "cgroup2":
        assert (root / "cgroup.subtree_control").read_text() == "+cpu"
        assert written == {"cpu.max": "5000 20000"}
    else:
        assert written == {"cpu.cfs_period_us": "20000", "cpu.cfs_quota_us": "5000"}
    share.limit(None)
    no_limit = {"cgroup": ("cpu.cfs_quota_us", "-1"), "cgroup2": ("cpu.max", "max 20000")}
    file, text = no_limit[kind]
    assert (root / "one" / file).read_text() == text


@needs_root
def test_a_host_without_a_share_cannot_become_slower() -> None:
    with NetLab(1) as lab, pytest.raises(NetLabError, match="host 0 was made without cpus; give them to NetLab"):
        lab.slow_down(0, "0.5")


def test_a_machine_without_control_groups_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounts").write_text("cgroup /sys/fs/cgroup/pids cgroup rw,pids 0 0\n")
    monkeypatch.setattr(shares, "_MOUNTS", tmp_path / "mounts")
    with pytest.raises(NetLabError, match="no control group of this machine limits processor time.*leave cpus out"):
        shares.find_root()
    assert shares.names("gqsgd-") == []
    (tmp_path / "mounts").write_text(f"cgroup {tmp_path}/gone cgroup rw,cpu 0 0\n")
    with pytest.raises(NetLabError, match=r"cpus=0.5 needs a control group, and .*/gone takes none.*leave cpus out"):
        shares.Share("one", 0.5)


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
def test_a_links_rate_changes_and_its_packets_get_lost() -> None:
    with NetLab(2, "20mbit") as lab:
        lab.reshape(1, "2mbit")
        assert 0.5 * 2e6 < lab.measure(500_000) < 1.5 * 2e6
        lab.reshape(1, "20mbit")
        lab.lose(1)
        connect = f"import socket; socket.create_connection(('{lab.address(0)}', 9), 1)"
        lost = lab.popen(1, [sys.executable, "-c", connect], stderr=subprocess.PIPE).communicate()[1]
        assert "timed out" in lost or "No route to host" in lost  # and nobody has refused it
        lab.mend(1)
        assert 0.5 * 20e6 < lab.measure(2_000_000) < 1.5 * 20e6
        with pytest.raises(NetLabError, match="host 1: rate='none' cannot replace 20000000"):
            lab.reshape(1, "none")
    with NetLab(1, "none", latency="1ms") as lab, pytest.raises(NetLabError, match="lose.. needs a lab without"):
        lab.lose(0)


_ROUND_TRIPS = """
import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5); s.connect(("10.213.7.1", 9999))
def ask():
    for _ in range(20):
        begun = time.perf_counter()
        try: s.send(b"?"); s.recv(9); return time.perf_counter() - begun
        except OSError: time.sleep(0.2)
ask()
print(min(ask() for _ in range(20)))
"""
_ECHO = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("", 9999))
while True: s.sendto(*s.recvfrom(9))
"""


def _shortest_round_trip(lab: NetLab) -> float:
    """Seconds from host 1 to host 0 and back, without what the load of the machine adds."""
    lab.popen(0, [sys.executable, "-c", _ECHO])
    return float(lab.popen(1, [sys.executable, "-c", _ROUND_TRIPS], stdout=subprocess.PIPE).communicate(timeout=60)[0])


@pytest.mark.slow
@needs_root
def test_packets_wait_for_the_latency_each_way() -> None:
    with NetLab(2, "none", latency="30ms") as lab:
        assert 0.060 <= _shortest_round_trip(lab) < 0.090  # the kernel's bridge: below 0.001
    with NetLab(2, "none", latency="30ms", jitter="20ms") as lab:
        # 20 round trips: the chance that none is below is smaller than one in 10^5.
        assert 0.020 <= _shortest_round_trip(lab) < 0.060


@needs_root
def test_every_byte_arrives_through_a_link_with_latency_and_cuts() -> None:
    with NetLab(3, ["none", "20mbit", "none"], latency="2ms", jitter="1ms") as lab:
        assert 0.5 * 20e6 < lab.measure(2_000_000) < 1.5 * 20e6  # the rate of host 1
        lab.cut(0)
        lab.mend(0)
        assert lab.measure(1_000_000)


@needs_root
def test_a_hosts_processes_together_get_its_share_of_the_processors() -> None:
    burn = (
        "import os, time; os.fork(); t = time.time()\n"
        "while time.time() < t + 1.5: pass\n"
        "os.write(1, f'{time.process_time()} '.encode())"
    )
    with NetLab(2, "none", cpus=["none", "0.1"]) as lab:
        process = lab.popen(1, [sys.executable, "-c", burn], stdout=subprocess.PIPE)
        seconds = [float(line) for line in process.communicate(timeout=60)[0].split()]
        assert len(seconds) == 2
        assert sum(seconds) < 0.5  # without a limit, up to 3
        name = lab.namespace(1)
        assert shares.names(name) == [name]
    assert not shares.names(name)


@needs_root
def test_a_host_with_a_limit_runs_on_its_core() -> None:
    last = len(os.sched_getaffinity(0)) - 1
    tell = "import os; print(sorted(os.sched_getaffinity(0)))"
    with NetLab(2, "none", cpus=["0.5", "none"], on_cores=[last, 0]) as lab:
        hosts = [lab.popen(host, [sys.executable, "-c", tell], stdout=subprocess.PIPE) for host in range(2)]
        cores = [json.loads(host.communicate(timeout=60)[0]) for host in hosts]
    usable = sorted(os.sched_getaffinity(0))
    assert cores == [usable[-1:], usable]  # the second host has no limit


@pytest.mark.parametrize("cores", [[0], [0, 10_000], [0, -1]])
def test_cores_are_those_of_the_machine(cores: list[int]) -> None:
    with pytest.raises(NetLabError, match=r"on_cores=\[0.*\] must have a number from 0 to \d+, .* for each of 2 hosts"):
        NetLab(2, cpus=["0.5", "0.5"], on_cores=cores)


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
        (["--latency", "40", "--", "true"], "netlab: latency '40' is not a number and a unit; write e.g. 40ms"),
        (["--jitter", "1ms", "--", "true"], "netlab: jitter '1ms' is longer than latency 'none'"),
        (["--rates", "1gbit,1gbit,1gbit", "--", "true"], "netlab: rate has 3 values"),
        (["--rate", "1gbit", "--rates", "1gbit,1gbit", "--", "true"], "netlab: --rate 1gbit and --rates 1gbit,1gbit"),
        (["--cpus", "1", "--", "true"], "netlab: cpus has 1 value, 1, and there are 2 hosts; give one for each host"),
        (["--cpus", "1,quick", "--", "true"], "netlab: cpus 'quick' is not a number of processors"),
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
    netlab.lab._remove_lab("gqsgd-1")
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
        [sys.executable, "-m", "netlab", "--hosts", "1", "--latency", "5ms", "--cpus", "0.5", *command],
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
    assert not shares.names(f"{netlab.lab.PREFIX}-{driver.pid}-")


@needs_root
def test_a_script_of_ones_own_takes_its_lab_down_at_sigterm() -> None:
    program = (
        "import time\n"
        "from netlab.lab import NetLab\n"
        "with NetLab(1):\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    script = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert script.stdout is not None
    assert script.stdout.readline() == "ready\n"
    script.terminate()
    assert script.wait(30) == 128 + signal.SIGTERM
    script.stdout.close()
    assert f"{netlab.lab.PREFIX}-{script.pid}-" not in _namespaces()


@needs_root
def test_a_process_ends_at_sigterm_as_before_once_its_lab_is_gone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with NetLab(1):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is before
