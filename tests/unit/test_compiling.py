"""What is compiled before the first step, and what users are told of it."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from typer.testing import CliRunner

from lightning_gqsgd.cli import doctor, warming
from lightning_gqsgd.cli.app import app
from lightning_gqsgd.codecs.top_k import cpu as top_k
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels import cpu, readable_kernels
from lightning_gqsgd.kernels.cpu import cache, jit, stages
from lightning_gqsgd.kernels.cpu.blocks import codec_kernel
from lightning_gqsgd.presets import PRESETS, make_config
from lightning_gqsgd.reducers import Setting
from lightning_gqsgd.wire import announcing, compiling
from lightning_gqsgd.wire.compiling import MOST_VIRTUAL, check, compile_kernels, run_once, settings_of
from lightning_gqsgd.wire.plan import GatherPlan, Plan, ScatterPlan, ShardPlan

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of the cache, which is empty."""
    monkeypatch.setattr(cache, "folders", lambda: [tmp_path])
    forget()
    return tmp_path


@pytest.fixture
def no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has no folder that is writable."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(cache, "folders", lambda: [tmp_path / "file" / "folder"])
    forget()


def forget() -> None:
    """Forget the kernel of the codec top_k, as in a new process."""
    top_k._kernel = codec_kernel("top_k", top_k._write, top_k._read)
    stages._coder.cache_clear()


def compile_top_k() -> None:
    """Compile one kernel, the one of the codec top_k."""
    compile_kernels(resolve(make_config("topk_ef"), 2), torch.float32, CPU, 2)


@pytest.mark.slow
def test_one_line_says_that_kernels_are_compiled_and_none_that_they_are_in_the_cache(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lightning_gqsgd"):
        compile_top_k()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "float32" in record.message
    assert "not been compiled" in record.message
    assert str(folder) in record.message
    caplog.clear()
    forget()
    with caplog.at_level(logging.INFO, "lightning_gqsgd"):
        compile_top_k()
    assert caplog.records == []


@pytest.mark.slow
@pytest.mark.usefixtures("no_folder")
def test_a_warning_names_the_remedy_where_compiled_kernels_cannot_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning_gqsgd"):
        compile_top_k()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "NUMBA_CACHE_DIR" in record.message
    assert "writable" in record.message


def _scale(x: torch.Tensor) -> None:
    x *= 1.01


def _spoil_every_fourth(x: torch.Tensor) -> None:
    x[::4] += 1


def _lose_a_block(x: torch.Tensor) -> None:
    x[:16] = torch.nan


def _round_one_otherwise(x: torch.Tensor) -> None:
    x[5] += 1


def _spoil_decoding(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[torch.Tensor], None]) -> None:
    """Let the kernel for CPUs that decodes change what it has written, as one that was compiled wrongly might."""
    decode = cpu.decode

    def decode_wrongly(wires: Any, how: Any, out: torch.Tensor, *args: Any) -> Any:
        bad = decode(wires, how, out, *args)
        spoil(out)
        return bad

    monkeypatch.setattr(cpu, "decode", decode_wrongly)


def _check(preset: str, dtype: torch.dtype) -> None:
    for setting in settings_of(resolve(make_config(preset), 2), dtype, CPU, 2):
        check(setting, CPU, run_once(setting, CPU))


@pytest.mark.parametrize("kind", [ScatterPlan, GatherPlan])
@pytest.mark.parametrize("fields", [{}, {"bits": 4, "warmup_steps": 2}, {"bits": 3, "codec": "eden"}])
def test_collectives_of_shards_are_compiled_and_checked(
    fields: dict, kind: type[ShardPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GQSGDConfig(reducer="two_shot", memory_down="none", **fields)
    made: list[object] = []
    collective = kind.collective

    def kept(*args: Any) -> object:
        made.append(collective(*args))
        return made[-1]

    monkeypatch.setattr(kind, "collective", staticmethod(kept))
    compile_kernels(config, torch.float32, CPU, 2, kind)
    assert made
    _spoil_decoding(monkeypatch, _scale)
    with pytest.raises(ConfigError, match=r"of 144 coordinates to other numbers"):
        compile_kernels(config, torch.float32, CPU, 2, kind)


#: Reducers whose kernels depend on the number of ranks, with what is done with a tensor.
OF_MANY_RANKS: tuple[tuple[dict[str, Any], type[Plan]], ...] = (
    ({"reducer": "two_shot", "bits": 4}, Plan),
    ({"reducer": "two_shot", "memory": "ef", "codec": "linear"}, Plan),
    ({"reducer": "gather"}, Plan),
    ({"reducer": "sum", "codec": "linear"}, Plan),
    ({"reducer": "tree", "codec": "exponential", "mantissa": 0}, Plan),
    ({"reducer": "two_shot"}, ScatterPlan),
    ({"reducer": "two_shot"}, GatherPlan),
)


@pytest.mark.parametrize(("fields", "kind"), OF_MANY_RANKS, ids=str)
def test_kernels_for_many_ranks_are_run_on_few(
    fields: dict[str, Any], kind: type[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = 9
    made: list[torch.Tensor] = []
    gradient = compiling._gradient

    def kept(rank: int, numel: int) -> torch.Tensor:
        made.append(gradient(rank, numel))
        return made[-1]

    monkeypatch.setattr(compiling, "_gradient", kept)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    gpu = torch.device("cuda")  # only its name: all tensors are on the CPU
    (setting,) = settings_of(resolve(GQSGDConfig(**fields), ranks), torch.float32, gpu, ranks)
    assert setting.ranks == ranks
    mean = run_once(setting, gpu, kind, on=CPU)
    assert len(made) == MOST_VIRTUAL
    assert mean.any()
    check(setting, gpu, mean, kind)
    with pytest.raises(ConfigError, match="other numbers"):
        check(setting, gpu, 1.1 * mean, kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", ["gqsgd", "gqsgd_2bit", "natural_compression", "topk_ef", "global_qsgd_linear"])
def test_kernels_pass_their_check(preset: str, dtype: torch.dtype) -> None:
    _check(preset, dtype)


@pytest.mark.parametrize("preset", ["gqsgd", "gqsgd_2bit", "qsgd_elias", "topk_ef"])
def test_a_default_device_of_the_user_s_is_not_taken(preset: str) -> None:
    with torch.device("meta"):
        _check(preset, torch.float32)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fields", [{"codec": "eden", "bits": 4}, {"codec": "trellis", "bits": 2}, {"reducer": "sum"}])
def test_a_default_dtype_of_the_user_s_changes_nothing(fields: dict[str, Any], default: torch.dtype) -> None:
    (setting,) = settings_of(resolve(GQSGDConfig(**fields), 2), torch.float32, CPU, 2)
    with readable_kernels():
        expected = run_once(setting, CPU)
        torch.set_default_dtype(default)
        try:
            found = run_once(setting, CPU)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("spoil", [_scale, _spoil_every_fourth, _lose_a_block])
def test_kernels_that_were_compiled_wrongly_are_an_error(
    spoil: Callable[[torch.Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil_decoding(monkeypatch, spoil)
    with pytest.raises(ConfigError, match=r"of 72 coordinates to other numbers .* Numba .* plain DDP"):
        _check("gqsgd", torch.float32)
    (finding,) = [finding for finding in doctor.findings() if finding.question == "CPU kernels"]
    assert finding.is_bad
    assert "other numbers" in finding.answer


@pytest.mark.parametrize(("compiler", "is_said"), [("/usr/bin/gcc", False), (None, True)])
def test_the_doctor_says_where_triton_has_no_c_compiler(
    monkeypatch: pytest.MonkeyPatch, compiler: str | None, is_said: bool
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: compiler)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ("needs a C compiler on nodes with GPUs: install gcc, or set CC" in doctor._gpu_kernels()) == is_said


def test_a_coordinate_that_is_rounded_otherwise_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil_decoding(monkeypatch, _round_one_otherwise)
    _check("gqsgd", torch.float32)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_what_is_compiled_anew_is_checked_and_what_is_in_the_cache_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil_decoding(monkeypatch, _scale)
    for _ in range(2):
        with pytest.raises(ConfigError, match="other numbers"):
            compile_top_k()
        forget()


def test_every_start_of_a_process_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(make_config("gqsgd"), 2)
    compile_kernels(config, torch.float32, CPU, 2)
    _spoil_decoding(monkeypatch, _scale)
    for _ in range(2):
        with pytest.raises(ConfigError, match="other numbers"):
            compile_kernels(config, torch.float32, CPU, 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 1024, "bits": 5, "rotation": True, "warmup_steps": 3},
        {"block_size": 64, "codec": "exponential", "mantissa": 1, "reducer": "gather"},
        {"block_size": 48, "codec": "top_k", "density": 0.1, "memory": "ef"},
        {"block_size": 80, "reducer": "sum", "scale_per": "parameter"},
    ],
)
def test_kernels_are_compiled_for_the_configuration_as_it_is(fields: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(GQSGDConfig(**fields), 8)
    run: list[Setting] = []
    monkeypatch.setattr(compiling, "run_once", lambda setting, device, plan: run.append(setting))
    monkeypatch.setattr(compiling, "check", lambda *_: None)
    compile_kernels(config, torch.bfloat16, CPU, 8)
    assert run[0] == setting_of(config, 2, torch.bfloat16)
    assert len(run) == 1 + bool(config.warmup_steps)


@pytest.mark.slow
def test_warmup_fills_the_cache_and_names_its_folder(folder: Path) -> None:
    result = CliRunner().invoke(app, ["warmup", "topk_ef"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"CPU kernels of 1 preset are in {folder} (")
    files = set(folder.iterdir())
    assert any("top_k" in file.name for file in files)
    forget()
    assert CliRunner().invoke(app, ["warmup", "topk_ef", "--dtype", "bfloat16"]).exit_code == 0  # fp32 arithmetic
    assert set(folder.iterdir()) == files


@pytest.mark.usefixtures("no_folder")
def test_warmup_fails_with_one_line_if_no_folder_is_writable() -> None:
    result = CliRunner().invoke(app, ["warmup", "topk_ef"])
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert "NUMBA_CACHE_DIR" in line


@pytest.mark.slow
def test_warmup_fails_with_one_line_if_the_disk_is_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "_write", full)
    result = CliRunner().invoke(app, ["warmup", "topk_ef"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.count("No space left on device") == result.stderr.count("NUMBA_CACHE_DIR") == 1


@pytest.mark.parametrize(("arguments", "word"), [(["topk"], "topk_ef"), (["topk_ef", "--dtype", "int8"], "bfloat16")])
def test_warmup_refuses_what_it_does_not_know(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(app, ["warmup", *arguments])
    assert result.exit_code == 2
    assert word in result.stderr


def test_warmup_can_prepare_every_preset_and_nothing_twice() -> None:
    jobs = warming._jobs(list(PRESETS), ["float32"], [2, 8])
    assert {name for name, *_ in jobs} == set(PRESETS)
    assert len({(config, dtype) for _, config, dtype, _ in jobs}) == len(jobs)


@pytest.mark.parametrize("gains", [True, False])
def test_vectors_are_long_where_the_processor_gains_by_them(monkeypatch: pytest.MonkeyPatch, *, gains: bool) -> None:
    monkeypatch.setattr(jit, "_gains_by_long_vectors", lambda: gains)

    @jit.called
    def twice(x: float) -> float:
        return 2 * x

    twice.compile((numba.float32,))
    (made,) = twice.inspect_llvm().values()
    assert ('"prefer-vector-width"="512"' in made) == gains


def _said_of_a_gpu(local_rank: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said while kernels of a GPU are compiled for so long."""
    said: list[str] = []
    announcing._say_once.cache_clear()
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(announcing, "say", said.append)
    with announcing.compilation_is_announced(torch.bfloat16, torch.device("cuda")):
        end = time.monotonic() + seconds
        while not said and time.monotonic() < end:
            time.sleep(0.01)
    return said


def test_compilers_of_a_gpu_are_announced_on_each_machine_once_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _said_of_a_gpu("0", 0, monkeypatch) == []
    monkeypatch.setattr(announcing, "_SILENT_S", 0.01)
    assert _said_of_a_gpu("1", 0.1, monkeypatch) == []
    (line,) = _said_of_a_gpu("0", 30, monkeypatch)
    assert line == "gqsgd: compiling GPU kernels for torch.bfloat16, which takes up to a minute once"


def test_whichever_process_of_a_machine_compiles_for_a_cpu_says_so_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with caplog.at_level(logging.INFO, "lightning_gqsgd"):
        for kernel in ("companded", "narrow"):  # of two configurations
            with announcing.compilation_is_announced(torch.float32, CPU):
                for watcher in cache._watchers:
                    watcher(cache.Compilation(kernel, "why", tmp_path))
    (record,) = caplog.records
    assert "compiling CPU kernels for torch.float32" in record.message
    assert str(tmp_path) in record.message
