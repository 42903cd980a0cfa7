"""Trainings under other tools' hooks and codes beside this package's: bytes, error, bias, time and loss in one run.

    python -m benchmarks.rival_trainings --save

The benchmark needs Linux, root and iproute2, see `netlab`. Every way to average has a model of its own in the same
processes. All of them start from the same parameters and make their steps in turns, on the same batches. torch's hooks
are torch's own. hivemind's, torchft's and CGX's codes are written out in `benchmarks.rival_hooks`. DRIVE, EDEN and
top-k with memory are this package's presets.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.hosts import add_labs, begin, finish, in_labs, sent_bytes, slowest, work_or_present
from benchmarks.report import Report, command_line
from benchmarks.rival_hooks import BlockwiseCodes, Hook, MaxMinCodes, RowCodes, UniformCodes, gathering
from lightning_gqsgd.cli.training_steps import dense_layers
from lightning_gqsgd.ddp.hook import register_gqsgd
from lightning_gqsgd.predict.timing import Spread
from lightning_gqsgd.research.simulation import relative_error
from workloads.digits import load_digits

WIDTHS = (64, 384, 384, 10)
BATCH = 32
RATE_OF_LEARNING, MOMENTUM = 0.05, 0.9
STEPS, SEEDS = 150, 3
#: PowerSGD has plain averages in its first steps, as its documentation advises; they are not timed.
POWERSGD_START = 10
UNTIMED = POWERSGD_START + 2
#: The step of plain DDP after which gradients are averaged again and again, and how often.
PROBED_AT, WARMING, REPEATS = 20, 3, 16

COMPUTE, BASELINE = "no communication", "ddp, fp32"

#: Registers a way to average on a model, for a seed; returns what closes it.
Register = Callable[[DistributedDataParallel, int], Callable[[], None]]


def _hook(hook: Hook) -> Register:
    def register(model: DistributedDataParallel, seed: int) -> Callable[[], None]:
        model.register_comm_hook(None, hook)
        return _nothing

    return register


def _powersgd(rank: int) -> Register:
    def register(model: DistributedDataParallel, seed: int) -> Callable[[], None]:
        state = powerSGD_hook.PowerSGDState(None, rank, POWERSGD_START, random_seed=seed)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return _nothing

    return register


def _preset(name: str) -> Register:
    def register(model: DistributedDataParallel, seed: int) -> Callable[[], None]:
        return register_gqsgd(model, name, sample_every=0, seed=seed).close

    return register


def _plain(model: DistributedDataParallel, seed: int) -> Callable[[], None]:
    return _nothing


def _nothing() -> None:
    pass


OURS = ("gqsgd", "gqsgd_4bit", "gqsgd_3bit", "gqsgd_2bit")
WAYS: dict[str, Register] = {
    COMPUTE: _plain,
    BASELINE: _plain,
    **{name: _preset(name) for name in OURS},
    "eden, 2 bits": _preset("eden"),
    "drive, 1 bit": _preset("drive"),
    "top-k 1 %, memory": _preset("topk_ef"),
    "torch fp16 hook": _hook(default_hooks.fp16_compress_hook),
    "torch bf16 hook": _hook(default_hooks.bf16_compress_hook),
    "torch per-tensor hook": _hook(quantization_hooks.quantization_pertensor_hook),
    "torch per-channel hook": _hook(quantization_hooks.quantization_perchannel_hook),
    "torch PowerSGD, rank 1": _powersgd(1),
    "torch PowerSGD, rank 4": _powersgd(4),
    "torchft fp8": _hook(gathering(RowCodes(torch.float8_e4m3fn))),
    "torchft int8": _hook(gathering(RowCodes(torch.int8))),
    "hivemind uniform 8 bit": _hook(gathering(UniformCodes())),
    "hivemind blockwise 8 bit": _hook(gathering(BlockwiseCodes())),
    "CGX max-min 4 bit": _hook(gathering(MaxMinCodes())),
}


def network() -> nn.Module:
    """Dense layers; their gradients fit one of DDP's buckets."""
    return dense_layers(WIDTHS)


class Run:
    """A model under one way to average.

    Args:
        name: of the way.
        seed: of the model's start, and of the way's random numbers.
    """

    def __init__(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = DistributedDataParallel(network())
        self.close = WAYS[name](self.model, seed)
        self.averages = name != COMPUTE
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE_OF_LEARNING, momentum=MOMENTUM)
        self.seconds: list[float] = []
        self.processor: list[float] = []
        self.sent: list[int] = []

    def backward(self, images: Tensor, labels: Tensor) -> None:
        """Leave the gradient in the parameters."""
        self.optimizer.zero_grad()
        if self.averages:
            F.cross_entropy(self.model(images), labels).backward()
        else:
            with self.model.no_sync():
                F.cross_entropy(self.model(images), labels).backward()

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Make a step, and measure it."""
        begun, worked = time.perf_counter(), time.process_time()
        self.backward(images, labels)
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - begun)
        self.processor.append(time.process_time() - worked)

    def gradient(self) -> Tensor:
        """The gradient in the parameters, flat."""
        return torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])  # type: ignore[union-attr]


class Batches:
    """The digits, and batches of them that depend on seed and step only."""

    def __init__(self) -> None:
        data = load_digits("digits", 8, 1)
        self.images = torch.from_numpy(data.train_images.reshape(-1, 64)).float() / 255
        self.labels = torch.from_numpy(data.train_labels)

    def of(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        """This rank's batch."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(1000 * seed + step)
        rows = torch.randint(len(self.labels), (ranks * BATCH,), generator=generator)[rank::ranks]
        return self.images[rows], self.labels[rows]

    def loss(self, model: nn.Module) -> float:
        """Of all images for training."""
        with torch.no_grad():
            return float(F.cross_entropy(model(self.images), self.labels))


def train(names: list[str], seed: int, steps: int, batches: Batches) -> tuple[dict[str, Run], dict[str, Any]]:
    """Train under all ways in turns.

    Returns:
        The runs, and plain DDP's parameters after its first steps.
    """
    runs = {name: Run(name, seed) for name in names}
    early: dict[str, Any] = {}
    for step in range(steps):
        images, labels = batches.of(seed, step)
        for run in runs.values():
            dist.barrier()
            before = sent_bytes()
            run.step(images, labels)
            dist.barrier()  # behind the step's last bytes in the queue of the interface
            run.sent.append(sent_bytes() - before)
        if step == min(PROBED_AT, steps - 1):
            early = copy.deepcopy(runs[BASELINE].model.module.state_dict())
    return runs, early


def probe(name: str, parameters: dict[str, Any], batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Average the same gradients again and again, with a new model and an empty memory.

    Returns:
        The relative L2 error of the first mean; and the error of the mean of all means, over that.
    """
    run = Run(name, 0)
    run.model.module.load_state_dict(parameters)
    with run.model.no_sync():
        F.cross_entropy(run.model(batch[0]), batch[1]).backward()
    own = run.gradient().double()
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    start = POWERSGD_START if "PowerSGD" in name else WARMING
    means = []
    for step in range(start + REPEATS):
        run.backward(*batch)
        if step >= start:
            means.append(run.gradient())
    run.close()
    error = relative_error(means[0], everyone)
    return error, relative_error(torch.stack(means).double().mean(0), everyone) / error


def work(options: argparse.Namespace) -> None:
    """Do one rank's part."""
    begin()
    batches = Batches()
    found: dict[str, dict[str, Any]] = {name: {"losses": [], "seconds": [], "processor": []} for name in WAYS}
    for seed in range(SEEDS):
        runs, early = train(list(WAYS), seed, STEPS, batches)
        for name, run in runs.items():
            case = found[name]
            case["losses"].append(batches.loss(run.model.module))
            case["seconds"] += [round(value, 5) for value in slowest(run.seconds[UNTIMED:])]
            case["processor"] += [round(value, 5) for value in run.processor[UNTIMED:]]
            case["sent"] = fmean(run.sent[UNTIMED:])
            run.close()
        if seed == 0:
            for name in WAYS:
                if name not in (COMPUTE, BASELINE):
                    found[name]["error"], found[name]["kept"] = probe(name, early, batches.of(seed, STEPS))
    finish({**found, "numel": sum(parameter.numel() for parameter in network().parameters())})


def measure(options: argparse.Namespace) -> Report:
    """Run the workers in every lab."""
    report = Report(
        "rival_trainings",
        f"Trainings under other tools' hooks and codes, {STEPS} steps, {SEEDS} seeds",
        {
            "way": "",
            "rate": "",
            "bits sent": ".2f",
            "rel-L2 (%)": ".2f",
            "kept": ".2f",
            "processor (ms)": ".1f",
            "step (ms)": ".1f",
            "ddp / step": ".2f",
            "loss": ".4f",
            "less ddp's": "+.4f",
            "by seed": "",
        },
    )
    in_labs(options, report, add_rows)
    report.notes = (*_how_to_read(), *(who_wins(report.rows, rate) for rate in options.rate))
    return report


def add_rows(report: Report, hosts: int, rate: str, result: dict[str, Any]) -> None:
    """Add a row for each way."""
    numel, base, idle = result["numel"], result[BASELINE], float(np.median(result[COMPUTE]["processor"]))
    for name in (name for name in WAYS if name in result and name != COMPUTE):
        case = result[name]
        apart = [mine - plain for mine, plain in zip(case["losses"], base["losses"], strict=True)]
        step = float(np.median(case["seconds"]))
        ratio = float(np.median(np.array(base["seconds"]) / np.array(case["seconds"])))
        report.rows.append(
            [
                name,
                rate,
                8 * case["sent"] / numel,
                100 * case["error"] if "error" in case else None,
                case.get("kept"),
                1e3 * (float(np.median(case["processor"])) - idle),
                1e3 * step,
                ratio,
                fmean(case["losses"]),
                None if name == BASELINE else fmean(apart),
                None if name == BASELINE else ", ".join(f"{round(1e4 * value):+d}" for value in apart),
            ]
        )

    for case in (case for case in result.values() if isinstance(case, dict)):  # the file keeps no single steps
        for clock in ("seconds", "processor"):
            case[clock] = Spread.of(np.array(case[clock]))._asdict()


def who_wins(rows: list[Any], rate: str) -> str:
    """The paragraph on who is ahead in what, from the rows of one rate."""
    own = [row for row in rows if row[1] == rate and row[0] != BASELINE]
    rivals, ours = [row for row in own if row[0] not in OURS], [row for row in own if row[0] in OURS]
    said = [f"Who wins where at {rate}, by the table."]
    for what, column, form, most in (
        ("The fewest bits", 2, ".2f", math.inf),
        ("The smallest error at up to 9 bits", 3, ".2f", 9.0),
        ("The smallest error at up to 5 bits", 3, ".2f", 5.0),
        ("The smallest error at up to 3 bits", 3, ".2f", 3.0),
        ("The least work of the processor", 5, ".1f", math.inf),
        ("The shortest step", 6, ".1f", math.inf),
        ("The lowest loss", 8, ".4f", math.inf),
        ("The lowest loss at up to 5 bits", 8, ".4f", 5.0),
    ):
        first, second = _narrow(rivals, most), _narrow(ours, most)
        if not first or not second:
            continue
        rival, mine = min(first, key=lambda row: row[column]), min(second, key=lambda row: row[column])
        winner, other = (rival, mine) if rival[column] < mine[column] else (mine, rival)
        whose = "a rival has it" if winner is rival else "this package has it"
        said.append(
            f"{what}: {whose}, `{winner[0]}` with {winner[column]:{form}}; `{other[0]}` has {other[column]:{form}}."
        )
    for how, sign in (("above", 1), ("below", -1)):
        apart = {row[0]: [sign * int(value) for value in row[10].split(", ")] for row in own}
        steady = [f"`{name}`" for name, values in apart.items() if min(values) > 0]
        said.append(f"Losses {how} plain DDP's with every seed: {', '.join(steady) or 'none'}.")
    return " ".join(said)


def _narrow(rows: list[Any], most: float) -> list[Any]:
    return [row for row in rows if row[2] <= most]


def _how_to_read() -> list[str]:
    return [
        f"Digits of scikit-learn, dense layers of widths {', '.join(map(str, WIDTHS))}, SGD with rate "
        f"{RATE_OF_LEARNING} and momentum {MOMENTUM} under every way, batches of {BATCH} per host. The rate is plain "
        "DDP's; ways with a memory may want one of their own, and lose here without it. All ways make a step before "
        "any of them makes the next one.",
        "bits sent: all bits that leave a host's interface in a step, over the number of parameters, with the headers "
        "of packets and the acknowledgements of what the other host sends. Two hosts send 32 bits per parameter in a "
        "ring all-reduce, and the bits of one message when they gather. Ways that gather send n - 1 times as much on n "
        "hosts.",
        "rel-L2: error of one mean of the gradients that plain DDP has after "
        f"{PROBED_AT} steps. kept: error of the mean of {REPEATS} means of the same gradients, over the error of one: "
        "0.25 without bias, and 1 if the error is always the same. A memory sends what earlier steps left out, so its "
        "error of one step says little.",
        "processor: median of the processor's time of all threads of a host's process in a step, less that of a step "
        "without communication. It includes coding and what Gloo does to send. step: median over steps and seeds of "
        "the slower host. ddp / step: median of the ratio within a turn. Both hosts share the cores of one machine "
        "with other work.",
        f"loss: of all images for training, after {STEPS} steps, mean over seeds. by seed: its difference to "
        "plain DDP of the same seed, in units of 0.0001. A difference whose sign changes with the seed is noise.",
        "torch's hooks are torch's own. Its quantisation hooks run on Gloo, and so does PowerSGD here, where all "
        "gradients fit one bucket. With several buckets, a process of PowerSGD on Gloo ended with SIGABRT in one of "
        "several short runs. PowerSGD averages the first "
        f"{POWERSGD_START} steps plainly. The codes of torchft, hivemind and CGX are written out from their formulas, "
        "in torch and without their kernels, so their times are those of a plain hook. torchft's rows are those of "
        "matrices; of flat buckets it sends 8 bytes per number. hivemind's way back, which sends differences in the "
        "same codes, is left out, so its error is larger there than here.",
    ]


if __name__ == "__main__":
    parser = command_line(__doc__)
    add_labs(parser)
    parser.set_defaults(rate=["100mbit"])
    work_or_present(parser, work, measure)
