"""Groups, orders and timeouts of a communicator, over Gloo and over a stand-in for NCCL."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_gqsgd import LocalSteps, all_reduce
from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.kernels.layout import PIECE_NUMEL
from lightning_gqsgd.reducers.base import ALL, Exchange, Scope
from lightning_gqsgd.wire import communicator as module
from lightning_gqsgd.wire.communicator import NCCL_PIECE_NUMEL, Communicator
from tests.distributed.ranks import logged, on_ranks, run
from tests.errors import error_text

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NODE, PEERS = Scope("node", 2), Scope("peers", 2)


@pytest.mark.parametrize(
    ("config", "device", "backend", "staged"),
    [
        ("cpu:gloo,cuda:gloo", CPU, "gloo", False),
        ("cpu:gloo,cuda:gloo", GPU, "gloo", True),
        ("cpu:gloo", GPU, "gloo", True),
        ("cuda:nccl", GPU, "nccl", False),
        ("cpu:gloo,cuda:nccl", GPU, "nccl", False),
        ("cpu:gloo,cuda:nccl", CPU, "gloo", False),
    ],
)
def test_backends(config: str, device: torch.device, backend: str, staged: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: config)
    assert module.backend_for(None, device) == backend  # type: ignore[arg-type]
    assert module.needs_staging(backend, device) == staged


@pytest.mark.parametrize(
    ("config", "device"),
    [("cuda:nccl", CPU), ("cpu:mpi,cuda:mpi", GPU), ("cpu:gloo,cuda:gloo", torch.device("mps"))],
)
def test_backends_that_do_not_go_with_a_device(config: str, device: torch.device, monkeypatch: Any) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: config)
    with pytest.raises(ConfigError, match=f"tensors on {device} over the backend '{config}' are not supported; use"):
        module.backend_for(None, device)  # type: ignore[arg-type]


@on_ranks(2)
def test_all_ranks_say_that_a_group_for_gpus_takes_no_tensors_on_the_cpu(rank: int) -> None:
    group = dist.new_group(backend="cuda:gloo")  # like NCCL's, it takes no tensors on the CPU
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    texts = (
        error_text(ConfigError, all_reduce, torch.ones(2), group=group),
        error_text(ConfigError, LocalSteps, model, optimizer, every=2, group=group),
    )
    assert all("tensors on cpu over the backend 'cuda:gloo' are not supported; use" in text for text in texts)


class FakeNCCL:
    """Takes the place of torch's backend, and keeps what it is asked."""

    log: list[tuple[Any, ...]] = []
    made = 0

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.number, self.rank, self.size, self.timeout = FakeNCCL.made, rank, size, timeout
        FakeNCCL.made += 1

    def allreduce(self, tensors: list[torch.Tensor], op: Any) -> FakeWork:
        FakeNCCL.log.append(("start", self.number, self.timeout))
        return FakeWork(self.number)

    def abort(self) -> None:
        FakeNCCL.log.append(("abort", self.number))


class FakeWork:
    def __init__(self, number: int) -> None:
        self._number = number

    def wait(self) -> None:
        FakeNCCL.log.append(("wait", self._number))

    def is_completed(self) -> bool:
        FakeNCCL.log.append(("completed", self._number))
        return True


@on_ranks(2)
def test_a_collective_that_close_ends_is_said(rank: int) -> None:
    """A step on a slow link may take longer than close() waits, and would have a wrong result in silence."""
    module.backend_for = lambda *_: "nccl"
    dist.ProcessGroupNCCL = FakeNCCL
    module.CLOSE_S = 0.05
    lines, x = logged(), torch.zeros(3)
    said = []
    for fails in (False, True):
        made = Communicator(CPU, dist.group.WORLD, f"closed early {fails}", timedelta(seconds=7))
        made.start(Exchange.in_place("sum", x), 0)
        FakeWork.is_completed = lambda _: False
        if fails:
            made.describe(RuntimeError("a peer is gone"), "a bucket")
        made.close()
        said.append(len(lines))
    assert [entry[0] for entry in FakeNCCL.log] == ["start", "abort"] * 2
    assert said == [1, 1]  # an error was said already
    assert f"the last collective of rank {rank} had not ended 0 s after close(), which has ended it" in lines[0]
    assert "Call torch.cuda.synchronize() before close()" in lines[0]


@on_ranks(4)
def test_nccl_connects_before_the_first_step_and_aborts_after_an_error(rank: int) -> None:
    module.backend_for = lambda *_: "nccl"
    dist.ProcessGroupNCCL = FakeNCCL
    made = Communicator(CPU, dist.group.WORLD, "tried", timedelta(seconds=7))
    made.extend([(ALL, NODE), (PEERS,), (NODE,)])
    made.try_groups()
    started = [entry[1] for entry in FakeNCCL.log if entry[0] == "start"]
    assert sorted(started) == sorted(set(started)) == sorted({group.number for group in made._groups.values()})
    FakeNCCL.log.clear()
    made.try_groups()
    assert not FakeNCCL.log  # once for each group
    made.describe(RuntimeError("a peer is gone"), "a bucket")
    made.close()
    assert {entry[0] for entry in FakeNCCL.log} == {"abort"}  # its own work may wait for a peer that is gone


@on_ranks(4)
def test_nccl_has_one_group_for_each_scope_and_runs_one_at_a_time(rank: int) -> None:
    module.backend_for = lambda *_: "nccl"
    dist.ProcessGroupNCCL = FakeNCCL
    timeout, x = timedelta(seconds=7), torch.zeros(3)
    alike = Communicator(CPU, dist.group.WORLD, "alike", timeout)
    alike.extend([(ALL,)] * 3)
    assert FakeNCCL.made == 1
    assert alike.piece_size(2) == (NCCL_PIECE_NUMEL, NCCL_PIECE_NUMEL)
    for stage in (0, 1, 2, 3, 0):
        alike.start(Exchange.in_place("sum", x), stage)
    # All in one group, whose order is the order of starts: nothing is waited for.
    assert FakeNCCL.log == [("start", 0, timeout)] * 5
    alike.close()
    # Once its own work has ended: a shutdown would wait for the other ranks of the node.
    assert FakeNCCL.log[5:] == [("completed", 0), ("abort", 0)]
    FakeNCCL.log.clear()

    several = Communicator(CPU, dist.group.WORLD, "several", timeout)
    several.extend([(ALL, NODE), (PEERS,), (NODE,)])
    assert FakeNCCL.made == 4
    for stage, scope in ((0, ALL), (1, NODE), (1, ALL), (2, PEERS), (2, PEERS), (3, NODE)):
        several.start(Exchange("max", x, x, scope=scope), stage)
    asked = [entry[:2] for entry in FakeNCCL.log]
    assert asked == [
        *[("start", 1), ("wait", 1), ("start", 2), ("wait", 2), ("start", 1), ("wait", 1)],
        *[("start", 3), ("start", 3), ("wait", 3), ("start", 2)],
    ]
    several.close()
    with pytest.raises(ConfigError, match="connections=2 is for Gloo; leave it out, and set NCCL_NSOCKS_PERTHREAD"):
        several.extend([(ALL,)], connections=2)


@on_ranks(2)
def test_gloo_has_a_group_for_each_stage(rank: int) -> None:
    made = Communicator(CPU, dist.group.WORLD, "first")
    assert len(set(made._groups.values())) == 1
    made.extend([(ALL,)] * 2)
    assert len(set(made._groups.values())) == 3  # each stage's order is its own
    made.extend([(ALL,)])  # what is there stays
    assert len(set(made._groups.values())) == 3
    made.extend([(ALL,)] * 2, connections=3)  # what ranks agree on needs no second connection
    assert len(set(made._groups.values())) == 7
    assert [made.next_turn(3) for _ in range(5)] == [0, 1, 2, 0, 1]
    assert {made.piece_size(bits).least for bits in (1, 4, 32)} == {PIECE_NUMEL}
    assert [made.piece_size(bits).most // PIECE_NUMEL for bits in (1, 2, 3, 4, 5, 8, 32)] == [4, 4, 2, 2, 1, 1, 1]
    assert made.control_device == CPU
    assert made.gather(torch.tensor([rank]), "a test").tolist() == [[0], [1]]
    made.close()
    with pytest.raises(RuntimeError, match="the communicator was closed"):
        made.gather(torch.tensor([rank]), "a test")


def _receiving() -> int:
    """How many threads of this process receive what comes over Gloo."""
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")


def _threads(rank: int) -> tuple[list[int], float]:
    before = _receiving()
    communicator = Communicator(CPU, dist.group.WORLD, "threads")
    communicator.extend([(ALL,), (ALL,)], connections=3)
    with_groups = _receiving()
    x = torch.full((4,), float(rank))
    for stage, turn in [(0, 0), (1, 0), (1, 2), (2, 1)]:
        communicator.start(Exchange.in_place("sum", x), stage, turn).wait()
    communicator.close()
    return [before, with_groups], float(x[0])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted on Linux")
def test_groups_over_gloo_have_a_thread_that_receives_for_each_connection(tmp_path: Path) -> None:
    for (before, with_groups), total in run(_threads, 2, tmp_path):
        if before:  # older versions of Gloo give it no name
            assert with_groups == before + 3
        assert total == 8.0  # 1, added four times over two ranks that have the same from then on


@pytest.mark.parametrize(("names", "count"), [("", 1), ("lo", 1), ("lo,lo", 2)])
def test_gloo_has_a_device_for_each_interface_that_the_environment_names(
    names: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    assert len(module.gloo_devices()) == count


class _Devices:
    """Gloo's devices, as what they were asked for."""

    @staticmethod
    def create_device(**asked: str) -> dict[str, str]:
        return asked

    @staticmethod
    def create_default_device() -> dict[str, str]:
        return {}


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("127.0.1.1", {"hostname": "10.0.0.7"}),
        ("192.0.2.1", {"hostname": "10.0.0.7"}),  # of no interface of this host
        (None, {"hostname": "10.0.0.7"}),
        ("0.0.0.0", {}),  # noqa: S104
    ],
)
def test_gloo_listens_at_a_given_address_where_the_name_of_the_host_reaches_no_other_host(
    address: str | None, asked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*_: Any, **__: Any) -> Any:
        if address is None:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(dist, "ProcessGroupGloo", _Devices)
    assert module.gloo_devices("10.0.0.7") == [asked]
    assert module.gloo_devices() == [{}]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert module.gloo_devices("10.0.0.7") == [{"interface": "eth1"}]


def test_gloo_listens_at_a_given_address_where_the_name_of_the_host_is_too_long_for_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: 64 * "a")  # as long as Linux allows
    monkeypatch.setattr(dist, "ProcessGroupGloo", _Devices)
    assert module.gloo_devices("10.0.0.7") == [{"hostname": "10.0.0.7"}]
