"""Several hosts on one machine: network namespaces around a switch, every link shaped to a rate in both directions.

    python -m benchmarks.netlab --hosts 2 --rate 1gbit -- python train.py
    python -m benchmarks.netlab --hosts 4 --rate 100mbit --check

The command runs once in every host, or ``--ranks-per-host`` times, with torchrun's environment. Needs Linux, root and
iproute2.

Each host is a namespace with one interface, joined by a veth pair to a bridge in a namespace of its own (where the
rules of the machine's own firewall do not reach). A token bucket (tc tbf) at each end of each pair shapes what the
host sends and what it receives. There is no added latency: netem is not in every kernel.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType, TracebackType

PREFIX = "gqsgd"
NETWORK = "10.213.7"  # the same in every lab: labs do not see each other
INTERFACE = "eth0"
PORT = 29500
MAX_HOSTS = 64
#: How long the other hosts may go on after one has failed, and between SIGTERM and SIGKILL.
GRACE_S = 5.0

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class NetLabError(RuntimeError):
    """The lab cannot be built: the message names the reason and the remedy."""


def parse_rate(text: str) -> int | None:
    """Bits per second of e.g. ``100mbit`` or ``2.5gbit``; None for ``none``, an unshaped link.

    Raises:
        NetLabError: not a rate, or one out of range.
    """
    if text == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", text.lower())
    if not match:
        raise NetLabError(f"rate {text!r} is not a number and a unit; write e.g. 100mbit, 1gbit, 2.5gbit or none")
    rate = int(float(match[1]) * _UNITS[match[2]])
    if not 10**6 <= rate <= 10**11:
        raise NetLabError(f"rate {text!r} is out of range: 1mbit to 100gbit")
    return rate


class NetLab:
    """A lab as a context manager: it exists inside ``with``, and is gone afterwards, whatever happens.

    Args:
        hosts: number of hosts, 1 to 64.
        rate: rate of each link and direction, e.g. ``"1gbit"``, or ``"none"``.
        ranks_per_host: how many processes of a job each host runs; they reach each other without the link.

    Raises:
        NetLabError: a value out of range, no root, or no iproute2.
    """

    def __init__(self, hosts: int, rate: str = "1gbit", ranks_per_host: int = 1) -> None:
        for name, value in (("hosts", hosts), ("ranks_per_host", ranks_per_host)):
            if not 1 <= value <= MAX_HOSTS:
                raise NetLabError(f"{name}={value} is out of range: 1 to {MAX_HOSTS}")
        self.hosts, self.ranks_per_host = hosts, ranks_per_host
        self.rate = parse_rate(rate)
        self._name = f"{PREFIX}-{os.getpid()}"
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> NetLab:
        _check_machine()
        remove_leftovers()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._remove()

    def address(self, host: int) -> str:
        """IPv4 address of a host."""
        return f"{NETWORK}.{host + 1}"

    def namespace(self, host: int) -> str:
        """Name of a host's namespace, for ``ip netns exec``."""
        return f"{self._name}-h{host}"

    def environment(self, host: int, local_rank: int = 0) -> dict[str, str]:
        """What torchrun would set for a process of a host."""
        ranks = self.hosts * self.ranks_per_host
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // ranks)))  # hosts share them
        return {
            "RANK": str(host * self.ranks_per_host + local_rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_host),
            "NODE_RANK": str(host),
            "GROUP_RANK": str(host),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(PORT),
            "TORCHELASTIC_RUN_ID": self._name,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": threads,
            # Hosts have no names, about which torch warns at every connection.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }

    def popen(self, host: int, command: Sequence[str], local_rank: int = 0, **options: object) -> subprocess.Popen[str]:
        """Start a command on a host, in a session of its own. It dies with this process, even by SIGKILL."""
        if shutil.which(command[0]) is None:
            raise NetLabError(f"command {command[0]!r} was not found; give its path")
        process: subprocess.Popen[str] = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), *command],  # noqa: S607
            env={**os.environ, **self.environment(host, local_rank)},
            start_new_session=True,
            preexec_fn=_die_with_parent,
            text=True,
            **options,  # type: ignore[call-overload]
        )
        self._processes.append(process)
        return process

    def stop(self) -> None:
        """End every command that was started: SIGTERM, and SIGKILL to what is left after a grace period."""
        for number, wait in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            left = [process for process in self._processes if process.poll() is None]
            for process in left:
                _signal_session(process, number)
            deadline = time.monotonic() + wait
            while any(process.poll() is None for process in left) and time.monotonic() < deadline:
                time.sleep(0.02)
        for process in self._processes:  # what a leader that is gone has left behind in its session
            _signal_session(process, signal.SIGKILL)
        self._processes.clear()

    def measure(self, nbytes: int = 20_000_000) -> float:
        """Bits per second of goodput that one TCP connection from host 1 to host 0 reaches."""
        receive = (
            "import socket,time\n"
            f"s=socket.create_server(('',{PORT}));c,_=s.accept();n=len(c.recv(1));t=time.perf_counter()\n"
            "while True:\n d=c.recv(1<<20)\n if not d:break\n n+=len(d)\n"
            "print(8*n/(time.perf_counter()-t))"
        )
        send = (
            "import socket,time\n"
            "for _ in range(100):\n"
            f" try:c=socket.create_connection(('{self.address(0)}',{PORT}),1);break\n"
            " except OSError:time.sleep(0.05)\n"
            f"c.settimeout(None);c.sendall(bytes({nbytes}));c.close()"
        )
        receiver = self.popen(0, [sys.executable, "-c", receive], stdout=subprocess.PIPE)
        self.popen(1, [sys.executable, "-c", send])
        return float(receiver.communicate(timeout=60 + 16 * nbytes / (self.rate or 10**9))[0])

    def _build(self) -> None:
        switch = f"{self._name}-sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for host in range(self.hosts):
            name, port = self.namespace(host), f"p{host}"
            _ip("netns", "add", name)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
            if self.rate is not None:
                _shape(name, INTERFACE, self.rate)
                _shape(switch, port, self.rate)

    def _remove(self) -> None:
        _remove_namespaces(self._name)


def _shape(namespace: str, device: str, rate: int) -> None:
    """Token bucket on what a device sends.

    The bucket holds 0.5 ms of traffic: short messages are shaped, too. It has to hold one 64 KiB packet, as the kernel
    hands them over before segmentation; smaller buckets work but cost processor time for cutting them up.
    """
    burst = max(70_000, rate // 16_000)
    parameters = ["rate", f"{rate}bit", "burst", f"{burst}b", "latency", "50ms"]
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *parameters)


def remove_leftovers() -> None:
    """Remove the labs of processes that were killed before they could do it."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)  # noqa: S607
    for name in re.findall(rf"^({PREFIX}-\d+)-\S+", listed.stdout, re.MULTILINE):
        if not os.path.exists(f"/proc/{name.split('-')[1]}"):
            _remove_namespaces(name)


def _remove_namespaces(lab: str) -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)  # noqa: S607
    for name in re.findall(rf"^({lab}-\S+)", listed.stdout, re.MULTILINE):
        for pid in subprocess.run(
            ["ip", "netns", "pids", name],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
        ).stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)  # noqa: S607


def _check_machine() -> None:
    if sys.platform != "linux":
        raise NetLabError(f"network namespaces need Linux, not {sys.platform}; run it in a Linux virtual machine")
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise NetLabError("the commands ip and tc were not found; install iproute2 (apt-get install iproute2)")
    if os.geteuid() != 0:
        raise NetLabError("making network namespaces needs root; run the same command with sudo")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetLabError(f"{' '.join(command)!r} failed: {done.stderr.strip() or done.stdout.strip()}")


def _die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends: `__exit__` does not run if it is killed itself."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _signal_session(process: subprocess.Popen[str], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def run_everywhere(
    lab: NetLab, command: Sequence[str], timeout: float | None = None, plain_rank: int | None = None
) -> int:
    """Run a command as every rank, with its output prefixed line by line; the first exit code that is not 0.

    When a host fails, the others are stopped after a grace period. 124 after ``timeout`` seconds. The output of
    ``plain_rank`` has no prefix.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    places = [(host, local_rank) for host in range(lab.hosts) for local_rank in range(lab.ranks_per_host)]
    processes = [lab.popen(host, command, local_rank, **pipes) for host, local_rank in places]
    names = [f"host{host}" + f".{local_rank}" * (lab.ranks_per_host > 1) for host, local_rank in places]
    prefixes = ["" if rank == plain_rank else f"[{name}] " for rank, name in enumerate(names)]
    readers = [
        threading.Thread(target=_copy_lines, args=one, daemon=True) for one in zip(prefixes, processes, strict=True)
    ]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + timeout if timeout else float("inf")
    failed_at = float("inf")
    code = 0
    while None in (codes := [process.poll() for process in processes]):
        code = code or next((one for one in codes if one), 0)
        now = time.monotonic()
        failed_at = min(failed_at, now) if code else failed_at
        if now > deadline or now > failed_at + GRACE_S:
            lab.stop()
            if now > deadline:
                print(f"netlab: stopped after {timeout:.0f} s", flush=True)
            code = code or 124
            break
        time.sleep(0.05)
    for reader in readers:
        reader.join(GRACE_S)
    return code or next((process.returncode for process in processes if process.returncode), 0)


def _copy_lines(prefix: str, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(f"{prefix}{line}")
        sys.stdout.flush()


def exit_on_signals() -> None:
    """From now on SIGTERM and SIGHUP end this process by an exception, which takes down the lab of a `with`."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.netlab", description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=int, default=2, help=f"number of hosts, 1 to {MAX_HOSTS} (default 2)")
    parser.add_argument("--rate", default="1gbit", help="rate of every link, e.g. 100mbit, 1gbit, none (default 1gbit)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="processes on each host (default 1)")
    parser.add_argument("--timeout", type=float, help="stop everything after so many seconds")
    parser.add_argument("--check", action="store_true", help="measure the rate between two hosts instead of a command")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and a command, which runs as every rank")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if bool(command) == options.check:
        parser.error("give a command after --, or --check")
    exit_on_signals()
    try:
        hosts = max(options.hosts, 2) if options.check else options.hosts
        with NetLab(hosts, options.rate, options.ranks_per_host) as lab:
            if options.check:
                print(f"{lab.measure() / 1e6:.0f} Mbit/s of goodput at {options.rate}")
                return 0
            return run_everywhere(lab, command, options.timeout)
    except NetLabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
