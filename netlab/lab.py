"""Hosts on one machine: network namespaces around a switch, every link shaped to a rate in both directions.

Each host is a namespace with one interface. A veth pair joins the interface to a bridge; the bridge has a namespace of
its own, which the rules of the machine's firewall do not reach. A token bucket (tc tbf) at each end of each pair shapes
what the host sends and what the host receives. With a latency, a process that holds packets takes the bridge's place
(`netlab.switch`), because not every kernel has netem. With a share of the processors, a host's processes are in a
control group (`netlab.shares`).

A lab needs Linux, root and iproute2.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

from lightning_gqsgd.errors import counted
from lightning_gqsgd.wire.processors import processors
from netlab import shares
from netlab.errors import NetLabError as NetLabError
from netlab.units import parse_cpus, parse_delays
from netlab.units import parse_rate as parse_rate

PREFIX = "gqsgd"
#: First three bytes of all addresses: the same in every lab, for labs do not see each other.
NETWORK = "10.213.7"
INTERFACE = "eth0"
PORT = 29500
MAX_HOSTS = 64
#: Seconds for which the other ranks go on after one has failed, and between SIGTERM and SIGKILL.
GRACE_S = 5.0
#: Seconds for which a switch may take to start.
_SWITCH_S = 60.0
#: Bytes of the largest and the smallest bound that a lab with latency puts on TCP's windows.
_LEAST_WINDOW, _MOST_WINDOW = 32 << 20, 1 << 30

#: Numbers of the labs of this process.
_numbers = itertools.count()


def exit_on_signals() -> list[int]:
    """Make SIGTERM and SIGHUP raise SystemExit where they would end this process at once, so that a ``with`` takes down
    what it holds; returns the signals. Only the main thread can do that. In another one there are none."""
    if threading.current_thread() is not threading.main_thread():
        return []
    numbers: list[int] = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _exit)
    return numbers


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class NetLab:
    """A lab as a context manager: the hosts exist inside ``with``, and are gone afterwards, whatever happens.

    Inside ``with``, SIGTERM and SIGHUP raise SystemExit, unless the process handles them in another way.

    Args:
        hosts: number of hosts, 1 to 64.
        rate: rate of each link in each direction, see `parse_rate`; or a sequence with the rate of each host's link.
        ranks_per_host: number of processes that each host runs of a job, 1 to 64; the processes of one host reach each
            other without the link.
        latency: one-way latency from each host to each other, see `parse_delays`; ping shows twice as much.
        jitter: a packet's latency is uniform between so much below and above; packets keep their order.
        cpus: processors of each host, see `parse_cpus`; None: no limits.
        on_cores: the core that each host with such a limit runs on, numbered from 0 among those that this process may
            use; None: any. A host with less than a whole core would otherwise run on several at the same time, and lose
            a part of its time whenever a thread wakes up on another one.

    Raises:
        NetLabError: a value is out of range; at ``with``, the machine has no Linux, no root, no iproute2, or no control
            groups for ``cpus``.
    """

    def __init__(
        self,
        hosts: int,
        rate: str | Sequence[str] = "1gbit",
        ranks_per_host: int = 1,
        *,
        latency: str = "none",
        jitter: str = "none",
        cpus: Sequence[str] | None = None,
        on_cores: Sequence[int] | None = None,
    ) -> None:
        for name, value in (("hosts", hosts), ("ranks_per_host", ranks_per_host)):
            if not 1 <= value <= MAX_HOSTS:
                raise NetLabError(f"{name}={value} is out of range: 1 to {MAX_HOSTS}")
        self.hosts, self.ranks_per_host = hosts, ranks_per_host
        #: Bits per second of each host's link; None where it is not shaped.
        self.rates = [parse_rate(one) for one in _for_each_host("rate", rate, hosts)]
        #: Seconds of one-way latency between two hosts, and by how many it varies.
        self.latency_s, self.jitter_s = parse_delays(latency, jitter)
        #: Processors of each host; None where there is no limit.
        self.cpus = [parse_cpus(one, processors()) for one in _for_each_host("cpus", cpus or "none", hosts)]
        if on_cores is not None:
            _check_cores(on_cores, hosts)
        self._on_cores = on_cores
        self._name = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._processes: list[subprocess.Popen[str]] = []
        self._shares: dict[int, shares.Share] = {}
        self._switch: subprocess.Popen[str] | None = None
        #: Signals that raise SystemExit inside ``with`` only.
        self._signals: list[int] = []

    def __enter__(self) -> NetLab:
        _check_machine()
        remove_leftovers()
        self._signals = exit_on_signals()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:  # a second interrupt ends the wait for the processes
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
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, processors() // ranks)))
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
        share = self._shares.get(host)

        def prepare() -> None:
            _die_with_parent()
            if share is not None:
                share.join()

        process: subprocess.Popen[str] = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), *command],  # noqa: S607
            env={**os.environ, **self.environment(host, local_rank)},
            start_new_session=True,
            preexec_fn=prepare,
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

    def lose(self, host: int) -> None:
        """Lose everything that a host sends and receives, somewhere in the network, until `mend`.

        The host's own link stays up, so its kernel does not notice. After `cut`, it tries again every half second;
        after this, TCP tries again less and less often, at both ends.

        Raises:
            NetLabError: the lab has a latency.
        """
        if self.latency_s:
            raise NetLabError(f"latency={self.latency_s:g} s: lose() needs a lab without latency; use cut()")
        _ip("-n", f"{self._name}-sw", "link", "set", f"p{host}", "nomaster")

    def mend(self, host: int) -> None:
        """Undo `cut` and `lose`. Connections go on where both ends still wait."""
        bridge = () if self.latency_s else ("master", "br0")
        _ip("-n", f"{self._name}-sw", "link", "set", f"p{host}", *bridge, "up")

    def reshape(self, host: int, rate: str) -> None:
        """Change the rate of a host's link, in both directions; the lab was made with a rate for it.

        Args:
            host: number of the host, from 0.
            rate: see `parse_rate`.

        Raises:
            NetLabError: the host's link was made without a rate, or the new one is none.
        """
        bits = parse_rate(rate)
        if self.rates[host] is None or bits is None:
            raise NetLabError(f"host {host}: rate={rate!r} cannot replace {self.rates[host]}; give both as any number")
        for namespace, device in self._ends(host):
            _run("tc", "-n", namespace, "qdisc", "change", "dev", device, "root", "tbf", *_bucket(bits))

    def slow_down(self, host: int, cpus: str) -> None:
        """Change the processor time of a host that was made with a limit of it.

        Args:
            host: number of the host, from 0.
            cpus: processors of the host, or ``"none"``; see `parse_cpus`.

        Raises:
            NetLabError: the host was made without a limit, or the number is out of range.
        """
        if host not in self._shares:
            raise NetLabError(f"host {host} was made without cpus; give them to NetLab, as any number")
        self._shares[host].limit(parse_cpus(cpus, processors()))

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
        slowest = min(rate or 10**9 for rate in self.rates[:2])
        patience_s = 60 + 16 * nbytes / slowest + 100 * self.latency_s
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
        if not self.latency_s:
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
        for host in range(self.hosts):
            name, port, rate, cpus = self.namespace(host), f"p{host}", self.rates[host], self.cpus[host]
            _ip("netns", "add", name)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", switch, "link", "set", port, *(() if self.latency_s else ("master", "br0")), "up")
            if rate is not None:
                for namespace, device in self._ends(host):
                    _shape(namespace, device, rate)
            if cpus is not None:
                self._shares[host] = shares.Share(name, cpus, None if self._on_cores is None else self._on_cores[host])
        if self.latency_s:
            self._start_switch(switch)

    def _ends(self, host: int) -> list[tuple[str, str]]:
        """Namespace and device of both ends of a host's link."""
        return [(self.namespace(host), INTERFACE), (f"{self._name}-sw", f"p{host}")]

    def _start_switch(self, namespace: str) -> None:
        """Start the process that holds packets, and let TCP have as many bytes under way as the links hold."""
        most = max(rate or 10**10 for rate in self.rates)
        # The bytes of a round trip with full queues, and as many again for what TCP keeps beside them.
        window = int(2 * most / 8 * (2 * (self.latency_s + self.jitter_s) + 0.1))
        window = min(max(window, _LEAST_WINDOW), _MOST_WINDOW)
        for host in range(self.hosts):
            for name, first in (("tcp_rmem", 131072), ("tcp_wmem", 65536)):
                line = f"echo 4096 {first} {window} > /proc/sys/net/ipv4/{name}"
                _ip("netns", "exec", self.namespace(host), "sh", "-c", line)
        program = str(Path(__file__).with_name("switch.py"))
        delays = [str(self.latency_s), str(self.jitter_s)]
        self._switch = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-I", program, str(self.hosts), *delays],  # noqa: S607
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            text=True,
        )
        assert self._switch.stdout is not None
        ready = select.select([self._switch.stdout], [], [], _SWITCH_S)[0]
        if not ready or self._switch.stdout.readline() != "ready\n":
            raise NetLabError(
                f"the switch did not start within {_SWITCH_S:.0f} s; its error stands above. Leave latency out for a "
                "lab without it"
            )

    def _remove(self) -> None:
        _remove_lab(self._name)
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)
        if self._switch is not None:
            self._switch.wait()
            assert self._switch.stdout is not None
            self._switch.stdout.close()


def _for_each_host(name: str, given: str | Sequence[str], hosts: int) -> Sequence[str]:
    """One value for each host, from one for all or a sequence."""
    if isinstance(given, str):
        return [given] * hosts
    if len(given) != hosts:
        raise NetLabError(
            f"{name} has {counted(len(given), 'value')}, {','.join(given)}, and there are {hosts} hosts; give "
            "one for each host"
        )
    return given


def _check_cores(on_cores: Sequence[int], hosts: int) -> None:
    if len(on_cores) != hosts or not set(on_cores) <= set(range(processors())):
        raise NetLabError(
            f"on_cores={list(on_cores)} must have a number from 0 to {processors() - 1}, the cores of this machine, "
            f"for each of {hosts} hosts"
        )


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
    names = [*listed.stdout.splitlines(), *shares.names(f"{PREFIX}-")]
    for name in re.findall(rf"^({PREFIX}-\d+)-\S+", "\n".join(names), re.MULTILINE):
        if not os.path.exists(f"/proc/{name.split('-')[1]}"):
            _remove_lab(name)


def _remove_lab(lab: str) -> None:
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
    shares.remove(f"{lab}-")


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
