"""What would go wrong on a GPU only: races of streams, memory that is freed too early, tensors of the host among those
of the GPU, and a host that waits. `simulated_cuda` finds all of them without a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.adaptive.sampling import GradientSampler
from lightning_gqsgd.codecs import LinearCodec
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.errors import CollectiveError
from lightning_gqsgd.kernels import cuda
from lightning_gqsgd.kernels.layout import Segment, cut
from lightning_gqsgd.kernels.protocol import Coding
from lightning_gqsgd.local_steps.merges.fixed import FixedMembers
from lightning_gqsgd.membership.members import RowsOfAll, SumOfAll
from lightning_gqsgd.presets import FIXED
from lightning_gqsgd.reducers import new_store
from lightning_gqsgd.wire.agreement import WEIGHTS_COMPARED, Stamp, Weights
from lightning_gqsgd.wire.communicator import Communicator
from lightning_gqsgd.wire.engine import Engine, Request
from lightning_gqsgd.wire.peers import Peers
from lightning_gqsgd.wire.pipeline import STREAMS, Job
from lightning_gqsgd.wire.plan import GatherPlan, Plan, ScatterPlan
from lightning_gqsgd.wire.staging import StagedWork
from lightning_gqsgd.wire.telemetry import MOST_TERMS
from tests.simulated_cuda import DEVICE, RaceError, SimulatedCuda, simulated

__all__ = ["simulated"]

RANKS = 4
BUCKETS = 3
#: Presets whose codes have no fixed length are refused for GPUs.
PRESETS = {name: preset.config for name, preset in FIXED.items() if preset.config.coder == "fixed"}
_names = count()


def segments_of(buckets: int, parts: int = 1) -> list[tuple[Segment, ...]]:
    """The parameters of each bucket; ``parts`` times as many if the bucket consists of equal parts."""
    numbers = count()
    sizes = (3000, 10, 700) * parts
    return [tuple(Segment(next(numbers), numel, raw=numel < 100) for numel in sizes) for _ in range(buckets)]


class Rank:
    """One of `RANKS` ranks, the others of which are not there, with the buckets of a model on the GPU."""

    def __init__(
        self,
        config: GQSGDConfig,
        dtype: torch.dtype = torch.float32,
        plan: type[Plan] = Plan,
        backend: str = "nccl",
    ) -> None:
        self.config = resolve(config, RANKS)
        peers = Peers(0, tuple(range(RANKS)), dist.HashStore(), {"cuda": backend}, timedelta(seconds=10))
        self.engine = Engine(DEVICE, peers, f"races {next(_names)}")
        self.engine.connect(self.config)
        self.plan = plan
        self.segments = segments_of(BUCKETS, 1 if plan is Plan else RANKS)
        self.numel = sum(one.numel for one in self.segments[0])
        self.dtype = dtype
        sizes = {one.parameter: one.numel for bucket in self.segments for one in bucket if not one.raw}
        self.store = new_store(setting_of(self.config, RANKS, dtype), sizes, DEVICE)
        self.weights = torch.zeros(WEIGHTS_COMPARED, dtype=torch.float64, device=DEVICE)

    def new_bucket(self) -> Tensor:
        return torch.randn(self.numel, device=DEVICE, dtype=self.dtype)

    def reduce(self, step: int, number: int, x: Tensor, **fields: Any) -> Job:
        request = Request(
            name=f"bucket {number} of step {step}",
            configs=(self.config,),
            segments=self.segments[number],
            step=step,
            store=self.store,
            agreement=Stamp(0, step, 0, weights=Weights("weights", self.weights * 1)) if number == 0 else None,
            bucket=number,
            ends_step=number == BUCKETS - 1,
            plan=self.plan,
            **fields,
        )
        return self.engine.reduce(x, request)

    def train(self, steps: Sequence[int], buckets: Sequence[Tensor], **fields: Any) -> None:
        """Reduce buckets as DDP does, which writes and reads them on the default stream, and keeps them."""
        for step in steps:
            futures = []  # DDP keeps no job
            for number, bucket in enumerate(buckets):
                bucket.copy_(torch.randn_like(bucket))  # the backward pass
                futures.append(self.reduce(step, number, bucket, **fields).future)
            for future, bucket in zip(futures, buckets, strict=True):
                future.wait()
                bucket.mul_(0.1)  # the optimizer
            self.weights += 1

    def close(self, simulated: SimulatedCuda) -> None:
        assert self.engine.telemetry.totals()["nonfinite_blocks"] == 0
        self.engine.close()
        simulated.find_freed()


def no_races(simulated: SimulatedCuda, rank: Rank, steps: int = 5, **fields: Any) -> None:
    """Check steps of a training. The host waits for the GPU in the first steps only, in which tables are made."""
    buckets = [rank.new_bucket() for _ in range(BUCKETS)]
    rank.train(range(2), buckets, **fields)
    simulated.host_waits.clear()
    rank.train(range(2, steps), buckets, **fields)
    assert not simulated.host_waits
    rank.close(simulated)


@pytest.mark.parametrize("name", PRESETS)
def test_trainings_with_every_preset(simulated: SimulatedCuda, name: str) -> None:
    no_races(simulated, Rank(PRESETS[name]))
    assert simulated.launches["encode_kernel"]
    assert simulated.launches["decode_kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["gqsgd_4bit", "dore", "eden", "terngrad"])
def test_trainings_with_every_dtype(simulated: SimulatedCuda, name: str, dtype: torch.dtype) -> None:
    no_races(simulated, Rank(PRESETS[name], dtype))


OTHERS: list[dict[str, Any]] = [
    {"reducer": "native"},
    {"reducer": "gather"},
    {"reducer": "tree", "codec": "exponential"},
    {"reducer": "hierarchical", "node_size": 2},
    {"reducer": "hierarchical", "node_size": 2, "bits": 4, "rotation": True},
    {"reducer": "gather", "scale": "global"},
    {"reducer": "two_shot", "scale_per": "parameter"},
    {"reducer": "two_shot", "scale_per": "parameter", "norm": "l2", "clip": 2.5},
    {"reducer": "gather", "norm": "power_of_two"},
    {"reducer": "gather", "scale": "global", "norm_over_ranks": "l1"},
    {"reducer": "sum", "norm": "l2", "norm_over_ranks": "l2"},
    {"reducer": "sum", "scale_per": "bucket", "norm_over_ranks": "l2"},
    {"reducer": "two_shot", "scale_per": "bucket"},
    {"reducer": "gather", "codec": "sign", "bits": 1, "memory": "ef"},
    {"reducer": "gather", "codec": "top_k", "bits": 32, "density": 0.1, "memory": "ef"},
    {"reducer": "two_shot", "memory": "diana", "memory_down": "ef"},
    {"bits": 16},
]


@pytest.mark.parametrize("fields", OTHERS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_trainings_with_other_fields(simulated: SimulatedCuda, fields: dict[str, Any]) -> None:
    no_races(simulated, Rank(GQSGDConfig(sample_every=1, **fields)))


@pytest.mark.parametrize("name", ["gqsgd", "dore", "gqsgd_sum", "eden"])
def test_trainings_over_gloo(simulated: SimulatedCuda, name: str) -> None:
    simulated.events_pass = True  # the thread that stages messages waits for the GPU
    rank = Rank(PRESETS[name], backend="gloo")
    rank.train(range(4), [rank.new_bucket() for _ in range(BUCKETS)])
    rank.close(simulated)


@pytest.mark.slow
def test_errors_that_are_sampled_in_many_steps(simulated: SimulatedCuda) -> None:
    no_races(simulated, Rank(GQSGDConfig(reducer="two_shot", sample_every=1)), steps=MOST_TERMS + 6)


def test_the_sums_of_a_merge(simulated: SimulatedCuda) -> None:
    rank = Rank(PRESETS["gqsgd_4bit"])
    members = FixedMembers(rank.engine, rank.config)
    simulated.default.waited_for.clear()
    for number in range(3):
        change = rank.new_bucket()
        mean = members.answer(SumOfAll(change, rank.segments[0], number))
        mean += 1
        assert members.answer(RowsOfAll(torch.tensor([7]))).tolist() == [[7]] * RANKS
        del change, mean
    # The training goes on meanwhile, on the default stream, which is that of all threads.
    assert not simulated.default.waited_for
    rank.close(simulated)


def test_the_tensors_of_one_call_of_torchft(simulated: SimulatedCuda) -> None:
    pytest.importorskip("torchft")
    from lightning_gqsgd.membership.process_group import _Result, _Work

    simulated.events_pass = True  # the thread that stages messages waits for the GPU
    rank = Rank(PRESETS["gqsgd"], backend="gloo")
    buckets = [rank.new_bucket() for _ in range(2)]
    jobs = [rank.reduce(0, number, bucket) for number, bucket in enumerate(buckets)]
    errors: list[Exception] = []
    work = _Work([_Result(job, x, x, RANKS) for job, x in zip(jobs, buckets, strict=True)], errors.append)
    work.wait()
    work.block_current_stream()
    assert not errors
    for bucket in buckets:
        bucket.mul_(0.1)
    rank.close(simulated)


def test_trainings_without_compression(simulated: SimulatedCuda) -> None:
    no_races(simulated, Rank(PRESETS["gqsgd"]), compressed=False)


@pytest.mark.parametrize("plan", [ScatterPlan, GatherPlan])
@pytest.mark.parametrize("is_held", [True, False])
def test_shards_that_are_freed_behind_their_use(simulated: SimulatedCuda, plan: type[Plan], is_held: bool) -> None:
    rank = Rank(GQSGDConfig(bits=8, reducer="two_shot"), plan=plan)
    fsdp = simulated.new_stream()
    for step in range(3):
        fsdp.wait_stream(simulated.default)
        for number in range(BUCKETS):
            with simulated.stream(fsdp):
                bucket = rank.new_bucket()
                rank.reduce(step, number, bucket, is_held=is_held).wait()
                bucket.mul_(0.1)
            del bucket
    rank.close(simulated)


def test_tensors_that_nobody_keeps(simulated: SimulatedCuda) -> None:
    rank = Rank(PRESETS["gqsgd"])
    for step in range(3):
        futures = [rank.reduce(step, number, rank.new_bucket()).future for number in range(BUCKETS)]
        for future in futures:
            future.wait()
        del future, futures
    rank.close(simulated)


def test_plans_that_are_dropped_while_streams_use_their_tables(simulated: SimulatedCuda) -> None:
    rank = Rank(PRESETS["terngrad"])
    buckets = [rank.new_bucket() for _ in range(BUCKETS)]
    rank.train(range(1), buckets)
    # The number of buckets is odd, so that each bucket has the other stream now.
    futures = [rank.reduce(1, number, bucket).future for number, bucket in enumerate(buckets)]
    rank.engine.plans.drop_unused(100)
    gc.collect()
    simulated.find_freed()
    for future in futures:
        future.wait()
    rank.close(simulated)


def test_gradients_are_sampled_beside_their_reduction(simulated: SimulatedCuda) -> None:
    candidates = {bits: resolve(one, RANKS) for bits, one in GQSGDConfig(bits="auto").candidates().items()}
    rank, sampler = Rank(candidates[4]), GradientSampler(candidates)
    buckets = [rank.new_bucket() for _ in range(BUCKETS)]
    for step in range(2):
        futures = []
        for number, bucket in enumerate(buckets):
            taken = sampler.take(bucket, rank.segments[number], step, 0)
            assert taken is not None
            futures.append(rank.reduce(step, number, bucket, watch=sampler.watch(taken)).future)
            sampler.measure(taken)
            del taken
        for future, bucket in zip(futures, buckets, strict=True):
            future.wait()
            bucket.mul_(0.1)
        assert sampler.collect() is not None
    rank.close(simulated)


@pytest.mark.parametrize("bits", [8, 4])
def test_memory_for_tables_and_messages(simulated: SimulatedCuda, bits: int) -> None:
    rank = Rank(GQSGDConfig(bits=bits, reducer="two_shot"))
    numel = 1 << 23
    rank.segments = [(Segment(number, numel, raw=False),) for number in range(BUCKETS)]
    buckets = [torch.zeros(numel, device=DEVICE) for _ in range(BUCKETS)]
    before = simulated.allocated.total()
    for step in range(2):
        simulated.peak.clear()
        jobs = [rank.reduce(step, number, bucket) for number, bucket in enumerate(buckets)]
        for job in jobs:
            job.future.wait()
        del job, jobs
        simulated.find_freed()
    tables = simulated.allocated.total() - before
    messages = simulated.peak.total() - simulated.allocated.total()
    # 32 bytes for each block of 128 values that is encoded, reduced or decoded: those of others, own ones, and all.
    assert tables == pytest.approx(BUCKETS * numel * 32 / 128 * (3 / 4 + 1 / 4 + 1), rel=0.01)
    # A message to others, one from them, the own shard and the result, for the bucket of each of two streams.
    assert messages == pytest.approx(STREAMS * numel * (bits + 16 / 128) / 8 * (2 + 1 / RANKS), rel=0.2)
    rank.close(simulated)


def test_an_error_leaves_no_race(simulated: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(PRESETS["gqsgd"])

    def fails(*_: object) -> None:
        raise RuntimeError("the cable is out")

    monkeypatch.setattr("tests.simulated_cuda.NcclGroup.alltoall_base", fails)
    for is_held in (True, False):
        bucket = rank.new_bucket()
        job = rank.reduce(0, 0, bucket, is_held=is_held)
        with pytest.raises(CollectiveError, match=r"the cable is out|an earlier failure"):
            job.wait()
        assert bucket.isnan().all()
        del job, bucket
    rank.close(simulated)


# --- the simulation finds what is wrong ------------------------------------------------------------------------------


def _without_waiting(job: Job, stream: Any) -> None:
    job._stream = stream


def _without_recording(job: Job, stream: Any) -> None:
    job._stream = stream
    stream.wait_event(job._arrived)


def test_a_stream_that_does_not_wait_for_the_gradient_is_found(
    simulated: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "take", _without_waiting)
    rank = Rank(PRESETS["gqsgd"])
    with pytest.raises(CollectiveError, match=r"RaceError: stream \d reads \(.*\) what default writes"):
        rank.reduce(0, 0, rank.new_bucket()).wait()


def test_memory_that_is_freed_under_a_stream_is_found(
    simulated: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "take", _without_recording)
    rank = Rank(PRESETS["gqsgd"])
    job = rank.reduce(0, 0, rank.new_bucket())
    del job
    gc.collect()
    with pytest.raises(RaceError, match=r"memory of default is freed, and stream \d may still use it"):
        simulated.find_freed()


def test_an_optimizer_that_does_not_wait_is_found(simulated: SimulatedCuda) -> None:
    rank = Rank(PRESETS["gqsgd"])
    bucket = rank.new_bucket()
    job = rank.reduce(0, 0, bucket)
    with pytest.raises(RaceError, match=r"default (reads|writes) \(aten::mul_\) what stream \d writes"):
        bucket.mul_(0.1)
    job.wait()
    bucket.mul_(0.1)


def test_a_collective_that_nobody_waits_for_is_found(simulated: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulated_cuda.Work.wait", lambda work: True)
    rank = Rank(PRESETS["gqsgd"])
    with pytest.raises(CollectiveError, match=r"RaceError: stream \d reads \(.*\) what stream \d writes"):
        rank.reduce(0, 0, rank.new_bucket()).wait()


def test_groups_of_nccl_that_run_at_once_are_found(simulated: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Communicator, "_wait_for_other_groups", lambda communicator, group: None)
    rank = Rank(GQSGDConfig(reducer="hierarchical", node_size=2))
    with pytest.raises(CollectiveError, match="RaceError: two groups of NCCL may run at once"):
        rank.train(range(2), [rank.new_bucket() for _ in range(BUCKETS)])


def test_a_message_that_is_sent_before_it_is_copied_is_found(
    simulated: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StagedWork, "_wait_for_input", lambda work: None)
    rank = Rank(PRESETS["gqsgd"], backend="gloo")
    with pytest.raises(CollectiveError, match=r"RaceError: the host reads what stream \d writes"):
        rank.reduce(0, 0, rank.new_bucket()).wait()
    rank.engine.close()


def _on_the_host(x: Tensor, blocks: Tensor) -> Any:
    q = LinearCodec(8, "adaptive").quantiser(128)
    return cuda.encode(x, Coding(blocks, q), torch.zeros(4096, dtype=torch.uint8), (1, 2))


def _mixed(x: Tensor, blocks: Tensor) -> Any:
    return x[: len(blocks)] + blocks[:, 0]


def _as_array(x: Tensor, blocks: Tensor) -> Any:
    return x.numpy()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (_on_the_host, "encode_kernel gets 'wire' on the host"),
        (_mixed, "aten::add has tensors on the GPU and on the host"),
        (_as_array, "has no array"),
    ],
)
def test_tensors_of_the_host_are_found(
    simulated: SimulatedCuda, wrong: Callable[[Tensor, Tensor], Any], said: str
) -> None:
    blocks = torch.from_numpy(cut([Segment(0, 1000, raw=False)], 128))
    with pytest.raises((RaceError, TypeError), match=said):
        wrong(torch.randn(1000, device=DEVICE), blocks)
