"""Measures how long computation takes in the package's pipeline over Gloo, while collectives are under way.

Times are seconds of the sequencing thread's own processor time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from statistics import mean, median

import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels.layout import PIECE_NUMEL, PieceSize, Segment
from lightning_gqsgd.predict.costs import BF16_HOOK, Costs
from lightning_gqsgd.predict.device_times import MODEL_NUMEL
from lightning_gqsgd.predict.profile import bucket_profiles
from lightning_gqsgd.predict.timing import slowest
from lightning_gqsgd.reducers import Setting, Steps, new_store
from lightning_gqsgd.wire.communicator import Communicator
from lightning_gqsgd.wire.pipeline import Job, Runner, Start, release, runner_for
from lightning_gqsgd.wire.plan import Plan
from lightning_gqsgd.wire.telemetry import Telemetry

#: Number of pieces of one block that go through the pipeline to time the overhead of a stage.
_SMALL = 32
#: Number of pieces of each bucket that is reduced to time kernels, and the largest number of buckets. Together they
#: have as many coordinates as a model that exceeds the caches.
_LARGE = 8
_BUCKETS = MODEL_NUMEL // (8 * PIECE_NUMEL)
#: Seconds after which no further bucket is started, and the smallest number of buckets; the first one is for warm-up.
_PATIENCE_S = 0.8
_FEWEST = 2


@dataclass
class _Marks:
    """The starts of the stages of pieces, and the durations of their own computation, in processor time of the
    thread."""

    begun: list[float] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)

    def on(self, start: Start) -> Start:
        """Wrap a start so that its stages are recorded."""

        def steps() -> Steps:
            taken = start()
            while True:
                begun = time.thread_time()
                self.begun.append(begun)
                try:
                    exchanges = next(taken)
                except StopIteration as end:
                    return end.value
                finally:
                    self.spent.append(time.thread_time() - begun)
                yield exchanges

        return steps


def in_pipeline(communicator: Communicator, costs: Costs, bits: int) -> Costs:
    """Returns the costs in the pipeline, from the times of pieces of a two-shot reduction. A collective, over Gloo.

    Args:
        communicator: the communicator that runs the collectives.
        costs: the costs of kernels that run alone.
        bits: number of bits of the default codec, which has to be in ``costs``.
    """
    config = resolve(GQSGDConfig(bits=bits, reducer="two_shot", sample_every=0), communicator.size)
    setting = setting_of(config, communicator.size, torch.float32)
    communicator.extend(setting.reducer.scopes(setting))
    runner = runner_for(communicator)
    try:
        block = config.block_size
        small = _Case(communicator, runner, replace(setting, piece_size=PieceSize(block, block)))
        x = torch.zeros(_SMALL * block)
        small.reduce(x)  # warms up
        marks = small.reduce(x)
        large = _Case(communicator, runner, setting)
        slowdown = large.slowdown(costs, overhead_s=mean(marks.spent))
    finally:
        runner.close(communicator)
        release(runner)
    stage_s = (marks.begun[-1] - marks.begun[0]) / (len(marks.begun) - 1)
    gammas = {name: gamma if name == BF16_HOOK else gamma.times(slowdown) for name, gamma in costs.gammas.items()}
    return replace(costs, gammas=gammas, stage_s=max(0.0, stage_s - costs.launch_s))


class _Case:
    """Buckets that have one parameter for each piece, under a setting."""

    def __init__(self, communicator: Communicator, runner: Runner, setting: Setting) -> None:
        self._communicator = communicator
        self._runner = runner
        self._setting = setting

    def reduce(self, x: Tensor) -> _Marks:
        """Reduce a bucket in place."""
        communicator = self._communicator
        setting = self._setting
        marks = _Marks()
        plan = Plan(self._segments(x.numel()), setting)
        store = new_store(setting, {}, x.device)
        telemetry = Telemetry()
        counters = telemetry.bucket(0)
        starts = plan.starts(x, communicator.rank, 1, store, counters, telemetry)
        job = Job(x, [marks.on(start) for start in starts], "probe", counters, telemetry, ends_step=False)
        self._runner.submit(communicator, job)
        job.wait()
        return marks

    def slowdown(self, costs: Costs, overhead_s: float) -> float:
        """Returns the factor by which the codec's kernels take longer than alone, 1 or more, because other threads and
        ranks use the processors and the caches, and messages come from other processors.

        ``overhead_s``: the seconds of a stage without its kernel.
        """
        numel = _LARGE * PIECE_NUMEL
        buckets = torch.randn(numel, generator=torch.Generator().manual_seed(0)).repeat(_BUCKETS, 1)
        profiles = bucket_profiles(self._setting, self._segments(numel))
        works = [work for profile in profiles for stage in profile.stages for work in stage.works]
        works += [work for profile in profiles for work in profile.last]
        alone = replace(costs, launch_s=0.0)
        expected_s = sum(alone.seconds(work) for work in works if work.codec)
        begun = time.perf_counter()
        spent = []
        for bucket in buckets:
            marks = self.reduce(bucket)
            spent.append(sum(marks.spent) - overhead_s * len(marks.spent))
            passed = slowest([time.perf_counter() - begun], bucket.device)
            if len(spent) >= _FEWEST and float(passed[0]) > _PATIENCE_S:  # all ranks stop together
                break
        return max(1.0, median(spent[1:]) / expected_s)

    def _segments(self, numel: int) -> tuple[Segment, ...]:
        """Returns one parameter for each piece."""
        each = self._setting.piece_size.least
        return tuple(Segment(number, each, raw=False) for number in range(numel // each))
