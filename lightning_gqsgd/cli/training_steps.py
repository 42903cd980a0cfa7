"""Times of whole training steps of a small model between processes, under plain DDP and under hooks: ``gqsgd bench``.

Each case is a DDP model of its own in the same processes. The cases train in turns, on equal data (`timing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.ddp.hook import GQSGDState, register_gqsgd
from lightning_gqsgd.predict.bench import WARMUP, WIDTHS, WayTime, on_slowest_rank
from lightning_gqsgd.reducers.base import ring_bytes

#: The model: dense layers of these widths, 4.7 M parameters, on so many samples of each rank.
LAYERS = (512, 1024, 1024, 1024, 1024, 1024)
CLASSES = 10
BATCH = 8
PLAIN = "ddp"


def step_runs(rounds: int) -> int:
    """Returns how many steps `measure_steps` makes, those that are not timed included."""
    return (rounds + WARMUP) * (2 + len(WIDTHS))


def measure_steps(device: torch.device, rounds: int, tick: Callable[[], object]) -> tuple[WayTime, ...]:
    """Time training steps between the ranks of the default process group. A collective.

    Args:
        device: device of the model: the CPU over Gloo, or CUDA over NCCL.
        rounds: number of timed rounds.
        tick: called before every step, `step_runs` times.
    """
    cases = {PLAIN: _small_model(device), "bf16 hook": _small_model(device)}
    cases["bf16 hook"].model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    for bits in WIDTHS:
        name = f"{bits} bits"
        cases[name] = _small_model(device)
        cases[name].state = register_gqsgd(cases[name].model, bits=bits, sample_every=0)
    try:
        seconds = on_slowest_rank({name: case.step for name, case in cases.items()}, device, rounds, tick)
        sent = {name: case.sent_bytes(2 if name == "bf16 hook" else 4) for name, case in cases.items()}
    finally:
        for case in cases.values():
            case.close()
    return WayTime.all_of(seconds, sent, against=PLAIN)


class TimedModel:
    """A model under DDP, with its optimizer and its data.

    Args:
        network: the model.
        inputs: the inputs of each step.
        labels: the class of each input.
        **ddp: further arguments of DistributedDataParallel.

    Attributes:
        inputs: the inputs.
        model: the DDP model.
        state: the state of the package's hook; None: DDP has another hook, or none.
    """

    def __init__(self, network: nn.Module, inputs: Tensor, labels: Tensor, **ddp: Any) -> None:
        self.inputs = inputs
        self._labels = labels
        self._numel = sum(p.numel() for p in network.parameters())
        self.model = DistributedDataParallel(network, gradient_as_bucket_view=True, **ddp)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.state: GQSGDState | None = None

    def step(self) -> None:
        """Make one step: forward, backward, optimizer."""
        F.cross_entropy(self.model(self.inputs), self._labels).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def sent_bytes(self, itemsize: int) -> float:
        """Returns the bytes of gradients that each rank sends in a step.

        Args:
            itemsize: bytes of a coordinate under a hook that is not the package's.
        """
        if self.state is None:
            return ring_bytes(itemsize * self._numel, dist.get_world_size())
        totals = self.state.telemetry.totals()
        return totals["bytes_sent"] / totals["steps"]

    def close(self) -> None:
        """Close the package's hook, if DDP has it."""
        if self.state is not None:
            self.state.close()


def _small_model(device: torch.device) -> TimedModel:
    """Returns a model with its data, which are the same in all cases of a rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(BATCH, LAYERS[0], generator=generator).to(device)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator).to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = dense_layers((*LAYERS, CLASSES)).to(device)
    return TimedModel(network, inputs, labels)


def dense_layers(widths: Sequence[int]) -> nn.Module:
    """Returns a network of dense layers with ReLU in between, from ``widths[0]`` inputs to ``widths[-1]`` outputs."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
