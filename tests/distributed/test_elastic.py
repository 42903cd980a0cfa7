"""Members that die, join, get a notice, or do not fit, at torchft's lighthouse, over real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gqsgd import ConfigError, LocalSteps
from lightning_gqsgd.presets import make_config
from tests.distributed import elastic_members as members
from tests.distributed.elastic_members import SECOND
from tests.distributed.ranks import run
from tests.distributed.test_merges import network
from tests.marks import needs_root, skip_without_torchft
from tests.processes import ended_well

skip_without_torchft()

#: Members find each other at the lighthouse, and not as under torchrun.
run_members = partial(run, initialise=False, torchrun=False)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """The address of a lighthouse."""
    with serving("127.0.0.1") as address:
        yield address


@pytest.fixture
def lighthouse6() -> Iterator[str]:
    """The address of a lighthouse, by IPv6 where this machine has it."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        host = "[::1]"
    except OSError:
        host = "127.0.0.1"
    with serving(host) as address:
        yield address


@contextmanager
def serving(host: str, min_replicas: int = 1) -> Iterator[str]:
    """The address of a lighthouse at an address of this machine."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"{host}:0",
        min_replicas=min_replicas,
        join_timeout_ms=10_000,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=2000,
    )
    # By number: the machine's name need not be known.
    yield f"{host}:{server.address().rpartition(':')[2]}"
    server.shutdown()


@pytest.mark.parametrize("delay", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_survivors_go_on_and_a_newcomer_takes_their_state(delay: int, tmp_path: Path, lighthouse: str) -> None:
    survivor, _, newcomer = run_members(members.death_and_newcomer, 3, tmp_path, lighthouse, tmp_path, delay, dies=(1,))
    assert survivor["bits"] == newcomer["bits"]
    assert survivor["samples"] == newcomer["samples"]
    assert newcomer["joined with"] > 0
    # Those of the dead one are in it, too; none is there twice.
    assert survivor["samples"] > newcomer["steps"] + survivor["steps"]


def test_who_waits_for_a_survivor_finds_out_when_that_one_does(tmp_path: Path, lighthouse: str) -> None:
    # In a ring, two members are no neighbours of the dead one.
    results = run_members(members.death_in_a_merge, 4, tmp_path, lighthouse, tmp_path, dies=(1,))
    survivors = [result for rank, result in enumerate(results) if rank != 1]
    assert len({survivor["bits"] for survivor in survivors}) == 1
    assert len({survivor["samples"] for survivor in survivors}) == 1
    assert all(survivor["failed"] for survivor in survivors)


def test_a_newcomer_trains_from_the_others_state_before_their_next_merge(tmp_path: Path, lighthouse6: str) -> None:
    there, newcomer = run_members(members.between_merges, 2, tmp_path, lighthouse6, tmp_path)
    assert newcomer["start"] == there["start"]
    assert newcomer["merges"] == there["merges"] == 1
    assert newcomer["steps"] == 3
    assert "started from what another member had after merge 1" in newcomer["report"]


def test_a_newcomer_trains_while_its_kernels_are_compiled(tmp_path: Path, lighthouse: str) -> None:
    there, newcomer = run_members(members.compiling, 2, tmp_path, lighthouse, tmp_path)
    assert newcomer["bits"] == there["bits"]
    assert newcomer["samples"] == there["samples"] == there["steps"] + newcomer["steps"]


@pytest.mark.slow  # waits for seconds; `test_merges` has the ranks of a process group
def test_members_that_have_finished_end_without_one_that_makes_no_steps(tmp_path: Path, lighthouse: str) -> None:
    ends, goes_on = run_members(members.stands_still, 2, tmp_path, lighthouse, tmp_path)
    assert any("made no step for 3 s, and all other members have finished" in text for text in ends["said"])
    assert goes_on["alone"] >= 5  # its steps are in the model that it ends with
    assert goes_on["samples"] > ends["samples"]


def test_a_member_that_has_made_no_step_since_it_finished_takes_part_when_the_others_finish_again(
    tmp_path: Path, lighthouse: str
) -> None:
    has_more, has_none = run_members(members.no_more_data, 2, tmp_path, lighthouse, tmp_path)
    assert has_more["bits"] == has_none["bits"]
    assert has_more["more"] == has_none["more"] == 3


def test_members_that_have_all_finished_do_not_wait_for_the_end_of_a_long_round(
    tmp_path: Path, lighthouse: str
) -> None:
    first, second = run_members(members.short_training, 2, tmp_path, lighthouse)
    assert first == second
    assert first["samples"] == 6
    assert first["members"] == 2


def test_a_machine_with_notice_merges_what_it_has_learnt_and_leaves(tmp_path: Path, lighthouse: str) -> None:
    stays, leaves = run_members(members.notice, 2, tmp_path, lighthouse, tmp_path)
    assert stays["exits"] is None
    assert leaves["exits"] == 0
    assert stays["samples"] == stays["steps"] + leaves["steps"]


def test_who_leaves_merges_weights_that_were_changed_without_a_step(tmp_path: Path, lighthouse: str) -> None:
    assert run_members(members.changed_without_steps, 1, tmp_path, lighthouse, tmp_path) == [True]


@pytest.mark.parametrize(
    ("fields", "is_frozen"), [({"bits": 3}, False), ({"min_replicas": 2}, False), ({}, True)], ids=str
)
def test_who_does_not_fit_is_refused_at_the_door_and_nobody_else_notices(
    fields: dict[str, Any], is_frozen: bool, tmp_path: Path, lighthouse: str
) -> None:
    inside, stranger = run_members(members.strangers, 2, tmp_path, lighthouse, tmp_path, fields, False, is_frozen)
    assert "another model, other options or another compression" in stranger["error"]
    assert inside["failed"] == 0
    assert inside["samples"] == inside["steps"]


@pytest.mark.parametrize(
    ("fields", "is_frozen", "words"),
    [
        pytest.param({"outer": "sgd"}, False, "do not agree: outer: ", marks=pytest.mark.slow),
        pytest.param({"every": "300ms"}, False, "do not agree: every: ", marks=pytest.mark.slow),
        ({}, True, "do not agree: values of untrained parameters: "),
    ],
)
def test_who_does_not_fit_is_refused_where_all_came_at_once(
    fields: dict[str, Any], is_frozen: bool, words: str, tmp_path: Path, lighthouse: str
) -> None:
    inside, stranger = run_members(members.strangers, 2, tmp_path, lighthouse, tmp_path, fields, True, is_frozen)
    assert words in stranger["error"]
    assert "\n" not in stranger["error"]
    assert inside["samples"] == inside["steps"]


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (None, "gqsgd lighthouse"),
        ("127.0.0.1:9", "no lighthouse answers at http://127.0.0.1:9"),
        ("no-such-host.invalid:29510", "cannot be reached"),
    ],
)
def test_without_a_lighthouse_there_is_one_line(address: str | None, words: str, tmp_path: Path) -> None:
    (message,) = run_members(members.unreachable, 1, tmp_path, address)
    assert words in message
    assert "\n" not in message


def test_a_training_of_somebody_else_is_named(lighthouse: str) -> None:
    from datetime import timedelta

    from torchft.coordination import LighthouseClient

    from lightning_gqsgd.membership.door import check_others, name_for

    client = LighthouseClient(f"http://{lighthouse}", connect_timeout=timedelta(seconds=5))
    own = name_for({"bits": 4})
    check_others(f"http://{lighthouse}", own, 5.0)
    client.heartbeat("gqsgd-0.0.1-0123456789abcdef:1")
    with pytest.raises(ConfigError, match=r"another build of lightning-gqsgd \(0\.0\.1\)"):
        check_others(f"http://{lighthouse}", own, 5.0)
    client.heartbeat("llama:2")
    with pytest.raises(ConfigError, match="'llama' is not a training of this package|another build"):
        check_others(f"http://{lighthouse}", own, 5.0)


def test_a_process_group_is_refused(tmp_path: Path) -> None:
    model = network(0)
    with pytest.raises(ConfigError, match="leave group out"):
        LocalSteps(model, torch.optim.SGD(model.parameters(), 0.1), every="1s", elastic=True, group=object())  # type: ignore[arg-type]


def test_who_comes_when_all_others_have_gone_hears_that_a_new_training_begins(tmp_path: Path, lighthouse: str) -> None:
    first, late = run_members(members.after_the_end, 2, tmp_path, lighthouse, tmp_path)
    assert first == [1, []]
    merges, said = late
    assert merges == 1
    assert len(said) == 1
    assert "merges, and none of its members is left: a new training begins, unless this process loads a" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("further", [0, 5])
def test_who_was_suspended_until_all_others_had_gone_hears_that_it_goes_on_by_itself(
    further: int, tmp_path: Path, lighthouse: str
) -> None:
    _, said = run_members(members.suspended, 2, tmp_path, lighthouse, tmp_path, further)
    assert len(said) == 1
    assert "none of its members is left: this process goes on by itself after merge" in said[0]


def test_members_may_start_before_their_lighthouse(tmp_path: Path) -> None:
    from torchft.coordination import LighthouseServer

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    servers: list[LighthouseServer] = []

    def start() -> None:
        members.wait_for((tmp_path / "waits").exists)
        time.sleep(2)
        servers.append(LighthouseServer(bind=address, min_replicas=1))

    starter = threading.Thread(target=start)
    starter.start()
    try:
        assert run_members(members.early, 1, tmp_path, address, tmp_path) == [1]
    finally:
        starter.join()
        for server in servers:
            server.shutdown()


def _own_lighthouse() -> tuple[str, list[str]]:
    """A free address, and the command of a lighthouse there, which can be killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return address, members.lighthouse_command(address)


def _listens(host: str, port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex((host, port)) == 0


@pytest.mark.slow
def test_members_go_on_with_a_lighthouse_that_was_killed_and_started_again(tmp_path: Path) -> None:
    address, command = _own_lighthouse()
    lighthouses = [subprocess.Popen(command)]

    def kill_and_start_again() -> None:
        members.wait_for(lambda: all((tmp_path / f"merges{rank}").exists() for rank in range(2)), 200)
        lighthouses[0].kill()
        lighthouses[0].wait()
        time.sleep(1)  # in which members call it
        lighthouses.append(subprocess.Popen(command))
        (tmp_path / "again").touch()

    killer = threading.Thread(target=kill_and_start_again)
    killer.start()
    try:
        first, second = run_members(
            members.without_a_lighthouse_for_a_while, 2, tmp_path, address, tmp_path, timeout=250
        )
    finally:
        killer.join()
        for lighthouse in lighthouses:
            lighthouse.kill()
            lighthouse.wait()
    assert first["bits"] == second["bits"]
    assert first["samples"] == second["samples"] == first["steps"] + second["steps"]


@pytest.mark.slow
@pytest.mark.parametrize(("delay", "steps"), [(1, 1000), (0, 1000), (1, 2)], ids=["steps", "waits", "finishes"])
def test_a_machine_with_notice_does_not_wait_for_a_lighthouse_that_is_gone(
    delay: int, steps: int, tmp_path: Path
) -> None:
    address, command = _own_lighthouse()
    lighthouse = subprocess.Popen(command)
    host, _, port = address.partition(":")
    members.wait_for(lambda: _listens(host, int(port)))  # the member would wait for its timeout only

    def kill() -> None:
        members.wait_for((tmp_path / "merges").exists)
        lighthouse.kill()
        lighthouse.wait()
        (tmp_path / "gone").touch()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        (leaver,) = run_members(members.notice_without_a_lighthouse, 1, tmp_path, address, tmp_path, delay, steps)
    finally:
        killer.join()
        lighthouse.kill()
        lighthouse.wait()
    assert leaver["exits"] == 0
    assert any("this member leaves, and what it has learnt since" in line for line in leaver["said"])


def test_a_member_that_waits_for_others_in_vain_says_how_many_there_are(tmp_path: Path, lighthouse: str) -> None:
    (found,) = run_members(members.too_few, 1, tmp_path, lighthouse)
    words = "1 member came, and a merge needs min_replicas=2"
    assert words in found["error"]
    assert "\n" not in found["error"]
    assert len([line for line in found["said"] if words in line]) == 1


def test_a_lighthouse_that_waits_for_more_members_is_named(tmp_path: Path) -> None:
    with serving("127.0.0.1", min_replicas=2) as lighthouse:
        (found,) = run_members(members.too_few_for_a_lighthouse, 1, tmp_path, lighthouse)
    words = f"1 member came to the lighthouse http://{lighthouse}, and it was started with --min-replicas 2; start more"
    assert words in found["error"]
    assert any(words in line for line in found["said"])


@pytest.mark.parametrize("bind", ["nonsense", "127.0.0.1", "::1:29510", "[::1]", "127.0.0.1:65536", ""])
def test_what_is_no_address_to_listen_at_is_refused(bind: str) -> None:
    from lightning_gqsgd.cli.lighthouse import serve

    with pytest.raises(
        ConfigError, match=r"is not an address; write host:port, e\.g\. 0\.0\.0\.0:29510 or \[::\]:29510"
    ):
        serve(bind, 1, "1s", "1s", print)


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_none_to_listen_at(host: str) -> None:
    from lightning_gqsgd.cli.lighthouse import serve

    with pytest.raises(ConfigError, match="a lighthouse cannot listen there .*; give an address of this machine"):
        serve(f"{host}:29510", 1, "1s", "1s", print)


def test_a_second_lighthouse_at_a_port_is_refused(lighthouse: str) -> None:
    from lightning_gqsgd.cli.lighthouse import serve

    with pytest.raises(ConfigError, match=r"Address already in use .* a port that is free \(0 takes one\)"):
        serve(lighthouse, 1, "1s", "1s", print)


@pytest.mark.parametrize(
    ("join", "heartbeat", "words"),
    [
        ("5", "1s", "--join-timeout='5' is not a time: .*, e.g. --join-timeout='20s'$"),
        ("100us", "1s", "--join-timeout=100us is too short: 1 ms is the least"),
        ("1s", "200ms", "--heartbeat-timeout=200ms is too short: 1000 ms is the least, because members give a sign"),
    ],
)
def test_a_time_that_no_lighthouse_can_keep_is_refused(join: str, heartbeat: str, words: str) -> None:
    from lightning_gqsgd.cli.lighthouse import serve

    with pytest.raises(ConfigError, match=words):
        serve("127.0.0.1:0", 1, join, heartbeat, print)


def test_a_reducer_that_needs_nodes_is_refused_and_not_asked_for_their_size() -> None:
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with pytest.raises(ConfigError, match="ranks come and go; leave it out"):
        LocalSteps(model, optimizer, every="1s", elastic=True, reducer="hierarchical")


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names with which members come to the door, where all of them are refused."""
    from lightning_gqsgd.membership import manager

    seen: list[str] = []

    def refuse(_: str, name: str, *__: object) -> None:
        seen.append(name)
        raise ConfigError("seen")

    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "127.0.0.1:9")
    monkeypatch.setattr(manager, "check_others", refuse)
    return seen


def test_a_member_that_has_compiled_its_model_fits_one_that_has_not(names: list[str]) -> None:
    for compiles in (False, True):
        model = network(0)
        model[0].requires_grad_(False)
        if compiles:
            model[0] = torch.compile(model[0], backend="eager")
            model = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        with pytest.raises(ConfigError, match="seen"):
            LocalSteps(model, optimizer, every="1s", elastic=True)
    assert names[0] == names[1]


def test_a_member_on_a_device_of_another_kind_is_refused_at_the_door(names: list[str]) -> None:
    from lightning_gqsgd.membership.manager import TorchftMembers

    for kind in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match="seen"):
            TorchftMembers(
                make_config(bits=4), {}, dict, device=torch.device(kind), min_replicas=1, patience=20 * SECOND
            )
    assert names[0] != names[1]


@pytest.mark.parametrize("timeout", [timedelta.max, timedelta(0), timedelta(seconds=-1), 5])
def test_a_timeout_that_cannot_be_is_refused_before_a_lighthouse_is_asked(timeout: object) -> None:
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with pytest.raises(ConfigError, match="must be a positive datetime.timedelta of at most 3650 days"):
        LocalSteps(model, optimizer, every="1s", elastic=True, timeout=timeout)  # type: ignore[arg-type]


def _fetch(*_: object) -> dict[str, int]:
    """A state that takes a while."""
    time.sleep(0.05)
    return {"merges": 3}


def test_a_state_that_comes_too_slowly_and_is_old_is_refused_before_anybody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lightning_gqsgd.membership import manager

    merges = 3

    monkeypatch.setattr(manager, "_fetch_present", _fetch)
    monkeypatch.setattr(manager, "merges_at", lambda *_: merges)
    newcomer = manager.TorchftMembers.__new__(manager.TorchftMembers)
    newcomer.timeout = SECOND / 100
    newcomer._lighthouse = "http://127.0.0.1:9"
    # Nobody has merged meanwhile, so that it takes part in their next merge with this state.
    assert newcomer._fetched_present([]) == {"merges": 3}
    merges = 4
    with pytest.raises(ConfigError, match=r"members wait for each other for timeout=0.01 s; give all of them"):
        newcomer._fetched_present([])
    newcomer.timeout = 20 * SECOND
    assert newcomer._fetched_present([]) == {"merges": 3}


def test_a_merge_that_fails_because_a_member_was_closed_asks_nothing_of_what_has_ended() -> None:
    from lightning_gqsgd.membership import manager

    member = manager.TorchftMembers.__new__(manager.TorchftMembers)
    member._manager = object()  # type: ignore[assignment]  # it answers nothing
    member._is_closed = True
    member._fail(RuntimeError("the connection was closed"))


def test_a_lighthouse_says_where_it_listens_and_stays_where_an_answer_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lightning_gqsgd.cli import lighthouse as command

    looks: list[str] = []

    def look(address: str, *_: float) -> list[str]:
        looks.append(address)
        if len(looks) == 1:
            raise ConfigError("no lighthouse answers")
        os.kill(os.getpid(), signal.SIGTERM)
        return ["a"]

    said: list[str] = []
    monkeypatch.setattr(command, "_LOOK_S", 0.01)
    monkeypatch.setattr(command, "members_at", look)
    command.serve("127.0.0.1:0", 1, "1s", "1s", said.append)
    assert said[0].startswith("lighthouse at http://127.0.0.1:")
    assert said[1].endswith(" 1 member: 1 came, 0 went")
    assert looks[1].startswith("http://127.0.0.1:")


def test_a_state_that_takes_longer_than_members_wait_is_an_error_of_who_fetches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torchft.checkpointing.http_transport import HTTPTransport

    from lightning_gqsgd.membership.transport import PlainTransport

    monkeypatch.setattr(HTTPTransport, "recv_checkpoint", _fetch)
    transport = PlainTransport(SECOND, "127.0.0.1", dict)
    assert transport.recv_checkpoint(0, "http://127.0.0.1:1/checkpoint/", 3, 20 * SECOND) == {"merges": 3}
    with pytest.raises(ConfigError, match=r"members wait for each other for timeout=0.01 s; give all of them"):
        transport.recv_checkpoint(0, "http://127.0.0.1:1/checkpoint/", 3, SECOND / 100)
    address = transport.address()
    transport.shutdown()
    with pytest.raises(OSError, match="refused"):
        PlainTransport.fetch_present(address, SECOND)


def test_empty_tensors_travel_with_memory_behind_them_which_torch_before_2_10_needs() -> None:
    from lightning_gqsgd.membership.transport import sendable

    sent = sendable({"merges": 3, "integers": torch.empty(0, 2, dtype=torch.int64), "anchors": {"w": torch.ones(2)}})
    assert sent["merges"] == 3
    assert sent["integers"].dtype == torch.int64
    assert sent["integers"].shape == (0, 2)
    assert sent["integers"].untyped_storage().nbytes() > 0
    assert torch.equal(sent["anchors"]["w"], torch.ones(2))


#: A member on a host whose name reaches no other host. The first one also runs the lighthouse.
_ON_A_HOST = """
import os, time
import torch
from torchft.coordination import LighthouseServer
from lightning_gqsgd import LocalSteps

del os.environ["GLOO_SOCKET_IFNAME"]
address = os.environ["MASTER_ADDR"]
if os.environ["RANK"] == "0":
    server = LighthouseServer(bind=f"{address}:29510", min_replicas=2, join_timeout_ms=10_000, quorum_tick_ms=50)
os.environ["TORCHFT_LIGHTHOUSE"] = f"{address}:29510"
model = torch.nn.Linear(64, 64)
options = {"every": 5, "elastic": True, "min_replicas": 2}
optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.01), **options)
for _ in range(15):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
optimizer.finish()
print("merged", optimizer.samples, float(model.weight.detach().double().sum()), flush=True)
optimizer.close()
time.sleep(3)  # the lighthouse is there until both have left
"""


@needs_root
@pytest.mark.slow
def test_members_merge_between_hosts_whose_names_reach_no_other_host() -> None:
    lab = ["-m", "netlab", "--hosts", "2", "--rate", "1gbit", "--", sys.executable, "-c", _ON_A_HOST]
    shown = ended_well(*lab, timeout=200).stdout
    merged = re.findall(r"merged (\d+) (\S+)", shown)
    assert len(merged) == 2, shown
    assert len({*merged}) == 1, shown
    assert int(merged[0][0]) == 30
