"""The command ``gqsgd probe``, as one of a launcher's ranks or as their parent. ``gqsgd bench`` starts ranks in the
same way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lightning_gqsgd.cli import waiting
from lightning_gqsgd.cli.doctor_places import number_in
from lightning_gqsgd.cli.tables import plain_table
from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.predict import models
from lightning_gqsgd.predict.advice import check_batch
from lightning_gqsgd.predict.files import check_writable
from lightning_gqsgd.predict.probe import Probe, measure, to_rows
from lightning_gqsgd.predict.recording import Recorder
from lightning_gqsgd.predict.timeline import Timeline
from lightning_gqsgd.wire.node import local_ranks

#: Seconds that ranks wait for each other.
_TIMEOUT_S = 120
#: Steps from which a model's timeline is taken, after those that warm up.
_STEPS = 8
_WARMUP = 3
#: Most processes of one machine.
MOST_PROCS = 64


def is_rank() -> bool:
    """Returns whether a launcher has given this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check(model: str | None, batch: int | None, output: Path) -> None:
    """Raise ConfigError for a model that cannot be built, a batch that it does not have, or a file that cannot be
    written; ``batch`` is None where it was not given."""
    check_writable("--output", output)
    check_batch(batch)
    if model is None:
        if batch is not None:
            raise ConfigError(f"--batch {batch} has no effect without a model; leave it out, or give --model")
        return
    built = models.build(model, batch or models.USUAL_BATCH, torch.device("meta"))
    if built.inputs is None:
        raise ConfigError(
            f"the inputs of {model} are not known; let its factory return the model and a tuple of inputs"
        )
    if batch is not None and built.samples not in (None, batch):
        raise ConfigError(
            f"--batch {batch}: the factory {model} returns inputs of {built.samples} samples; leave out --batch, or "
            "let the factory return as many"
        )


def save(probe: Probe, output: Path) -> None:
    """Write a probe.

    Raises:
        ConfigError: the file cannot be written after all, e.g. because the disk is full.
    """
    try:
        probe.save(output)
    except OSError as error:
        raise ConfigError(
            f"--output {output} cannot be written ({error.strerror}); free the disk, or name another file, and measure "
            "again"
        ) from None


def run_ranks(procs: int, arguments: Sequence[str]) -> int:
    """Run a command as ranks on this machine. Returns 0, or the exit code of a rank that failed.

    Args:
        procs: number of ranks.
        arguments: the name of the command, and its arguments without ``--procs``.

    Raises:
        ConfigError: too few or too many ranks.
    """
    if not 2 <= procs <= MOST_PROCS:
        raise ConfigError(f"--procs {procs} is out of range: 2 to {MOST_PROCS}")
    # The store is this process's, as under torchrun: it picks a free port itself, and holds the port from then on.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(procs),
        "LOCAL_WORLD_SIZE": str(procs),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    command = [sys.executable, "-m", "lightning_gqsgd.cli", *arguments]
    ranks: list[subprocess.Popen[bytes]] = []
    # By itself, SIGTERM would end this process and leave its ranks.
    with _handling(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)):
        try:
            for rank in range(procs):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                # Also in the new process, which inherits that and is ended by this one.
                with _handling(signal.SIGINT, signal.SIG_IGN):
                    ranks.append(subprocess.Popen(command, env={**os.environ, **place, **own}))
            while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
                time.sleep(0.05)
            return next((code for code in codes if code), 0)
        finally:
            for started in ranks:
                started.kill()
                started.wait()


@contextmanager
def _handling(number: int, handler: Any) -> Iterator[None]:
    """Handle a signal in this context as given. In threads other than the main thread, do nothing: they get no
    signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def run_rank(bits: Sequence[int], model: str | None, batch: int | None) -> Probe | None:
    """Measure as one of a launcher's ranks. Returns the probe on rank 0, and None on the others.

    Raises:
        ConfigError: one rank, a model that cannot be built, or a variable of the launcher that has no number.
    """
    per_node = local_ranks() or 1
    with joined_ranks() as device:
        console = Console(stderr=True, quiet=dist.get_rank() != 0)
        with waiting.status("measuring links and kernels", console) as say:
            probe = measure(device, "gqsgd probe", bits, per_node)
            if model is not None:
                probe = replace(probe, timelines=(timeline_of(model, batch, device, say),))
        return probe if dist.get_rank() == 0 else None


@contextmanager
def joined_ranks() -> Iterator[torch.device]:
    """Join the process group of a launcher's ranks, and leave it at the end of the context. Yields the device.

    Raises:
        ConfigError: a variable of the launcher has no number, or there are fewer GPUs than ranks.
    """
    for name in ("RANK", "WORLD_SIZE"):
        number_in(os.environ, name)  # torch reads them, and would say neither the name nor the remedy
    local = number_in(os.environ, "LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0
    on_gpu = torch.cuda.is_available()
    ranks = local_ranks() or local + 1
    if on_gpu and torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"this machine has {counted(torch.cuda.device_count(), 'GPU')} for {counted(ranks, 'rank')}; start as many "
            "ranks as GPUs, or set CUDA_VISIBLE_DEVICES= (empty) to measure its processors"
        )
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    try:
        yield device
    finally:
        dist.destroy_process_group()


def timeline_of(name: str, batch: int | None, device: torch.device, say: Callable[[str], object]) -> Timeline:
    """Measure the timeline of a model, and note its batch. A collective.

    Args:
        name: of the model, see `models.build`.
        batch: samples of this rank in a step; None: those of a factory's inputs, or else `models.USUAL_BATCH`.
        device: of this rank.
        say: is called with words for a progress line.
    """
    say(f"building {name}")
    built = models.build(name, batch or models.USUAL_BATCH, device)
    inputs = built.inputs
    assert inputs is not None  # see `check`
    update = torch.optim.SGD(built.model.parameters(), lr=1e-6).step
    recorder = Recorder(built.model, lambda wrapped: models.loss_of(wrapped(*inputs)), update, name)
    for number in range(_WARMUP + _STEPS):
        say(f"{name}: step {number + 1} of {_WARMUP + _STEPS}")
        if number == _WARMUP:
            recorder.forget()
        dist.barrier()  # in a training, the mean of the step before is one
        recorder.step()
    return replace(recorder.timeline(), batch=built.samples or batch)


def tables(probe: Probe) -> list[Table]:
    """Returns the tables of links and of kernels."""
    rows = to_rows(probe)
    links = plain_table(f"{probe.ranks} ranks over {probe.backend}, {probe.per_node} per node", list(rows[0]))
    for row in rows:
        links.add_row(*(value if isinstance(value, str) else f"{value:.3g}" for value in row.values()))
    kernels = plain_table(f"Kernels on {probe.device}", ["codec", "encode (ns)", "decode (ns)", "add (ns)"])
    for name, gamma in probe.costs.gammas.items():
        kernels.add_row(name, *(f"{1e9 * value:.3g}" for value in (gamma.encode_s, gamma.decode_s, gamma.reduce_s)))
    return [links, kernels]


def lines(probe: Probe) -> list[str]:
    """Returns lines on the other constants, and on the timelines."""
    costs = probe.costs
    said = [
        f"Each rank has {costs.cores:.2g} processors, {costs.thread:.2g} with one thread; a copy takes "
        f"{1e9 * costs.touch_s:.2g} ns per byte, a launch {1e6 * costs.launch_s:.3g} µs, "
        f"a stage of a piece {1e6 * costs.stage_s:.3g} µs more. Measured in "
        f"{probe.seconds:.0f} s, with fewer repetitions where there are more ranks."
    ]
    return said + [
        f"{line.name}: {len(line.buckets)} buckets, ready after "
        + ", ".join(f"{1e3 * bucket.ready_s:.0f}" for bucket in line.buckets)
        + f" of {1e3 * line.backward_s:.0f} ms."
        for line in probe.timelines
    ]
