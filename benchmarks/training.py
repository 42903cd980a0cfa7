"""Time of whole training steps under DDP on links of a given rate: the package's hook against torch's hooks.

    python -m benchmarks.training --hosts 2 --rate 1gbit --save
    python -m benchmarks.training --hosts 2 --rate 1gbit --device cuda --model resnet50 --batch-size 64 --save
    python -m benchmarks.training --hosts 1 --ranks-per-host 2 --rate none --case "no communication" ddp ddp_bf16 \
        "native over Gloo" native "gqsgd over Gloo" gqsgd "gqsgd_4bit over Gloo" gqsgd_4bit --rounds 25 --save

The benchmark needs Linux, root and iproute2, see `netlab`. Every case is a DDP model of its own in the same processes.
The cases train in turns, on equal data. With ``--device cuda``, all ranks share one card, and gradients go over Gloo
through the memory of the host. On one host, "gqsgd over Gloo" is the hook without shared memory. Torch's
PowerSGD hook has a single bucket and a process group of its own: over Gloo, it aborts with several buckets.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks.hosts import add_labs, begin, finish, in_labs, slowest, wire_seconds, work_or_present
from benchmarks.report import Report, command_line, gpu_machine, slug
from lightning_gqsgd.cli.training_steps import TimedModel, dense_layers
from lightning_gqsgd.ddp.hook import register_gqsgd
from lightning_gqsgd.predict.timing import Spread, in_turns
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.wire.neighbours import VARIABLE

CLASSES = 10
COMPUTE = "no communication"
POWERSGD = "powersgd of rank 4"
#: The note on its row.
_OF_POWERSGD = (
    "PowerSGD sends one bucket after the backward pass, because torch's hook aborts over Gloo with several. Its error "
    "is another one: it sends what the gradients of matrices have in common with rank 4, and remembers the rest."
)
HOOKS: dict[str, dict[str, Any]] = {
    "gqsgd": {"preset": "gqsgd"},
    "gqsgd_4bit": {"preset": "gqsgd_4bit"},
    "native": {"reducer": "native"},
    "gqsgd on one level": {"preset": "gqsgd", "reducer": "two_shot"},  # with several ranks per host
}
#: Bytes of a coordinate under DDP's own all-reduce, and under torch's hook.
ITEMSIZES = {"ddp": 4, "ddp_bf16": 2}
OVER_GLOO = " over Gloo"  # on one host, where ranks share memory otherwise


def mlp() -> nn.Module:
    """A network of 14.7 M parameters in dense layers, whose computation is short."""
    return dense_layers((1024, 2048, 2048, 2048, 2048, CLASSES))


#: Networks, among them torchvision's ResNet-18 and ResNet-50, which has 23.5 M parameters.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "resnet18": partial(torchvision.models.resnet18, num_classes=CLASSES),
    "resnet50": partial(torchvision.models.resnet50, num_classes=CLASSES),
}
#: Shape of a sample of each network: of ResNets, an image of 64x64 pixels.
SHAPES = {"mlp": (1024,), "resnet18": (3, 64, 64), "resnet50": (3, 64, 64)}


def batch_of(model: str, size: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Returns random samples of a network, and a label for each."""
    samples = torch.randn(size, *SHAPES[model], generator=generator)
    return samples, torch.randint(CLASSES, (size,), generator=generator)


class Model(TimedModel):
    """One of the networks, under DDP."""

    def __init__(self, model: str, batch: Tensor, labels: Tensor, **ddp: Any) -> None:
        torch.manual_seed(0)
        super().__init__(MODELS[model]().to(batch.device), batch, labels, **ddp)

    def step(self) -> None:
        """Make one step, and wait for a GPU."""
        super().step()
        if self.inputs.is_cuda:
            torch.cuda.synchronize()


class Case(Model):
    """One way of averaging gradients."""

    def __init__(self, name: str, model: str, batch: Tensor, labels: Tensor) -> None:
        super().__init__(model, batch, labels, **({"bucket_cap_mb": 1000} if name == POWERSGD else {}))
        self.synchronise = name != COMPUTE
        self._powersgd: powerSGD_hook.PowerSGDState | None = None
        if name == "ddp_bf16":
            self.model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        elif name == POWERSGD:
            self._powersgd = powerSGD_hook.PowerSGDState(dist.new_group(), 4, start_powerSGD_iter=2)
            self.model.register_comm_hook(self._powersgd, powerSGD_hook.powerSGD_hook)
        elif name.removesuffix(OVER_GLOO) in HOOKS:
            shared = {VARIABLE: "0"} if name.endswith(OVER_GLOO) else {}
            with mock.patch.dict(os.environ, shared):
                self.state = register_gqsgd(self.model, **HOOKS[name.removesuffix(OVER_GLOO)], sample_every=0)

    def sent_bytes(self, itemsize: int) -> float:
        """Returns the bytes of gradients that each rank sends in a step; see `TimedModel.sent_bytes`."""
        if self._powersgd is None:
            return super().sent_bytes(itemsize)
        steps = self._powersgd.iter - self._powersgd.start_powerSGD_iter  # those that were compressed
        numel = self._powersgd.total_numel_after_compression // steps
        return ring_bytes(4 * numel, dist.get_world_size())

    def step(self) -> None:
        """Make one step."""
        with nullcontext() if self.synchronise else self.model.no_sync():
            super().step()


def work(options: argparse.Namespace) -> None:
    """Do one rank's part."""
    rank, _ = begin()
    batch, labels = batch_of(options.model, options.batch_size, torch.Generator().manual_seed(rank))
    device = torch.device(options.device)
    cases = {name: Case(name, options.model, batch.to(device), labels.to(device)) for name in options.case}
    steps: dict[str, Callable[[], object]] = {name: case.step for name, case in cases.items()}
    seconds = in_turns(steps, options.rounds, warmup=3, before=dist.barrier)
    result: dict[str, Any] = {
        "seconds": {name: slowest(values).tolist() for name, values in seconds.items()},
        "bytes": {name: case.sent_bytes(ITEMSIZES.get(name, 0)) for name, case in cases.items()},
        "reducers": {name: case.state.config.reducer for name, case in cases.items() if case.state is not None},
    }
    for case in cases.values():
        case.close()
    finish(result)


def measure(options: argparse.Namespace) -> Report:
    """Run the workers in every lab."""
    is_one = options.hosts == [1]
    several = f"_{options.ranks_per_host}_ranks_per_host" if options.ranks_per_host > 1 and not is_one else ""
    card = torch.device("cuda", 0) if options.device == "cuda" else None
    of_card = f"_{slug(torch.cuda.get_device_name(card))}" if card else ""
    report = Report(
        f"training_{'one_machine' if is_one else 'netlab'}_{options.model}" + several + of_card,
        f"Training step of {options.model}, {options.batch_size} samples per rank, "
        + (f"{options.ranks_per_host} ranks of one machine" if is_one else "over shaped links"),
        {
            "case": "",
            "hosts": "d",
            "rate": "",
            "sent (MB)": ".1f",
            "wire (ms)": ".0f",
            "step (ms)": ".0f",
            "10 to 90 % (ms)": "",
            "ddp / step": ".2f",
            "ddp_bf16 / step": ".2f",
        },
        notes=(
            "wire = bytes that each host sends in a step / rate of its link. step = median over rounds of the slowest "
            f"host's time, {'all ranks on one card' if card else 'one compute thread each'}. "
            "Ratios are medians over rounds of times within one round.",
            *([_OF_POWERSGD] if POWERSGD in options.case else []),
        ),
        machine=gpu_machine(card) if card else "",
    )
    in_labs(options, report, _add_rows)
    return report


def _add_rows(report: Report, hosts: int, rate: str, result: dict[str, Any]) -> None:
    seconds = {name: torch.tensor(values).numpy() for name, values in result["seconds"].items()}
    for name, values in seconds.items():
        step = Spread.of(values)
        sent = result["bytes"][name]
        # With two levels, most bytes stay inside of a host.
        wire = wire_seconds(sent, rate) if result["reducers"].get(name) != "hierarchical" else None
        spread = f"{1e3 * step.low:.0f} to {1e3 * step.high:.0f}"
        ratios = [
            Spread.of(seconds[plain] / values).median if plain in seconds else None for plain in ("ddp", "ddp_bf16")
        ]
        by = f" ({result['reducers'][name]})" if name in result["reducers"] else ""
        report.rows.append(
            [name + by, hosts, rate, sent / 1e6, 1e3 * wire if wire else None, 1e3 * step.median, spread, *ratios]
        )


if __name__ == "__main__":
    usual = [COMPUTE, "ddp", "ddp_bf16", POWERSGD, "gqsgd", "gqsgd_4bit"]
    cases = [*usual, *(name for name in HOOKS if name not in usual), *(name + OVER_GLOO for name in HOOKS)]
    parser = command_line(__doc__)
    add_labs(parser)
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    parser.add_argument("--batch-size", type=int, default=8, help="per rank (default 8)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", nargs="+", choices=cases, default=usual)
    parser.add_argument("--rounds", type=int, default=20)
    work_or_present(parser, work, measure)
