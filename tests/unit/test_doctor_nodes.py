"""What `gqsgd doctor --nodes` makes of launchers and interfaces."""

from __future__ import annotations

import json
import socket
from itertools import combinations
from pathlib import Path

import pytest

from lightning_gqsgd.cli import doctor_nodes
from lightning_gqsgd.cli.doctor_interfaces import Interface, address_of, busiest, interfaces, warnings
from lightning_gqsgd.cli.doctor_nodes import Findings, Host, Pair, rounds
from lightning_gqsgd.cli.places import Place, first_node, place_of, torchruns_variables
from lightning_gqsgd.errors import ConfigError

LO = Interface("lo", "127.0.0.1", None, 0, True)
SLOW = Interface("eth0", "10.0.0.1", 1000, 0, False)
FAST = Interface("ib0", "10.1.0.1", 100_000, 0, False)
DOCKER = Interface("docker0", "172.17.0.1", 10_000, 0, True)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (
            {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1234", "SLURM_PROCID": "0"},
            Place("torchrun or its like", 1, 4, "a", 1234),
        ),
        (
            {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_NODELIST": "gpu[03-05]"},
            Place("srun", 2, 3, "gpu03", 29500),
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "123456"},
            Place("srun", 0, 2, "a", 18456),
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"},
            Place("mpirun (Open MPI)", 0, 2, "10.0.0.1", 29500),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "h"}, Place("mpirun (MPICH)", 1, 2, "h", 29500)),
    ],
)
def test_the_place_of_a_rank_is_known_under_every_launcher(environment: dict[str, str], place: Place) -> None:
    assert place_of(environment) == place


@pytest.mark.parametrize(
    ("environment", "variables"),
    [
        (
            {
                **{"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_JOB_NODELIST": "gpu[03-04]"},
                **{"SLURM_JOB_ID": "7", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"},
            },
            ["9", "16", "gpu03", "15007", "1", "8"],
        ),
        (
            {
                **{"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "12", "SLURM_JOB_NODELIST": "a,b"},
                **{"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "8,4"},
            },
            ["0", "12", "a", "29500", "0", None],
        ),
        (
            {
                **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "h"},
                **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            },
            ["1", "2", "h", "29500", "1", "2"],
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6"}, [None] * 6),
    ],
)
def test_every_launcher_gives_what_torchrun_gives(environment: dict[str, str], variables: list[str | None]) -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [torchruns_variables(environment).get(name) for name in names] == variables


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "none has started this process; type on each node e.g. torchrun"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "none has started this process; .* srun gqsgd doctor --nodes"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"}, "WORLD_SIZE=1: one rank has no other to send to"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, r"mpirun \(MPICH\) does not say where rank 0 is; set MASTER_ADDR"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK='x' is not a number"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "70000"},
            "MASTER_PORT='70000' is not a port; take a number from 1 to 65535",
        ),
    ],
)
def test_a_launch_that_cannot_be_measured_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place_of(environment)


def test_a_port_of_another_process_is_named_and_not_the_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(
            ConfigError, match=rf"rank 0 on .* cannot listen at port {port}, .* set MASTER_PORT to a free"
        ):
            doctor_nodes.examine()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-07,12],login1", "gpu03"), ("gpu[3,5]-ib", "gpu3-ib"), ("alone", "alone"), ("a,b", "a")],
)
def test_the_first_of_slurms_nodes(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_interfaces_are_read_from_the_system(tmp_path: Path) -> None:
    described = {"eth0": ("up", "25000"), "docker0": ("up", "-1"), "eth1": ("down", "1000"), "br7": ("up", "10000")}
    for name, (state, speed) in described.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
        (tmp_path / name / "speed").write_text(f"{speed}\n")
    (tmp_path / "br7" / "bridge").mkdir()
    counters = tmp_path / "dev"
    head = "Inter-|   Receive  |  Transmit\n face |bytes packets | bytes packets\n"
    counters.write_text(head + "".join(f"{name}: 1 2 3 4 5 6 7 8 {n} 10\n" for n, name in enumerate(described)))
    found = {each.name: each for each in interfaces(tmp_path, counters)}
    assert list(found) == ["eth0", "docker0", "br7"]
    assert [(each.mbit, each.sent, each.of_one_host) for each in found.values()] == [
        (25000, 0, False),
        (None, 1, True),
        (10000, 3, True),
    ]
    assert (found["eth0"].speed, found["docker0"].speed) == ("25 Gbit/s", "not known")


def test_an_interface_without_an_ipv4_address_is_shown_with_its_ipv6_address(tmp_path: Path) -> None:
    table = tmp_path / "if_inet6"
    link, unique = "fe80" + 27 * "0" + "1", "fd77" + 27 * "0" + "2"
    table.write_text(f"{link} 02 40 20 80     eth9\n{unique} 02 40 00 80     eth9\n{unique} 03 40 00 80     eth8\n")
    assert address_of("eth9", table) == "fd77::2"
    assert address_of("eth7", table) is None
    assert address_of("lo", table) == "127.0.0.1"


def test_the_interface_in_use_is_the_one_whose_counter_grows() -> None:
    later = [LO, Interface("eth0", "10.0.0.1", 1000, 900, False), Interface("ib0", "10.1.0.1", 100_000, 20, False)]
    used = busiest([LO, SLOW, FAST], later)
    assert used is not None
    assert used.name == "eth0"
    assert busiest([LO, SLOW], [LO, SLOW]) is None
    # An interface that has appeared meanwhile has an unknown past.
    assert busiest([LO], [LO, later[1]]) is None


def test_traffic_over_the_slower_network_or_over_none_is_a_warning() -> None:
    (slower,) = warnings("n0", SLOW, [LO, SLOW, FAST, DOCKER], is_alone=False)
    assert "traffic takes eth0 (1 Gbit/s), and ib0 (100 Gbit/s) is up" in slower
    assert "set GLOO_SOCKET_IFNAME=ib0 and NCCL_SOCKET_IFNAME=ib0" in slower
    for used in (DOCKER, LO):
        (inside,) = warnings("n0", used, [LO, SLOW, DOCKER], is_alone=False)
        assert f"traffic takes {used.name}, which is for containers of one host; set GLOO_SOCKET_IFNAME=eth0" in inside
    assert not warnings("n0", FAST, [LO, SLOW, FAST, DOCKER], is_alone=False)
    assert not warnings("n0", LO, [LO, SLOW, FAST], is_alone=True)
    assert not warnings("n0", None, [LO, SLOW], is_alone=False)
    assert not warnings("n0", SLOW, [SLOW, Interface("eth1", None, 10_000, 0, False)], is_alone=False)


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_rounds_have_every_pair_once_and_no_rank_twice(count: int) -> None:
    plan = rounds(range(count))
    assert sorted(pair for pairs in plan for pair in pairs) == list(combinations(range(count), 2))
    for pairs in plan:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len({*ranks})


def test_each_host_is_warned_of_once_and_its_ranks_share_what_one_has_measured() -> None:
    hosts = [Host(rank, "n", f"{rank // 2}", None if rank % 2 else SLOW, (LO, SLOW, FAST), "1") for rank in range(4)]
    assert [Host.of(json.loads(json.dumps(host))) for host in hosts] == hosts
    findings = Findings(Place("torchrun", 0, 4, "a", 1), hosts, [Pair(0, 2, 1e-4, 1e9)])
    assert len(doctor_nodes.warnings(findings)) == 2
    assert doctor_nodes.opening(findings) == "4 ranks on 2 hosts, started by torchrun; they met at a:1"
    by_address = findings._replace(place=Place("torchrun", 0, 4, "fd77::1", 29501))
    assert doctor_nodes.opening(by_address).endswith("they met at [fd77::1]:29501")
    ranks, pairs = doctor_nodes.tables(findings)
    assert (ranks.row_count, pairs.row_count) == (4, 1)


def test_ranks_with_other_software_are_named() -> None:
    software = ["a 1, torch 2", "a 1, torch 2", "a 0, torch 2"]
    hosts = [Host(rank, f"n{rank}", "", FAST, (LO, FAST), name) for rank, name in enumerate(software)]
    (line,) = doctor_nodes.warnings(Findings(Place("srun", 0, 3, "a", 1), hosts, []))
    assert line == (
        "ranks run different software (ranks 0 and 1: a 1, torch 2; rank 2: a 0, torch 2): "
        "install the same versions on all hosts"
    )
