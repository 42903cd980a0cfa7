"""Rounds by the clock: ranks of different speeds, merged with weights, over real processes."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_gqsgd import CollectiveError, ConfigError, LocalSteps
from lightning_gqsgd.local_steps.checkpoint import load_gathered
from lightning_gqsgd.local_steps.merges.averages import MergedAverages
from lightning_gqsgd.local_steps.merges.contribution import Contribution
from lightning_gqsgd.local_steps.merges.fixed import FixedMembers
from lightning_gqsgd.local_steps.merges.merge import merge
from lightning_gqsgd.local_steps.merges.thread import MergeThread
from tests.distributed.local_models import bits_of_model
from tests.distributed.ranks import logged, on_ranks, run, run_alike
from tests.errors import error_text


class Adds(torch.optim.SGD):
    """An optimizer whose every step takes ``lr`` off all parameters, so that a model counts the steps that it has."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter -= group["lr"]


def counting(each: float = 1.0, **fields: Any) -> tuple[nn.Module, LocalSteps]:
    """A model that counts steps, and its optimizer, uncompressed; ``each``: what a step counts."""
    model = nn.Linear(4, 2, bias=False)
    nn.init.zeros_(model.weight)
    given = {"every": "200ms", "outer": "sgd", "bits": 32, **fields}
    return model, LocalSteps(model, Adds(model.parameters(), lr=each), **given)


def network(rank: int) -> nn.Module:
    """A network with buffers of both kinds, of each rank's own."""
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))


def merging(rank: int, every: int | str = "200ms", **fields: Any) -> tuple[nn.Module, LocalSteps, torch.Generator]:
    """A network, its optimizer, and what draws a rank's own data."""
    model = network(rank)
    optimizer = LocalSteps(model, torch.optim.AdamW(model.parameters(), 1e-2), every=every, bits=4, **fields)
    return model, optimizer, torch.Generator().manual_seed(rank)


def train_step(model: nn.Module, optimizer: LocalSteps, generator: torch.Generator, pause_s: float = 0.0) -> float:
    """A step on data of the rank's own; its loss."""
    x = torch.randn(16, 32, generator=generator)
    loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
    loss.backward()
    time.sleep(pause_s)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _unequal(rank: int, delay: int) -> dict[str, Any]:
    model, optimizer, generator = merging(rank, "300ms", delay=delay)
    start = bits_of_model(model)
    losses = []
    while optimizer.samples < 150:
        losses.append(train_step(model, optimizer, generator, 0.02 if rank else 0.002))
    optimizer.finish()
    result = {
        "start": start,
        "end": bits_of_model(model),
        "samples": optimizer.samples,
        "merges": optimizer.averages.averages,
        "steps": optimizer.averages.step,
        "learns": losses[-1] < losses[0],
    }
    optimizer.finish()  # changes nothing
    assert bits_of_model(model) == result["end"]
    optimizer.close()
    return result


@pytest.mark.parametrize("delay", [0, 1])
def test_a_slow_rank_makes_fewer_steps_and_all_have_the_same_bits(delay: int, tmp_path: Path) -> None:
    fast, slow = run(_unequal, 2, tmp_path, delay)
    for name in ("start", "end", "samples", "merges"):
        assert fast[name] == slow[name], name
    assert fast["steps"] > slow["steps"]
    assert fast["steps"] + slow["steps"] == fast["samples"]  # every step is in the model, and none twice
    assert fast["learns"]


@pytest.mark.parametrize("delay", [0, 1])
@on_ranks(1)
def test_each_step_is_in_the_model_once(rank: int, delay: int) -> None:
    model, optimizer = counting(delay=delay)
    for _ in range(40):
        optimizer.step()
        time.sleep(0.02)
        if optimizer.averages.averages:
            assert -float(model.weight.detach().max()) >= optimizer.samples  # what is merged is never lost
    optimizer.finish()
    optimizer.close()
    samples = optimizer.samples
    least = float(model.weight.detach().min())
    most = float(model.weight.detach().max())
    assert (samples, least, most) == (40, -40, -40)


@on_ranks(2)
def test_changes_are_weighted_by_samples(rank: int) -> list[tuple[float, float]]:
    # The weight of a change are its samples: rank 0's steps have 3, those of rank 1 have 1.
    model, optimizer = counting(4.0 if rank else 1.0, every="10s")
    found = []
    for _ in range(3):
        before = model.weight.detach().clone()
        optimizer.add_samples(1 if rank else 3)
        optimizer.step()
        optimizer.finish()
        found.append((float((before - model.weight.detach()).mean()), float(optimizer.samples)))
    optimizer.close()
    for number, (moved, samples) in enumerate(found, 1):
        assert moved == pytest.approx((3 * 1 + 1 * 4) / 4)
        assert samples == 4 * number
    return found


@on_ranks(2)
def test_a_weighted_merge_is_unbiased(rank: int) -> None:
    """How far the mean of many merges is from the weighted mean, in standard errors, at most and in the mean."""
    torch.manual_seed(0)
    model = nn.Linear(64, 32, bias=False)
    fields = {"every": "1h", "outer": "sgd", "bits": 2, "min_numel": 0}
    optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=1.0), **fields)
    averages = optimizer.averages
    thread = averages._thread
    shared = averages._shared
    changes = [torch.randn(2048, generator=torch.Generator().manual_seed(number)) for number in range(2)]
    samples = [5, 1]
    exact = (5 * changes[0] + changes[1]) / 6
    start = torch.zeros(2048)
    total = torch.zeros(2048, dtype=torch.float64)
    squares = torch.zeros(2048, dtype=torch.float64)
    count = 400
    for number in range(1, count + 1):
        with torch.no_grad():
            for anchor in shared.fragment.bundles[0].anchors:
                anchor.zero_()
            shared.version += 1
        mine = Contribution(number, [start], [-changes[rank]], samples[rank], 1, torch.empty(0, dtype=torch.int64))
        with thread.between_merges:
            thread._members.run(merge(shared, thread._member, mine))
        moved = -shared.fragment.bundles[0].flat_anchors().double()
        total += moved
        squares += moved**2
    mean = total / count
    error = ((squares / count - mean**2).clamp_min(1e-12) / count).sqrt()
    z = (mean - exact.double()) / error
    optimizer.close()
    largest = float(z.abs().max())
    assert largest < 5  # of 2,048 coordinates
    assert abs(float(z.mean() * math.sqrt(z.numel()))) < 4


def _poisoned(rank: int, bad: float) -> dict[str, Any]:
    model, optimizer, generator = merging(rank)
    for step in range(30):
        if step == 10 and rank == 2:
            with torch.no_grad():
                next(model.parameters()).view(-1)[3] = bad
        train_step(model, optimizer, generator, 0.02)
    optimizer.finish()
    result = {
        "end": bits_of_model(model),
        "left out": optimizer.averages.left_out,
        "own": optimizer.averages.skipped,
        "is finite": all(bool(p.isfinite().all()) for p in model.parameters()),
        "largest": max(float(p.detach().abs().max()) for p in model.parameters()),
    }
    optimizer.close()
    return result


@pytest.mark.parametrize("bad", [math.nan, 1e6])
def test_a_change_that_is_not_finite_or_much_too_large_is_left_out_by_all(bad: float, tmp_path: Path) -> None:
    results = run(_poisoned, 3, tmp_path, bad)
    assert len({result["end"] for result in results}) == 1
    assert {result["left out"] for result in results} == {1}
    assert [result["own"] for result in results] == [0, 0, 1]
    assert all(result["is finite"] and result["largest"] < 100 for result in results)


def _scheduled(rank: int) -> dict[str, Any]:
    """The fast rank is at the end of its schedule when the slow one has just begun."""
    model, optimizer = counting(each=1.0)
    for step in range(10 if rank else 60):
        if step == 10:
            optimizer.param_groups[0]["lr"] = 1e-6
        optimizer.step()
        time.sleep(0.12 if rank else 0.02)
    optimizer.finish()
    optimizer.close()
    return {"end": bits_of_model(model), "left out": optimizer.averages.left_out}


def test_a_slow_rank_is_no_outlier_when_the_learning_rate_of_a_fast_one_ends_near_zero(tmp_path: Path) -> None:
    fast, slow = run(_scheduled, 2, tmp_path)
    assert fast["end"] == slow["end"]
    assert fast["left out"] == slow["left out"] == 0


def _late(rank: int) -> dict[str, Any]:
    model, optimizer = counting(every="200ms")
    longest = 0.0
    for step in range(20):
        if rank and step == 3:
            time.sleep(1.5)  # a checkpoint, or an epoch of validation
        before = time.monotonic()
        optimizer.step()
        longest = max(longest, time.monotonic() - before)
        time.sleep(0.02 if rank else 0.1)
    merges = optimizer.averages.averages
    optimizer.finish()
    optimizer.close()
    return {"longest": longest, "samples": optimizer.samples, "bits": bits_of_model(model), "merges": merges}


def test_nobody_waits_for_a_rank_that_is_late_and_what_it_learns_is_not_lost(tmp_path: Path) -> None:
    fast, late = run(_late, 2, tmp_path)
    assert fast["bits"] == late["bits"]
    assert fast["samples"] == 40
    assert fast["merges"] > 5  # those of the time in which the other rank slept


@on_ranks(2)
def test_a_run_continues_from_its_state(rank: int, tmp_path: Path) -> list[str]:
    folder = str(tmp_path)
    model, optimizer, generator = merging(rank)
    for _ in range(20):
        train_step(model, optimizer, generator, 0.02)
    optimizer.finish()
    path = Path(folder) / f"{rank}.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    samples = optimizer.samples
    end = bits_of_model(model)
    optimizer.close()
    saved = torch.load(path, weights_only=True)
    again, other, _ = merging(rank + 5)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert other.samples == samples
    assert bits_of_model(again) == end
    for _ in range(10):
        train_step(again, other, generator, 0.02)
    other.finish()
    assert other.samples == samples + 20
    other.close()
    result = [end, bits_of_model(again)]
    assert result[0] != result[1]
    return result


@on_ranks(1)
def test_a_state_of_another_kind_is_refused(rank: int) -> None:
    problems = []
    model = network(rank)
    by_steps = LocalSteps(model, torch.optim.SGD(model.parameters(), 1e-2), every=4, bits=4)
    state = by_steps.state_dict()
    optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), 1e-2), every="1s", bits=4)
    mine = optimizer.state_dict()
    turned = "this run has a number of steps between averages"
    assert turned in error_text(ConfigError, by_steps.load_state_dict, mine)
    assert turned in error_text(ConfigError, load_gathered, by_steps.averages, mine["local_steps"], [])
    by_steps.close()
    merged = mine["local_steps"]["merged"]
    bits = bits_of_model(model)
    anchors = {name: anchor + 1 for name, anchor in merged["anchors"].items()}
    damaged = {**merged, "anchors": anchors, "merges": 7}
    for bad in ({"merges": 3}, {**damaged, "counted": {"1": 5}}, {**damaged, "mean_steps": math.inf}, {"merges": -1}):
        whole = {**mine, "local_steps": {**mine["local_steps"], "merged": bad}}
        problems.append(error_text(ConfigError, optimizer.load_state_dict, whole))
    problems.append(error_text(ConfigError, optimizer.load_state_dict, state))
    with pytest.raises(ConfigError, match="not that of this run's optimizers"):
        optimizer.load_state_dict({**mine, "param_groups": []})
    assert bits_of_model(model) == bits
    assert optimizer.averages.averages == mine["local_steps"]["merged"]["merges"]
    with pytest.raises(ConfigError, match="call finish"):
        optimizer.leave()
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(ConfigError, match="before LocalSteps is made"):
        optimizer.step()
    optimizer.close()
    words = ("samples=None", "counted={'1': 5}", "mean_steps=inf", "merges=-1", "merges by the clock")
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


@pytest.mark.parametrize(("kind", "name"), [(MergedAverages, "_go_on_from_anchors"), (MergeThread, "hand_over")])
@on_ranks(1)
def test_after_an_interrupt_in_a_merge_no_change_is_counted_twice(rank: int, kind: type, name: str) -> None:
    """An interrupt comes at the end of a part of a merge, and the training goes on."""
    model, optimizer, generator = merging(0, "50ms")
    part = getattr(kind, name)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        part(*args, **kwargs)
        raise KeyboardInterrupt

    def train() -> None:
        for _ in range(1000):
            train_step(model, optimizer, generator, 0.01)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            train()
    before = bits_of_model(model)
    with pytest.raises(RuntimeError, match="was closed"):
        optimizer.finish()
    assert bits_of_model(model) == before


@on_ranks(2)
def test_a_state_cannot_be_loaded_over_steps_that_are_not_merged(rank: int) -> list[str]:
    model, optimizer, generator = merging(rank, "5s")
    saved = optimizer.state_dict()
    train_step(model, optimizer, generator, 0.0)
    refused = error_text(ConfigError, optimizer.load_state_dict, saved)
    optimizer.finish()
    optimizer.load_state_dict(saved)
    optimizer.close()
    one = [refused, bits_of_model(model)]
    assert "load it before the first step, or call finish() first" in one[0]
    return one


@on_ranks(2)
def test_a_state_that_goes_back_to_an_earlier_step_can_be_trained_to_the_same_step_again(rank: int) -> list[str]:
    """Bits after three steps from the start, and after the same steps again, from the loaded state of the start."""
    model, optimizer = counting(every="5s")
    start = optimizer.state_dict()
    bits = []
    for _ in range(2):
        for _ in range(3):
            optimizer.step()
        optimizer.finish()
        bits.append(bits_of_model(model))
        optimizer.load_state_dict(start)
    optimizer.finish()  # without a step since the state was loaded
    optimizer.step()
    optimizer.finish()
    bits.append(bits_of_model(model))
    optimizer.close()
    assert bits[0] == bits[1] != bits[2]
    return bits


@on_ranks(2, collective_timeout=10)
def test_a_rank_that_has_made_no_step_since_it_finished_takes_part_when_the_others_finish_again(rank: int) -> str:
    model, optimizer = counting(every="5s")
    optimizer.step()
    optimizer.finish()
    for _ in range(0 if rank else 3):  # this rank has no more data
        optimizer.step()
    optimizer.finish()
    assert optimizer.samples == 5
    optimizer.close()
    return bits_of_model(model)


def _closed_in_a_merge(rank: int) -> str:
    """The other rank is late for a merge, in which this one closes."""
    answer = FixedMembers.answer

    def answer_late(members: FixedMembers, request: Any) -> Any:
        time.sleep(2)
        return answer(members, request)

    with pytest.MonkeyPatch.context() as patch:
        model, optimizer = counting(every="100ms")
        if rank:
            patch.setattr(FixedMembers, "answer", answer_late)
        optimizer.step()
        time.sleep(2 if rank else 1)
        optimizer.close()
        assert isinstance(optimizer.averages, MergedAverages)
        optimizer.averages._thread._thread.join(30)
        return error_text(RuntimeError, optimizer.step)


def test_a_step_after_close_names_close_also_where_a_merge_was_under_way(tmp_path: Path) -> None:
    text, _ = run(_closed_in_a_merge, 2, tmp_path)
    assert "this LocalSteps was closed" in text


def _one_dies(rank: int) -> str:
    model, optimizer, generator = merging(rank)
    for step in range(200):
        if rank and step == 5:
            os._exit(1)
        try:
            train_step(model, optimizer, generator, 0.02)
        except CollectiveError as error:
            with pytest.raises(CollectiveError):
                optimizer.finish()
            optimizer.close()
            return str(error)
    return "no error"


def test_a_dead_rank_of_a_process_group_is_an_error_on_the_others(tmp_path: Path) -> None:
    message, _ = run(_one_dies, 2, tmp_path, dies=(1,))
    assert "failed on rank 0 of 2" in message
    assert "merge" in message


def _stands_still(rank: int) -> str:
    """Training ends with an error on rank 1, whose process goes on. Rank 2 trains for longer than others wait."""
    model, optimizer, generator = merging(rank)
    optimizer.averages._members.patience_s = 2.0
    for _ in range(20 if rank < 2 else 150):
        train_step(model, optimizer, generator, 0.02)
    if rank == 1:
        deadline = time.monotonic() + 60
        while not optimizer.averages.is_closed and time.monotonic() < deadline:
            time.sleep(0.1)
        return error_text(CollectiveError, optimizer.step)
    assert not optimizer.averages.is_closed  # nobody stops a rank that trains
    return error_text(CollectiveError, optimizer.finish)


def test_ranks_that_have_finished_name_the_rank_that_makes_no_more_steps(tmp_path: Path) -> None:
    text = run_alike(_stands_still, 3, tmp_path)
    assert "finish() has waited for rank 1 (" in text
    assert "made no step for 2 s and did not call finish()" in text


def _counts_once(rank: int) -> tuple[str, list[str]]:
    said = logged()
    model, optimizer = counting(every="100ms")
    for step in range(12):
        if not step:
            optimizer.add_samples(64)
        optimizer.step()
        time.sleep(0.05)
    optimizer.finish()
    optimizer.close()
    return bits_of_model(model), said


def test_steps_whose_samples_are_not_counted_are_said_to_weigh_nothing(tmp_path: Path) -> None:
    (bits, said), (others, _) = run(_counts_once, 2, tmp_path)
    assert bits == others
    assert len([text for text in said if "add_samples has counted 0 samples in" in text]) == 1


@on_ranks(2)
def test_ranks_with_other_rounds_refuse_each_other(rank: int) -> None:
    text = error_text(ConfigError, merging, rank, "1s" if rank else "2s")
    assert "do not agree: every" in text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"every": "20 parsecs"}, "is not a time.* a number of steps is an integer, e.g. every=32"),
        ({"every": "0s"}, "out of range"),
        ({"every": "1s", "fragments": 2}, "fragments=2"),
        ({"every": "1s", "inner_state": "average"}, "different numbers of steps"),
        ({"every": "1s", "rule": "censored"}, "weighted by samples"),
        ({"every": "1s", "outlier": 0.5}, "outlier"),
        ({"every": "1s", "outlier": math.nan}, "outlier"),
        ({"every": "1s", "min_replicas": 0}, "min_replicas"),
        ({"every": "1s", "min_replicas": 2}, "is for elastic=True"),
        ({"every": 4, "elastic": "yes"}, "elastic"),
        ({"every": 4, "outlier": 5.0}, "is for rounds by the clock"),
        ({"every": "1s", "preset": "gqsgd_sparseloco"}, "give memory='none', or a number of steps for every"),
        ({"every": "1s", "preset": "gqsgd_muloco"}, "give memory='none' and memory_down='none', or"),
        ({"every": "1s", "preset": "gqsgd_muloco", "memory": "none"}, "give memory_down='none', or"),
    ],
)
def test_values_that_cannot_work_are_named(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = network(0)
        with pytest.raises(ConfigError, match=words):
            LocalSteps(model, torch.optim.SGD(model.parameters(), 1e-2), **{"bits": 4, **fields})
    finally:
        dist.destroy_process_group()


@on_ranks(1)
def test_samples_are_for_rounds_by_the_clock(rank: int) -> None:
    _, optimizer, _ = merging(rank, 2)
    text = error_text(ConfigError, lambda: optimizer.samples)
    optimizer.close()
    assert "all ranks make equally many steps" in text


def _changes_model(rank: int) -> str:
    model, optimizer, generator = merging(rank)
    for step in range(200):
        if rank and step == 5:
            model[0].add_module("more", nn.Linear(2, 2))
        try:
            train_step(model, optimizer, generator, 0.02)
        except (ConfigError, CollectiveError) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_model_that_one_rank_changes_is_an_error_on_all(tmp_path: Path) -> None:
    other, changed = run(_changes_model, 2, tmp_path, collective_timeout=15)
    assert "parameters were added to the model" in changed
    assert "CollectiveError" in other


def _forks(rank: int) -> list[str]:
    model, optimizer = counting(every="1s")
    optimizer.step()
    reader, writer = os.pipe()
    is_merging = threading.Event()

    def hold() -> None:
        with optimizer.averages._shared.lock:
            is_merging.set()
            time.sleep(0.5)

    threading.Thread(target=hold).start()
    is_merging.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # which ends this process
        for use in (optimizer.step, optimizer.state_dict, optimizer.averages.at_anchor().__enter__):
            try:
                use()
            except RuntimeError as error:
                os.write(writer, f"{error}\n".encode())
        optimizer.close()  # does nothing to the parent's threads and connections
        os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reader, 10_000).decode()
    optimizer.step()
    optimizer.finish()
    optimizer.close()
    return [said, str(optimizer.samples)]


def test_a_fork_cannot_step_and_leaves_its_parent_alone(tmp_path: Path) -> None:
    for said, samples in run(_forks, 2, tmp_path):
        assert said.count("forked") == 3
        assert samples == "4"
