"""Hosts on one machine: network namespaces around a switch, every link shaped to a rate in both directions.

Each host is a namespace with one interface. A veth pair joins the interface to a bridge; the bridge has a namespace of
its own, which the rules of the machine's firewall do not reach. A token bucket (tc tbf) at each end of each pair shapes
what the host sends and what the host receives. No latency is added: not every kernel has netem.

A lab needs Linux, root and iproute2.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

from netlab.machine import cores

PREFIX = "gqsgd"
#: First three bytes of all addresses: the same in every lab, for labs do not see each other.
NETWORK = "10.213.7"
INTERFACE = "eth0"
PORT = 29500
MAX_HOSTS = 64
#: Seconds for which the other ranks go on after one has failed, and between SIGTERM and SIGKILL.
GRACE_S = 5.0

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class NetLabError(RuntimeError):
    """A lab that cannot be built, or a command that cannot be started; the message names the reason and the remedy."""


def parse_rate(text: str) -> int | None:
    """The rate that a text names.

    Args:
        text: a number and a unit, e.g. ``"100mbit"`` or ``"2.5gbit"``, or ``"none"`` for an unshaped link.

    Returns:
        Bits per second, 10^6 to 10^11; None for ``"none"``.

    Raises:
        NetLabError: the text is no rate, or the rate is out of range.
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


#: Numbers of the labs of this process.
_numbers = itertools.count()


class NetLab:
    """A lab as a context manager: the hosts exist inside ``with``, and are gone afterwards, whatever happens.

    Args:
        hosts: number of hosts, 1 to 64.
        rate: rate of each link in each direction, see `parse_rate`.
        ranks_per_host: number of processes that each host runs of a job, 1 to 64; the processes of one host reach each
            other without the link.

    Raises:
        NetLabError: a value is out of range; at ``with``, the machine has no Linux, no root or no iproute2.
    """

    def __init__(self, hosts: int, rate: str = "1gbit", ranks_per_host: int = 1) -> None:
        for name, value in (("hosts", hosts), ("ranks_per_host", ranks_per_host)):
            if not 1 <= value <= MAX_HOSTS:
                raise NetLabError(f"{name}={value} is out of range: 1 to {MAX_HOSTS}")
        self.hosts, self.ranks_per_host = hosts, ranks_per_host
        self.rate = parse_rate(rate)
        self._name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
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
        """IPv4 address of a host, by its number from 0."""
        return f"{NETWORK}.{host + 1}"

    def namespace(self, host: int) -> str:
        """Name of a host's namespace, for ``ip netns exec``."""
        return f"{self._name}-h{host}"

    def environment(self, host: int, local_rank: int = 0) -> dict[str, str]:
        """The environment variables that torchrun would set for a process of a host."""
        ranks = self.hosts * self.ranks_per_host
        # All hosts share the cores of this machine.
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
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
            # The hosts have no names, and torch would warn of that at every connection.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }

    def popen(self, host: int, command: Sequence[str], local_rank: int = 0, **options: object) -> subprocess.Popen[str]:
        """Start a command on a host, in a session of its own. The command dies with this process, even by SIGKILL.

        Args:
            host: number of the host, from 0.
            command: program and arguments.
            local_rank: number of the process on its host, from 0.
            **options: further arguments of ``subprocess.Popen``.

        Raises:
            NetLabError: the program does not exist.
        """
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
        """End every command that was started: with SIGTERM, and with SIGKILL after `GRACE_S` seconds."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [process for process in self._processes if process.poll() is None]
            for process in running:
                _signal_session(process, number)
            deadline = time.monotonic() + GRACE_S
            while any(process.poll() is None for process in running) and time.monotonic() < deadline:
                time.sleep(0.02)
        for process in self._processes:  # a command that has ended may have left other processes in its session
            _signal_session(process, signal.SIGKILL)
        self._processes.clear()

    def cut(self, host: int) -> None:
        """Lose everything that a host sends and receives, as if somebody had pulled its cable, until `mend`."""
        _ip("-n", f"{self._name}-sw", "link", "set", f"p{host}", "down")

    def mend(self, host: int) -> None:
        """Undo `cut`. Connections go on where both ends still wait; TCP tries again less and less often."""
        _ip("-n", f"{self._name}-sw", "link", "set", f"p{host}", "up")

    def measure(self, nbytes: int = 20_000_000) -> float:
        """Bits per second of goodput of one TCP connection from host 1 to host 0, which sends ``nbytes`` bytes.

        Raises:
            NetLabError: there is one host only, or the bytes did not arrive in time.
        """
        if self.hosts == 1:
            raise NetLabError("hosts=1 has no link to measure; take at least 2")
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
        patience_s = 60 + 16 * nbytes / (self.rate or 10**9)
        try:
            return float(receiver.communicate(timeout=patience_s)[0])
        except (subprocess.TimeoutExpired, ValueError) as error:  # nothing has come, or half a number
            raise NetLabError(
                f"host 1 could not send {nbytes:,} bytes to host 0 within {patience_s:.0f} s ({error}); look whether "
                f"port {PORT} is free, and whether other processes slow this machine down"
            ) from error

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
    """Put a token bucket on what a device sends.

    The bucket holds 0.5 ms of traffic, so that short messages are shaped as well. The bucket also has to hold one
    packet of 64 KiB: the kernel hands over packets of that size before segmentation, and with a smaller bucket it would
    spend processor time on cutting them up.
    """
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *_bucket(rate))


def _bucket(rate: int) -> list[str]:
    """Parameters of a token bucket."""
    return ["rate", f"{rate}bit", "burst", f"{max(70_000, rate // 16_000)}b", "latency", "50ms"]


def reshape_own_link(text: str) -> None:
    """Give what this process's host sends another rate; for processes that run on a host of an unshaped lab.

    Args:
        text: see `parse_rate`; "none" removes the limit.
    """
    rate = parse_rate(text)
    subprocess.run(  # there may be no limit yet
        ["tc", "qdisc", "del", "dev", INTERFACE, "root"],  # noqa: S607
        capture_output=True,
        check=False,
    )
    if rate is not None:
        _run("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *_bucket(rate))


def remove_leftovers() -> None:
    """Remove the labs of processes that were killed before they could remove their lab."""
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
            with suppress(ProcessLookupError):  # the process may have ended since it was listed
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
    """Ask the kernel to kill this process when its parent ends: a killed parent does not run `NetLab.__exit__`."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _signal_session(process: subprocess.Popen[str], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
