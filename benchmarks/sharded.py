"""Time of whole training steps under FSDP2 on links of a given rate, with weights and gradients at few bits.

    python -m benchmarks.sharded --hosts 2 --rate 100mbit 1gbit --save

The benchmark needs Linux, root and iproute2, see `netlab`. Parameters are divided among all hosts, so weights are
gathered before a layer's forward pass and before its backward pass, and gradients are reduce-scattered. Every case is a
model of its own in the same processes. The cases train in turns, on equal data. Before that, every case trains a
smaller network on scikit-learn's digits, on two hosts without a limit: its loss says what few bits cost.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from benchmarks.hosts import add_labs, begin, finish, in_lab, in_labs, slowest, wire_seconds, work_or_present
from benchmarks.report import Report, command_line, program
from benchmarks.training import CLASSES, batch_of, mlp
from lightning_gqsgd.frameworks.fsdp import GQSGDFSDPState, register_gqsgd_fsdp
from lightning_gqsgd.predict.timing import Spread, in_turns, ratio
from netlab.lab import NetLab

#: Epochs of a training on the digits, and its seeds.
EPOCHS, SEEDS = 15, (0, 1, 2)
#: Digits that are trained on; the others are for validation.
TRAINED = 1500


class Way(NamedTuple):
    """A way to communicate.

    Attributes:
        number_bytes: bytes of a number that torch sends.
        torchs_share: how often a number travels in a step by torch: twice as a weight, and once as a gradient.
        hooks: options of `register_gqsgd_fsdp`; None: there are no hooks.
    """

    number_bytes: int = 4
    torchs_share: int = 3
    hooks: dict[str, Any] | None = None


WAYS = {
    "fp32": Way(),
    "bf16": Way(number_bytes=2),
    "gradients 8 bit": Way(torchs_share=2, hooks={"reduce_scatter": True}),
    "weights 8 bit, gradients 8 bit": Way(torchs_share=0, hooks={"reduce_scatter": True, "all_gather_bits": 8}),
    "weights 8 bit, gradients 4 bit": Way(
        torchs_share=0, hooks={"reduce_scatter": True, "all_gather_bits": 8, "bits": 4}
    ),
    "weights 4 bit, gradients 4 bit": Way(
        torchs_share=0, hooks={"reduce_scatter": True, "all_gather_bits": 4, "bits": 4}
    ),
}


class Case:
    """A network that trains in one way, its parameters divided among all ranks layer by layer."""

    def __init__(self, way: Way, network: nn.Module, lr: float) -> None:
        self.network = network
        self.numel = sum(p.numel() for p in network.parameters())
        self._way = way
        number = torch.bfloat16 if way.number_bytes == 2 else None
        policy = MixedPrecisionPolicy(param_dtype=number, reduce_dtype=number)
        for layer in network.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mp_policy=policy)
        fully_shard(network, mp_policy=policy)
        self.state: GQSGDFSDPState | None = None
        if way.hooks is not None:
            self.state = register_gqsgd_fsdp(network, sample_every=0, **way.hooks)
        self._optimizer = torch.optim.Adam(network.parameters(), lr=lr)

    def step(self, batch: Tensor, labels: Tensor) -> float:
        """Make one step: forward, backward, optimizer. Returns the loss before it."""
        loss = F.cross_entropy(self.network(batch).float(), labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())

    def sent_bytes(self, ranks: int) -> float:
        """Bytes of weights and gradients that each rank sends in a step."""
        sent = self._way.torchs_share * self._way.number_bytes * self.numel * (ranks - 1) / ranks
        if self.state is not None:
            totals = self.state.telemetry.totals()
            sent += totals["bytes_sent"] / totals["steps"]
        return sent

    def close(self) -> None:
        """Release what the hooks have."""
        if self.state is not None:
            self.state.close()


def loss_on_digits(way: Way, seed: int) -> float:
    """Train a small network on scikit-learn's digits; the loss on other digits, the same on all ranks."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    case = Case(way, network, lr=1e-3)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(TRAINED, generator=torch.Generator().manual_seed(seed))
    mine = order[dist.get_rank() :: dist.get_world_size()]
    for _ in range(EPOCHS):
        for part in mine.split(32):
            case.step(images[part], labels[part])
    with torch.no_grad():
        loss = F.cross_entropy(network(images[TRAINED:]).float(), labels[TRAINED:])
    case.close()
    return float(loss)


def work(options: argparse.Namespace) -> None:
    """Do one rank's part."""
    rank, ranks = begin()
    if options.losses:
        finish({name: [loss_on_digits(WAYS[name], seed) for seed in SEEDS] for name in options.case})
        return
    batch, labels = batch_of("mlp", options.batch_size, torch.Generator().manual_seed(rank))
    cases = {}
    for name in options.case:
        torch.manual_seed(0)
        cases[name] = Case(WAYS[name], mlp(), lr=1e-4)
    steps: dict[str, Callable[[], object]] = {name: partial(case.step, batch, labels) for name, case in cases.items()}
    seconds = in_turns(steps, options.rounds, warmup=2, before=dist.barrier)
    result: dict[str, Any] = {
        "seconds": {name: slowest(values).tolist() for name, values in seconds.items()},
        "bytes": {name: case.sent_bytes(ranks) for name, case in cases.items()},
    }
    for case in cases.values():
        case.close()
    finish(result)


def measure(options: argparse.Namespace) -> Report:
    """Run the workers in every lab."""
    report = Report(
        "sharded_netlab",
        f"Training step of dense layers under FSDP2, {options.batch_size} samples per host, over shaped links",
        {
            "case": "",
            "hosts": "d",
            "rate": "",
            "sent (MB)": ".1f",
            "wire (ms)": ".0f",
            "step (ms)": ".0f",
            "10 to 90 % (ms)": "",
            "fp32 / step": ".2f",
            "bf16 / step": ".2f",
            "loss": ".3f",
            "lowest": ".3f",
            "highest": ".3f",
        },
        notes=(
            "14.7 M parameters, divided among all hosts. Weights are gathered for the forward pass of a layer and "
            "again for its backward pass, and gradients are reduce-scattered. sent: bytes of each host in a step; "
            "of torch's own collectives, the least that they can send. wire: these bytes / rate of the link. "
            "step: median over rounds of the slowest host's time, one compute thread each. Ratios are medians "
            "over rounds of times within one round. bf16: torch's MixedPrecisionPolicy for weights and gradients. "
            f"loss: of a network of 84,000 parameters on digits that it was not trained on, after {EPOCHS} epochs, "
            f"mean over {len(SEEDS)} seeds, and the lowest and the highest of them.",
        ),
    )
    with NetLab(2, "none") as lab:
        losses = in_lab(lab, f"{program()} --losses", "on two hosts without a limit")
    report.raw["losses"] = losses
    in_labs(options, report, partial(_add_rows, losses))
    return report


def _add_rows(losses: dict[str, list[float]], report: Report, hosts: int, rate: str, result: dict[str, Any]) -> None:
    seconds = {name: np.array(values) for name, values in result["seconds"].items()}
    for name, values in seconds.items():
        step = Spread.of(values)
        sent = result["bytes"][name]
        wire = wire_seconds(sent, rate)
        ratios = [ratio(seconds, plain, name) if plain in seconds else None for plain in ("fp32", "bf16")]
        report.rows.append(
            [
                name,
                hosts,
                rate,
                sent / 1e6,
                1e3 * wire if wire else None,
                1e3 * step.median,
                f"{1e3 * step.low:.0f} to {1e3 * step.high:.0f}",
                *ratios,
                float(np.mean(losses[name])),
                min(losses[name]),
                max(losses[name]),
            ]
        )


if __name__ == "__main__":
    parser = command_line(__doc__)
    add_labs(parser)
    parser.add_argument("--batch-size", type=int, default=8, help="per host (default 8)")
    parser.add_argument("--case", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--losses", action="store_true", help=argparse.SUPPRESS)  # of the workers that train on digits
    work_or_present(parser, work, measure)
