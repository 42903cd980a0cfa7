"""Predicts the duration of a training step by running the package's own reducers on a virtual clock.

`predict` takes the computation of a rank (`Timeline`) and all costs (`Costs`). `profile` records computation and
messages from the reducers themselves, and `runners` runs their pieces in the order of `wire.pipeline`.

The model makes these simplifications: all ranks are equally fast, so no rank waits for a slower one, and all steps are
equal. Collectives that are under way together take turns on the link, although TCP would share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import PieceSize
from lightning_gqsgd.predict.bunches import pieces_of
from lightning_gqsgd.predict.clock import Clock, Event, Resource
from lightning_gqsgd.predict.costs import Costs
from lightning_gqsgd.predict.profile import Profile, bf16_hook_profile, bucket_profiles, stamp_profile
from lightning_gqsgd.predict.runners import Network, runner_for
from lightning_gqsgd.predict.timeline import MOST, Timeline
from lightning_gqsgd.wire.communicator import NCCL_PIECE_SIZE
from lightning_gqsgd.wire.engine import SHARED_GROWTH

#: The names under which `predict` knows plain DDP's all-reduce, and torch's hook that sends bf16.
NATIVE = "native"
BF16 = "bf16"
#: Names of the resources that carry messages.
LINKS = ("link", "node")


@dataclass(frozen=True)
class Prediction:
    """The prediction of one training step.

    Attributes:
        step_s: seconds of the step.
        compute_s: seconds of forward pass, backward pass and optimizer, without any communication.
        codec_s: seconds in which gradients are encoded, reduced, decoded or copied.
        wire_s: seconds in which a link carries messages.
        sent_bytes: bytes that each rank sends in a step.
        events: the work of each resource, with times.
        node_bytes: the part of ``sent_bytes`` that is sent in collectives between the ranks of one node.
    """

    step_s: float
    compute_s: float
    codec_s: float
    wire_s: float
    sent_bytes: int
    events: tuple[Event, ...]
    node_bytes: int

    @property
    def exposed_s(self) -> float:
        """Seconds by which the step is longer than its computation."""
        return self.step_s - self.compute_s

    @property
    def network_bytes(self) -> int:
        """Bytes that a rank sends in collectives that reach other nodes."""
        return self.sent_bytes - self.node_bytes

    @property
    def efficiency(self) -> float:
        """The scaling efficiency, 0 to 1: the duration of a step that never waits, divided by the duration of this
        step."""
        return self.compute_s / self.step_s if self.step_s else 1.0

    def throughput(self, batch: int, ranks: int) -> float:
        """Returns the samples per second of all ranks; ``batch`` is the number of samples of a rank in a step."""
        return batch * ranks / self.step_s


def predict(timeline: Timeline, costs: Costs, ranks: int, method: GQSGDConfig | str) -> Prediction:
    """Predict one step.

    Args:
        timeline: the computation of each rank.
        costs: all costs, for this number of ranks.
        ranks: number of ranks; 1 sends nothing.
        method: a configuration; ``"native"``, plain DDP; or ``"bf16"``, torch's ``bf16_compress_hook``.

    Raises:
        ConfigError: if the configuration cannot work at this number of ranks, or if costs are missing.
    """
    if ranks < 1:
        raise ConfigError(f"ranks={ranks} must be at least 1")
    profiles = _profiles(timeline, costs, ranks, method) if ranks > 1 else [() for _ in timeline.bunches]
    clock = Clock(costs.cores)
    backward = Resource(clock, "backward")
    network = Network(clock, costs, has_backward=timeline.backward_s > 0)
    runner = runner_for(clock, costs, network)
    demand = costs.speed  # times were measured while all ranks computed, each on one thread or GPU
    clock.start(timeline.forward_s, demand, lambda: None)
    clock.run()
    begun = clock.now_s
    if begun:
        clock.events.append(Event("backward", "forward", -1, -1, 0.0, begun))
    done = 0.0
    for number, bunch in enumerate(timeline.bunches):
        submit = partial(runner.submit, profiles[number], number)
        backward.add(bunch.ready_s - done, demand, "backward", number, -1, submit)
        done = bunch.ready_s
    backward.add(timeline.backward_s - done, demand, "backward", len(timeline.bunches), -1, lambda: None)
    clock.run()
    reduced = clock.now_s
    step = reduced + timeline.update_s
    if timeline.update_s:
        clock.events.append(Event("backward", "optimizer", -1, -1, reduced, step))
    return prediction_of(clock.events, step, timeline.compute_s, chain.from_iterable(profiles))


def prediction_of(events: Sequence[Event], step_s: float, compute_s: float, profiles: Iterable[Profile]) -> Prediction:
    """Returns the prediction of a step with given tasks and pieces; for the other arguments, see `Prediction`."""
    pieces = [profile for profile in profiles if not profile.is_agreement]
    return Prediction(
        step_s=step_s,
        compute_s=compute_s,
        codec_s=_busy(events, lambda name: name == "codec" or name.startswith("stream")),
        wire_s=_busy(events, lambda name: name in LINKS),
        sent_bytes=sum(profile.sent_bytes for profile in pieces),
        events=tuple(sorted(events, key=lambda event: event.start_s)),
        node_bytes=sum(profile.node_bytes for profile in pieces),
    )


def _profiles(timeline: Timeline, costs: Costs, ranks: int, method: GQSGDConfig | str) -> list[tuple[Profile, ...]]:
    """Returns the profiles of the pieces of each bucket, or of each bunch of buckets."""
    if method == BF16:
        return pieces_of(timeline, lambda segments: [bf16_hook_profile(sum(one.numel for one in segments), ranks)])
    if isinstance(method, str) and method != NATIVE:
        raise ConfigError(f"method={method!r} is not 'native', 'bf16' or a GQSGDConfig")
    config = resolve(GQSGDConfig(reducer="native") if isinstance(method, str) else method, ranks)
    setting = setting_of(config, ranks, timeline.dtype, piece_size_of(costs, config.num_bits))
    is_large = timeline.is_bunched or timeline.numel > MOST * setting.piece_size.most
    several = pieces_of(timeline, partial(bucket_profiles, setting, by_shape=is_large))
    if setting.reducer.compresses:
        several[0] = (stamp_profile(ranks), *several[0])
    return several


def piece_size_of(costs: Costs, bits: int) -> PieceSize:
    """Returns the number of coordinates of a piece whose codes have ``bits`` bits, as `wire.engine` chooses it if each
    rank has one thread."""
    if costs.on_streams:
        return NCCL_PIECE_SIZE
    size = PieceSize.of_bits(bits)
    return size.times(SHARED_GROWTH) if costs.shares_memory else size


def _busy(events: Sequence[Event], counts: Callable[[str], bool]) -> float:
    """Returns the seconds in which resources were busy, summed over the resources for which ``counts`` returns True."""
    return sum(event.end_s - event.start_s for event in events if counts(event.resource))
