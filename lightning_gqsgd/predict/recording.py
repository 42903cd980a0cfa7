"""Measures the timeline of a real model, which is when DDP has each bucket ready, with a hook that sends nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict.timeline import Bucket, Timeline
from lightning_gqsgd.predict.timing import of_all_ranks, slowest
from lightning_gqsgd.session.parameters import number_parameters, segments_of


class Recorder:
    """Records the steps of a model under DDP, without sending gradients.

    Creating it is a collective, because DDP's constructor is one. `timeline` is also a collective.

    Args:
        module: the model.
        forward: computes the loss of a DDP model.
        update: the optimizer's step; None if there is none.
        name: name of the model.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[[nn.Module], Tensor],
        update: Callable[[], object] | None = None,
        name: str = "",
    ) -> None:
        self._forward = forward
        self._update = update
        self._name = name
        segments = segments_of(number_parameters(dict(module.named_parameters()), GQSGDConfig()), {})
        self._segment_of = {id(p): segment for p, segment in zip(module.parameters(), segments, strict=True)}
        self._device = next(module.parameters()).device
        self._dtype = next(p.dtype for p in module.parameters() if p.requires_grad)
        self.model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        self.model.register_comm_hook(self, _keep)
        self._buckets: list[tuple[float, tuple[Segment, ...]]] = []
        self._rows: list[list[float]] = []
        self._layout: list[tuple[Segment, ...]] = []

    def step(self) -> None:
        """Make one step: forward, backward, optimizer."""
        self._buckets = []
        begun = self._now()
        loss = self._forward(self.model)
        forward = self._now()
        loss.backward()
        backward = self._now()
        if self._update is not None:
            self._update()
        self.model.zero_grad()
        layout = [segments for _, segments in self._buckets]
        if layout != self._layout:  # DDP rebuilds its buckets after the first step
            self._layout = layout
            self._rows = []
        ready = [at - forward for at, _ in self._buckets]
        self._rows.append([forward - begun, backward - forward, self._now() - backward, *ready])

    def forget(self) -> None:
        """Discard the steps so far, which were for warm-up."""
        self._rows = []

    def timeline(self) -> Timeline:
        """Returns the timeline: medians over the steps so far that had the latest buckets, on the last rank of each
        step, because all ranks wait for it.

        If ranks share processors, the last rank may differ from step to step.

        Raises:
            ConfigError: if a rank has recorded no step with the buckets that DDP keeps.
        """
        fewest = -int(slowest([-len(self._rows)], self._device)[0])
        if not fewest:
            raise ConfigError("no step was recorded; make at least three")
        rows = of_all_ranks(self._rows[-fewest:], self._device)
        # Rows are [ranks, steps, columns].
        last = rows[..., :2].sum(dim=-1).argmax(dim=0)
        forward, backward, update, *ready = rows[last, torch.arange(fewest)].quantile(0.5, dim=0).tolist()
        backward = max(backward, *ready)
        times = [max(ready[: number + 1]) for number in range(len(ready))]
        buckets = tuple(Bucket(segments, at) for segments, at in zip(self._layout, times, strict=True))
        return Timeline(buckets, backward, forward, update, self._dtype, self._name)

    def take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Note the time, and return the gradients unchanged. This is DDP's communication hook."""
        segments: Sequence[Segment] = [self._segment_of[id(p)] for p in bucket.parameters()]
        self._buckets.append((self._now(), tuple(segments)))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _keep(recorder: Recorder, bucket):  # type: ignore[no-untyped-def]  # DDP rejects annotations that are strings
    return recorder.take(bucket)
