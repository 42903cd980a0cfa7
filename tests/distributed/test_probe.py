"""`gqsgd probe` and `gqsgd doctor` on real processes; their figures are nobody's business here."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from lightning_gqsgd import version
from lightning_gqsgd.cli import benching, doctor, probing, ranks
from lightning_gqsgd.cli.app import app
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.cpu import cache
from lightning_gqsgd.predict import bench, predict
from lightning_gqsgd.predict import probe as probe_module
from lightning_gqsgd.predict.costs import BF16_HOOK, KINDS, Costs
from lightning_gqsgd.predict.probe import Probe
from lightning_gqsgd.predict.recording import Recorder
from lightning_gqsgd.reducers.base import ALL, Exchange, Scope
from lightning_gqsgd.wire.build import this_build
from lightning_gqsgd.wire.communicator import Communicator
from lightning_gqsgd.wire.shared_memory import SharedGroup
from tests.commands import output_of, refusal
from tests.distributed.ranks import on_ranks, run_alike
from tests.errors import error_text
from tests.processes import ended_well


def network() -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of two buckets, and its inputs."""
    return nn.Sequential(nn.Linear(500, 700), nn.ReLU(), nn.Linear(700, 600)), (torch.zeros(4, 500),)


def _gqsgd(*arguments: str) -> str:
    """What the command prints, in processes of its own."""
    root = Path(__file__).resolve().parents[2]
    return ended_well("-m", "lightning_gqsgd.cli", *arguments, timeout=200, cwd=root).stdout


@pytest.mark.slow
def test_a_probe_of_two_processes_is_enough_for_a_prediction(tmp_path: Path) -> None:
    file = tmp_path / "probe.json"
    words = ("--output", str(file), "--model", "tests.distributed.test_probe:network")
    shown = _gqsgd("probe", "--procs", "2", "--bits", "4", "--bits", "2", *words)
    assert f"written: {file}" in shown
    assert "2 ranks over gloo, 2 per node" in shown
    probe = Probe.load(file)
    assert (probe.ranks, probe.per_node, probe.backend) == (2, 2, "gloo")
    assert list(probe.costs.collectives) == [f"all {kind}" for kind in KINDS]
    for cost in probe.costs.collectives.values():
        assert cost.alpha_s > 0
        assert cost.beta_s > 0
        assert cost.alone_s >= 0
    assert 0 < probe.costs.cores <= 64
    assert probe.costs.stage_s >= 0
    assert set(probe.costs.gammas) == {"companded/4", "eden/2", "trellis/2", BF16_HOOK}
    hook = probe.costs.gammas[BF16_HOOK]
    assert min(hook.decode_s, hook.encode_s) > 0
    (line,) = probe.timelines
    assert line.batch == 4  # that of the factory's inputs
    assert line.numel == 500 * 700 + 700 + 700 * 600 + 600
    made = predict(line, probe.costs, 2, GQSGDConfig(bits=4, sample_every=0))
    assert made.step_s > line.compute_s * 0.99
    advised = _gqsgd("advise", "--probe", str(file), "--json")
    said = json.loads(advised)
    assert said["nodes"] == 1
    assert said["over_nodes"] == []  # a probe of one node says nothing of several
    assert said["over_rates"]
    assert "2 bit, trellis" in advised


class _SlowClock(probe_module._Stopwatch):
    """A stopwatch on a link where each byte takes 1 µs; time passes without anybody waiting."""

    def __init__(self, kinds: int) -> None:
        communicator = SimpleNamespace(rank=0, size=8, device=torch.device("cpu"))
        super().__init__(cast("Communicator", communicator), kinds)
        self.now_s = 0.0

    def _spent(self) -> float:
        return self.now_s

    def _row(self, kind: str, nbytes: int, scope: Scope, count: int) -> tuple[float, float]:
        took_s = count * (1e-3 + 1e-6 * self._exchange(kind, nbytes, scope)[1])
        self.now_s += took_s
        return took_s, 1e-4 * count


@pytest.mark.parametrize("scopes", [1, 3])
def test_a_probe_keeps_to_its_time_on_slow_links(scopes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_processors", lambda *_: 1.0)
    clock = _SlowClock(scopes * len(KINDS))
    for _ in range(scopes):
        for kind in KINDS:
            cost = clock.collective(kind, ALL)
            assert cost.beta_s == pytest.approx(1e-6, rel=0.1)
            assert cost.alpha_s == pytest.approx(1e-3 + 1e-6 * clock._exchange(kind, 4096, ALL)[1])
    assert clock.now_s < 16


@on_ranks(2)
def test_the_timeline_of_a_model_is_the_same_on_all_ranks_and_has_all_parameters_once(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, inputs = network()
    before = [p.detach().clone() for p in model.parameters()]
    recorder = Recorder(model, lambda wrapped: wrapped(*inputs).sum(), name="mine")
    for _ in range(4):
        recorder.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    result = recorder.timeline().to_dict()
    numbers = [number for _, segments in result["buckets"] for number, _, _ in segments]
    assert sorted(numbers) == [0, 1, 2, 3]
    times = [ready for ready, _ in result["buckets"]]
    assert times == sorted(times)
    assert times[-1] <= result["backward_s"]
    return result


def _words(rank: int) -> list[str]:
    said: list[str] = []
    probing.timeline_of("tests.distributed.test_probe:network", None, torch.device("cpu"), said.append)
    return said


def test_a_progress_line_has_the_steps_of_the_model(tmp_path: Path) -> None:
    name = "tests.distributed.test_probe:network"
    steps = [f"{name}: step {number} of 11" for number in range(1, 12)]
    assert run_alike(_words, 2, tmp_path) == [f"building {name}", *steps]


#: Seconds of forward and backward pass in three steps, by rank.
_PASSES = (((5.0, 1.0), (5.0, 1.0), (1.0, 1.0)), ((1.0, 4.0), (1.0, 6.0), (1.0, 6.0)))


@on_ranks(2)
def test_each_step_of_a_timeline_is_as_its_last_rank_says(rank: int) -> dict[str, Any]:
    model, inputs = network()
    recorder = Recorder(model, lambda wrapped: wrapped(*inputs).sum())
    for _ in range(2):
        recorder.step()
    buckets = len(recorder.timeline().buckets)
    recorder.forget()
    recorder._rows = [[forward, backward, 0.5, *[backward] * buckets] for forward, backward in _PASSES[rank]]
    if rank:  # a step that the other rank has not recorded
        recorder._rows.insert(0, [9.0] * (3 + buckets))
    result = recorder.timeline().to_dict()
    # Rank 0 is the last in the first step, rank 1 in the others: medians of 5, 1, 1 and of 1, 6, 6.
    assert (result["forward_s"], result["backward_s"], result["update_s"]) == (1.0, 6.0, 0.5)
    return result


@on_ranks(2)
def test_a_rank_without_a_recorded_step_is_an_error_on_all(rank: int) -> None:
    model, inputs = network()
    recorder = Recorder(model, lambda wrapped: wrapped(*inputs).sum())
    recorder.step()
    if rank:
        recorder.forget()
    assert error_text(ConfigError, recorder.timeline) == "no step was recorded; make at least three"


@pytest.mark.parametrize("procs", ["1", "65"])
def test_too_few_or_too_many_processes_exit_with_2(procs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert f"--procs {procs} is out of range: 2 to 64" in refusal("probe", "--procs", procs)


def without_inputs() -> nn.Module:
    """A model of which nobody knows what it can be called with."""
    return nn.Linear(2000, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--output", "/nowhere/probe.json"], "there is no folder /nowhere"),
        (["--output", "/"], "--output / cannot be written: it is a folder"),
        (["--output", "/dev/null"], "--output /dev/null cannot be written: it is not a regular file"),
        (["--output", "a" * 300], "cannot be written: File name too long"),
        (["--batch", "4"], "--batch 4 has no effect without a model"),
        (["--batch", "99999999999999999999"], "has to be at most 1,000,000"),
        (
            ["--model", "tests.distributed.test_probe:network", "--batch", "5"],
            "--batch 5: the factory tests.distributed.test_probe:network returns inputs of 4 samples",
        ),
        (["--model", "torchvision:resnt50"], "did you mean 'resnet50'?"),
        (["--model", "tests.distributed.test_probe:without_inputs"], "let its factory return the model and a tuple"),
    ],
)
def test_bad_options_exit_with_2_and_one_line_before_any_process_starts(arguments: list[str], words: str) -> None:
    assert words in refusal("probe", *arguments)


def test_a_folder_that_is_not_writable_is_refused_before_any_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    line = refusal("probe", "--output", str(tmp_path / "p.json"))
    assert f"the folder {tmp_path} is not writable; name a file in a folder" in line


def test_a_disk_that_is_full_when_the_probe_is_done_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Probe, "save", full)
    probe = Probe(Costs({}, {}), 2, 1, "gloo", "CPU", 1.0)
    with pytest.raises(ConfigError, match=r"p\.json cannot be written \(No space left on device\); free the disk"):
        probing.save(probe, Path("p.json"))


def test_a_rank_of_a_launcher_starts_no_ranks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "leave out --procs" in refusal("probe", "--procs", "2")


def test_the_only_rank_of_a_container_starts_ranks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    started: list[int] = []
    monkeypatch.setattr(ranks, "run_ranks", lambda procs, _: started.append(procs) or 0)
    output_of("bench", "--procs", "3")
    output_of("bench")
    assert started == [3, 2]


def test_ranks_import_what_their_parent_has_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lightning_gqsgd", "typer"):  # another copy of the package, and a file of a user's
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is the current folder')")
    assert ranks.run_ranks(2, ["--version"]) == 0


@pytest.mark.parametrize("command", ["bench", "probe"])
def test_ranks_that_do_not_connect_are_one_line(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    line = refusal(command)
    assert line.startswith("gqsgd: rank 1 of 2 has no connection to the others (Error initializing torch.distributed")
    assert "correct MASTER_ADDR, MASTER_PORT or GLOO_SOCKET_IFNAME" in line
    assert line.endswith("with `gqsgd doctor --nodes` under the same launcher")


def test_the_doctor_answers_every_question_in_a_line() -> None:
    output = output_of("doctor")
    lines = output.splitlines()
    assert len(lines) == 10
    assert all(line.startswith("ok  ") for line in lines)
    assert 'knows strategy="gqsgd"' in output
    assert f"lightning-gqsgd {this_build()} in {Path(version.__file__).parent}" in lines[0]


def test_the_doctor_names_a_remedy_where_kernels_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gqsgd.kernels.cpu.cache.writable_folder", lambda: None)
    (finding,) = [finding for finding in doctor.findings() if finding.question == "CPU kernels"]
    assert not finding.is_bad
    assert "set the environment variable NUMBA_CACHE_DIR to a folder that is writable" in finding.answer


@pytest.mark.parametrize(("usable", "said"), [(2, " for 2 processors: set OMP_NUM_THREADS=2"), (64, "")])
def test_the_doctor_says_how_many_threads_a_limit_of_processors_is_for(
    usable: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(doctor, "processors", lambda: usable)
    assert f", 64 threads{said})" in doctor._devices()


def test_the_doctor_says_why_kernels_are_not_kept_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_a_full_disk(_: object) -> None:
        for watcher in cache._watchers:
            watcher(cache.Compilation("linear", "a file in /cache could not be written (no space)", folder=None))

    monkeypatch.setattr(cache, "writable_folder", lambda: Path("/cache"))
    monkeypatch.setattr(doctor, "_check_kernels", on_a_full_disk)
    answer = doctor._cpu_kernels()
    assert "compiles them again, because a file in /cache could not be written (no space): set the" in answer
    assert "kept in" not in answer


def test_the_doctor_fails_where_a_question_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise OSError("no kernels today")

    monkeypatch.setattr(doctor, "_cpu_kernels", broken)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "FAIL  CPU kernels" in result.stdout
    assert "OSError: no kernels today" in result.stdout


@pytest.mark.slow
def test_a_bench_of_two_processes_times_kernels_and_all_reduces(tmp_path: Path) -> None:
    made = json.loads(_gqsgd("bench", "--megabytes", "1", "--rounds", "3", "--json"))
    assert (made["ranks"], made["backend"], made["numel"]) == (2, "gloo", 2**18)
    assert [(kernel["codec"], kernel["bits"]) for kernel in made["kernels"]] == list(bench.KERNELS)
    assert all(kernel["times_copy"] > 0 for kernel in made["kernels"])
    ways = {way["name"].split(",")[0]: way for way in made["all_reduces"]}
    sent = {name: way["sent_mb"] / ways["fp32"]["sent_mb"] for name, way in ways.items()}
    assert sent["bf16"] == 0.5
    assert 0.25 < sent["8 bits"] < 0.27
    assert 0.125 < sent["4 bits"] < 0.145


def test_a_bench_is_a_table_of_kernels_and_one_of_all_reduces() -> None:
    kernels = (bench.KernelTime("companded", 8, 2.0, 1.0, 1.3, 3.1),)
    ways = (bench.WayTime("fp32", 26.2, 30, 1, 1, 1), bench.WayTime("8 bits, gather", 6.7, 20, 1.5, 1.4, 1.6))
    made = bench.Bench("CPU", "gloo", 2, 6_553_600, 15, kernels, ways)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(*benching.parts_of(made))
    text = captured.get()
    assert "All-reduce of 25 MiB over 2 local ranks by gloo" in text
    assert "1.50×" in text
    assert "8 bits, gather is fastest" in text
    assert benching.ADVICE in text


def test_what_a_bench_advises_works_without_further_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torchvision", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    assert "Take bits=" in output_of(*benching.ADVICE.split()[1:])


@pytest.mark.slow
def test_a_bench_of_training_times_steps_under_ddp_and_hooks(tmp_path: Path) -> None:
    made = json.loads(_gqsgd("bench", "training", "--rounds", "3", "--json"))
    assert (made["ranks"], made["backend"], made["rounds"]) == (2, "gloo", 3)
    steps = {step["name"]: step for step in made["steps"]}
    assert list(steps) == ["ddp", "bf16 hook", "8 bits", "4 bits"]
    assert steps["ddp"]["speedup"] == 1
    assert all(step["ms"] > 0 and step["low"] <= step["speedup"] <= step["high"] for step in steps.values())
    sent = [step["sent_mb"] / steps["ddp"]["sent_mb"] for step in steps.values()]
    assert sent[:2] == [1, 0.5]
    assert 0.25 < sent[2] < 0.27
    assert 0.125 < sent[3] < 0.145


@pytest.mark.slow
@pytest.mark.parametrize("part", ["kernels", "reducers"])
def test_a_bench_of_one_part_leaves_the_other_out(part: str, tmp_path: Path) -> None:
    made = json.loads(_gqsgd("bench", part, "--rounds", "3", "--json"))
    assert (bool(made["kernels"]), bool(made["all_reduces"])) == (part == "kernels", part == "reducers")


def test_a_bench_of_training_is_a_table() -> None:
    steps = (bench.WayTime("ddp", 18.9, 40, 1, 1, 1), bench.WayTime("4 bits", 2.4, 20, 2, 1.9, 2.1))
    console = Console(width=120)
    with console.capture() as captured:
        console.print(*benching.parts_of(benching.Training("CPU", "gloo", 2, 15, steps)), sep="\n")
    text = captured.get()
    assert "Training step of a small model over 2 local ranks by gloo" in text
    assert "against ddp" in text
    assert "4 bits is fastest" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trainings"], "the part='trainings' is not one of 'kernels', 'reducers', 'training'"),
        (["training", "--megabytes", "3"], "--megabytes 3 has no effect on `gqsgd bench training`; leave it out"),
    ],
)
def test_a_bench_of_what_does_not_exist_is_refused_before_any_process_starts(arguments: list[str], words: str) -> None:
    assert words in refusal("bench", *arguments)


def test_a_bench_of_one_process_is_refused() -> None:
    assert "--procs 1 is out of range: 2 to 64" in refusal("bench", "--procs", "1")


@on_ranks(2)
def test_sums_of_gradients_are_timed_over_gloo_because_plain_ddp_shares_no_memory(rank: int) -> None:
    assert dist.group.WORLD is not None
    communicator = Communicator(torch.device("cpu"), dist.group.WORLD, "probe of memory")
    communicator.extend([(ALL,)])
    clock = probe_module._Stopwatch(communicator, len(KINDS))
    taken = []
    start = SharedGroup.start

    def count(group: SharedGroup, exchange: Exchange) -> Any:
        taken.append(exchange.kind)
        return start(group, exchange)

    with mock.patch.object(SharedGroup, "start", count):
        found = [kind for kind in KINDS if not taken.clear() and clock._row(kind, 4096, ALL, 3) and taken]
    communicator.close()
    assert found == ["all_to_all", "all_gather", "max", "sum/uint8"]
