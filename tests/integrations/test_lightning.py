"""The Lightning strategies: names, hook, checkpoints, in processes of their own."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import importlib.resources
import importlib.util
import inspect
import json
import re
import sys
import typing
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

import lightning_gqsgd
from lightning_gqsgd._autoload import flavour, strategy_names
from lightning_gqsgd.cli.doctor import _framework
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.frameworks import trainer
from lightning_gqsgd.frameworks.versions import OLDEST
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.presets import LOCAL_PRESETS, PRESETS
from lightning_gqsgd.spec.decisions import Decision
from tests.distributed.ranks import RankFailed, run
from tests.integrations.fit import fits
from tests.processes import ended, ended_well

SCRIPT = Path(__file__).with_name("fit.py")


def start(folder: Path, *runs: dict[str, Any], **environment: str) -> list[list[dict[str, Any]]]:
    """Run the script in a new interpreter, which takes seconds; what each rank saw in each run."""
    folder.mkdir(exist_ok=True)
    options = json.dumps({"folder": str(folder), "runs": list(runs)})
    usual = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(SCRIPT.parents[2])}
    done = ended_well(str(SCRIPT), options, timeout=240, **usual, **environment)
    (folder / "output.txt").write_text(done.stdout + done.stderr)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def elastic(folder: Path, *runs: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The same in processes that exist already, as under torchrun."""
    return run(fits, 2, folder, folder, *runs, initialise=False)


def alone(folder: Path, *runs: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The same in one process that no launcher started."""
    return run(fits, 1, folder, folder, *runs, initialise=False, torchrun=False)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_string_is_enough_in_both_packages(package: str, tmp_path: Path) -> None:
    """No import of ours; the hook is installed on the CPU; two fits in a process; the start-up line; logged
    counters."""
    runs = [{"strategy": "gqsgd", "csv": True}, {"strategy": "gqsgd_4bit_find_unused_parameters_true"}]
    first, second = start(tmp_path, *runs, FIT_FLAVOUR=package)
    for mine, other in zip(first, second, strict=True):
        assert (mine["world"], mine["step"], mine["hook_step"]) == (2, 8, 8)
        assert mine["hooks"] == other["hooks"] == ["gqsgd_hook"]
        assert mine["bits"] == other["bits"]
        assert ("pytorch_lightning" in mine["strategy"]) == (package == "pytorch_lightning")
    assert [run["config"]["bits"] for run in first] == [8, 4]
    output = (tmp_path / "output.txt").read_text()
    assert output.count("gqsgd: 5,376 gradient values in 2 tensors at 8 bits") == 1
    assert output.count("gqsgd: 5,376 gradient values in 2 tensors at 4 bits") == 1
    assert output.count("gqsgd: in 8 steps, rank 0 sent ") == 2  # once in each fit
    rows = list(csv.DictReader(next(tmp_path.glob("csv/*/metrics.csv")).open()))
    sent = [float(row["gqsgd/bytes_sent"]) for row in rows if row["gqsgd/bytes_sent"]]
    assert len(sent) == 8
    assert sent == sorted(sent)
    assert {"gqsgd/rel_l2", "gqsgd/encode_s", "gqsgd/wait_s", "gqsgd/exposed_s", "gqsgd/decode_s"} <= set(rows[0])
    assert 0 < float(rows[-1]["gqsgd/rel_l2"]) < 0.05
    assert 8 < float(rows[-1]["gqsgd/bits_per_coordinate"]) < 10


def test_lightning_starts_processes_by_fork(tmp_path: Path) -> None:
    ((result,),) = alone(tmp_path, {"strategy": "gqsgd_fork_find_unused_parameters_true"})
    assert result["metrics"]["gqsgd/bytes_sent"] > 0


@pytest.mark.slow
def test_lightning_starts_processes_by_spawn(tmp_path: Path) -> None:
    ((result,),) = start(tmp_path, {"strategy": "gqsgd_spawn"})
    assert result["metrics"]["gqsgd/bytes_sent"] > 0


def test_compression_is_close_to_plain_ddp_and_native_equal_to_it(tmp_path: Path) -> None:
    strategies = ["ddp", {"reducer": "native"}, {"reducer": "hierarchical"}, {"bits": 8}]
    (ddp, native, one_node, quantised), _ = elastic(tmp_path, *[{"strategy": one} for one in strategies])
    assert native["bits"] == one_node["bits"] == ddp["bits"]
    assert quantised["bits"] != ddp["bits"]
    assert quantised["metrics"]["loss"] == pytest.approx(ddp["metrics"]["loss"], rel=0.02)


@pytest.mark.parametrize(
    "fields",
    [
        *(
            pytest.param(fields, marks=pytest.mark.slow)
            for fields in (
                {"bits": 4},
                {"bits": 4, "reducer": "two_shot"},
                {"bits": 4, "reducer": "sum"},
                {"preset": "signsgd_ef"},
            )
        ),
        {"preset": "dore", "memory": {"alpha": 0.0, "beta": 0.0, "rho": 0.02}},
    ],
    ids=str,
)
def test_an_interrupted_run_resumes_to_the_same_bits(fields: dict, tmp_path: Path) -> None:
    strategy = {**fields, "warmup_steps": 3, "seed": 9, "bucket_cap_mb": 0.01}
    path = str(tmp_path / "last.ckpt")
    whole = elastic(tmp_path, {"strategy": strategy, "max_epochs": 3})
    elastic(tmp_path, {"strategy": strategy, "max_epochs": 3, "max_steps": 16, "save": path})
    saved = torch.load(path, weights_only=True)["gqsgd"]
    assert (saved["schema"], saved["seed"], saved["step"]) == (1, 9, 16)
    resumed = elastic(tmp_path, {"strategy": strategy, "max_epochs": 3, "ckpt_path": path})
    for before, after in zip(whole, resumed, strict=True):
        assert before[0]["hook_step"] == after[0]["hook_step"] == 24
        assert before[0]["bits"] == after[0]["bits"]


def test_checkpoints_go_between_ddp_and_gqsgd(tmp_path: Path) -> None:
    plain, quantised = str(tmp_path / "ddp.ckpt"), str(tmp_path / "gqsgd.ckpt")
    elastic(tmp_path, {"strategy": "ddp", "save": plain}, {"strategy": "gqsgd", "save": quantised})
    assert "gqsgd" not in torch.load(plain, weights_only=True)
    runs = [
        {"strategy": "gqsgd", "ckpt_path": plain, "max_epochs": 2},
        {"strategy": "ddp", "ckpt_path": quantised, "max_epochs": 2},
        {"strategy": "gqsgd_4bit", "ckpt_path": quantised, "max_epochs": 2},
    ]
    first, second, third = elastic(tmp_path, *runs)[0]
    assert (first["step"], first["hook_step"]) == (16, 8)  # the dither starts anew
    assert (second["step"], second["hook_step"]) == (16, None)
    assert (third["step"], third["hook_step"]) == (16, 16)


def test_another_number_of_processes_in_one_process_is_an_error(tmp_path: Path) -> None:
    message = "this run asks for 2 processes, but the process group of an earlier run in this process has 1"
    with pytest.raises(RankFailed, match=message):
        alone(tmp_path, {"strategy": "gqsgd", "devices": 1}, {"strategy": "gqsgd", "devices": 2})


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "gqsgd_find_unused_parameters_true"),
        ({"preset": "gqsgd_4bit"}, "gqsgd_4bit_find_unused_parameters_true"),
        ({"bits": 4}, "gqsgd_4bit_find_unused_parameters_true"),
        ({"preset": "dore"}, "dore_find_unused_parameters_true"),
    ],
)
def test_unused_parameters_hint_names_this_strategy(arguments: dict[str, Any], name: str) -> None:
    strategy = lightning_gqsgd.GQSGDStrategy(**arguments)
    error = RuntimeError("Expected to have finished reduction in the prior iteration before ...")
    strategy.on_exception(error)
    assert f"strategy='{name}'" in str(error)
    assert name in strategy_names()
    assert "GQSGDStrategy(find_unused_parameters=True)" in str(error)


@pytest.mark.parametrize("make", ["lightning.pytorch.Trainer", "lightning.fabric.Fabric"])
@pytest.mark.parametrize(
    ("name", "near"),
    [("gqsgd_5bit", "strategy=lightning_gqsgd.GQSGDStrategy(bits=5)"), ("gqsgd4bit", "'gqsgd_4bit'")],
)
def test_a_name_that_is_nearly_ours_names_ours(make: str, name: str, near: str) -> None:
    package, _, kind = make.rpartition(".")
    words = f"unknown strategy '{name}'; did you mean {re.escape(near)}.*GQSGDStrategy\\(bits=5"
    with pytest.raises(ValueError, match=words):
        getattr(importlib.import_module(package), kind)(strategy=name, accelerator="cpu", devices=2)
    with pytest.raises(ValueError, match="invalid strategy name"):
        getattr(importlib.import_module(package), kind)(strategy="dpp", accelerator="cpu", devices=2)


_FLAVOURS = {
    "lightning.pytorch.Trainer": "trainer_lightning.GQSGDStrategy",
    "pytorch_lightning.Trainer": "trainer_pytorch_lightning.GQSGDStrategy",
    "lightning.fabric.Fabric": "fabric_lightning.GQSGDFabricStrategy",
    "lightning_fabric.Fabric": "fabric_lightning_fabric.GQSGDFabricStrategy",
}


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("make", _FLAVOURS)
def test_a_strategy_of_another_front_end_is_refused_with_the_one_to_import(make: str) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 2}
    for other, home in _FLAVOURS.items():
        strategy = _named(f"lightning_gqsgd.frameworks.{home}")(bits=4)
        if other == make:
            _named(make)(strategy=strategy, **options)
        else:
            module, _, name = _FLAVOURS[make].rpartition(".")
            words = f"take `from lightning_gqsgd.frameworks.{module} import {name}`"
            with pytest.raises(TypeError, match=re.escape(words)):
                _named(make)(strategy=strategy, **options)


def test_local_steps_that_are_to_choose_bits_are_refused_without_a_word_of_bits_that_nobody_gave() -> None:
    with pytest.raises(ConfigError, match="auto=True chooses bits by the length of the steps of a DDP training"):
        lightning_gqsgd.GQSGDStrategy(local_steps=4, auto=True)


class _Counted:
    """A state whose counters tell how often they are read."""

    def __init__(self) -> None:
        self.telemetry, self.reads = self, 0
        self.choice: dict[str, float] = {}

    def totals(self) -> dict[str, float]:
        self.reads += 1
        names = ("bytes_sent", "nonfinite_blocks", "bits_per_coordinate", "rel_l2", "encode_s", "wait_s", "decode_s")
        return {**dict.fromkeys((*names, "exposed_s"), 1.0), "steps": self.reads, "plain_steps": 0}


def test_counters_are_read_when_the_trainer_logs_and_only_then() -> None:
    """On a GPU, reading them waits for it."""
    callback, counted, logged = lightning_gqsgd.GQSGDTelemetry(), _Counted(), []
    connector = SimpleNamespace(should_update_logs=False)
    trainer = SimpleNamespace(strategy=SimpleNamespace(gqsgd_state=counted), _logger_connector=connector)
    module = SimpleNamespace(log_dict=lambda values, **_: logged.append(values))
    callback.on_train_start(trainer, module)
    for batch in range(1, 13):
        connector.should_update_logs = batch % 4 == 0
        callback.on_train_batch_end(trainer, module, None, None, batch)
    assert len(logged) == 3
    assert counted.reads == 1 + 3


NO_IMPORT = "import lightning.pytorch as pl; pl.Trainer(strategy='gqsgd', accelerator='cpu', devices=2, logger=False)"


@pytest.mark.slow
def test_names_are_known_without_an_import() -> None:
    ended_well("-c", NO_IMPORT)


@pytest.mark.slow
def test_names_are_known_unless_switched_off() -> None:
    off = ended("-W", "ignore", "-c", NO_IMPORT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "strategy='gqsgd'" in off.stderr
    assert off.returncode != 0
    ended_well("-c", "import lightning_gqsgd;" + NO_IMPORT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    ended_well("-c", NO_IMPORT + ";import lightning_gqsgd", PL_TRAINER_STRATEGY="gqsgd")


def test_importing_the_package_loads_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; import lightning_gqsgd; loaded = {name.split('.')[0] for name in sys.modules};"
        "assert not loaded & {'torch', 'numpy', 'numba', 'lightning', 'pytorch_lightning'}, loaded"
    )
    ended_well("-c", code)


@pytest.mark.parametrize(
    ("first", "second", "home"),
    [
        ("lightning.pytorch", "pytorch_lightning", "trainer_pytorch_lightning"),
        ("lightning.fabric", "lightning_fabric", "fabric_lightning_fabric"),
    ],
)
def test_a_class_that_is_imported_before_lightning_is_of_the_package_that_is_installed(
    first: str, second: str, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (first, second):  # neither is imported yet
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert flavour(first, second) == home.removesuffix(second) + "lightning"  # both are installed
    monkeypatch.setitem(sys.modules, "lightning", None)
    assert flavour(first, second) == home


@pytest.mark.slow
def test_a_failure_does_not_break_torch_where_warnings_are_errors() -> None:
    code = "import lightning_gqsgd._autoload as a; a._warn(KeyError('x')); import torch"
    done = ended_well("-W", "error", "-c", code)
    assert "could not register its strategies by name (KeyError: 'x')" in done.stderr


@pytest.mark.parametrize(
    ("name", "missing", "package"),
    [
        ("GQSGDStrategy", "lightning", "lightning"),
        ("GQSGDFabricStrategy", "lightning", "lightning"),
        ("GQSGDKwargs", "accelerate", "accelerate"),
    ],
)
def test_a_missing_framework_is_an_error_that_names_its_own_package(
    name: str, missing: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == missing]:
        monkeypatch.setitem(sys.modules, module, None)
    for module in [module for module in sys.modules if module.startswith("lightning_gqsgd.frameworks.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "lightning":  # some packages look for Lightning's older name, and leave such an entry behind
        monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
        monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    with pytest.raises(ImportError, match=rf"{name} needs {package}, .*: pip install '{package}>=[\d.]+"):
        getattr(lightning_gqsgd, name)


def test_a_star_import_has_what_the_installed_packages_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("accelerate", "ray"):
        monkeypatch.setitem(sys.modules, missing, None)
        monkeypatch.delitem(sys.modules, f"lightning_gqsgd.frameworks.{missing}", raising=False)
    names: dict[str, object] = {}
    exec("from lightning_gqsgd import *", names)  # noqa: S102  (functions cannot have a star import)
    assert {"GQSGDStrategy", "GQSGDFabricStrategy", "register_gqsgd", "all_reduce"} <= set(names)
    assert not {"GQSGDKwargs", "RayGQSGDStrategy"} & set(names)


def test_remedies_for_missing_packages_are_what_the_extras_bring() -> None:
    project = (Path(lightning_gqsgd.__file__).parents[1] / "pyproject.toml").read_text()
    extras = project.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    for remedy in lightning_gqsgd._BRINGS.values():
        assert f'"{remedy}"' in extras


@pytest.mark.parametrize("package", OLDEST)
def test_a_framework_that_is_too_old_is_named_with_the_version_of_the_extra(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.9.1" if name == package else found(name))
    monkeypatch.delitem(sys.modules, f"lightning_gqsgd.frameworks.{package}", raising=False)
    remedy = f"pip install '{lightning_gqsgd._BRINGS[package]}'"
    said = f"lightning_gqsgd needs {package} {OLDEST[package]} or newer, and 0.9.1 is installed: {remedy}"
    with pytest.raises(ImportError, match=f"^{re.escape(said)}$"):
        importlib.import_module(f"lightning_gqsgd.frameworks.{package}")
    assert _framework(package) == f"0.9.1; {said}"


@pytest.mark.slow
def test_autoload_warns_and_never_raises(tmp_path: Path) -> None:
    """A package that stands for Lightning takes less time to import."""
    (tmp_path / "lightning" / "pytorch" / "strategies").mkdir(parents=True)
    for folder in ("lightning", "lightning/pytorch", "lightning/pytorch/strategies"):
        (tmp_path / folder / "__init__.py").write_text("")
    code = (
        "import warnings, lightning_gqsgd._autoload as a;"
        "a._register = lambda *_: 1 / 0;"
        "warnings.simplefilter('always');"
        "import torch, lightning.pytorch.strategies"
    )
    done = ended_well("-c", code, PYTHONPATH=str(tmp_path), PYTHONWARNINGS="always")
    assert "could not register its strategies by name (ZeroDivisionError: division by zero)" in done.stderr


def find_all_names(_: int) -> None:
    """In a process of its own, for it loads modules again."""
    import lightning.fabric.strategies
    import lightning.pytorch.strategies
    import lightning_fabric.strategies
    import pytorch_lightning.strategies

    inspect.getsource(lightning.pytorch.strategies)
    importlib.resources.files(lightning.pytorch.strategies)
    registries = [
        lightning.pytorch.strategies.StrategyRegistry,
        pytorch_lightning.strategies.StrategyRegistry,
        lightning.fabric.strategies.STRATEGY_REGISTRY,
        lightning_fabric.strategies.STRATEGY_REGISTRY,
    ]
    kinds = set()
    for registry in registries:
        for name, arguments in strategy_names().items():
            strategy = registry.get(name)
            kinds.add(type(strategy))
            preset = arguments["preset"]
            compression = LOCAL_PRESETS[preset].compression if preset in LOCAL_PRESETS else PRESETS[preset]
            assert strategy.gqsgd_config == compression.config
            assert strategy._start_method == arguments["start_method"]
            assert strategy._ddp_kwargs.get("find_unused_parameters") == arguments.get("find_unused_parameters")
    assert len(kinds) == 4, kinds
    importlib.reload(lightning.pytorch.strategies)
    importlib.reload(lightning_gqsgd)


@pytest.mark.slow
def test_all_names_are_in_all_four_registries(tmp_path: Path) -> None:
    names = strategy_names()
    assert {arguments["preset"] for arguments in names.values()} == {*PRESETS, *LOCAL_PRESETS}
    assert len(names) == len(PRESETS) * 4 * 3 + len(LOCAL_PRESETS) * 4
    assert {"gqsgd", "gqsgd_4bit", "gqsgd_spawn", "gqsgd_fork_find_unused_parameters_true", "gqsgd_notebook"} <= set(
        names
    )
    run(find_all_names, 1, tmp_path, initialise=False, torchrun=False)


def test_every_field_is_an_argument() -> None:
    values = {
        "codec": "linear",
        "bits": 5,
        "levels": 9,
        "mantissa": 0,
        "density": 0.01,
        "block_size": 128,
        "norm": "l2",
        "clip": 2.5,
        "scale": "local",
        "norm_over_ranks": "max",
        "scale_per": "parameter",
        "dither": "stochastic",
        "rotation": True,
        "coder": "fixed",
        "reducer": "two_shot",
        "node_size": 0,
        "memory": {"alpha": 0.5, "beta": 1.0, "rho": 0.0},
        "memory_down": "none",
        "min_numel": 7,
        "exclude": ("*.bias",),
        "warmup_steps": 3,
        "seed": 4,
        "sample_every": 5,
        "auto": False,
        "allow": (32, 16, 8, 4),
        "max_slowdown": None,
        "sparse": "refuse",
        "sparse_limit": 1.0,
        "connections": 2,
    }
    assert set(values) == set(GQSGDConfig.field_names())
    assert lightning_gqsgd.GQSGDStrategy(**values).gqsgd_config == GQSGDConfig(**values)
    assert lightning_gqsgd.GQSGDFabricStrategy(**values).gqsgd_config == GQSGDConfig(**values)
    others = {"bits": "auto", "max_slowdown": 0.1, "sparse": "gather", "sparse_limit": 0.5}
    assert lightning_gqsgd.GQSGDStrategy(**others).gqsgd_config == GQSGDConfig(**others)
    chosen = GQSGDConfig(auto=True, allow=(32, 4))
    assert lightning_gqsgd.GQSGDStrategy(auto=True, allow=[4, 32]).gqsgd_config == chosen
    assert lightning_gqsgd.GQSGDStrategy(preset="gqsgd_4bit", block_size=64).gqsgd_config == GQSGDConfig(
        bits=4, block_size=64
    )


def test_the_strategys_signature_the_fields_and_their_description_agree() -> None:
    """One record repeats the fields, which jsonargparse reads by way of the signature, and editors by themselves."""
    inherited = inspect.signature(lightning_gqsgd.GQSGDStrategy).parameters
    of_fabric = inspect.signature(lightning_gqsgd.GQSGDFabricStrategy).parameters
    assert set(inherited) - set(of_fabric) == {"telemetry", "validate_at"}
    assert all(of_fabric[name].annotation == inherited[name].annotation for name in GQSGDConfig.field_names())
    fields = {field.name: field for field in dataclasses.fields(GQSGDConfig)}
    others = ("preset", "telemetry", "kwargs", "local_steps", "validate_at", *LocalOptions.field_names())
    repeated = [name for name in inherited if name not in others]
    assert repeated == list(fields)
    types = typing.get_type_hints(trainer.TrainerMixin.__init__)
    for name, field in typing.get_type_hints(GQSGDConfig).items():
        assert inherited[name].default is None
        assert inherited[name].kind is inspect.Parameter.KEYWORD_ONLY
        taken = set(typing.get_args(types[name]))
        if name == "exclude":
            assert taken == {Sequence[str], type(None)}
        elif name == "allow":
            assert taken == {Sequence[int], type(None)}
        elif name == "bits":  # files of configurations have dictionaries
            assert taken == {int, Literal["auto"], dict[str, int], type(None)}
        elif name == "auto":  # so do decisions of checkpoints
            assert taken == {bool, dict[str, Any], Decision, type(None)}
        else:
            assert taken >= {*(typing.get_args(field) or (field,)), type(None)}
    # Python 3.13 takes the indentation off a docstring, and `getdoc` does under all versions.
    described = re.findall(r"^    (\w+): ", str(inspect.getdoc(GQSGDConfig)), re.MULTILINE)
    assert [name for name in described if name != "ConfigError"] == list(fields)


@pytest.mark.parametrize("strategy", ["GQSGDStrategy", "GQSGDFabricStrategy"])
def test_arguments_that_cannot_work(strategy: str) -> None:
    make = getattr(lightning_gqsgd, strategy)
    with pytest.raises(ConfigError, match="no argument 'bit'; did you mean 'bits'"):
        make(bit=4)
    with pytest.raises(ConfigError, match="no argument 'find_unused_params'; did you mean 'find_unused_parameters'"):
        make(find_unused_params=True)
    with pytest.raises(ConfigError, match="bits=9 is out of range: 1 to 8"):
        make(bits=9)
    with pytest.raises(ConfigError, match="preset=4 is neither .* e.g. bits=4"):
        make(4)
    assert make(GQSGDConfig(bits=3)).gqsgd_config == make("gqsgd", bits=3).gqsgd_config == GQSGDConfig(bits=3)
    with pytest.raises(ConfigError, match="unknown preset 'gqsgd4'"):
        make(preset="gqsgd4")
    with pytest.raises(ConfigError, match="drop ddp_comm_hook, or use DDPStrategy"):
        make(ddp_comm_hook=print)
    assert make(bits=4, bucket_cap_mb=50, static_graph=True)._ddp_kwargs == {"bucket_cap_mb": 50, "static_graph": True}
