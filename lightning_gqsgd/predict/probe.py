"""`measure`, a collective: measures the constants of a device and of the network between ranks, for the model.

Constants of collectives come from two sizes of messages: a short one for the latency, and one of the package's usual
length for the time per byte. The long message is measured twice: with one collective at a time, and with several
collectives under way in one process group, as in a training, where they fill each other's pauses. `device_times` times
the computation of a device.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.predict import files
from lightning_gqsgd.predict.costs import BF16_HOOK, KINDS, Collective, Costs, Gamma
from lightning_gqsgd.predict.device_times import TRELLIS, bf16_hook, codec_of_config, copying, gamma_of
from lightning_gqsgd.predict.pipeline_times import in_pipeline
from lightning_gqsgd.predict.profile import message_of
from lightning_gqsgd.predict.timeline import Timeline
from lightning_gqsgd.predict.timing import name_of, slowest
from lightning_gqsgd.reducers.base import ALL, Exchange, Scope
from lightning_gqsgd.wire.communicator import Communicator

#: Version of the file format of a probe.
VERSION = 2

#: Number of collectives that are under way at once in a row.
AT_ONCE = 4
#: Bytes of the short message.
SHORT_BYTES = 4096
#: Bytes of the longest message of a kind: scales of a piece for ``max``, a large bucket of DDP for sums, and codes of a
#: piece at 8 bits for others.
LONG_BYTES = {"max": 1 << 14, "sum/float32": 1 << 24, "sum/bfloat16": 1 << 24}
PIECE_BYTES = 1 << 19
#: Bytes of the first long message that is tried. Each next one is four times as long, until one takes `LONG_ENOUGH_S`
#: seconds.
FIRST_LONG_BYTES = 1 << 14
LONG_ENOUGH_S = 0.1
#: Approximate seconds of repetitions of one message length, and the smallest and largest number of repetitions.
PATIENCE_S = 0.3
REPEATS = (3, 15)
#: Approximate seconds of a row, and the number of collectives in the shortest and in the longest row.
ROW_S = 1.0
ROWS = (AT_ONCE, 32)
#: Approximate seconds of all collectives together, and of the kernels. With more ranks, there are fewer repetitions.
COLLECTIVES_S = 10.0
KERNELS_S = 3.0
#: Approximate smallest number of seconds for one kind of collective. With less, messages would be too short to time a
#: byte.
LEAST_S = 0.4
#: The work of a thread while processors are counted: the number of hashes of 1 MiB, about 30 ms. Processors are counted
#: once for each kind of collective, because other programs start and end.
HASHES = 24
#: Largest number of busy threads of a rank: backward pass, codec, and two of Gloo.
MOST_THREADS = 4

#: Fields of `Costs` that a probe does not have: measured times already include terms and latency, and the nodes may
#: differ.
_NOT_MEASURED = ("terms", "latency_s", "shares_memory")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8}


@dataclass(frozen=True)
class Probe:
    """Measurements of a probe.

    Attributes:
        costs: the constants, for `ranks` ranks.
        ranks: number of ranks.
        per_node: ranks of each node.
        backend: ``"gloo"`` or ``"nccl"``.
        device: name of the device that computes.
        seconds: duration of the measurements.
        timelines: timelines of models, if any were measured.
    """

    costs: Costs
    ranks: int
    per_node: int
    backend: str
    device: str
    seconds: float
    timelines: tuple[Timeline, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the probe as values for JSON, with its version."""
        values = {**asdict(replace(self, timelines=())), "timelines": [line.to_dict() for line in self.timelines]}
        for name in _NOT_MEASURED:
            del values["costs"][name]
        return {"version": VERSION, **values}

    @classmethod
    def from_dict(cls, values: object, source: str = "the probe") -> Probe:
        """Returns the probe from the result of `to_dict`; ``source`` names the origin of the values.

        Raises:
            ConfigError: if the values are not those of a probe of this version. The message names the entry.
        """
        own = dict(values) if isinstance(values, dict) else {}
        version = own.pop("version", None)
        if version != VERSION:
            raise ConfigError(f"{source} is not a probe of version {VERSION} (its version: {version})")
        try:
            given = files.entries(own, "the probe", tuple(field.name for field in fields(cls)))
            return cls(
                costs=_costs_of(given["costs"], source),
                ranks=files.integer(given["ranks"], "ranks", 2),
                per_node=files.integer(given["per_node"], "per_node", 1),
                backend=files.text(given["backend"], "backend"),
                device=files.text(given["device"], "device"),
                seconds=files.number(given["seconds"], "seconds"),
                timelines=tuple(map(Timeline.from_dict, files.rows(given["timelines"], "timelines"))),
            )
        except ConfigError as error:
            raise ConfigError(f"{source} is not a probe: {error}") from None

    def save(self, path: Path) -> None:
        """Write the probe as JSON."""
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Probe:
        """Read a probe that `save` wrote.

        Raises:
            ConfigError: see `files.json_in`; or if it is not a probe of this version.
        """
        values = files.json_in(path, "give a file that `gqsgd probe --output FILE` has written")
        try:
            return cls.from_dict(values, str(path))
        except ConfigError as error:
            raise ConfigError(f"{error}; run `gqsgd probe --output {path}` again") from None


def _costs_of(values: object, source: str) -> Costs:
    """Returns the constants of a probe's entry ``costs``; raises ConfigError if it does not belong to a probe."""
    names = tuple(field.name for field in fields(Costs) if field.name not in _NOT_MEASURED)
    given = files.entries(values, "costs", names)
    collectives, gammas = (files.entries(given[name], f"costs.{name}") for name in ("collectives", "gammas"))
    return Costs(
        {key: files.numbers(Collective, cost, f"costs.collectives[{key!r}]") for key, cost in collectives.items()},
        {key: files.numbers(Gamma, gamma, f"costs.gammas[{key!r}]") for key, gamma in gammas.items()},
        touch_s=files.number(given["touch_s"], "costs.touch_s"),
        launch_s=files.number(given["launch_s"], "costs.launch_s"),
        stage_s=files.number(given["stage_s"], "costs.stage_s"),
        cores=files.above_0(given["cores"], "costs.cores"),
        thread=files.above_0(given["thread"], "costs.thread"),
        on_streams=files.flag(given["on_streams"], "costs.on_streams"),
        source=source,
    )


def measure(device: torch.device, key: str, bits: Sequence[int], per_node: int = 1) -> Probe:
    """Measure this device and the network between the ranks of the default process group. A collective.

    Args:
        device: device of gradients: the CPU over Gloo, or CUDA over NCCL.
        key: a name that no other probe of this process group has used.
        bits: the numbers of bits for which kernels of the default configuration's codec are timed; at least one. With
            2, kernels of the preset ``gqsgd_trellis`` are timed as well on a CPU.
        per_node: ranks of each node.

    Raises:
        ConfigError: if there are no codes for a number of bits, if ``bits`` is empty, if there is only one rank, or if
            the ranks cannot be divided into nodes of this size.
    """
    if not bits:
        raise ConfigError(f"bits={bits!r} names no number of bits whose kernels could be timed; give one, e.g. (4,)")
    configs = [GQSGDConfig(bits=width) for width in bits]
    if TRELLIS.bits in bits and device.type == "cpu":  # on a GPU, its kernels compile for half a minute
        configs.append(TRELLIS)
    codecs = {codec_of_config(config): config for config in configs}
    assert dist.group.WORLD is not None
    ranks = dist.get_world_size()
    if ranks < 2:
        raise ConfigError("one process has nobody to send to: start at least two, e.g. `gqsgd probe --procs 2`")
    if ranks % per_node:
        raise ConfigError(f"{ranks} ranks do not make nodes of {per_node}; start as many on every node")
    begun = time.perf_counter()
    communicator = Communicator(device, dist.group.WORLD, key)
    scopes = (ALL, Scope("node", per_node), Scope("peers", per_node)) if 1 < per_node < ranks else (ALL,)
    communicator.extend([scopes])
    try:
        communicator.try_groups()  # NCCL takes seconds to connect ranks, which are no part of what is measured
        clock = _Stopwatch(communicator, len(scopes) * len(KINDS))
        collectives = {f"{scope.kind} {kind}": clock.collective(kind, scope) for scope in scopes for kind in KINDS}
        on_streams = communicator.backend == "nccl"
        thread = 1.0 if on_streams else median(clock.thread)
        cores = 1.0 if on_streams else max(thread, median(clock.cores))
        patience_s = KERNELS_S / (3 * len(codecs) + 4)
        gammas = {codec: gamma_of(device, config, patience_s) for codec, config in codecs.items()}
        gammas[BF16_HOOK] = bf16_hook(device, patience_s)
        touch_s, launch_s = copying(device, patience_s)
        costs = Costs(collectives, gammas, touch_s, launch_s, cores, thread, on_streams, source="measured")
        # Stages on a GPU are issued while the GPU computes. Stages of a GPU over Gloo were not measured.
        if device.type == "cpu":
            costs = in_pipeline(communicator, costs, min(bits))
    finally:
        communicator.close()
    return Probe(costs, ranks, per_node, communicator.backend, name_of(device), time.perf_counter() - begun)


class _Stopwatch:
    """Times collectives. If ranks measure different times, the time of the slowest rank is used.

    Attributes:
        cores: numbers of processors that a rank got while all ranks used as many as possible, measured several times.
        thread: the same while all ranks ran one thread.

    Args:
        communicator: the communicator that runs the collectives.
        kinds: number of kinds of collectives to time. They share `COLLECTIVES_S` seconds.
    """

    def __init__(self, communicator: Communicator, kinds: int) -> None:
        self._communicator = communicator
        self._left = kinds
        self._begun = time.perf_counter()
        self.cores: list[float] = []
        self.thread: list[float] = []

    def collective(self, kind: str, scope: Scope) -> Collective:
        """Returns the constants of one kind of collective."""
        share_s = self._share()
        if len(self.cores) < len(KINDS):  # other scopes use the same processors
            self.cores.append(_processors(min(MOST_THREADS, os.cpu_count() or 1), self._communicator.device))
            self.thread.append(_processors(1, self._communicator.device))
        patience_s = min(PATIENCE_S, share_s / 6)
        most_s = min(ROW_S, share_s / 5)
        members = len(scope.members(self._communicator.rank, self._communicator.size))
        alpha_s = self._repeat(kind, SHORT_BYTES, scope, patience_s)
        short = _between(ROWS, patience_s / alpha_s)
        cpu_s = self._row(kind, SHORT_BYTES, scope, short)[1] / short
        longest = LONG_BYTES.get(kind, PIECE_BYTES)
        if kind == "all_gather" and members > 2:  # shards of a piece: only two ranks gather pieces
            longest //= members
        nbytes = min(FIRST_LONG_BYTES, longest)
        enough_s = min(LONG_ENOUGH_S, share_s / 16)
        while nbytes < longest and self._row(kind, nbytes, scope, 1)[0] < enough_s:
            nbytes = min(4 * nbytes, longest)
        sent = self._exchange(kind, nbytes, scope)[1]
        alone_s = self._repeat(kind, nbytes, scope, patience_s)
        count = _between(ROWS, most_s / alone_s)
        rows = [self._row(kind, nbytes, scope, count)]
        if rows[0][0] < share_s / 3:  # the shorter of two rows is used, because an idle connection may pause
            rows.append(self._row(kind, nbytes, scope, count))
        row_s, row_cpu_s = min(rows)
        # The latency of short messages varies. It is a small part of a row, but may be most of one collective.
        beta_s = min((row_s - alpha_s) / count, alone_s) / sent
        if beta_s <= 0:  # other programs slowed the short messages down
            beta_s = row_s / (count * sent)
        alone_beta_s = (alone_s - alpha_s) / sent
        cpu_beta_s = max(0.0, row_cpu_s / count - cpu_s) / sent
        return Collective(alpha_s, beta_s, max(0.0, alone_beta_s - beta_s), cpu_s, cpu_beta_s)

    def _share(self) -> float:
        """Returns the approximate seconds that the next kind of collective may take. All ranks get the same number."""
        left_s = COLLECTIVES_S - self._spent()
        self._left -= 1
        return max(LEAST_S, left_s / (self._left + 1))

    def _spent(self) -> float:
        """Returns the seconds since the start, on the slowest rank."""
        return float(slowest([time.perf_counter() - self._begun], self._communicator.device)[0])

    def _exchange(self, kind: str, nbytes: int, scope: Scope) -> tuple[Exchange, int]:
        """Returns a collective with messages of about ``nbytes`` bytes, and the bytes that a rank sends in it."""
        rank = self._communicator.rank
        size = self._communicator.size
        device = self._communicator.device
        members = len(scope.members(rank, size))
        name, _, dtype = kind.partition("/")
        if name == "all_to_all":
            tensor = torch.zeros(-(-nbytes // members) * members, dtype=torch.uint8, device=device)
            exchange = Exchange(name, torch.empty_like(tensor), tensor, scope=scope)
        elif name == "all_gather":
            tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            everyone = torch.empty(members, nbytes, dtype=torch.uint8, device=device)
            exchange = Exchange(name, everyone, tensor, scope=scope)
        else:
            of = _DTYPES[dtype] if dtype else torch.int32
            tensor = torch.zeros(max(1, nbytes // of.itemsize), dtype=of, device=device)
            exchange = Exchange(name, tensor, tensor, scope=scope)
        return exchange, message_of(exchange, rank, size).sent_bytes

    def _repeat(self, kind: str, nbytes: int, scope: Scope, patience_s: float) -> float:
        """Returns the median seconds of one collective, repeated for about ``patience_s`` seconds. All ranks get the
        same number."""
        walls: list[float] = []
        while len(walls) < REPEATS[0] or (len(walls) < REPEATS[1] and sum(walls) < patience_s):
            walls.append(self._row(kind, nbytes, scope, 1)[0])
        return median(walls)

    def _row(self, kind: str, nbytes: int, scope: Scope, count: int) -> tuple[float, float]:
        """Returns seconds and processor-seconds of a rank for a row of collectives, `AT_ONCE` of them under way."""
        exchanges = [self._exchange(kind, nbytes, scope)[0] for _ in range(min(count, AT_ONCE))]
        under_way: deque[Any] = deque()
        dist.barrier()
        cpu = time.process_time()
        begun = time.perf_counter()
        for number in range(count):
            if len(under_way) == AT_ONCE:
                under_way.popleft().wait()
            under_way.append(self._start(exchanges[number % AT_ONCE]))
        for work in under_way:
            work.wait()
        if exchanges[0].input.is_cuda:
            torch.cuda.synchronize()
        times = [time.perf_counter() - begun, time.process_time() - cpu]
        wall_s, cpu_s = slowest(times, self._communicator.device).tolist()
        return wall_s, cpu_s

    def _start(self, exchange: Exchange) -> Any:
        """Start a collective as training does.

        Only plain DDP and its hooks add the gradients of all ranks, and they do not use shared memory.
        """
        is_plain_ddp = exchange.kind == "sum" and exchange.input.is_floating_point() and exchange.scope == ALL
        if is_plain_ddp and self._communicator.shares_memory:
            return dist.all_reduce(exchange.output, async_op=True)
        return self._communicator.start(exchange, stage=1)


def _between(limits: tuple[int, int], value: float) -> int:
    return min(limits[1], max(limits[0], int(min(value, limits[1]))))


def _processors(count: int, device: torch.device) -> float:
    """Returns the number of processors that a rank gets while all ranks do the same work on ``count`` threads each,
    until the last thread has ended.

    Training steps are similar: ranks begin together, and wait for the last one. If all ranks share one machine, an idle
    processor takes over threads that wait for another processor.
    """
    data = bytes(1 << 20)

    def work() -> None:
        for _ in range(HASHES):
            hashlib.blake2b(data).digest()  # lets other threads run

    threads = [threading.Thread(target=work) for _ in range(count)]
    dist.barrier()
    cpu = time.process_time()
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    busy_s, wall_s = slowest([time.process_time() - cpu, time.perf_counter() - begun], device).tolist()
    return busy_s / wall_s
