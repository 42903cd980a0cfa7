"""Local steps between processes: what changes after they began. Ranks end with the same bits, or with an error each."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

from lightning_gqsgd import LocalSteps
from lightning_gqsgd.errors import CollectiveError, ConfigError
from tests.bits import bits_of
from tests.distributed.local_models import bits_of_anchors, bits_of_model
from tests.distributed.models import batch, loss_of
from tests.distributed.ranks import logged, on_ranks, run
from tests.errors import error_text

Optimizer = torch.optim.Optimizer


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 10))
    model[0].requires_grad_(False)
    return model


def _unfreeze(model: nn.Sequential, inner: Optimizer, rank: int) -> None:
    model[0].requires_grad_(True)


def _replace(model: nn.Sequential, inner: Optimizer, rank: int) -> None:
    torch.manual_seed(rank)
    model[4] = nn.Linear(24, 10)


def _replace_and_train(model: nn.Sequential, inner: Optimizer, rank: int) -> None:
    _replace(model, inner, rank)
    inner.add_param_group({"params": list(model[4].parameters())})


def _assign(model: nn.Sequential, inner: Optimizer, rank: int) -> None:
    state = {name: value + rank for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _normalise(model: nn.Sequential, inner: Optimizer, rank: int) -> None:
    weight_norm(model[2])


def _add(model: nn.Sequential, inner: Optimizer, rank: int) -> None:
    torch.manual_seed(rank)
    model.append(nn.Linear(10, 10))


def _add_and_train(model: nn.Sequential, inner: Optimizer, rank: int) -> None:
    _add(model, inner, rank)
    inner.add_param_group({"params": list(model[5].parameters())})


def _cast(model: nn.Sequential, inner: Optimizer, rank: int) -> None:
    model.to(torch.bfloat16)


def _cast_and_back(model: nn.Sequential, inner: Optimizer, rank: int) -> None:
    model.double().float()


def _prune(model: nn.Sequential, inner: Optimizer, rank: int) -> None:
    prune.l1_unstructured(model[2], "weight", 0.5)


def _limit(model: nn.Sequential, inner: Optimizer, rank: int) -> None:
    torch.manual_seed(rank)
    spectral_norm(model[2])


def _limit_as_before(model: nn.Sequential, inner: Optimizer, rank: int) -> None:
    torch.manual_seed(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is deprecated
        nn.utils.spectral_norm(model[2])


class _Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()

    def right_inverse(self, y: Tensor) -> Tensor:
        return (y.abs() + 1e-3).log()


def _parametrize(model: nn.Sequential, inner: Optimizer, rank: int) -> None:
    register_parametrization(model[2], "weight", _Exponential())


def _keep_inputs(model: nn.Sequential, inner: Optimizer, rank: int) -> None:
    model[2].register_buffer("scratch", torch.full((3,), float(rank)), persistent=False)


def _freeze(model: nn.Sequential, inner: Optimizer, rank: int) -> None:
    model[2].requires_grad_(False)


#: What happens to the model, and a part of the error; None: ranks end with the same bits.
CHANGES: dict[str, tuple[Callable[[nn.Sequential, Optimizer, int], None], str | None]] = {
    "unfrozen": (_unfreeze, "the optimizer trains 2 parameters that LocalSteps has found frozen"),
    "replaced": (_replace, "no longer in the model: '4.weight', '4.bias'"),
    "replaced and trained": (_replace_and_train, "trains 2 parameters that LocalSteps has found frozen, or not in"),
    "assigned": (_assign, "no longer in the model: '2.weight', '2.bias', '4.weight' and 1 more"),
    "normalised": (_normalise, "no longer in the model: '2.weight'"),
    "added": (_add, "were added to the model after LocalSteps was made: '5.weight', '5.bias'"),
    "added and trained": (_add_and_train, "trains 2 parameters that LocalSteps has found frozen, or not in"),
    "pruned": (_prune, "were added to the model after LocalSteps was made, or were empty then: '2.weight_mask'"),
    "limited": (_limit, "parametrizations were added or removed after LocalSteps was made: '2.weight'"),
    "limited as before": (_limit_as_before, "or were empty then: '2.weight_u', '2.weight_v'"),
    "parametrized": (_parametrize, "parametrizations were added or removed after LocalSteps was made: '2.weight'"),
    "a buffer that is not saved": (_keep_inputs, None),
    "cast": (_cast, "torch.float32 on cpu when LocalSteps was made, and is (24, 24) torch.bfloat16 on cpu now"),
    "cast and back": (_cast_and_back, None),
    "frozen": (_freeze, None),
}

#: Without a memory, with one, with one on the way back too, and several fragments with a delay.
WAYS: dict[str, dict[str, Any]] = {
    "none": {"every": 3, "preset": "gqsgd_4bit"},
    "ef": {"every": 3, "preset": "gqsgd_4bit", "memory": "ef"},
    "both ways": {"every": 3, "preset": "gqsgd_4bit", "memory": "ef", "memory_down": "ef"},
    "fragments": {"every": 3, "preset": "gqsgd_4bit", "fragments": 2, "delay": 1},
}


def _trained(rank: int, change: Callable[[nn.Sequential, Optimizer, int], None] | None, way: dict[str, Any]) -> str:
    """Bits at the end, or the error, of a run in which the model changes after four steps, within a round."""
    model = _model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = LocalSteps(model, inner, timeout=timedelta(seconds=20), min_numel=16, **way)
    try:
        for step in range(8):
            if step == 4 and change is not None:
                change(model, inner, rank)
            x, y = batch(rank, step)
            optimizer.zero_grad()
            output = model(x.to(model[0].weight.dtype)).float()
            nn.functional.cross_entropy(output, y).backward()
            optimizer.step()
        optimizer.finish()
    except (ConfigError, CollectiveError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        optimizer.close()
    return bits_of(model.parameters())


def _table(rank: int, way: str) -> dict[str, str]:
    return {name: _trained(rank, change, WAYS[way]) for name, (change, _) in CHANGES.items()}


@pytest.mark.parametrize("way", [way if way == "none" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_after_a_change_ranks_have_the_same_bits_or_an_error(way: str, tmp_path: Path) -> None:
    first, second = run(_table, 2, tmp_path, way)
    for name, (_, text) in CHANGES.items():
        if text is None:
            assert first[name] == second[name], name
            assert "Error" not in first[name], name
        else:
            assert text in first[name], name
            assert text in second[name], name


def _on_one_rank(rank: int) -> dict[str, str]:
    return {
        name: _trained(rank, change if rank == 1 else None, WAYS["none"])
        for name, (change, text) in CHANGES.items()
        if text is not None
    }


def test_a_change_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = run(_on_one_rank, 2, tmp_path)
    for name, text in second.items():
        assert str(CHANGES[name][1]) in text, name
        assert first[name].startswith(("CollectiveError", "ConfigError")), name


@on_ranks(2)
def test_layers_that_change_places_on_one_rank_are_an_error_on_all(rank: int) -> str:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(2)), nn.Linear(32, 10))
    optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2, min_numel=16)
    _steps(model, optimizer, rank, range(2))
    if rank == 1:
        model[0], model[1] = model[1], model[0]
    text = error_text(ConfigError, _steps, model, optimizer, rank, range(2, 4))
    optimizer.close()
    assert "layers of the model have changed places, on some ranks only" in text
    return text


def _steps(model: nn.Module, optimizer: Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_outer_momentum_leaves_out_what_all_ranks_have_frozen_and_still_moves_what_was_trained(rank: int) -> None:
    """A layer that is frozen after a round, on all ranks and on one; one that is frozen while others' steps average."""
    fields: dict[str, Any] = {"every": 3, "outer_after": 0, "preset": "gqsgd_4bit", "min_numel": 16}
    results: list[Any] = []
    for frozen_on in ((), (0, 1), (1,)):
        model = _model()
        layer = model[2]
        optimizer = LocalSteps(
            model, torch.optim.SGD(model.parameters(), lr=0.1), timeout=timedelta(seconds=20), **fields
        )
        _steps(model, optimizer, rank, range(6))
        before = [bits_of_model(layer), bits_of_model(model[4])]
        layer.requires_grad_(rank not in frozen_on)
        try:
            _steps(model, optimizer, rank, range(6, 12))
            results.append([bits_of_model(layer) == before[0], bits_of_model(model[4]) == before[1]])
        except (ConfigError, CollectiveError) as error:
            results.append(str(error))
        optimizer.close()
    bits = []
    for is_toggled in (False, True):
        model = _model()
        optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), **fields)
        for step in range(6):
            loss_of(model, rank, step).backward()
            model[2].requires_grad_(not is_toggled)
            optimizer.step()
            optimizer.zero_grad()
            model[2].requires_grad_(True)
        optimizer.close()
        bits.append(bits_of_model(model))
    trained, frozen, on_one_rank, is_equal_if_toggled = [*results, bits[0] == bits[1]]
    assert trained == [False, False]
    assert frozen == [True, False]
    assert "ranks 0 and 1 do not agree: digest" in on_one_rank
    assert "parameters were frozen" in on_one_rank
    assert is_equal_if_toggled


@on_ranks(2)
def test_an_average_leaves_out_what_was_frozen_when_it_was_started(rank: int) -> list[str]:
    """Anchors if a layer that was frozen through a round is trained again, on one rank, until that average is used; and
    if a state of that time is loaded, also one of an earlier version, while the layer is trained or frozen."""
    way = {"every": 3, "delay": 1, "mixing": 0.0, "outer_after": 0, "preset": "gqsgd_4bit", "min_numel": 16}

    def made() -> tuple[nn.Sequential, LocalSteps]:
        model = _model()
        return model, LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), **way)

    model, optimizer = made()
    _steps(model, optimizer, rank, range(7))
    model[2].requires_grad_(False)
    _steps(model, optimizer, rank, range(7, 9))
    weights, state = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    model[2].requires_grad_(rank == 1)
    _steps(model, optimizer, rank, range(9, 10))
    bits = [bits_of_anchors(optimizer)]
    optimizer.close()
    for is_earlier in (False, True):
        model, optimizer = made()
        model.load_state_dict(weights)
        saved = copy.deepcopy(state)
        if is_earlier:
            del saved["local_steps"]["under_way"][0]["frozen"]
            model[2].requires_grad_(False)
        optimizer.load_state_dict(saved)
        _steps(model, optimizer, rank, range(9, 10))
        bits.append(bits_of_anchors(optimizer))
        optimizer.close()
    assert len(set(bits)) == 1
    return bits


@pytest.mark.parametrize("every", [2, pytest.param("50ms", marks=pytest.mark.slow)])
@on_ranks(2)
def test_parameters_that_move_and_are_not_averaged_are_named_once(rank: int, every: int | str) -> None:
    """What is said where the first layer stays, is moved by hand, is loaded with a state, and has its own averages."""
    said = logged(level=logging.WARNING)
    results = []
    for way in ("stays", "moves", "is loaded", "is averaged"):
        model = _model()
        optimizer = LocalSteps(model, torch.optim.SGD(model[2:].parameters(), lr=0.1), every=every)
        optimizers = [optimizer]
        if way == "is averaged":
            model[0].requires_grad_(True)
            optimizers.append(LocalSteps(model, torch.optim.SGD(model[0].parameters(), lr=0.1), every=every))
        for step in range(6):
            loss_of(model, rank, step).backward()
            for each in optimizers:
                each.step()
            model.zero_grad()
            if way == "moves":
                with torch.no_grad():
                    model[0].weight += 0.01 * (rank + 1)
            if way == "is loaded" and step == 3:
                optimizer.finish()
                nn.init.ones_(model[0].weight)
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each in optimizers:
            each.finish()
            each.close()
        results.append([text for text in said if "parameters have changed that are not averaged" in text])
        said.clear()
    stays, moves, is_loaded, is_averaged = results
    assert stays == is_loaded == is_averaged == []
    assert len(moves) == 1
    assert "averaged: '0.weight'. Each rank has its own" in moves[0]


def _ended(model: nn.Module, optimizer: LocalSteps, train: Callable[[Any, LocalSteps], None]) -> str:
    """The bits of a model after a training and the last average, or the error."""
    try:
        train(model, optimizer)
        optimizer.finish()
        return bits_of_model(model)
    except ConfigError as error:
        return str(error)
    finally:
        optimizer.close()


def _prune_midway(rank: int, amount: float, model: nn.Sequential, optimizer: LocalSteps) -> None:
    _steps(model, optimizer, rank, range(4))
    prune.l1_unstructured(model[2], "weight", amount)
    _steps(model, optimizer, rank, range(4, 8))


@on_ranks(2)
def test_a_model_that_is_pruned_again_is_an_error_and_no_fraction_of_a_mask(rank: int) -> list[str]:
    """A model that was pruned before, and whose mask is set again to the same values, or to others of each rank."""
    results = []
    for amount in (0, 0.5):
        model = _model()
        prune.l1_unstructured(model[2], "weight", 0.5)
        optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), every=3)
        results.append(_ended(model, optimizer, partial(_prune_midway, rank, amount)))
    same, others = results
    assert "mask" not in same
    assert "masks of pruning have changed after LocalSteps was made: '2.weight_mask'" in others
    return results


class _Observer(nn.Module):
    """Gives a buffer its shape in its first forward pass, in place or anew, as observers of quantisation do."""

    def __init__(self, in_place: bool, size: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(32, 10)
        self.in_place = in_place
        self.register_buffer("scale", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        largest = y.detach().abs().amax(0)
        if self.in_place:
            self.scale.resize_(10).copy_(largest)
        else:
            self.scale = largest
        return y


def _observe(rank: int, model: _Observer, optimizer: LocalSteps) -> None:
    for step in range(4):
        model(batch(rank, step)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_a_buffer_that_gets_another_shape_is_named_with_both_shapes_and_the_remedy(rank: int) -> list[str]:
    results = []
    for in_place, size in ((True, 1), (False, 1), (True, 0), (False, 0)):
        for passes_before in (0, 1):
            model = _Observer(in_place, size)
            for _ in range(passes_before):
                model(torch.randn(4, 32))
            optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
            results.append(_ended(model, optimizer, partial(_observe, rank)))
    for resized, given_before in (results[4:6], results[6:]):
        assert "buffers were added to the model after LocalSteps was made, or were empty then: 'scale'" in resized
        assert "buffer" not in given_before
    for resized, given_before in (results[:2], results[2:4]):
        assert "buffer 'scale' was (1,) torch.float32 on cpu" in resized
        assert "is (10,) torch.float32 on cpu now" in resized
        assert "needs that pass before" in resized
        assert "buffer" not in given_before
    return results


def _sharpen(rank: int, moves_back: bool, model: nn.Sequential, optimizer: LocalSteps) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for step in range(5):
        loss_of(model, rank, step).backward()
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        moves = [0.05 * p.grad / norm for p in trained]
        with torch.no_grad():
            torch._foreach_add_(trained, moves)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        if moves_back:
            with torch.no_grad():
                torch._foreach_sub_(trained, moves)
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_sharpness_aware_minimisation_by_hand_works_and_is_named_where_weights_stay_moved(rank: int) -> list[str]:
    """SAM by hand: weights are moved, a second gradient is taken, and they are moved back, or not."""
    results = []
    for moves_back in (True, False):
        model = _model()
        optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2, preset="gqsgd_4bit")
        results.append(_ended(model, optimizer, partial(_sharpen, rank, moves_back)))
    assert "weights" not in results[0]
    assert "SAM by hand" in results[1]
    assert "move them back before step()" in results[1]
    return results
