"""Ctrl-C: what a run and a comparison say, and that no process is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from recipes.comparison.plan import Cell, make_plan
from recipes.comparison.processes import ForkedRun, FreshRun, Starter, can_fork, modules_of
from tests.marks import needs_root
from tests.recipes.conftest import ROOT, TINY, clean_environment

#: Long enough to be interrupted.
LONG = (*TINY, "data.batch_size=16", "trainer.max_epochs=100000")


def _interrupted(
    tmp_path: Path,
    script: str,
    *arguments: str,
    sign: str,
    number: int = signal.SIGINT,
    ranks: int = 0,
    patience: float = 60,
) -> tuple[int, str, list[psutil.Process]]:
    """Send a script a signal, once its output or the log of a cell has a line that begins with ``sign``.

    The script has to have started ``ranks`` further ranks, too. It has to end within ``patience`` seconds.
    An interrupt goes to the whole group of processes, as that of a terminal does; other signals to the script alone.

    Returns:
        The exit code, the output, and the processes that the script had started.
    """
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "recipes" / script), *arguments],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Where these tests run in the background of a shell, they ignore interrupts, and so would the script.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith(sign):
                ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    started: list[psutil.Process] = []
    try:
        for _ in range(24_000):
            time.sleep(0.01)
            logs = [log.read_text() for log in tmp_path.rglob("output.log")]
            said = ready.is_set() or any(f"\n{sign}" in log for log in logs)
            if said and _ranks_of(process.pid) >= ranks:
                break
        started = psutil.Process(process.pid).children(recursive=True)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
        code = process.wait(patience)
        reader.join(10)
    finally:
        process.kill()
        for child in started:
            if not code_is_known(child):
                child.kill()
    return code, "".join(lines), started


def _ranks_of(pid: int) -> int:
    """How many processes of ranks a script has started. Imports start others: ``ldconfig``, for a moment."""
    number = 0
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):  # it has ended, or it is between two programs
            number += "LOCAL_RANK" in child.environ()
    return number


def code_is_known(process: psutil.Process) -> bool:
    """Whether a process has ended."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on_and_leaves_no_process(number: int, tmp_path: Path) -> None:
    code, output, started = _interrupted(tmp_path, "run.py", *LONG, sign="epoch 2/", number=number)
    assert code == 130
    assert "Traceback" not in output
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    assert f"interrupted; the checkpoint of the last validation is {checkpoint}\n" in output
    assert f"ckpt_path={checkpoint}" in output.splitlines()[-1]
    assert len(started) == 1
    assert not psutil.wait_procs(started, timeout=20)[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_ended_takes_its_job_along_which_says_how_to_go_on(number: int, tmp_path: Path) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    shutil.copy(ROOT / "conf" / "model" / "resnet_digits.yaml", tmp_path / "mine" / "model" / "own.yaml")
    sweep = ("-m", "--config-dir=mine", *LONG, "model=own", "strategy=gqsgd,ddp")
    code, output, started = _interrupted(tmp_path, "run.py", *sweep, sign="epoch 2/", number=number)
    assert code == 128 + number
    assert "Traceback" not in output
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    (command,) = (line for line in output.splitlines() if "ckpt_path=" in line)
    assert command.endswith(f"ckpt_path={checkpoint}")
    assert " -m " not in command
    assert "searchpath" in command
    assert "strategy=gqsgd " in command
    assert len(started) == 2
    assert not psutil.wait_procs(started, timeout=20)[1]


@pytest.mark.slow
def test_an_interrupted_job_in_the_process_of_the_sweep_goes_on_by_itself(tmp_path: Path) -> None:
    sweep = ("-m", *LONG, "trainer.devices=1", "strategy=gqsgd,ddp")
    code, output, _ = _interrupted(tmp_path, "run.py", *sweep, sign="epoch 2/")
    assert code == 130
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    *_, command, last = output.splitlines()
    assert command.endswith(f"ckpt_path={checkpoint}")
    assert " -m " not in command
    assert "strategy=gqsgd " in command
    assert last == "the sweep ends with job 0; jobs that follow have not run"


def test_an_interrupt_before_the_training_is_one_line(tmp_path: Path) -> None:
    code, output, _ = _interrupted(tmp_path, "run.py", "+exp=quickstart", sign="run.py: one training", patience=5)
    assert code == 130
    assert output.splitlines()[-1] == "interrupted before the training; nothing has been written"
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_processes_that_are_loading_torch_are_ended_at_once(number: int, tmp_path: Path) -> None:
    code, output, started = _interrupted(
        tmp_path, "run.py", "+exp=quickstart", sign="quickstart under", number=number, ranks=1, patience=5
    )
    assert code == 128 + number
    assert "Traceback" not in output
    assert "interrupted before the first checkpoint" in output
    assert len(started) == 1
    assert not psutil.wait_procs(started, timeout=5)[1]


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on_with_the_same_command_and_leaves_no_process(tmp_path: Path) -> None:
    code, output, started = _interrupted(tmp_path, "compare.py", *LONG, sign="epoch 2/")
    assert code == 130
    assert "Traceback" not in output
    assert "interrupted; finished runs are kept" in output
    assert output.splitlines()[-1].startswith(f"  python {ROOT}/recipes/compare.py +exp=quickstart")
    assert len(started) == 4  # the process that forks, the leader, and two ranks
    assert not psutil.wait_procs(started, timeout=20)[1]


LAB = ("hardware=netlab", "hardware.nodes=2", "hardware.rate=1gbit")


@pytest.mark.slow
@pytest.mark.parametrize("hardware", [(), pytest.param(LAB, marks=needs_root)], ids=["processors", "lab"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_that_is_ended_leaves_no_process(tmp_path: Path, hardware: tuple[str, ...], number: int) -> None:
    code, output, started = _interrupted(tmp_path, "compare.py", *LONG, *hardware, sign="epoch 2/", number=number)
    assert len(started) >= 3
    assert not psutil.wait_procs(started, timeout=30)[1]
    if number == signal.SIGTERM:
        assert code == 143
        assert "stopped by a signal; finished runs are kept, and the same command goes on with the others" in output


@pytest.mark.parametrize(
    ("overrides", "forked"),
    [([], True), (["hardware=netlab"], False), (["hardware=pcie"], False), (["+hardware.env.A=1"], False)],
)
def test_only_runs_of_processors_without_variables_of_their_own_are_forked(overrides: list[str], forked: bool) -> None:
    (cell,) = make_plan(["+exp=quickstart", "strategy=gqsgd", *overrides]).cells
    assert can_fork(cell) == (forked and sys.platform == "linux")


def test_modules_that_a_run_needs_are_imported_before_the_fork() -> None:
    (cell,) = make_plan(["+exp=quickstart", "strategy=ddp"]).cells
    assert {"recipes.data.digits", "workloads.resnet", "recipes.strategies.baselines"} <= set(modules_of(cell.config))


def test_other_runs_have_fresh_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (planned,) = make_plan(["+exp=quickstart", "strategy=ddp", "hardware=netlab"]).cells
    cell = Cell(planned.variant, planned.seed, ("--epochs",), planned.config, tmp_path)
    monkeypatch.setattr("recipes.comparison.processes.command", lambda cell: [sys.executable, "-c", "print('fresh')"])
    starter = Starter()
    run = starter.start(cell, tmp_path / "log")
    assert isinstance(run, FreshRun)
    while run.poll() is None:
        pass
    run.end()
    starter.close()
    assert (tmp_path / "log").read_text() == "fresh\n"


def test_a_run_whose_processes_have_ended_is_ended_in_silence(tmp_path: Path) -> None:
    (cell,) = make_plan(["+exp=quickstart", "strategy=ddp"]).cells
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    run = ForkedRun(cell, tmp_path / "log", server, None)
    run._session = gone.pid
    run.end()
    assert server.poll() == -signal.SIGKILL
    server.communicate()
