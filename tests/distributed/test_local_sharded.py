"""Local steps of replicas that FSDP2 has sharded, against the same of whole replicas."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_gqsgd import LocalSteps
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.local_steps.sharding import divided_like
from tests.bits import bits_of
from tests.distributed.models import loss_of, mlp
from tests.distributed.ranks import logged, on_ranks, run
from tests.integrations.fsdp_models import mesh, needs_fsdp_hooks, sharded, weight_bits

pytestmark = [needs_fsdp_hooks, pytest.mark.slow]

EXACT = {"reducer": "native", "outer": "sgd"}


def local_steps(model: nn.Module, on: DeviceMesh, **arguments: Any) -> LocalSteps:
    """With AdamW, over the replicas of a mesh."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return LocalSteps(model, optimizer, **{"every": 3, "group": on["replicate"].get_group(), **arguments})


def train(model: nn.Module, steps: LocalSteps, on: DeviceMesh, numbers: range) -> None:
    """Every rank has its own data."""
    data = on["replicate"].get_local_rank() * on["shard"].size() + on["shard"].get_local_rank()
    for number in numbers:
        loss_of(model, data, number).backward()
        steps.step()
        steps.zero_grad()


def _whole_replicas() -> list[torch.Tensor]:
    """The parameters after 7 steps of two replicas of two ranks each, which are averaged every 3 steps and at last."""
    replicas = [mlp(), mlp()]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in replicas]
    for number in range(7):
        for replica, (model, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            sum(loss_of(model, 2 * replica + shard, number) for shard in range(2)).div(2).backward()
            optimizer.step()
            optimizer.zero_grad()
        if number in (2, 5, 6):
            with torch.no_grad():
                for one, other in zip(*(list(model.parameters()) for model in replicas), strict=True):
                    one.add_(other).div_(2)
                    other.copy_(one)
    return list(replicas[0].parameters())


def _against_whole(rank: int) -> list[str]:
    on = mesh(2)
    expected = _whole_replicas()
    found = []
    for fields in ({**EXACT}, {"bits": 8, "outer": "sgd"}, {"bits": 4, "fragments": 2, "delay": 1}):
        model = sharded(on["shard"])
        steps = local_steps(model, on, **fields)
        train(model, steps, on, range(4))
        with steps.averages.at_anchor(), torch.no_grad():
            at_anchor = float(loss_of(model, 0, 0))
        own = float(loss_of(model, 0, 0))
        assert at_anchor != own
        train(model, steps, on, range(4, 7))
        steps.finish()
        if fields == EXACT:
            for parameter, other in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.full_tensor(), other, rtol=0, atol=1e-6)
        found += [f"{at_anchor:.6f}", weight_bits(model)]
        steps.close()
    return found


def test_replicas_are_averaged_shard_by_shard(tmp_path: Path) -> None:
    first, *others = run(_against_whole, 4, tmp_path)
    assert others == [first] * 3


@on_ranks(4)
def test_a_run_resumes_to_the_same_bits(rank: int) -> None:
    on = mesh(2)
    model = sharded(on["shard"])
    steps = local_steps(model, on, bits=4)
    train(model, steps, on, range(5))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "steps": steps.state_dict()}, file)
    train(model, steps, on, range(5, 8))
    steps.close()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = sharded(on["shard"])
    resumed = local_steps(again, on, bits=4)
    again.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["steps"])
    train(again, resumed, on, range(5, 8))
    others: list[Any] = [{**saved["steps"]["local_steps"], "shard": name} for name in ("shard 7 of 9", "shard 0 of 1")]
    for other in others:
        with pytest.raises(ConfigError, match=rf"the state is that of '{other['shard']}' .* this rank has 'shard"):
            resumed.load_state_dict({**saved["steps"], "local_steps": other})
    resumed.close()
    before, after = [bits_of(p.to_local() for p in one.parameters()) for one in (model, again)]
    assert before == after


#: Runs whose states have all kinds of tensors: an outer momentum, an average under way, a step counter, bf16 anchors.
RUNS: list[dict[str, Any]] = [
    {"bits": 4},
    {"bits": 4, "outer_after": 0, "fragments": 2, "delay": 2},
    {"bits": 8, "outer": torch.optim.Adam, "anchor_dtype": torch.bfloat16},
]


def _named(on: DeviceMesh, model: nn.Module, steps: LocalSteps) -> dict[str, Any]:
    """What torch.distributed.checkpoint saves, or loads into, under the replica's name."""
    weights, state = get_state_dict(model, steps)
    return {f"replica{on['replicate'].get_local_rank()}": {"model": weights, "optimizer": state}}


def _load(on: DeviceMesh, model: nn.Module, steps: LocalSteps, folder: Path) -> None:
    named = _named(on, model, steps)
    dcp.load(named, checkpoint_id=folder)
    (own,) = named.values()
    set_state_dict(model, steps, model_state_dict=own["model"], optim_state_dict=own["optimizer"])


def _whole(steps: LocalSteps) -> str:
    """The bits of all anchors and of the outer optimizer's tensors, with the parts of all shards."""
    averages = steps.averages
    found = []
    for entry, anchor in (pair for fragment in averages.fragments for pair in fragment.entries()):
        state = averages.outer.state.get(anchor, {}).values()
        tensors = [value for value in state if isinstance(value, torch.Tensor)]
        found += [divided_like(entry.whole, one).full_tensor() for one in [anchor, *tensors] if one.ndim]
    return bits_of(found)


def _saved_by_dcp(rank: int, folder: Path) -> list[Any]:
    """Bits of an undisturbed run, and of one that goes on from a checkpoint."""
    on = mesh(2)
    ends: list[Any] = []
    for number, fields in enumerate(RUNS):
        model = sharded(on["shard"])
        steps = local_steps(model, on, **fields)
        train(model, steps, on, range(7))
        assert bool(steps.averages.under_way) == ("delay" in fields)
        dcp.save(_named(on, model, steps), checkpoint_id=folder / str(number))
        ends.append(_whole(steps))
        train(model, steps, on, range(7, 12))
        undisturbed = [weight_bits(model), _whole(steps)]
        steps.close()

        model = sharded(on["shard"])
        steps = local_steps(model, on, **{**fields, "seed": 7})
        _load(on, model, steps, folder / str(number))
        assert (steps.averages.step, _whole(steps)) == (7, ends[-1])
        train(model, steps, on, range(7, 12))
        assert [weight_bits(model), _whole(steps)] == undisturbed
        steps.close()
    return ends


def _loaded_by_others(rank: int, folder: Path, replicas: int) -> list[Any]:
    """Bits of what another number of ranks has loaded."""
    on = mesh(replicas)
    records = logged()
    found: list[Any] = []
    for number, fields in enumerate(RUNS):
        model = sharded(on["shard"])
        steps = local_steps(model, on, **fields)
        _load(on, model, steps, folder / str(number))
        found.append(_whole(steps))
        records.clear()
        train(model, steps, on, range(7, 9))
        assert not [text for text in records if "not those that it was saved beside" in text]
        steps.finish()
        assert all(bool(one.to_local().isfinite().all()) for one in model.parameters())
        steps.close()
    return found


def test_a_distributed_checkpoint_resumes_to_the_same_bits_and_on_other_shards(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    saved = run(_saved_by_dcp, 4, tmp_path, folder)
    assert saved == [saved[0]] * 4
    for ranks, replicas in ((2, 2), (6, 2), (3, 1)):
        assert run(_loaded_by_others, ranks, tmp_path, folder, replicas) == [saved[0]] * ranks


def _under_one_name(rank: int, folder: Path) -> tuple[bool, list[str], str]:
    """All replicas save their own weights under the same names."""
    on = mesh(2)
    model = sharded(on["shard"])
    steps = local_steps(model, on, bits=4, outer_after=0)
    train(model, steps, on, range(5))
    weights, state = get_state_dict(model, steps)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    steps.close()
    model = sharded(on["shard"])
    steps = local_steps(model, on, bits=4, outer_after=0)
    weights, state = get_state_dict(model, steps)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    records = logged()
    set_state_dict(model, steps, model_state_dict=weights, optim_state_dict=state)
    steps.averages.check_start()
    starts = [text for text in records if "starts from the anchor" in text]
    bundles = [bundle for fragment in steps.averages.fragments for bundle in fragment.bundles]
    is_at_anchor = not any(bundle.has_changed(buffers=True, tolerance=0.0) for bundle in bundles)
    train(model, steps, on, range(5, 9))
    steps.finish()
    steps.close()
    return is_at_anchor, starts, weight_bits(model)


def test_replicas_that_have_saved_under_one_name_start_from_the_anchor(tmp_path: Path) -> None:
    ranks = run(_under_one_name, 4, tmp_path, tmp_path / "checkpoint")
    assert all(is_at_anchor and len(starts) == 1 for is_at_anchor, starts, _ in ranks)
    texts = {text for _, starts, _ in ranks for text in starts}
    assert len([text for text in texts if "Save the weights and the state of each replica" in text]) == 1
    assert len({bits for _, _, bits in ranks}) == 1


class _Factored(torch.optim.SGD):
    """Remembers a number for each row, as Adafactor does."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for tensor in group["params"]:
                self.state[tensor]["row"] = tensor.new_zeros(len(tensor))


@on_ranks(4)
def test_a_state_that_cannot_be_saved_or_loaded_is_refused(rank: int, tmp_path: Path) -> None:
    """One rank finds that a state does not fit, and keeps its own."""
    on = mesh(2)
    model = sharded(on["shard"])
    steps = local_steps(model, on, bits=4)
    state = get_optimizer_state_dict(model, steps)
    wide = sharded(on["shard"], mlp(width=160))
    other = local_steps(wide, on, bits=4, outer="sgd")
    before = _whole(other)
    if rank == 1:
        with pytest.raises(ConfigError, match=r"has \(64, 32\) for '0.weight', this model \(80, 32\)"):
            other.load_state_dict(state)
    train(wide, other, on, range(1))
    del state["state"]["2.weight"]["local_steps"]["anchor"]
    with pytest.raises(ConfigError, match="'anchor' of '2.weight' was not loaded"):
        steps.load_state_dict(state)
    whole = mlp()
    alone = LocalSteps(whole, torch.optim.AdamW(whole.parameters(), lr=0.01), bits=4)
    state = get_optimizer_state_dict(model, steps)
    for values in state["state"].values():
        del values["local_steps"]  # which dcp.load would not have loaded
    with pytest.raises(ConfigError, match="into a model that fully_shard has divided, be it among one rank"):
        alone.load_state_dict(state)
    other.finish()
    assert _whole(other) != before
    momentum = local_steps(sharded(on["shard"]), on, outer=partial(_Factored, lr=1.0))
    with pytest.raises(ConfigError, match="_Factored keeps 'row' in another shape .* in a file of its own"):
        get_optimizer_state_dict(model, momentum)
    model = sharded(on["shard"])
    remembering = local_steps(model, on, rule="predicted", bits=4, reducer="gather")
    with pytest.raises(ConfigError, match=r"rule=.* has a memory that torch.distributed.checkpoint cannot divide"):
        get_optimizer_state_dict(model, remembering)


@on_ranks(4)
def test_all_shards_leave_out_what_is_not_finite_in_one(rank: int) -> tuple[str, int, bool]:
    """One replica's change of one shard is not finite, in the first round."""
    on = mesh(2)
    model = sharded(on["shard"])
    start = weight_bits(model)
    steps = local_steps(model, on, **EXACT)
    records = logged()
    train(model, steps, on, range(2))
    if rank == 2:
        with torch.no_grad():
            model[0].weight.to_local()[0, 0] = torch.inf
    train(model, steps, on, range(2, 3))
    assert any("mean change of fragment 0 is not finite" in text for text in records)
    went_back = weight_bits(model) == start
    train(model, steps, on, range(3, 6))
    steps.finish()
    bits, skipped = weight_bits(model), steps.averages.skipped
    steps.close()
    assert skipped == 1
    assert went_back
    return bits, skipped, went_back


@on_ranks(4)
def test_a_model_that_was_evaluated_is_trained_and_averaged(rank: int) -> None:
    """Until a backward pass, FSDP2 keeps whole parameters, and shows them in place of the shards."""
    on = mesh(2)
    model = sharded(on["shard"])
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        with torch.no_grad():
            losses.append(float(loss_of(model, 0, 0)))
        if len(losses) < 2:
            steps = LocalSteps(model, inner, every=3, delay=2, group=on["replicate"].get_group(), bits=8, outer="sgd")
            train(model, steps, on, range(4))
    steps.averages.settle()
    with torch.no_grad():
        settled = float(loss_of(model, 0, 0))
    model.reshard()
    with torch.no_grad():
        assert losses[-1] != settled == float(loss_of(model, 0, 0))
    steps.close()
    with pytest.raises(ConfigError, match="has 2 of its 6 parameters from another model.* call model.reshard()"):
        local_steps(model, on)


@on_ranks(2)
def test_replicas_of_one_rank_each_are_shown_the_anchor_and_averaged_after_a_forward_pass_alone(rank: int) -> str:
    on = mesh(2)
    model = sharded(on["shard"])
    steps = local_steps(model, on)
    train(model, steps, on, range(4))
    with torch.no_grad():
        own = float(loss_of(model, 0, 0))
        with steps.averages.at_anchor():
            assert float(loss_of(model, 0, 0)) != own
    steps.finish()
    steps.close()
    return weight_bits(model)


@on_ranks(4)
def test_an_average_that_failed_for_one_shard_is_left_out_by_all(rank: int) -> str:
    """A rank died in the average of one shard, which is not in the states of the others that have this shard."""
    on = mesh(2)
    model = sharded(on["shard"])
    steps = local_steps(model, on, bits=8, delay=2, outer="sgd")
    train(model, steps, on, range(4))
    own, state = model.state_dict(), steps.state_dict()
    assert state["local_steps"]["under_way"]
    if on["shard"].get_local_rank() == 1:
        state["local_steps"]["under_way"] = []
    other = sharded(on["shard"])
    resumed = local_steps(other, on, bits=8, delay=2, outer="sgd")
    other.load_state_dict(own)
    resumed.load_state_dict(state)
    records = logged()
    train(other, resumed, on, range(4, 5))
    assert [text for text in records if "shards have different averages under way" in text]
    assert not resumed.averages.under_way
    train(other, resumed, on, range(5, 9))
    resumed.finish()
    return weight_bits(other)


@on_ranks(4, timeout=30)
def test_the_last_average_is_made_by_all_shards_if_one_has_changed(rank: int) -> str:
    """After the last average, ranks of one shard change their weights."""
    on = mesh(2)
    model = sharded(on["shard"])
    steps = local_steps(model, on, **EXACT)
    train(model, steps, on, range(3))
    before = model[4].bias.full_tensor()
    if on["shard"].get_local_rank() == 0:
        with torch.no_grad():
            model[4].bias.to_local()[0] += on["replicate"].get_local_rank()
    steps.finish()
    change = model[4].bias.full_tensor() - before
    assert (change[0], change[1:].any()) == (0.5, False)
    return weight_bits(model)


@on_ranks(4)
def test_what_cannot_work_is_refused(rank: int) -> None:
    on = mesh(2)

    def refuses(text: str, model: nn.Module, **arguments: Any) -> None:
        with pytest.raises(ConfigError, match=text):
            local_steps(model, on, **arguments)

    refuses("rounds by the clock and elastic=True need whole parameters", sharded(on["shard"]), every="20s")
    refuses("memories do not work with sharded parameters", sharded(on["shard"]), memory="ef")
    different = r"local steps would average over \[.*\] of them: those have different shards"
    refuses(different, sharded(on["shard"]), group=dist.group.WORLD)
    refuses(different, sharded(on))


@on_ranks(4)
def test_tensor_parallelism_inside_of_replicas(rank: int) -> str:
    """Two replicas of two ranks that compute layers together, and have the last layer each."""
    on = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = parallelize_module(mlp(), on["shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    steps = local_steps(model, on, bits=4, outer="sgd")
    for number in range(7):
        loss_of(model, on["replicate"].get_local_rank(), number).backward()
        steps.step()
        steps.zero_grad()
    steps.finish()
    steps.close()
    return bits_of(p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())


@on_ranks(4)
def test_a_distributed_checkpoint_of_replicas_of_two_dimensions(rank: int, tmp_path: Path) -> None:
    """One replica of two by two ranks, FSDP2 over tensor parallelism, with and without a distributed checkpoint."""
    folder = tmp_path / "checkpoint"
    on = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    ends = []
    for steps_before in (range(7), range(0)):
        model = parallelize_module(mlp(), on["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=on["shard"])
        steps = local_steps(model, on, bits=4, outer_after=0, delay=1)
        train(model, steps, on, steps_before)
        if steps_before:
            dcp.save(_named(on, model, steps), checkpoint_id=folder)
        else:
            _load(on, model, steps, folder)
        records = logged()
        train(model, steps, on, range(7, 12))
        assert not [text for text in records if "starts from the anchor" in text]
        ends.append([weight_bits(model), steps.averages.averages])
        steps.close()
    assert ends[0] == ends[1]
