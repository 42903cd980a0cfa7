"""torchft's process group with quantised all-reduces: sums, ranks that change, errors, and torchft's own trainings."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_gqsgd import CollectiveError, ConfigError
from lightning_gqsgd.wire.engine import Engine
from lightning_gqsgd.wire.processors import Place
from tests.distributed import torchft_replicas as replicas
from tests.distributed.ranks import on_ranks, run, run_alike
from tests.errors import error_text
from tests.marks import skip_without_torchft

skip_without_torchft()


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a store in which ranks meet."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store  # ranks need it until here


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """The address of a lighthouse."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="0.0.0.0:0",
        min_replicas=1,
        join_timeout_ms=2000,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=2000,
    )
    yield server.address()
    server.shutdown()


def _reduce_everything(rank: int, port: int) -> dict[str, Any]:
    group = replicas.process_group()
    replicas.configure(group, rank, 3, port, "first")
    transposed = replicas.values(rank).view(100, 200).t()
    results: dict[str, Any] = {
        "sum": replicas.reduce(group, replicas.values(rank)),
        "mean": replicas.reduce(group, replicas.values(rank), dist.ReduceOp.AVG),
        "transposed": replicas.reduce(group, transposed).t().reshape(-1),
    }
    results["bytes"] = sum(counters.bytes_sent for counters in group.telemetry.buckets.values())
    results["bf16"] = replicas.reduce(group, replicas.values(rank, dtype=torch.bfloat16))
    results["few"] = replicas.reduce(group, replicas.values(rank, 10))
    results["integers"] = replicas.reduce(group, torch.tensor([rank, 2]))
    results["largest"] = replicas.reduce(group, torch.tensor([float(rank)]), dist.ReduceOp.MAX)
    group.barrier(dist.BarrierOptions()).wait()
    return {name: _sent(result) for name, result in results.items()}


def _sent(result: Any) -> Any:
    """A tensor in a form that outlives its process."""
    return result.float().contiguous().numpy() if isinstance(result, torch.Tensor) else result


def _received(result: Any) -> Any:
    return result if isinstance(result, int) else torch.from_numpy(result)


def test_sums_and_means_travel_quantised_and_everything_else_as_it_is(tmp_path: Path, port: int) -> None:
    answers = run(_reduce_everything, 3, tmp_path, port, initialise=False)
    first, *others = [{name: _received(result) for name, result in answer.items()} for answer in answers]
    for name in ("sum", "mean", "transposed", "bf16", "few", "integers", "largest"):
        assert all(torch.equal(other[name], first[name]) for other in others), name
    exact = sum(replicas.values(rank) for rank in range(3))
    for result in (first["sum"], 3 * first["mean"], first["transposed"], first["bf16"].float()):
        assert 0 < float((result - exact).norm() / exact.norm()) < 0.2
    # Three tensors; each goes through two exchanges of 2/3 of its codes, 4 bits of each coordinate and the scales.
    codes = 3 * 2 * 20_000 * 2 / 3 / 2
    assert codes < first["bytes"] < 1.1 * codes
    torch.testing.assert_close(first["few"], sum(replicas.values(rank, 10) for rank in range(3)))
    assert first["integers"].tolist() == [3, 6]
    assert first["largest"].tolist() == [2.0]


def _change_ranks(rank: int, port: int) -> list[Any]:
    group = replicas.process_group()
    replicas.configure(group, rank, 3, port, "all")
    results = [replicas.reduce(group, replicas.values(rank))]
    if rank != 1:  # the others go on without this rank, in another order
        replicas.configure(group, 1 if rank == 0 else 0, 2, port, "two of them")
        results.append(replicas.reduce(group, replicas.values(rank)))
        group.barrier(dist.BarrierOptions()).wait()
    replicas.configure(group, rank, 3, port, "all again")
    results.append(replicas.reduce(group, replicas.values(rank)))
    group.barrier(dist.BarrierOptions()).wait()
    return [_sent(result) for result in results]


def test_the_engine_is_made_anew_for_other_ranks_and_uses_no_dither_twice(tmp_path: Path, port: int) -> None:
    answers = run(_change_ranks, 3, tmp_path, port, initialise=False)
    first, second, third = [[_received(result) for result in answer] for answer in answers]
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], third[1])
    assert torch.equal(first[2], second[1])
    of_two = replicas.values(0) + replicas.values(2)
    assert float((first[1] - of_two).norm() / of_two.norm()) < 0.2
    assert not torch.equal(first[0], first[2])  # the same tensors on the same ranks, in another call


def _places(rank: int, port: int) -> list[Any]:
    """The places with which a rank makes the engine of its second group, whose kernels are compiled."""
    from lightning_gqsgd.membership import process_group as module

    given = []

    def engine(*arguments: Any, **named: Any) -> Engine:
        given.append([list(place) for place in named["places"]])
        return Engine(*arguments, **named)

    patch = pytest.MonkeyPatch()
    patch.setattr(module, "Engine", engine)
    patch.setattr(module, "own_place", lambda: Place(f"machine {rank}", "", "f0"))
    group = replicas.process_group()
    for name in ("first", "second"):
        replicas.configure(group, rank, 2, port, name)
    group.barrier(dist.BarrierOptions()).wait()
    return given


def test_ranks_of_later_groups_know_which_machines_the_others_are_on(tmp_path: Path, port: int) -> None:
    both = [["machine 0", "", "f0"], ["machine 1", "", "f0"]]
    assert run(_places, 2, tmp_path, port, initialise=False) == [[both], [both]]


def _lose_a_rank(rank: int, port: int) -> tuple[str, bool, bool, bool]:
    group = replicas.process_group(10 * replicas.SECONDS)
    replicas.configure(group, rank, 2, port, "both")
    replicas.reduce(group, replicas.values(rank))
    if rank == 1:
        os._exit(0)
    tensor = replicas.values(rank)
    failure = error_text(CollectiveError, replicas.reduce, group, tensor)
    had_error = group.errored() is not None
    replicas.configure(group, 0, 1, port, "alone")
    alone = replicas.reduce(group, replicas.values(rank))
    return failure, bool(tensor.isnan().all()), had_error, torch.equal(alone, replicas.values(rank))


def test_a_rank_that_dies_is_an_error_until_the_others_are_configured_anew(tmp_path: Path, port: int) -> None:
    message, is_nan, had_error, goes_on = run(_lose_a_rank, 2, tmp_path, port, initialise=False, dies=(1,))[0]
    assert "rank 0 of 2" in message
    assert is_nan
    assert had_error
    assert goes_on


def test_a_rank_goes_on_to_others_while_old_connections_end(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    module = "lightning_gqsgd.membership.process_group"
    group = replicas.process_group()
    replicas.configure(group, 0, 1, port, "first")
    (engine,) = group._engines
    close = engine.close
    monkeypatch.setattr(engine, "close", lambda: ended.wait(30) and close())
    replicas.configure(group, 0, 1, port, "second")
    assert group._engines not in ([], [engine])
    assert torch.equal(replicas.reduce(group, torch.ones(4)), torch.ones(4))
    monkeypatch.setattr(f"{module}._CLOSE_S", 0.0)
    group.shutdown()  # its wait has an end
    assert not ended.is_set()
    ended.set()


@on_ranks(2, initialise=False)
def test_ranks_that_do_not_go_together_are_told_so(rank: int, port: int) -> None:
    group = replicas.process_group(bits=4 + rank)
    at_the_door = error_text(ConfigError, replicas.configure, group, rank, 2, port, "different bits")
    group = replicas.process_group()
    replicas.configure(group, rank, 2, port, "the same bits")
    tensor = replicas.values(0, 20_000 + rank)
    other_tensor = error_text(ConfigError, replicas.reduce, group, tensor)
    is_unchanged = torch.equal(tensor, replicas.values(0, 20_000 + rank))
    assert "bits" in at_the_door
    assert "numel" in other_tensor
    assert is_unchanged


@on_ranks(4, initialise=False)
def test_all_ranks_hear_of_one_whose_compression_cannot_work_for_so_many(rank: int, port: int) -> None:
    # Sums of 2 bits have room for three ranks.
    group = replicas.process_group(**({"bits": 2, "scale": "global"} if rank == 1 else {}))
    words = error_text(ConfigError, replicas.configure, group, rank, 4, port, "one cannot work")
    assert "at most 3 ranks, not 4" in words
    assert rank == 1 or "rank 1" in words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"preset": "signsgd_ef"}, "memory='none' and memory_down='none'"),
        ({"warmup_steps": 5}, "warmup_steps=5"),
        ({"reducer": "hierarchical", "node_size": 2}, "come and go"),
        ({"reducer": "hierarchical"}, "come and go"),
        ({"bits": "auto"}, "give one of bits="),
    ],
)
def test_configurations_that_cannot_work_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replicas.process_group(**fields)


def test_kernels_are_compiled_in_advance_for_no_more_ranks_than_can_add_their_codes() -> None:
    group = replicas.process_group(reducer="sum", bits=2)
    group.compile_for(8)
    assert {(config.reducer, config.bits) for config, _ in group._compiled} == {("sum", 2)}


def test_what_torchft_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchft.process_group import ProcessGroupDummy, ProcessGroupGloo

    from lightning_gqsgd import quantised

    with pytest.raises(ConfigError, match=r"give torchft.ProcessGroupGloo\(\)"):
        quantised(ProcessGroupDummy(0, 1))
    monkeypatch.setattr(dist.ProcessGroupGloo, "_Options", object)  # of an older torch
    with pytest.raises(ConfigError, match="does not have; update torch"):
        quantised(ProcessGroupGloo())


def test_survivors_go_on_and_a_newcomer_has_their_parameters(tmp_path: Path, lighthouse: str) -> None:
    first, _, newcomer = run(replicas.ddp_with_a_death, 3, tmp_path, lighthouse, tmp_path, initialise=False, dies=(1,))
    both = first.keys() & newcomer.keys()
    assert len(both) >= 3
    assert all(first[step] == newcomer[step] for step in both)
    assert min(first) < min(both)  # also with the one that has died


@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo"])
def test_replicas_are_equal_after_local_steps(kind: str, tmp_path: Path, lighthouse: str) -> None:
    (first, sent), (second, _) = run(replicas.local_steps, 2, tmp_path, lighthouse, kind, initialise=False)
    assert first == second
    # Three averages of 2048 weights at 4 bits and 324 other parameters at 32; uncompressed there were 3 * 2372 * 4.
    assert 0 < sent < 3 * 2372 * 4 / 2


def test_replicas_of_sharded_models_are_equal(tmp_path: Path, lighthouse: str) -> None:
    run_alike(replicas.sharded, 2, tmp_path, lighthouse, tmp_path, initialise=False)
