"""What it costs in every step to notice that a model was changed after it was wrapped.

    python -m benchmarks.changes

Prints microseconds per forward pass and per step of an optimizer, for a model of 1,000 parameters.
"""

from __future__ import annotations

import os
import tempfile
import timeit
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.report import command_line
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.ddp.unaveraged import BackwardWatch, TrainedParameters
from lightning_gqsgd.session.parameters import number_parameters

#: Calls that are timed together.
CALLS = 200

#: Times that they are timed; the shortest counts.
REPEATS = 20


def microseconds(function: Callable[[], object]) -> float:
    """The shortest time of a call, of several means."""
    return 1e6 * min(timeit.repeat(function, repeat=REPEATS, number=CALLS)) / CALLS


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{os.path.join(folder, 'store')}", rank=0, world_size=1)
        module = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(500)])
        model = DistributedDataParallel(module)
        named = dict(module.named_parameters())
        numbered = number_parameters(named, GQSGDConfig())
        entries = {id(p): entry for entry, p in zip(numbered, named.values(), strict=True)}
        trained = TrainedParameters(model, entries)
        watch = BackwardWatch(model, list(trained.reduced.values()))
        parameter = next(module.parameters())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        print(f"{len(named):,} parameters in {len(list(module.modules())):,} modules, microseconds per call")
        print(f"check before a forward pass       {microseconds(trained.check):6.1f}")
        print(
            f"look at the backward pass before  {microseconds(lambda: watch.before_forward(model, has_hook=True)):6.1f}"
        )
        print(f"count a watched gradient          {microseconds(lambda: watch.count_gradient(parameter)):6.1f}")
        watch.end_reduction()
        print(f"look at an optimizer's step       {microseconds(lambda: watch.before_optimizer_step(optimizer)):6.1f}")
        dist.destroy_process_group()


if __name__ == "__main__":
    command_line(__doc__).parse_args()
    main()
