"""Requests to the store of torch.distributed come to an end where the process that holds it stands still."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd import quantised
from lightning_gqsgd.ddp.hook import register_gqsgd
from lightning_gqsgd.errors import CollectiveError
from lightning_gqsgd.wire.communicator import Communicator
from lightning_gqsgd.wire.meeting import Meeting
from lightning_gqsgd.wire.peers import Peers
from lightning_gqsgd.wire.store import EndingStore, Store, wait_for_store
from tests.distributed.models import mlp, train
from tests.distributed.ranks import run
from tests.distributed.server import fork_context
from tests.errors import error_text
from tests.marks import skip_without_torchft
from tests.ports import free_port

#: Seconds of the process group's timeout, and what an error takes beyond it at most.
TIMEOUT_S, BEYOND_S = 4.0, 10.0


def _serve(ports: Any) -> None:
    """Hold a store until the process is killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    ports.put(store.port)
    signal.pause()


@pytest.fixture
def server() -> Iterator[tuple[Any, Store]]:
    context = fork_context()
    ports = context.Queue()
    process = context.Process(target=_serve, args=(ports,), daemon=True)
    process.start()
    port = ports.get(timeout=60)
    client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    yield process, Store(client, within_s=30.0)
    process.kill()
    process.join()


def stop(process: Any) -> None:
    """Let a process stand still; all of its threads do when this returns."""
    os.kill(process.pid, signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)


def test_values_numbers_and_parts(server: tuple[Any, Store]) -> None:
    _, store = server
    part = store.under("part")
    assert part.get("key") == ""
    part.set("key", "value")
    part.count("number")
    part.count("number")
    assert (part.get("key"), part.get("number"), store.get("key")) == ("value", "2", "")


def test_a_rank_waits_for_a_store_that_comes_late_and_says_why_it_has_not_reached_one() -> None:
    port = free_port()
    for place, said in (
        (("127.0.0.1", port), "Connection refused"),
        (("127.0.0.1", 70000), "70000 is not a port"),
        (("node..example", port), "'node..example' is not the name of a host"),
    ):
        with pytest.raises(dist.DistNetworkError, match=said):
            wait_for_store(*place, within_s=0.0)
    waiting = threading.Thread(target=wait_for_store, args=("127.0.0.1", port, 60.0))
    waiting.start()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    waiting.join(60)
    assert not waiting.is_alive()
    store.set("still", "there")  # a connection that has sent nothing is no matter


def test_a_server_that_stands_still_is_an_error_and_one_that_goes_on_is_none(
    server: tuple[Any, Store],
) -> None:
    process, store = server
    before = set(threading.enumerate())  # threads of other tests' stores end some time after their stores
    part = store.under("part")
    part.set("key", "value")
    store._requests.within_s = 1.0
    stop(process)
    for request in (store.get, part.count, part.get):  # the second and the third fail at once
        with pytest.raises(dist.DistStoreError, match="has not answered for 1 s"):
            request("key")
    assert sum(thread.name == "gqsgd-store" for thread in set(threading.enumerate()) - before) == 1
    os.kill(process.pid, signal.SIGCONT)
    for request in store._requests._left_behind:
        assert request.wait(10)
    store._requests.within_s = 30.0
    assert part.get("key") == "value"


def test_an_interrupt_of_a_request_leaves_it_behind_so_that_the_next_one_does_not_wait(
    server: tuple[Any, Store],
) -> None:
    process, store = server
    store._requests.within_s = 60.0
    stop(process)
    usual = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            store.get("key")
    finally:
        signal.signal(signal.SIGALRM, usual)
    begun = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="has not answered"):
        store.set("key", "value")
    assert time.monotonic() - begun < 30
    os.kill(process.pid, signal.SIGCONT)


def _interrupted_after(seconds: float, process: Any, call: Callable[[], object]) -> float:
    """Let the server stand still while a call waits, and interrupt the call; returns how long it goes on then."""
    usual = signal.signal(signal.SIGALRM, signal.default_int_handler)
    stops = threading.Timer(seconds / 2, stop, [process])
    stops.start()
    begun = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        signal.signal(signal.SIGALRM, usual)
    return time.monotonic() - begun - seconds


@pytest.mark.parametrize("others_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_interrupt_of_ranks_that_meet_goes_through_where_the_server_stands_still(
    server: tuple[Any, Store], others_compile: bool
) -> None:
    process, store = server

    def meet() -> None:
        with Meeting("f", [Peers(1, (0, 1), store._store, {})], timedelta(seconds=60)) as meeting:
            if not others_compile:
                meeting.agree()
            meeting._keys = ["key"]
            with meeting.preparing():
                pass

    assert _interrupted_after(2.0, process, meet) < 30
    os.kill(process.pid, signal.SIGCONT)


def test_a_server_that_has_ended_is_torchs_own_error(server: tuple[Any, Store]) -> None:
    process, store = server
    process.kill()
    process.join()
    with pytest.raises(dist.DistNetworkError):
        store.get("key")


def test_ranks_whose_store_stands_still_while_they_connect_find_out(
    server: tuple[Any, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_torchft()
    import torchft

    process, store = server
    create = torchft.process_group.create_store_client

    def create_and_stop(*arguments: Any, **named: Any) -> dist.Store:
        client: dist.Store = create(*arguments, **named)
        stop(process)
        return client

    monkeypatch.setattr(torchft.process_group, "create_store_client", create_and_stop)
    group = quantised(torchft.ProcessGroupGloo(timeout=timedelta(seconds=1)), bits=4)
    port = store._store.port  # type: ignore[attr-defined]
    with pytest.raises(dist.DistStoreError, match="has not answered for 3 s"):
        group.configure(f"127.0.0.1:{port}/quorum", "0", 0, 2, 1, 0, 1, [0, 1])


@pytest.mark.slow
def test_ranks_whose_store_stands_still_while_groups_are_created_find_out(server: tuple[Any, Store]) -> None:
    process, store = server
    peers = Peers(0, (0, 1), store._store, {"cpu": "gloo"}, timedelta(seconds=1))
    stop(process)
    with pytest.raises(CollectiveError, match="it has not answered for 3 s"):
        Communicator(torch.device("cpu"), peers, "key")


class _Silent(EndingStore):
    """A store whose rank says where it listens, and then connects to nobody."""

    def __init__(self, store: dist.Store, ends: threading.Event) -> None:
        super().__init__(store, timedelta(seconds=TIMEOUT_S))
        self._ends = ends
        self.has_said = threading.Event()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.has_said.set()
        self._ends.wait(60)
        raise dist.DistStoreError("the rank has ended")


@pytest.mark.skipif(torch.__version__ < "2.8", reason="collectives would keep the shorter timeout of connections")
def test_a_rank_waits_for_a_connection_as_long_as_its_timeout_says() -> None:
    ends = threading.Event()
    store = dist.HashStore()
    timeout = timedelta(seconds=2)
    ranks = tuple(range(12))  # which of two ranks waits for the other is up to their ports, so there are several
    silent = []
    for rank in ranks[1:]:
        ending = _Silent(store, ends)
        peers = Peers(rank, ranks, ending, {"cpu": "gloo"}, timedelta(seconds=60))
        thread = threading.Thread(
            target=error_text, args=(CollectiveError, Communicator, torch.device("cpu"), peers, "key")
        )
        thread.start()
        silent.append((ending, thread))
    for ending, _ in silent:
        assert ending.has_said.wait(60)
    begun = time.monotonic()
    try:
        with pytest.raises(CollectiveError, match="connecting to 12 ranks failed"):
            Communicator(torch.device("cpu"), Peers(0, ranks, store, {"cpu": "gloo"}, timeout), "key")
        assert time.monotonic() - begun < 4 * timeout.total_seconds()
    finally:
        ends.set()
        for _, thread in silent:
            thread.join()


def _save_while_rank_0_stands_still(rank: int, port: int) -> tuple[str, float]:
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timeout)
    model = DistributedDataParallel(mlp(64))
    state = register_gqsgd(model, codec="linear", memory="diana", reducer="two_shot")
    train(model, rank, range(2))
    if rank == 0:  # it stands still until a shell ends it
        subprocess.Popen(["/bin/sh", "-c", f"sleep {5 * TIMEOUT_S}; kill -9 {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    begun = time.monotonic()
    return error_text(CollectiveError, state.state_dict), time.monotonic() - begun


@pytest.mark.slow
def test_ranks_that_meet_have_an_error_in_time_where_the_rank_that_holds_the_store_stands_still(tmp_path: Path) -> None:
    _, (text, seconds) = run(_save_while_rank_0_stands_still, 2, tmp_path, free_port(), initialise=False, dies=(0,))
    assert "state_dict on rank 1 of 2: the store of torch.distributed is gone (it has not answered for 4 s)" in text
    assert "usually that of rank 0" in text
    assert seconds < TIMEOUT_S + BEYOND_S
