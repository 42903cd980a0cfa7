"""Time of whole training steps under FSDP2 on links of a given rate, with weights and gradients at few bits.

    python -m benchmarks.sharded --hosts 2 --rate 100mbit 1gbit --save
    python -m benchmarks.sharded --hosts 2 --rate 100mbit 1gbit --ranks-per-host 2 --save
    python -m benchmarks.sharded --hosts 2 --rate 100mbit 1gbit --ranks-per-host 2 --flat --save

The benchmark needs Linux, root and iproute2, see `netlab`. Parameters are divided among all hosts, so weights are
gathered before a layer's forward pass and before its backward pass, and gradients are reduce-scattered. With several
ranks per host, parameters are divided among the ranks of a host, and gradients are averaged over the hosts. With
``--flat``, they are divided among all ranks instead. Every case is a model of its own in the same processes. The cases
train in turns, on equal data. Before that, every case trains a smaller network on scikit-learn's digits, on two hosts
without a limit: its loss says what few bits cost.

Each process measures the links, the kernels and the processors once (`lightning_gqsgd.predict.probe`), and the
computation without communication in turns with the cases. From these, the model of `gqsgd advise --fsdp` predicts the
step.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from benchmarks.hosts import (
    add_labs,
    begin,
    finish,
    in_lab,
    in_labs,
    sent_bytes,
    slowest,
    wire_seconds,
    work_or_present,
)
from benchmarks.report import Report, command_line, program
from benchmarks.training import CLASSES, batch_of, mlp
from lightning_gqsgd.frameworks.fsdp import GQSGDFSDPState, register_gqsgd_fsdp
from lightning_gqsgd.predict.probe import Probe
from lightning_gqsgd.predict.probe import measure as probe_here
from lightning_gqsgd.predict.recording import Recorder
from lightning_gqsgd.predict.sharded import ShardedMethod, predict_sharded, sharded_model
from lightning_gqsgd.predict.timeline import Timeline
from lightning_gqsgd.predict.timing import Spread, in_turns
from lightning_gqsgd.wire.neighbours import VARIABLE as SHARED_MEMORY
from netlab.lab import NetLab

#: What travels where, for the page.
OF_SHARDS = (
    "divided among all ranks. Weights are gathered for the forward pass of a layer and again for its backward pass, "
    "and gradients are reduce-scattered."
)
OF_REPLICAS = (
    "divided among the ranks of a host, which gather weights and reduce-scatter gradients there: in fp32, or in bf16 "
    "if the case has it. The mean over hosts travels."
)
#: Samples of each rank.
BATCH = 8
#: The name of the step that computes without communication, and the rounds before the measurement of the links.
COMPUTED, WARMUP = "computed", 3
#: Epochs of a training on the digits, and its seeds.
EPOCHS, SEEDS = 15, (0, 1, 2)
#: Digits that are trained on; the others are for validation.
TRAINED = 1500


class Way(NamedTuple):
    """A way to communicate.

    Attributes:
        dtype: dtype of the numbers that torch sends.
        hooks: options of `register_gqsgd_fsdp`; None: there are no hooks.
    """

    dtype: torch.dtype = torch.float32
    hooks: dict[str, Any] | None = None

    def method(self, *, has_replicas: bool) -> ShardedMethod:
        """Returns what the model of a step calls this way."""
        if self.hooks is None:
            return ShardedMethod(self.dtype, has_replicas=has_replicas)
        has_levels = self.hooks.get("reducer") == "hierarchical"
        return ShardedMethod(
            self.dtype, self.hooks["bits"], self.hooks.get("all_gather_bits"), has_levels, has_replicas
        )


def scattered(bits: int, **options: Any) -> Way:
    """Returns a way with compressed reduce-scatters."""
    return Way(hooks={"reduce_scatter": True, "bits": bits, **options})


PLAIN = {"fp32": Way(), "bf16": Way(torch.bfloat16)}
WAYS = {
    **PLAIN,
    "gradients 8 bit": scattered(8),
    "weights 8 bit, gradients 8 bit": scattered(8, all_gather_bits=8),
    "weights 8 bit, gradients 4 bit": scattered(4, all_gather_bits=8),
    "weights 4 bit, gradients 4 bit": scattered(4, all_gather_bits=4),
}

#: The ways if every host has a replica, which is divided among its ranks.
WAYS_OF_REPLICAS = {
    **PLAIN,
    "means 8 bit": Way(hooks={"bits": 8}),
    "means 4 bit": Way(hooks={"bits": 4}),
    "means 2 bit": Way(hooks={"bits": 2}),
    "bf16, means 4 bit": Way(torch.bfloat16, {"bits": 4}),
}

#: The ways if the model is divided among the ranks of all hosts, of which each has several.
FLAT_WAYS = {
    **PLAIN,
    **{
        f"weights 8 bit, gradients {bits} bit, {name}": scattered(bits, all_gather_bits=8, reducer=reducer)
        for bits in (8, 4)
        for name, reducer in (("one level", "two_shot"), ("two levels", "hierarchical"))
    },
}


class Case:
    """A network that trains in one way, its parameters divided layer by layer among all ranks, or among those of a
    host."""

    def __init__(self, way: Way, network: nn.Module, lr: float, mesh: DeviceMesh) -> None:
        self.network = network
        self.steps = 0
        self._sent = 0
        policy = MixedPrecisionPolicy(param_dtype=way.dtype, reduce_dtype=way.dtype)
        for layer in network.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(network, mesh=mesh, mp_policy=policy)
        self.state: GQSGDFSDPState | None = None
        if way.hooks is not None:
            replicas = mesh["replicate"] if mesh.ndim == 2 else None
            self.state = register_gqsgd_fsdp(network, replicate=replicas, sample_every=0, **way.hooks)
        self._optimizer = torch.optim.Adam(network.parameters(), lr=lr)

    def step(self, batch: Tensor, labels: Tensor) -> float:
        """Make one step: forward, backward, optimizer. Returns the loss before it."""
        loss = F.cross_entropy(self.network(batch).float(), labels)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())

    def counted_step(self, batch: Tensor, labels: Tensor) -> None:
        """Make one step, and count what this host sends to others meanwhile."""
        before = sent_bytes()
        self.step(batch, labels)
        self._sent += sent_bytes() - before
        self.steps += 1

    @property
    def bytes_per_step(self) -> float:
        """Bytes that this host sent to others in a counted step, on average."""
        return self._sent / self.steps

    def close(self) -> None:
        """Release what the hooks have."""
        if self.state is not None:
            self.state.close()


def loss_on_digits(way: Way, seed: int, mesh: DeviceMesh) -> float:
    """Train a small network on scikit-learn's digits; the loss on other digits, the same on all ranks."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    case = Case(way, network, 1e-3, mesh)
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


def ways_of(options: argparse.Namespace) -> dict[str, Way]:
    """The ways to measure, by name."""
    if options.flat and options.ranks_per_host == 1:
        raise SystemExit("--flat has no effect on hosts with one rank; give --ranks-per-host 2, or leave it out")
    every = WAYS if options.ranks_per_host == 1 else FLAT_WAYS if options.flat else WAYS_OF_REPLICAS
    for name in options.case:
        if name not in every:
            raise SystemExit(
                f"--case {name!r} is none of {', '.join(every)} (--ranks-per-host {options.ranks_per_host})"
            )
    return {name: every[name] for name in options.case or every}


def has_replicas(options: argparse.Namespace) -> bool:
    """Returns whether each host has a replica of the model."""
    return options.ranks_per_host > 1 and not options.flat


def mesh_of(options: argparse.Namespace) -> DeviceMesh:
    """Returns all ranks, among which parameters are divided; with replicas, hosts by ranks of a host."""
    ranks = dist.get_world_size()
    ranks_per_host = options.ranks_per_host
    if not has_replicas(options):
        return init_device_mesh("cpu", (ranks,))
    return init_device_mesh("cpu", (ranks // ranks_per_host, ranks_per_host), mesh_dim_names=("replicate", "shard"))


def work(options: argparse.Namespace) -> None:
    """Do one rank's part."""
    rank, _ = begin()
    ways = ways_of(options)
    if has_replicas(options):
        # Only torch's own collectives run inside a host, over Gloo. The measurement of the links has to use Gloo, too.
        os.environ[SHARED_MEMORY] = "0"
    mesh = mesh_of(options)
    if options.losses:
        finish({name: [loss_on_digits(way, seed, mesh) for seed in SEEDS] for name, way in ways.items()})
        return
    batch, labels = batch_of("mlp", BATCH, torch.Generator().manual_seed(rank))
    cases = {}
    for name, way in ways.items():
        torch.manual_seed(0)
        cases[name] = Case(way, mlp(), 1e-4, mesh)
    network = mlp()
    recorder = Recorder(
        network,
        lambda model: F.cross_entropy(model(batch), labels),
        torch.optim.Adam(network.parameters(), lr=1e-4).step,
    )
    steps: dict[str, Callable[[], object]] = {COMPUTED: recorder.step}
    steps |= {name: partial(case.counted_step, batch, labels) for name, case in cases.items()}
    in_turns(steps, WARMUP, warmup=0, before=dist.barrier)
    probe = probe_here(torch.device("cpu"), "benchmarks.sharded", bits=(8, 4, 2), per_node=options.ranks_per_host)
    recorder.forget()
    seconds = in_turns(steps, options.rounds, warmup=0, before=dist.barrier)
    result: dict[str, Any] = {
        "seconds": {name: slowest(seconds[name]).tolist() for name in cases},
        "bytes": {name: case.bytes_per_step for name, case in cases.items()},
        "timeline": recorder.timeline().to_dict(),
        "probe": probe.to_dict(),
    }
    for case in cases.values():
        case.close()
    finish(result)


def measure(options: argparse.Namespace) -> Report:
    """Run the workers in every lab."""
    ways_of(options)  # before anything runs
    place = ", a replica on each host" if has_replicas(options) else ""
    if options.flat:
        place = f", divided among {options.ranks_per_host} ranks of each host"
    report = Report(
        "sharded_nodes_netlab" if options.flat else "replicated_netlab" if place else "sharded_netlab",
        f"Training step of dense layers under FSDP2{place}, "
        f"{BATCH} samples per {'rank' if place else 'host'}, over shaped links",
        {
            "case": "",
            "hosts": "d",
            "rate": "",
            "sent (MB)": ".1f",
            "wire (ms)": ".0f",
            "step (ms)": ".0f",
            "10 to 90 % (ms)": "",
            "predicted (ms)": ".0f",
            "error (%)": "+.0f",
            "fp32 / step": ".2f",
            "bf16 / step": ".2f",
            "loss": ".3f",
            "lowest": ".3f",
            "highest": ".3f",
        },
        notes=(
            f"14.7 M parameters, {OF_REPLICAS if has_replicas(options) else OF_SHARDS} sent: bytes that the first host "
            "sent to others in a step, as its network device counts them. Over Gloo, torch's own reduce-scatter is an "
            "all-reduce. wire: these bytes / rate of the link. step: median over rounds of the slowest rank's time, "
            "one compute thread each. predicted: by the model of `gqsgd advise --fsdp`, from a measurement of the "
            "links, kernels and processors, and of steps without communication. Ratios are medians over rounds of "
            "times within one round. bf16: torch's MixedPrecisionPolicy for weights and gradients. "
            f"loss: of a network of 84,000 parameters on digits that it was not trained on, after {EPOCHS} epochs, "
            f"mean over {len(SEEDS)} seeds, and the lowest and the highest of them.",
        ),
    )
    with NetLab(2, "none", options.ranks_per_host) as lab:
        losses = in_lab(lab, f"{program()} --losses", "on two hosts without a limit")
    report.raw["losses"] = losses
    in_labs(options, report, partial(_add_rows, options, losses))
    return report


def _add_rows(
    options: argparse.Namespace,
    losses: dict[str, list[float]],
    report: Report,
    hosts: int,
    rate: str,
    result: dict[str, Any],
) -> None:
    ways = ways_of(options)
    costs = Probe.from_dict(result["probe"]).costs
    model = sharded_model(mlp(), Timeline.from_dict(result["timeline"]))
    seconds = {name: np.array(values) for name, values in result["seconds"].items()}
    for name, values in seconds.items():
        step = Spread.of(values)
        sent = result["bytes"][name]
        wire = wire_seconds(sent, rate)
        method = ways[name].method(has_replicas=has_replicas(options))
        made = predict_sharded(model, costs, hosts, options.ranks_per_host, method)
        ratios = [Spread.of(seconds[plain] / values).median if plain in seconds else None for plain in ("fp32", "bf16")]
        report.rows.append(
            [
                name,
                hosts,
                rate,
                sent / 1e6,
                1e3 * wire if wire else None,
                1e3 * step.median,
                f"{1e3 * step.low:.0f} to {1e3 * step.high:.0f}",
                1e3 * made.step_s,
                100 * (made.step_s / step.median - 1),
                *ratios,
                float(np.mean(losses[name])),
                min(losses[name]),
                max(losses[name]),
            ]
        )


if __name__ == "__main__":
    parser = command_line(__doc__)
    add_labs(parser)
    parser.add_argument("--case", nargs="+", default=[], metavar="NAME", help="the cases of these names only")
    parser.add_argument(
        "--flat", action="store_true", help="with several ranks per host, divide the model among the ranks of all hosts"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--losses", action="store_true", help=argparse.SUPPRESS)  # of the workers that train on digits
    work_or_present(parser, work, measure)
