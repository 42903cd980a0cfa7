"""The command ``gqsgd probe``, as one of a launcher's ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lightning_gqsgd.cli import waiting
from lightning_gqsgd.cli.ranks import joined_ranks
from lightning_gqsgd.cli.tables import plain_table, three_digits
from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.predict import models
from lightning_gqsgd.predict.advice import BITS, check_batch
from lightning_gqsgd.predict.files import check_writable
from lightning_gqsgd.predict.probe import Probe, measure
from lightning_gqsgd.predict.recording import Recorder
from lightning_gqsgd.predict.timeline import Timeline
from lightning_gqsgd.wire.node import local_ranks

#: Steps from which a model's timeline is taken, after those that warm up.
_STEPS = 8
_WARMUP = 3


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
    """Write a probe."""
    try:
        probe.save(output)
    except OSError as error:
        raise ConfigError(
            f"--output {output} cannot be written ({error.strerror}); free the disk, or name another file, and measure "
            "again"
        ) from None


def run_rank(bits: Sequence[int] | None, model: str | None, batch: int | None) -> Probe | None:
    """Measure as one of a launcher's ranks. Returns the probe on rank 0, and None on the others. If ``bits`` is None,
    those that `gqsgd advise` compares are timed.

    Raises:
        ConfigError: one rank, a model that cannot be built, or a variable of the launcher that has no number.
    """
    with joined_ranks() as device:
        per_node = local_ranks() or 1
        console = Console(stderr=True, quiet=dist.get_rank() != 0)
        with waiting.status("measuring links and kernels", console) as say:
            probe = measure(device, "gqsgd probe", bits or BITS, per_node)
            if model is not None:
                probe = replace(probe, timelines=(timeline_of(model, batch, device, say),))
        return probe if dist.get_rank() == 0 else None


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
    title = f"{probe.ranks} ranks over {probe.backend}, {probe.per_node} per node"
    units = ("α (µs)", "β (ns/B)", "Gbit/s", "alone (ns/B)", "processor (µs)", "processor (ns/B)")
    links = plain_table(title, ["collective", *units])
    for name, cost in probe.costs.collectives.items():
        gbit = 8e-9 / cost.beta_s if cost.beta_s else math.inf
        alone = cost.beta_s + cost.alone_s
        values = (1e6 * cost.alpha_s, 1e9 * cost.beta_s, gbit, 1e9 * alone, 1e6 * cost.cpu_s, 1e9 * cost.cpu_beta_s)
        links.add_row(name, *map(three_digits, values))
    kernels = plain_table(f"Kernels on {probe.device}", ["codec", "encode (ns)", "decode (ns)", "add (ns)"])
    for name, gamma in probe.costs.gammas.items():
        kernels.add_row(
            name, *(three_digits(1e9 * value) for value in (gamma.encode_s, gamma.decode_s, gamma.reduce_s))
        )
    return [links, kernels]


def lines(probe: Probe) -> list[str]:
    """Returns lines on the other constants, and on the timelines."""
    costs = probe.costs
    said = [
        f"Each rank has {costs.cores:.2g} processors, {costs.thread:.2g} with one thread; a copy takes "
        f"{1e9 * costs.touch_s:.2g} ns per byte, a launch {three_digits(1e6 * costs.launch_s)} µs, "
        f"a stage of a piece {three_digits(1e6 * costs.stage_s)} µs more. Measured in "
        f"{probe.seconds:.0f} s, with fewer repetitions where there are more ranks."
    ]
    return said + [
        f"{line.name}: {counted(len(line.buckets), 'bucket')}, ready after "
        + ", ".join(f"{1e3 * bucket.ready_s:.0f}" for bucket in line.buckets)
        + f" of {1e3 * line.backward_s:.0f} ms."
        for line in probe.timelines
    ]
