"""One rank of `benchmarks.registered`: probes its machine without a limit on links, or times the settings of a lab."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from benchmarks.hosts import begin, finish, slowest
from benchmarks.registered_settings import ALONE, BATCH, SETS, Task, Way
from lightning_gqsgd import LocalSteps, register_gqsgd
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.predict.probe import measure as probe_here
from lightning_gqsgd.predict.recording import Recorder
from lightning_gqsgd.predict.timing import in_turns

PROGRAM = "python -m benchmarks.registered_rank"
#: Variable of the environment with what this rank is to do, as JSON.
TASK = "GQSGD_REGISTERED_TASK"

#: Learning rate of SGD: so small that a step is like every other.
RATE = 1e-3
#: The fewest and the most timed rounds, and rounds before them: DDP builds its buckets anew after the first.
ROUNDS, FIRST_ROUNDS = (3, 15), 2
#: Seconds of the timed rounds of a setting, about, and of those in which timelines are recorded.
SETTING_S, TIMELINES_S = 9.0, 25.0
#: How many steps without communication take their turn in each round.
ALONE_CASES = 3
#: Rounds of the probe that warm up: steps of many ranks per core become shorter until then.
WARMUP = 3
#: Bits whose kernels are timed.
WIDTHS = (8, 4, 3, 2)


class Trained:
    """A model that is trained in one way.

    Args:
        way: how ranks average.
        model: a name of `registered_settings.NETWORKS`.
        seed: of weights, and with the rank of batches; all ranks take the first one's weights.
        ranks_per_host: ranks of each host.
    """

    def __init__(self, way: Way, model: str, seed: int, ranks_per_host: int) -> None:
        self._task = Task.of(model, 1000 * seed + dist.get_rank())
        network = self._task.network
        self._way = way
        self._optimizer: Any = torch.optim.SGD(network.parameters(), lr=RATE)
        self._model: Any = network
        self.close: Callable[[], None] = lambda: None
        if way == ALONE:
            return
        if way.every > 1:
            preset = GQSGDConfig(bits=way.bits, sample_every=0)
            self._optimizer = LocalSteps(network, self._optimizer, every=way.every, preset=preset)
            self.close = self._optimizer.close
            return
        self._model = DistributedDataParallel(network, gradient_as_bucket_view=True)
        method = way.method(ranks_per_host)
        if way.bits == 16:
            self._model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        elif isinstance(method, GQSGDConfig):
            self.close = register_gqsgd(self._model, method).close

    def round(self) -> None:
        """Make a step, or all steps from one average to the next."""
        for _ in range(self._way.every):
            self._task.loss(self._model).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()


def probe(ranks_per_host: int) -> dict[str, Any]:
    """Returns the probe of this machine and the timelines of all models, with no training that communicates."""
    recorders = {}
    for model in BATCH:
        task = Task.of(model, dist.get_rank())
        update = torch.optim.SGD(task.network.parameters(), lr=RATE).step
        recorders[model] = Recorder(task.network, task.loss, update, name=model)
    steps = {model: recorder.step for model, recorder in recorders.items()}
    in_turns(steps, FIRST_ROUNDS + WARMUP, warmup=0, before=dist.barrier)
    made = probe_here(torch.device("cpu"), "benchmarks.registered", WIDTHS, ranks_per_host)
    for recorder in recorders.values():
        recorder.forget()
    begun = time.perf_counter()
    for done in range(ROUNDS[1]):
        in_turns(steps, 1, warmup=0, before=dist.barrier)
        passed = float(slowest([time.perf_counter() - begun])[0])
        if done + 1 >= ROUNDS[0] and passed > TIMELINES_S:
            break
    timelines = {model: recorder.timeline().to_dict() for model, recorder in recorders.items()}
    return {"probe": made.to_dict(), "timelines": timelines}


def time_steps(ways: list[Way], model: str, seed: int, ranks_per_host: int) -> list[list[float]]:
    """Returns the seconds of a step in each round, of each way; those of local steps are a mean over a round."""
    cases = [Trained(way, model, seed, ranks_per_host) for way in ways]
    rounds = {str(number): case.round for number, case in enumerate(cases)}
    first = in_turns(rounds, FIRST_ROUNDS, warmup=0, before=dist.barrier)
    round_s = float(sum(slowest(values)[-1] for values in first.values()))
    count = int(np.clip(SETTING_S * len(ways) / round_s, *ROUNDS))
    seconds = in_turns(rounds, count, warmup=0, before=dist.barrier)
    result = [(slowest(seconds[str(number)]) / way.every).tolist() for number, way in enumerate(ways)]
    for case in cases:
        case.close()
    return result


def main() -> None:
    """Do what the environment says."""
    asked = json.loads(os.environ[TASK])
    begin()
    if "probe" in asked:
        finish(probe(asked["probe"]))
        return
    lab = SETS[asked["set"]][asked["lab"]]
    ways = [lab.ways[place] for place in asked["ways"]] + [ALONE] * ALONE_CASES
    finish(time_steps(ways, lab.model, lab.seed, lab.of.ranks_per_host))


if __name__ == "__main__":
    main()
