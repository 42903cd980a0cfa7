"""Accelerate: the handler, `enable`, state in checkpoints, launchers; in processes with torchrun's environment."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import math
import os
import pickle
import re
import runpy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs, debug_launcher
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_gqsgd
from lightning_gqsgd import GQSGDKwargs, enable
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from tests.distributed.models import fingerprint, loss_of, mlp
from tests.distributed.ranks import logged, on_ranks, run
from tests.processes import ended_well

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"
STATE = "custom_checkpoint_0.pkl"


def accelerator_of(route: str, handler: dict[str, Any], **options: Any) -> tuple[Accelerator, GQSGDKwargs | None]:
    """A new Accelerator in a process that may have had others."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    if route == "plain":
        return Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**handler)], **options), None
    if route == "enable":
        kept = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=1)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[kept], **options)
        return accelerator, enable(accelerator, **handler)
    gqsgd = GQSGDKwargs(**handler)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[gqsgd], **options)
    accelerator.register_for_checkpointing(gqsgd)
    return accelerator, gqsgd


def fit(
    rank: int,
    route: str = "kwargs_handlers",
    handler: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    steps: tuple[int, int] = (0, 6),
    clip: float | None = None,
    overflow: int | None = None,
    load: Path | None = None,
    save: Path | None = None,
) -> dict[str, Any]:
    """Train; what a test compares."""
    records = logged()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        accelerator, gqsgd = accelerator_of(route, handler or {}, **(options or {}))
        if overflow is not None:
            accelerator.scaler = torch.amp.GradScaler("cpu")
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = accelerator.prepare(model, optimizer)
    if load:
        accelerator.load_state(load)
    skipped, losses = 0, []
    for step in range(*steps):
        with accelerator.accumulate(model):
            loss = loss_of(model, rank, step)
            accelerator.backward(loss * math.inf if (rank, step) == (1, overflow) else loss)
            if clip:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            skipped += optimizer.step_was_skipped
            optimizer.zero_grad()
        losses.append(loss.item())
    if save:
        accelerator.save_state(save)
    return {
        "ranks": accelerator.num_processes,
        "hook": model._get_ddp_logging_data().get("comm_hook", "none"),
        "unused": model.find_unused_parameters,
        "bucket_bytes": model.bucket_bytes_cap,
        "bits": fingerprint(model),
        "loss": losses[-1],
        "steps": [state.step for state in gqsgd.states] if gqsgd else [],
        "said": said.getvalue(),
        "logged": "\n".join(records),
        "skipped": skipped,
        "scaler": accelerator.scaler is not None,
    }


def fits(rank: int, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    os.environ["OMP_NUM_THREADS"] = "1"
    return [fit(rank, **one) for one in runs]


def start(tmp_path: Path, *runs: dict[str, Any], ranks: int = 2) -> list[list[dict[str, Any]]]:
    return run(fits, ranks, tmp_path, *runs, initialise=False)


def test_both_ways_install_the_hook_and_keep_other_settings(tmp_path: Path) -> None:
    runs = [
        {"handler": {"bits": 4, "find_unused_parameters": True}},
        {"route": "enable", "handler": {"preset": "gqsgd_4bit", "bucket_cap_mb": 2}, "clip": 0.5},
        {"handler": {}, "options": {"gradient_accumulation_steps": 2}, "steps": (0, 8)},
    ]
    first, second = start(tmp_path, *runs)
    for mine, other in zip(first, second, strict=True):
        assert (mine["hook"], mine["ranks"]) == ("gqsgd_hook", 2)
        assert mine["bits"] == other["bits"]
        assert other["said"] == ""
    handlers, enabled, accumulated = first
    assert handlers["unused"]
    assert enabled["unused"]
    assert not accumulated["unused"]
    assert (handlers["bucket_bytes"], enabled["bucket_bytes"]) == (25 << 20, 2 << 20)
    assert handlers["said"].startswith("gqsgd: 21,760 gradient values in 3 tensors at 4 bits")
    assert "at 4 bits" in enabled["said"]
    assert "at 8 bits" in accumulated["said"]
    assert (handlers["steps"], enabled["steps"], accumulated["steps"]) == ([6], [6], [4])


def test_native_is_equal_to_plain_accelerate_and_compression_close(tmp_path: Path) -> None:
    common = {"clip": 0.5, "options": {"gradient_accumulation_steps": 2}, "steps": (0, 12)}
    plain = {"route": "plain", **common}
    native = {"handler": {"reducer": "native"}, **common}
    ddp, native, quantised = start(tmp_path, plain, native, {"handler": {"bits": 8}, **common})[0]
    assert (ddp["hook"], native["hook"]) == ("none", "gqsgd_hook")
    assert native["bits"] == ddp["bits"]
    assert quantised["bits"] != ddp["bits"]
    assert quantised["loss"] == pytest.approx(ddp["loss"], rel=0.02)


MEMORYLESS = {"bits": 4, "reducer": "sum"}
WITH_MEMORY = {"preset": "signsgd_ef", "warmup_steps": 1}


@pytest.mark.parametrize(
    ("route", "handler"),
    [
        pytest.param("kwargs_handlers", MEMORYLESS, id="kwargs_handlers-memoryless", marks=pytest.mark.slow),
        pytest.param("enable", WITH_MEMORY, id="enable-memory"),
        pytest.param("kwargs_handlers", WITH_MEMORY, id="kwargs_handlers-memory", marks=pytest.mark.slow),
        pytest.param("enable", MEMORYLESS, id="enable-memoryless", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_resumes_to_the_same_bits(route: str, handler: dict[str, Any], tmp_path: Path) -> None:
    common = {"route": route, "handler": {**handler, "seed": 9}}
    folder = tmp_path / "state"
    begun = start(tmp_path, common, {**common, "steps": (0, 3), "save": folder})
    (saved,) = torch.load(folder / STATE, weights_only=True)["states"]
    assert (saved["schema"], saved["seed"], saved["step"]) == (1, 9, 3)
    assert ("memory" in saved) == ("preset" in handler)
    resumed = start(tmp_path, {**common, "steps": (3, 6), "load": folder})
    for (whole, half), (rest,) in zip(begun, resumed, strict=True):
        assert rest["steps"] == whole["steps"] == [6]
        assert rest["bits"] == whole["bits"] != half["bits"]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    folders = {preset: tmp_path / preset for preset in ("gqsgd_4bit", "signsgd_ef")}
    start(tmp_path, *({"handler": {"preset": one}, "save": folder} for one, folder in folders.items()))
    runs = [{"handler": {"preset": one}, "load": folder, "steps": (6, 9)} for one, folder in folders.items()]
    ranks = start(tmp_path, *runs, ranks=3)
    for memoryless, remembering in ranks:
        assert memoryless["steps"] == remembering["steps"] == [9]
        assert [memoryless["bits"], remembering["bits"]] == [one["bits"] for one in ranks[0]]
        assert memoryless["logged"] == ""
        assert "the memory starts empty: the checkpoint has that of 2 ranks" in remembering["logged"]


@on_ranks(2, initialise=False)
def test_a_folder_that_each_node_has_saved_resumes_to_the_same_bits(rank: int, tmp_path: Path) -> list[str]:
    """Two nodes of one process each, which share no folder: the bits of a run, and of the same run resumed."""
    os.environ.update(OMP_NUM_THREADS="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank))
    common = {"handler": WITH_MEMORY, "options": {"project_config": ProjectConfiguration(save_on_each_node=True)}}
    own = tmp_path / str(rank)
    runs: list[dict[str, Any]] = [{}, {"steps": (0, 3), "save": own}, {"steps": (3, 6), "load": own}]
    whole, half, resumed = [fit(rank, **common, **one)["bits"] for one in runs]
    assert resumed == whole != half
    return whole, half, resumed


def test_mixed_precision(tmp_path: Path) -> None:
    """Accelerate has fp16 and its GradScaler on accelerators only; on the CPU it trains without a word in fp32."""
    runs = [
        {"options": {"mixed_precision": "bf16"}},
        {"options": {"mixed_precision": "fp16"}},
        {"overflow": 2},  # on one rank
    ]
    first, second = start(tmp_path, *runs)
    for mine, other in zip(first, second, strict=True):
        assert (mine["hook"], mine["bits"], mine["skipped"]) == ("gqsgd_hook", other["bits"], other["skipped"])
    bf16, fp16, scaled = first
    assert bf16["bits"] != fp16["bits"]
    assert not fp16["scaler"]
    assert (scaled["skipped"], scaled["steps"]) == (1, [6])
    assert scaled["loss"] < 1.5


@on_ranks(2, initialise=False)
def test_accelerators_with_one_handler_save_and_load_the_states_of_their_own_models(rank: int, tmp_path: Path) -> None:
    """One handler for two Accelerators, each of which saves its own model, and loads it later."""
    os.environ["OMP_NUM_THREADS"] = "1"
    handler = GQSGDKwargs(bits=4)
    both = [Accelerator(cpu=True, kwargs_handlers=[handler]) for _ in range(2)]
    models = [accelerator.prepare(mlp(64)) for accelerator in both]

    def step(number: int) -> list[int]:
        both[number].backward(loss_of(models[number], rank, 0))
        return [state.step for state in handler.states]

    step(1)
    states = []
    for number, accelerator in enumerate(both):
        accelerator.register_for_checkpointing(handler)
        step(number)
        accelerator.save_state(str(tmp_path / str(number)))
    for number, accelerator in enumerate(both):
        step(number)
        accelerator.load_state(str(tmp_path / str(number)))
        states.append([state.step for state in handler.states])
    handler.load_state_dict(handler.state_dict())  # by nobody: all models
    assert states == [[1, 2], [1, 2]]
    assert [state.step for state in handler.states] == [1, 2]


@on_ranks(2, initialise=False)
def test_a_checkpoint_of_a_fold_has_that_fold_s_state_only(rank: int) -> None:
    """One handler, and an Accelerator for each fold; the models are kept for an ensemble."""
    os.environ["OMP_NUM_THREADS"] = "1"
    handler = GQSGDKwargs(bits=4)
    models = []
    steps = []
    for fold in range(3):
        accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
        models.append(accelerator.prepare(mlp(64)))
        for _ in range(fold + 1):
            accelerator.backward(loss_of(models[-1], rank, 0))
        steps.append([state["step"] for state in handler.state_dict()["states"]])
        accelerator.free_memory()
        if fold:
            del accelerator  # the first one is kept as well
    assert steps == [[1], [2], [3]]


@on_ranks(2, initialise=False)
def test_a_model_that_was_wrapped_anew_keeps_its_state_in_checkpoints(rank: int, tmp_path: Path) -> None:
    """A layer is frozen in training, and nothing but the Accelerator knows the first DDP model any more."""
    folder = tmp_path / "saved"
    accelerator, handler = accelerator_of("kwargs_handlers", {"preset": "signsgd_ef"})
    assert handler is not None
    model = accelerator.prepare(mlp(64))
    accelerator.backward(loss_of(model, rank, 0))
    (state,) = handler.states
    next(model.parameters()).requires_grad_(False)
    model = state.rewrap(DistributedDataParallel)
    gc.collect()
    accelerator.backward(loss_of(model, rank, 1))
    accelerator.save_state(str(folder), safe_serialization=False)
    accelerator.wait_for_everyone()
    steps = [one["step"] for one in torch.load(folder / STATE, weights_only=True)["states"]]
    accelerator.backward(loss_of(model, rank, 2))
    accelerator.load_state(str(folder))
    assert steps == [one.step for one in handler.states] == [2]


@pytest.mark.parametrize("preset", ["signsgd_ef", "gqsgd"])
@on_ranks(2, initialise=False)
def test_a_checkpoint_without_the_memory_is_warned_of(rank: int, tmp_path: Path, preset: str) -> None:
    accelerator, handler = accelerator_of("kwargs_handlers", {"preset": preset})
    model = accelerator.prepare(mlp(64))
    accelerator.backward(loss_of(model, rank, 0))
    with warnings.catch_warnings(record=True) as registered:
        accelerator.save_state(str(tmp_path / "registered"), safe_serialization=False)
    accelerator._custom_objects.clear()
    with warnings.catch_warnings(record=True) as found:
        accelerator.save_state(str(tmp_path / "not"), safe_serialization=False)
    said = ["register_for_checkpointing(handler)" in str(one.message) for one in found]
    assert any(said) == (preset == "signsgd_ef")
    assert not any("register_for_checkpointing" in str(one.message) for one in registered)


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_several_models_and_a_checkpoint_that_comes_before_them(rank: int, tmp_path: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    accelerator, handler = accelerator_of("enable", {"bits": 4})
    assert handler is not None
    first, second = accelerator.prepare(mlp(64), mlp(128))
    assert len(handler.states) == 2

    def step(*models: nn.Module) -> None:
        for model in models:
            accelerator.backward(loss_of(model, rank, 0))

    step(first, second, second)
    saved = handler.state_dict()
    assert [state["step"] for state in saved["states"]] == [1, 2]

    resumed = GQSGDKwargs(bits=4)
    resumed.load_state_dict(saved)  # before there is a hook
    assert resumed.state_dict() == saved
    accelerator, _ = accelerator_of("plain", {})
    accelerator.ddp_handler = resumed
    third, fourth = accelerator.prepare(mlp(64), mlp(128))
    assert [state.step for state in resumed.states] == [1, 2]
    step(third, fourth)
    assert [state.step for state in resumed.states] == [2, 3]
    accelerator.free_memory()  # forgets the models, which the user keeps
    inner = mlp(32)
    inner.module = nn.Identity()  # DDP's name for the model in it
    fifth = accelerator.prepare(inner)
    step(fifth, third)
    assert [state["step"] for state in resumed.state_dict()["states"]] == [1]
    accelerator.free_memory()
    accelerator.prepare(fifth)  # comes back in DDP
    assert [state.step for state in resumed.states] == [1]

    with pytest.raises(ConfigError, match="of 1 hook, and 2 models prepared"):
        handler.load_state_dict({"states": saved["states"][:1]})
    for foreign in ({"scale": 65536.0}, [1, 2], {"states": None}):
        with pytest.raises(ConfigError, match="is a dictionary with the key 'states'.*in the same order"):
            handler.load_state_dict(foreign)
    with pytest.warns(UserWarning, match="no state of gqsgd's hook, which starts anew"):
        handler.load_state_dict({"states": []})
    assert [state.step for state in handler.states] == [0, 0]
    del first, second, third, fourth, fifth


# --- the handler itself -----------------------------------------------------------------------------------------------


def test_every_field_is_an_argument_and_none_of_ours_is_passed_to_ddp() -> None:
    handler = GQSGDKwargs("gqsgd_4bit", block_size=64, find_unused_parameters=True, bucket_cap_mb=50)
    assert handler.config == GQSGDConfig(bits=4, block_size=64)
    assert handler.to_kwargs() == {"find_unused_parameters": True, "bucket_cap_mb": 50}
    values = {field.name: field.default for field in dataclasses.fields(GQSGDConfig)}
    base = {field.name for field in dataclasses.fields(DistributedDataParallelKwargs)}
    assert not base & set(values)
    assert GQSGDKwargs(**values, **dataclasses.asdict(DistributedDataParallelKwargs())).config == GQSGDConfig()


def test_copies_have_the_arguments() -> None:
    handler = GQSGDKwargs("signsgd_ef", static_graph=True, exclude=["*.bias"])
    for one in (copy.copy(handler), copy.deepcopy(handler), pickle.loads(pickle.dumps(handler))):  # noqa: S301
        assert type(one) is GQSGDKwargs
        assert isinstance(one, DistributedDataParallelKwargs)
        assert one.config == handler.config
        assert one.to_kwargs() == handler.to_kwargs()
        assert repr(one) == repr(handler)
        assert one != handler
    assert repr(GQSGDKwargs(bits=4, static_graph=True)) == "GQSGDKwargs(bits=4, static_graph=True)"
    assert GQSGDKwargs() != DistributedDataParallelKwargs()
    with pytest.raises(TypeError, match="unexpected keyword argument 'config'"):  # would be a handler without a hook
        dataclasses.replace(handler, static_graph=False)


def test_arguments_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="no argument 'bit'; did you mean 'bits'"):
        GQSGDKwargs(bit=4)
    with pytest.raises(ConfigError, match="no argument 'find_unused'; did you mean 'find_unused_parameters'"):
        GQSGDKwargs(find_unused=True)
    with pytest.raises(ConfigError, match="bits=9 is out of range: 1 to 8"):
        GQSGDKwargs(bits=9)
    with pytest.raises(ConfigError, match="unknown preset 'gqsgd4'"):
        GQSGDKwargs("gqsgd4")
    for name, value in (("comm_hook", "fp16"), ("comm_wrapper", "bf16"), ("comm_state_option", {"rank": 2})):
        with pytest.raises(ConfigError, match=f"drop {name}, or use DistributedDataParallelKwargs"):
            GQSGDKwargs(**{name: value})
    handler = GQSGDKwargs(comm_hook="no")
    handler.comm_hook = "fp16"
    with pytest.raises(ConfigError, match="drop comm_hook"):
        handler.register_comm_hook(None)  # type: ignore[arg-type]  # comes before the model is looked at
    with pytest.raises(
        ConfigError, match="int is neither an .* nor a transformers.Trainer; for a .* model, call register_gqsgd"
    ):
        enable(3)  # type: ignore[arg-type]


class Subclass(DistributedDataParallelKwargs):
    pass


@on_ranks(1, initialise=False)
def test_what_cannot_be_enabled(rank: int) -> None:
    """Errors and warnings of one process that Accelerate takes for one of several."""
    os.environ["OMP_NUM_THREADS"] = "1"
    # When this fails, Accelerate knows subclasses again, and the handler need not pose as its base any more.
    with pytest.raises(KeyError, match="Subclass"):
        Accelerator(cpu=True, kwargs_handlers=[Subclass()])
    with pytest.raises(ValueError, match="You can only pass one"):
        Accelerator(cpu=True, kwargs_handlers=[GQSGDKwargs(), DistributedDataParallelKwargs()])

    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="fp16")])
    with pytest.raises(ConfigError, match="drop comm_hook"):
        enable(accelerator)
    accelerator.ddp_handler = Subclass()
    with pytest.raises(ConfigError, match="has a handler of type Subclass, which gqsgd would replace; leave it out"):
        enable(accelerator)
    accelerator.ddp_handler = None
    with pytest.raises(ConfigError, match="bits=9"):
        enable(accelerator, bits=9)
    with pytest.raises(ConfigError, match="all_gather_bits: for models that FSDP2 shards"):
        enable(accelerator, bits=4, all_gather_bits=8)
    assert (accelerator.ddp_handler, accelerator._custom_objects) == (None, [])
    handler = enable(accelerator, bits=4)
    assert accelerator._custom_objects == [handler]
    with pytest.raises(ConfigError, match=r"enabled already, as GQSGDKwargs\(bits=4\)"):
        enable(accelerator, bits=5)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(mlp())
    with pytest.raises(ConfigError, match="has prepared 1 model already"):
        enable(accelerator)
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = "FSDP"
    accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=1)
    with pytest.raises(ConfigError, match="trains with FSDP, and gqsgd compresses the gradients of Distributed"):
        enable(accelerator)


@on_ranks(2, initialise=False)
def test_processes_that_do_not_find_each_other_are_told(rank: int) -> None:
    del os.environ["LOCAL_RANK"]  # as on a machine without a GPU: Accelerate does not look at it there
    accelerator = Accelerator()
    if accelerator.num_processes == 2:  # old versions do not look at LOCAL_RANK: nothing goes unnoticed
        return
    with pytest.warns(
        UserWarning, match=r"2 processes were started \(WORLD_SIZE\), but this Accelerator is on its own"
    ):
        enable(accelerator)
    os.environ["WORLD_SIZE"] = "1"
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()) as said:
        warnings.simplefilter("error")
        enable(Accelerator())
    (line,) = said.getvalue().splitlines()
    assert line.startswith("gqsgd: one process, so nothing is reduced. Several are started by torchrun")


@on_ranks(2, initialise=False)
@pytest.mark.parametrize("route", ["kwargs_handlers", "enable"])
def test_processes_that_do_not_find_each_other_are_told_once_why(rank: int, route: str) -> None:
    """A handler does not know its Accelerator, so they hear of it when they train."""
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(io.StringIO()) as printed:
        warnings.simplefilter("always")
        accelerator = Accelerator(kwargs_handlers=[GQSGDKwargs()] if route == "kwargs_handlers" else [])
        if accelerator.num_processes == 2:
            return
        if route == "enable":
            enable(accelerator)
        model = mlp(16)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            accelerator.backward(loss_of(model, rank, step))
            optimizer.step()
    (said,) = (str(warning.message) for warning in caught if "gqsgd" in str(warning.message))
    assert "one process" not in printed.getvalue()
    assert "this Accelerator is on its own" in said
    assert "set ACCELERATE_USE_CPU=true" in said


@pytest.mark.slow
def test_the_names_load_nothing_until_they_are_used() -> None:
    code = (
        "import sys, lightning_gqsgd; assert 'torch' not in sys.modules; lightning_gqsgd.enable; "
        "lightning_gqsgd.GQSGDKwargs; assert 'accelerate' in sys.modules; assert 'transformers' not in sys.modules"
    )
    ended_well("-c", code, timeout=60)
    assert {"GQSGDKwargs", "enable"} <= set(lightning_gqsgd.__all__)


# --- launchers --------------------------------------------------------------------------------------------------------

# `--cpu` would start one process. The script's `cpu=True` is enough for two, which `--multi_gpu` starts.
LAUNCH = [
    *("-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
]


def output_of(*command: str, **environment: str) -> str:
    done = ended_well(*command, timeout=240, **{"OMP_NUM_THREADS": "1", **environment})
    return done.stdout + done.stderr


@pytest.mark.slow
def test_accelerate_launch() -> None:
    output = output_of(*LAUNCH, str(EXAMPLE))
    assert output.count("at 4 bits") == 1
    assert "over 2 ranks" in output
    assert float(output.rsplit("accuracy ", 1)[1].split()[0]) > 0.9


def _debugged(folder: Path) -> None:
    seen = fit(dist.get_rank(), handler={"bits": 4})
    (folder / f"rank{dist.get_rank()}").write_text(f"{seen['ranks']} {seen['hook']} {seen['steps']} {seen['bits']}")


def _launches(_: int, folder: Path) -> None:
    debug_launcher(_debugged, (folder,), num_processes=2)


def test_debug_launcher(tmp_path: Path) -> None:
    run(_launches, 1, tmp_path, tmp_path, initialise=False, torchrun=False)
    first, second = ((tmp_path / f"rank{rank}").read_text() for rank in range(2))
    assert first.startswith("2 gqsgd_hook [6] ")
    assert first == second


def _alone(rank: int, example: Path) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        runpy.run_path(str(example), run_name="__main__")
    return output.getvalue()


@pytest.mark.slow
def test_one_process_is_told_that_nothing_is_reduced_and_the_example_trains(tmp_path: Path) -> None:
    """As ``accelerate launch --cpu`` starts it, whatever its ``--num_processes``."""
    (output,) = run(_alone, 1, tmp_path, EXAMPLE, initialise=False)
    assert output.count("gqsgd: one process, so nothing is reduced. Several are started by torchrun") == 1
    assert float(re.findall(r"accuracy (0\.\d+)", output)[-1]) > 0.8


@pytest.mark.parametrize("arguments", [{"local_steps": 32}, {"preset": "gqsgd_diloco"}, {"bits": 4, "fragments": 2}])
def test_local_steps_are_refused_with_the_way_that_works(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"is for local steps.*leave GQSGDKwargs out: .*LocalSteps\(model, optimizer"):
        GQSGDKwargs(**arguments)


def _forgets_the_model(rank: int) -> list[list[str]]:
    """Warnings where the optimizer alone is prepared, and where the model is as well."""
    os.environ["OMP_NUM_THREADS"] = "1"
    results = []
    for forgets in (True, False):
        accelerator, _ = accelerator_of("kwargs_handlers", {"bits": 4})
        model = mlp(16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared, optimizer = (
            (model, accelerator.prepare(optimizer)) if forgets else accelerator.prepare(model, optimizer)
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                accelerator.backward(loss_of(prepared, rank, step))
                optimizer.step()
        results.append([str(warning.message) for warning in caught if "gqsgd" in str(warning.message)])
    return results


def test_an_optimizer_without_a_prepared_model_is_warned_of_once_on_each_rank(tmp_path: Path) -> None:
    for forgotten, prepared in run(_forgets_the_model, 2, tmp_path, initialise=False):
        assert len(forgotten) == 1
        assert "no model has the hook of GQSGDKwargs" in forgotten[0]
        assert prepared == []
    assert run(_forgets_the_model, 1, tmp_path, initialise=False) == [[[], []]]


@on_ranks(2, initialise=False)
def test_local_sgd_around_a_model_with_the_hook_points_to_local_steps_on_each_rank(rank: int) -> None:
    """Warnings of LocalSGD around a model with the hook, where it is off, and around a model without the hook."""
    results = []
    for route, enabled in (("enable", True), ("enable", False), ("plain", True)):
        accelerator, _ = accelerator_of(route, {"bits": 4} if route == "enable" else {})
        model = accelerator.prepare(mlp(16))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=enabled):
                pass
            with accelerator.no_sync(model):
                pass
        results.append([str(warning.message) for warning in caught if "LocalSGD" in str(warning.message)])
    with_hook, off, without_hook = results
    assert len(with_hook) == 1
    assert "averages whole parameters uncompressed" in with_hook[0]
    assert "LocalSteps(model, optimizer, every=32)" in with_hook[0]
    assert off == without_hook == []
