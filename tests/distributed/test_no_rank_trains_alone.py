"""A parameter that trains on each rank's own gradient is an error, or a warning, and what is right stays silent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_gqsgd import CollectiveError, register_gqsgd
from lightning_gqsgd.config import ConfigError
from tests.distributed.changed_models import CHANGES, frozen_but_the_head
from tests.distributed.models import Branches, batch, fingerprint, loss_of, mlp, refused_step, train, wrapped
from tests.distributed.ranks import logged, on_ranks, run, run_alike
from tests.errors import error_text

#: Configurations by what is special about them.
HOOKS: dict[str, dict[str, Any]] = {
    "8 bits": {"bits": 8},
    "memory": {"preset": "dore"},
    "auto": {"auto": True},
    "bits by name": {"bits": {"*": 4, "0.*": 8}},
    "native": {"reducer": "native"},
}
#: The hooks as the tests have them: two always, the others as slow tests.
SOME_HOOKS = [pytest.param(name, marks=[] if name == "8 bits" else pytest.mark.slow) for name in HOOKS]


def _by_hand(model: nn.Module, rank: int, step: int, forward: Callable[..., Any] | None = None) -> None:
    """A step without an optimizer."""
    model.zero_grad()
    loss_of(forward or model, rank, step).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.requires_grad:
                parameter -= 0.1 * parameter.grad


#: Options of DDP that a change is tried with.
OPTIONS: list[dict[str, Any]] = [{"bucket_cap_mb": 0.03}, {"find_unused_parameters": True}]


@pytest.mark.parametrize("hook", SOME_HOOKS)
@on_ranks(2)
def test_a_changed_model_is_an_error_on_all_ranks_and_goes_on_when_wrapped_anew(
    rank: int, hook: str
) -> dict[str, tuple[str, str]]:
    """For each change, the error, and the weights some steps after the model was wrapped anew."""
    results = {}
    for number, (name, (make, change)) in enumerate(CHANGES.items()):
        # Without compression, each change is tried with the other options.
        options = OPTIONS[(number + (hook == "native")) % 2]
        model, state = wrapped(options, HOOKS[hook], make())
        _by_hand(model, rank, 0)
        _by_hand(model, rank, 1)
        change(model.module)
        before = fingerprint(model)
        text = error_text(ConfigError, _by_hand, model, rank, 2)
        assert fingerprint(model) == before, "a rank has trained by itself"
        assert state.step == 2
        model = state.rewrap(DistributedDataParallel)
        assert state.changes() == ([], [])
        train(model, rank, range(2, 5))
        assert state.step == 5
        results[name] = text, fingerprint(model)
        state.close()
    for name, (text, _) in results.items():
        assert text.startswith("parameter '"), name
        assert "state.rewrap(DistributedDataParallel)" in text, name
        assert "trainer.model_wrapped = trainer.model" in text, name
    named = "parameter '0.weight', '0.bias', '2.weight' and 1 more requires a gradient"
    assert results["all is unfrozen"][0].startswith(named)
    return results


@on_ranks(2)
def test_a_parameter_that_is_written_past_pytorch_is_found_in_the_next_step(rank: int) -> str:
    model, state = wrapped({"find_unused_parameters": True}, {})
    train(model, rank, range(1))
    layer = model.module[4]
    layer._parameters["bias"] = nn.Parameter(layer.bias.detach().clone())
    text = error_text(ConfigError, train, model, rank, range(1, 2))
    state.close()
    assert text.startswith("parameter '4.bias' was added")
    return text


@pytest.mark.parametrize("unused", [False, True])
@on_ranks(2)
def test_another_module_in_place_of_the_wrapped_one_is_an_error(rank: int, unused: bool) -> list[str]:
    """A module that is replaced by another, by its copy, or by one around it; and one around it without parameters."""
    replacements: dict[str, Callable[[nn.Module], nn.Module]] = {
        "'weight', 'bias' was added": lambda module: nn.Linear(32, 10),
        "'0.weight', '0.bias', '2.weight' and 3 more was added": copy.deepcopy,
        "'1.weight', '1.bias' was added": lambda module: nn.Sequential(module, nn.Linear(10, 10)),
        "": lambda module: nn.Sequential(module, nn.Identity()),
    }
    bits = []
    for words, replaced in replacements.items():
        model, state = wrapped({"find_unused_parameters": unused}, {})
        train(model, rank, range(2))
        torch.manual_seed(rank)
        model.module = replaced(model.module)
        if words:
            assert words in error_text(ConfigError, train, model, rank, range(2, 3))
            model = state.rewrap(DistributedDataParallel)
        train(model, rank, range(2, 4))
        assert state.step == 4
        state.close()
        bits.append(fingerprint(model))
    return bits


@on_ranks(2)
def test_the_model_of_before_is_refused_after_rewrap(rank: int) -> str:
    model, state = wrapped({}, {}, frozen_but_the_head())
    train(model, rank, range(2))
    model.module.requires_grad_(True)
    new = state.rewrap(DistributedDataParallel)
    text = refused_step(model, rank, 2)
    with torch.no_grad():
        loss_of(model, rank, 2)
    train(new, rank, range(2, 4))
    state.close()
    assert "keep and train what rewrap has returned" in text
    return fingerprint(model)


@on_ranks(2)
def test_a_layer_without_a_shape_is_an_error_that_says_what_to_do(rank: int) -> str:
    model, state = wrapped({}, {})
    train(model, rank, range(1))
    model.module.append(nn.LazyLinear(10))
    assert "'5.weight', '5.bias' was added" in error_text(ConfigError, train, model, rank, range(1, 2))
    text = error_text(ConfigError, state.rewrap, DistributedDataParallel)
    assert "'5.weight', '5.bias' has no shape before the first forward pass" in text
    with torch.no_grad():
        model.module(torch.zeros(1, 32))
    model = state.rewrap(DistributedDataParallel)
    train(model, rank, range(1, 3))
    state.close()
    return fingerprint(model)


@on_ranks(2)
def test_gradients_are_right_after_a_memory_format_has_changed(rank: int) -> str:
    """After wrapping anew, the gradient is that of the module, and the memory, which has the order of before, empty."""
    model, state = wrapped({}, {"bits": 2, "memory": "ef"})
    train(model, rank, range(3))
    kept = state._store.rows(0)
    CHANGES["a weight gets another memory format"][1](model.module)
    model = state.rewrap(DistributedDataParallel)
    assert not any(row.any() for row in state._store.rows(2).values())
    assert all(torch.equal(row, kept[kind]) for kind, row in state._store.rows(0).items())
    state.close()
    model, state = wrapped({}, {"reducer": "native"}, model.module)
    model.zero_grad()
    loss_of(model, rank, 3).backward()
    (weight,) = torch.autograd.grad(
        (loss_of(model.module, 0, 3) + loss_of(model.module, 1, 3)) / 2, [model.module[2].weight]
    )
    assert torch.allclose(model.module[2].weight.grad, weight, atol=1e-6)
    state.close()
    return fingerprint(model)


@on_ranks(2)
def test_a_compiled_model_with_another_layer_is_refused_before_weights_change(rank: int) -> str:
    model, state = wrapped({}, {})
    compiled = torch.compile(model, backend="eager")
    train(compiled, rank, range(2))
    model.module[4] = nn.Linear(128, 10)
    text = refused_step(compiled, rank, 2)
    state.close()
    assert "(2 parameters left the module after it was wrapped)" in text
    return text


def _changed_by_one(rank: int, name: str) -> str:
    make, change = CHANGES[name]
    model, state = wrapped({"find_unused_parameters": True}, {}, make())
    train(model, rank, range(2))
    if rank == 1:
        change(model.module)
    try:
        train(model, rank, range(2, 4))
    except (ConfigError, CollectiveError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        state.close()
    return "no error"


@pytest.mark.parametrize("name", ["a layer is replaced", "all is unfrozen", "a layer is cast and cast back"])
def test_a_change_on_one_rank_is_an_error_on_all(tmp_path: Path, name: str) -> None:
    waited, changed = run(_changed_by_one, 2, tmp_path, name, collective_timeout=5)
    assert changed.startswith("ConfigError: parameter '")
    assert waited != "no error"


def _equal_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 10))


def _swap(model: nn.Sequential) -> None:
    model[0], model[1] = model[1], model[0]


def _tie(model: nn.Sequential) -> None:
    model[0].weight = model[1].weight


@pytest.mark.parametrize("change", [_swap, _tie])
@on_ranks(2)
def test_layers_that_change_places_on_one_rank_are_an_error_on_all(
    rank: int, change: Callable[[nn.Sequential], None]
) -> str:
    model, state = wrapped({"find_unused_parameters": True}, {}, _equal_layers())
    train(model, rank, range(2))
    if rank == 1:
        change(model.module)
    text = error_text(RuntimeError, train, model, rank, range(2, 3))  # torch's, around ours
    state.close()
    assert "layers of the model have changed places on some ranks only" in text
    return text


@on_ranks(2)
def test_layers_may_change_places_on_all_ranks_and_one_rank_may_put_a_module_around_its_layer(rank: int) -> str:
    model, state = wrapped({}, {}, _equal_layers())
    train(model, rank, range(2))
    _swap(model.module)
    train(model, rank, range(2, 4))
    if rank == 0:
        model.module[1] = nn.Sequential(model.module[1], nn.Identity())
    train(model, rank, range(4, 6))
    state.close()
    return fingerprint(model)


@on_ranks(2)
def test_a_model_that_was_changed_between_wrapping_and_registering_is_refused(rank: int) -> list[str]:
    changes: dict[str, Callable[[nn.Sequential], object]] = {
        "cast": lambda model: model.bfloat16(),
        "replaced": lambda model: model.__setitem__(4, nn.Linear(128, 10)),
        "unfrozen": lambda model: model[0].requires_grad_(True),
    }
    texts = []
    for change in changes.values():
        module = mlp()
        module[0].requires_grad_(False)
        model = DistributedDataParallel(module)
        change(module)
        texts.append(error_text(ConfigError, register_gqsgd, model))
    for text, words in zip(texts, ("cast to 'torch.bfloat16'", "'4.weight', '4.bias'", "2 parameters"), strict=True):
        assert words in text
        assert text.endswith("change the module first, then wrap it, then register the hook")
    return texts


@pytest.mark.skipif(not hasattr(DistributedDataParallel, "finalize_backward"), reason="torch before 2.15")
@on_ranks(2)
def test_an_optimizer_that_steps_before_finalize_backward_is_refused(rank: int) -> str:
    model, state = wrapped({}, {})
    model.require_manual_backward_finalization = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, rank, 0).backward()
    before = fingerprint(model)
    said = error_text(ConfigError, optimizer.step)
    assert fingerprint(model) == before
    model.finalize_backward()
    optimizer.step()
    assert fingerprint(model) != before
    state.close()
    return said


@on_ranks(2)
def test_a_model_whose_gradients_never_reach_ddp_is_refused_by_the_optimizer(rank: int) -> str:
    module = mlp()
    model = DistributedDataParallel(module)
    module.double().float()
    state = register_gqsgd(model)
    text = error_text(ConfigError, train, model, rank, range(2))
    state.close()
    assert text.startswith("the latest backward pass has computed gradients, and none of them has reached")
    return text


@pytest.mark.parametrize("has_closure", [False, True])
@on_ranks(2)
def test_a_parameter_that_is_not_reached_is_an_error_before_weights_change(
    rank: int, has_closure: bool
) -> tuple[str, str]:
    model, state = wrapped({}, {"min_numel": 0}, Branches())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        x, y = batch(rank, 0)
        loss = nn.functional.cross_entropy(model(x, 1), y)
        loss.backward()
        return loss

    before = fingerprint(model)
    if not has_closure:
        closure()
    text = error_text(ConfigError, optimizer.step, closure if has_closure else None)
    assert fingerprint(model) == before
    model.module.layers[0].requires_grad_(False)
    of_frozen = error_text(ConfigError, state.rewrap, DistributedDataParallel)
    state.close()
    assert "'layers.0.weight', 'layers.0.bias', which was frozen after the forward pass had begun" in of_frozen
    assert "toggle_optimizer, wrap with find_unused_parameters=True" in of_frozen
    assert "some parameters ('layers.0.weight', 'layers.0.bias' have none)" in text
    assert "need find_unused_parameters=True" in text
    return text, of_frozen


@on_ranks(2)
def test_memories_stay_with_their_parameters_and_new_layers_start_alike(rank: int) -> list[Any]:
    """The memory of what stays is kept, and that of a parameter that is new begins empty."""
    model, state = wrapped({}, {"preset": "gqsgd", "bits": 2, "memory": "ef"}, mlp())
    train(model, rank, range(3))
    before = state._store.rows(2)
    model.module.insert(0, nn.Linear(32, 32))
    model.module[5] = nn.Linear(128, 10)
    model = state.rewrap(DistributedDataParallel)
    after = state._store.rows(4)
    assert all(torch.equal(before[kind], after[kind]) for kind in before)
    assert any(row.any() for row in after.values())
    assert not any(row.any() for row in state._store.rows(0).values())
    weights = fingerprint(model)
    train(model, rank, range(3, 6))
    saved = state.state_dict()
    state.close()
    result = [weights, fingerprint(model), saved["step"]]
    assert result[2] == 6
    return result


# --- backward passes that DDP does not reduce ----------------------------------------------------------------------


def _warned(rank: int, misuse: str) -> list[str]:
    said = logged()
    model, state = wrapped({}, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(step: int, forward: Callable[..., Any] = model) -> torch.Tensor:
        return loss_of(forward, rank, step)

    for step in range(4):
        optimizer.zero_grad()
        if misuse == "the module is called":
            loss(step, model.module).backward()
            optimizer.step()
        elif misuse == "the module is called, by hand":
            _by_hand(model, rank, step, model.module)
        elif misuse == "layers are called":
            loss(step, lambda x: model.module[4](model.module[3](model.module[:3](x)))).backward()
            optimizer.step()
        elif misuse == "two backward passes through one graph":
            once = loss(step)
            once.backward(retain_graph=True)
            (2 * once).backward()
        elif misuse == "two forward passes, then two backward passes":
            first, second = loss(step), loss(step + 10)
            first.backward()
            second.backward()
            optimizer.step()
        elif misuse == "the optimizer steps before no_sync is over":
            with model.no_sync():
                loss(step).backward()
            optimizer.step()
        elif misuse == "no_sync in a closure":

            def closure(step: int = step) -> torch.Tensor:
                with model.no_sync():
                    here = loss(step)
                    here.backward()
                return here

            optimizer.step(closure)
        elif misuse == "autograd.grad gives the gradients":
            parameters = list(model.parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss(step), parameters), strict=True):
                parameter.grad = gradient
            optimizer.step()
        else:
            hooks = [p.register_post_accumulate_grad_hook(lambda _: optimizer.step()) for p in model.parameters()]
            loss(step).backward()
            for hook in hooks:
                hook.remove()
    state.close()
    return list(said)


MISUSES = {
    "the module is called": "does not average",
    "the module is called, by hand": "does not average",
    "layers are called": "does not average",
    "two backward passes through one graph": "does not average",
    "two forward passes, then two backward passes": "does not average",
    "the optimizer steps before no_sync is over": "steps with gradients that were computed under no_sync()",
    "no_sync in a closure": "steps with gradients that were computed under no_sync()",
    "autograd.grad gives the gradients": "not those that torch.autograd.grad returns",
    "the optimizer steps in a gradient's hook": "an optimizer steps while the backward pass is under way",
}


@on_ranks(2)
def test_gradients_that_stay_on_a_rank_are_said_once(rank: int) -> None:
    said = {misuse: _warned(rank, misuse) for misuse in MISUSES}
    for misuse, words in MISUSES.items():
        # Then weights differ, which is said as well once they are far enough apart.
        causes = [line for line in said[misuse] if "ranks have different weights" not in line]
        assert len(causes) == 1, (misuse, said[misuse])
        assert words in causes[0], misuse


class _Loop:
    """One rank's training loop; each method is a way to train that is right."""

    def __init__(self, rank: int, options: dict[str, Any], hook: dict[str, Any]) -> None:
        self.rank = rank
        self.model, self.state = wrapped(options, hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self, step: int, forward: Callable[..., Any] | None = None) -> torch.Tensor:
        x, y = batch(self.rank, step)
        return nn.functional.cross_entropy((forward or self.model)(x), y)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _accumulates(loop: _Loop, step: int) -> None:
    with loop.model.no_sync():
        loop.loss(step).backward()
        first, second = loop.loss(step + 1), loop.loss(step + 2)
        first.backward()
        second.backward()
    loop.loss(step + 3).backward()
    loop.step()


def _validates(loop: _Loop, step: int) -> None:
    loop.loss(step).backward()
    loop.step()
    with torch.no_grad():
        loop.loss(step)
        loop.loss(step, loop.model.module)
    loop.model.eval()
    loop.loss(step)  # with gradients enabled, and no backward pass
    loop.model.train()


def _forward_only(loop: _Loop, step: int) -> None:
    loop.loss(step)
    loop.loss(step).backward()
    loop.loss(step + 1)
    loop.step()


def _attacks(loop: _Loop, step: int) -> None:
    """Adversarial examples, whose gradients of weights are thrown away."""
    x, y = batch(loop.rank, step)
    x.requires_grad_(True)
    nn.functional.cross_entropy(loop.model.module(x), y).backward()
    loop.optimizer.zero_grad()
    nn.functional.cross_entropy(loop.model(x.detach() + 0.1 * x.grad.sign()), y).backward()
    loop.step()


def _penalises(loop: _Loop, step: int) -> None:
    x, y = batch(loop.rank, step)
    x.requires_grad_(True)
    loss = nn.functional.cross_entropy(loop.model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    loop.step()


def _looks_at_gradients(loop: _Loop, step: int) -> None:
    loss = loop.loss(step)
    torch.autograd.grad(loss, list(loop.model.parameters()), retain_graph=True)
    loss.backward()
    loop.step()


def _skips_a_step(loop: _Loop, step: int) -> None:
    loop.loss(step).backward()
    loop.optimizer.zero_grad()
    loop.loss(step).backward()
    loop.step()


def _keeps_zeros(loop: _Loop, step: int) -> None:
    loop.loss(step).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)


def _recomputes(loop: _Loop, step: int) -> None:
    module = loop.model.module
    first = type(module).forward
    module.forward = lambda x: checkpoint(lambda y: first(module, y), x, use_reentrant=False)  # type: ignore[method-assign]
    loop.loss(step).backward()
    del module.forward
    loop.step()


def _has_closures(loop: _Loop, step: int) -> None:
    """The line search goes by the loss, so that ranks stay equal if they see the same one."""
    optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loop.loss(step)
        loss.backward()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean

    optimizer.step(closure)
    optimizer.zero_grad()


def _accumulates_before_a_closure(loop: _Loop, step: int) -> None:
    """As Lightning accumulates: the optimizer's closure has the last backward pass."""
    with loop.model.no_sync():
        loop.loss(step).backward()

    def closure() -> torch.Tensor:
        loss = loop.loss(step + 1)
        loss.backward()
        return loss

    if step % 2:
        loop.optimizer.step(closure)
    else:
        loop.optimizer.step(closure=closure)
    loop.optimizer.zero_grad()


def _steps_twice(loop: _Loop, step: int) -> None:
    """A step of SAM: weights move, gradients are computed again, weights move back."""
    loop.loss(step).backward()
    moves = [0.01 * p.grad for p in loop.model.parameters() if p.grad is not None]
    with torch.no_grad():
        for parameter, move in zip(loop.model.parameters(), moves, strict=True):
            parameter.add_(move)
    loop.optimizer.zero_grad()
    loop.loss(step).backward()
    with torch.no_grad():
        for parameter, move in zip(loop.model.parameters(), moves, strict=True):
            parameter.sub_(move)
    loop.step()


def _adapts(loop: _Loop, step: int) -> None:
    """A step of MAML: the model is called with weights that were computed from its own."""
    parameters = dict(loop.model.named_parameters())
    slopes = torch.autograd.grad(loop.loss(step, loop.model.module), list(parameters.values()), create_graph=True)
    fast = {name: p - 0.1 * slope for (name, p), slope in zip(parameters.items(), slopes, strict=True)}
    loop.loss(step + 1, lambda x: functional_call(loop.model, fast, x)).backward()
    loop.step()


def _skips_a_bad_batch(loop: _Loop, step: int) -> None:
    """A forward pass of no_sync counts, wherever its backward pass is, also after one that an exception has ended."""
    with pytest.raises(RuntimeError, match="shapes"):
        loop.loss(step, lambda x: loop.model(x[:, 1:]))
    with loop.model.no_sync():
        loss = loop.loss(step + 1)
    loss.backward()
    loop.loss(step + 2).backward()
    loop.step()


#: Ways to train that DDP reduces right.
RIGHT: dict[str, Callable[[_Loop, int], None]] = {
    "no_sync": _accumulates,
    "validation": _validates,
    "forward passes without backward passes": _forward_only,
    "gradients of the module that are thrown away": _attacks,
    "a penalty of gradients": _penalises,
    "autograd.grad of weights": _looks_at_gradients,
    "a step that is skipped": _skips_a_step,
    "gradients of zeros": _keeps_zeros,
    "activations that are computed again": _recomputes,
    "an optimizer with closures": _has_closures,
    "no_sync, and a closure": _accumulates_before_a_closure,
    "two backward passes for one step": _steps_twice,
    "weights that are computed from the model's": _adapts,
    "an exception in a forward pass, and no_sync": _skips_a_bad_batch,
}


def _train_right(rank: int, hook: dict[str, Any]) -> dict[str, tuple[str, list[str]]]:
    said = logged()
    results = {}
    cases = [({}, name) for name in RIGHT] + [({"static_graph": True}, "validation")]
    for options, name in cases:
        loop = _Loop(rank, options, hook)
        for step in range(4):
            RIGHT[name](loop, step)
        results[f"{name} {options}"] = (fingerprint(loop.model), list(said))
        loop.state.close()
        said.clear()
    return results


@on_ranks(2)
def test_a_parameter_of_two_models_is_averaged_by_either_and_nothing_is_logged(rank: int) -> list[str]:
    """Two models take turns, or learn together; at the end, one of them is called past DDP."""
    texts = logged()
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU())
    models = [DistributedDataParallel(nn.Sequential(encoder, nn.Linear(64, 10))) for _ in range(2)]
    states = [register_gqsgd(model) for model in models]
    optimizer = torch.optim.SGD([p for model in models for p in model.module.parameters()], lr=0.1)

    for step in range(4):
        loss_of(models[step % 2], rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for step in range(4, 6):
        for model in models:
            loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    silent = list(texts)
    bits = [fingerprint(model) for model in models]
    loss_of(models[0].module, rank, 6).backward()
    optimizer.step()
    for state in states:
        state.close()
    result = [*bits, *silent, str(len(texts))]
    bits, logs = result[:2], result[2:]
    assert bits[0] != bits[1]
    assert logs == ["2"]  # at the end, each model says that it has not averaged
    return result


@on_ranks(2)
def test_models_with_static_graphs_that_share_layers_are_refused_with_the_right_remedy(rank: int) -> str:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU())
    modules = [nn.Sequential(encoder, nn.Linear(64, 10)) for _ in range(2)]
    models = [DistributedDataParallel(module, static_graph=True) for module in modules]
    states = [register_gqsgd(model) for model in models]
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)

    def train() -> None:
        for step in range(4):
            loss_of(models[step % 2], rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    text = error_text(ConfigError, train)
    for state in states:
        state.close()
    assert "leave it out where DistributedDataParallel models share layers" in text
    assert "find_unused_parameters" not in text
    return text


@on_ranks(2)
def test_gradients_that_plain_ddp_averages_are_not_said_to_stay_on_a_rank(rank: int) -> None:
    """What is logged while a plain DDP model shares an encoder, once it rests, and of plain DDP around one module."""
    texts = logged()
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU())
    hooked, plain = (DistributedDataParallel(nn.Sequential(encoder, nn.Linear(64, 10))) for _ in range(2))
    state = register_gqsgd(hooked)

    def learn(model: nn.Module, steps: range) -> list[str]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        texts.clear()
        for step in steps:
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(texts)

    taking_turns = [text for step in range(6) for text in learn((hooked, plain)[step % 2], range(step, step + 1))]
    anew = learn(DistributedDataParallel(hooked.module), range(6, 10))  # the hook's own is still there
    past_ddp = learn(hooked.module, range(10, 12))
    state.close()
    assert taking_turns == anew == []
    assert len(past_ddp) == 1
    assert "does not average" in past_ddp[0]


@pytest.mark.parametrize("hook", [{}, pytest.param({"auto": True}, marks=pytest.mark.slow)], ids=str)
def test_what_is_right_is_silent(tmp_path: Path, hook: dict[str, Any]) -> None:
    result = run_alike(_train_right, 2, tmp_path, hook)
    assert {name: said for name, (_, said) in result.items() if said} == {}


@on_ranks(2)
def test_adversaries_and_uneven_inputs_are_silent(rank: int) -> list[str]:
    """A generator and a discriminator, each frozen while the other one is trained; and uneven inputs."""
    said = logged()
    torch.manual_seed(0)
    generator, first = wrapped({}, {"min_numel": 16}, nn.Linear(8, 32))
    judge, second = wrapped({}, {"min_numel": 16}, nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, judge)]
    for step in range(4):
        real, _ = batch(rank, step)
        noise = torch.randn(16, 8, generator=torch.Generator().manual_seed(step * 10 + rank))
        generator.requires_grad_(False)
        (judge(generator(noise)).mean() - judge(real).mean()).backward()
        optimizers[1].step()
        generator.requires_grad_(True)
        judge.requires_grad_(False)
        (-judge(generator(noise)).mean()).backward()
        optimizers[0].step()
        judge.requires_grad_(True)
        for optimizer in optimizers:
            optimizer.zero_grad()
    bits = [fingerprint(generator), fingerprint(judge)]
    first.close()
    second.close()

    model, state = wrapped({}, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(2 + 2 * rank):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    state.close()
    result = [*bits, "\n".join(said)]
    assert result[-1] == ""
    return result


class _Own(nn.Module):
    """A table of each rank's own, of another size on each rank, beside layers that are averaged."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.table = nn.Embedding(7 + rank, 32)
        self.layers = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x + self.table(torch.arange(len(x)) % 7))


@pytest.mark.parametrize("equal_sizes", [True, False])
@on_ranks(2)
def test_parameters_that_ddp_ignores_stay_each_ranks_own(rank: int, equal_sizes: bool) -> str:
    module = _Own(rank if not equal_sizes else 0)
    nn.init.constant_(module.table.weight, rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["table.weight"])
    model = DistributedDataParallel(module)
    state = register_gqsgd(model, preset="dore", min_numel=16)
    for step in range(2):
        loss_of(model, rank, step).backward()
        model.zero_grad()
    before = module.table.weight.detach().clone()
    module.layers[0].bias.requires_grad_(False)
    model = state.rewrap(DistributedDataParallel)
    assert torch.equal(module.table.weight, before)
    optimizer = torch.optim.SGD(module.layers.parameters(), lr=0.1)
    loss_of(model, rank, 2).backward()
    optimizer.step()
    state.close()
    return fingerprint(module.layers)


# --- counts ----------------------------------------------------------------------------------------------------------


class _Unused(nn.Module):
    """Three layers, of which one is never used: DDP's first bucket, or its last one."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        if not first:
            self.unused = nn.Linear(64, 64)
        self.body = nn.Linear(32, 64)
        self.head = nn.Linear(64, 8)
        if first:
            self.unused = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


@pytest.mark.slow
@on_ranks(2)
def test_steps_are_counted_where_ddp_skips_the_last_bucket(rank: int) -> list[Any]:
    """With the same bits as without skipping, so that warm-up, dither and memory go on in the same way."""
    results = []
    for first in (True, False):
        for hook in ({"bits": 2}, {"preset": "dore"}, {"auto": True}):
            outcomes = []
            for skips in (False, True):
                options = {
                    "find_unused_parameters": True,
                    "bucket_cap_mb": 0.001,
                    "skip_all_reduce_unused_params": skips,
                }
                model, state = wrapped(options, {**hook, "min_numel": 16, "warmup_steps": 1}, _Unused(first))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for step in range(6):
                    model(batch(rank, step)[0]).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                telemetry = state.telemetry
                outcomes.append([fingerprint(model), state.step, telemetry.steps, telemetry.exposed_s > 0])
                saved = state.state_dict()
                if saved is not None:
                    assert saved["step"] == 6
                state.close()
            results.append(outcomes)
    for together, skipping in results:
        assert skipping == together
        assert skipping[1:] == [6, 6, True]
    return results
