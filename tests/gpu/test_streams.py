"""The runner over NCCL with a group of one rank, which has streams, collectives and futures like a group of many."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels.layout import PieceSize, Segment
from lightning_gqsgd.presets import FIXED
from lightning_gqsgd.reducers import Steps, new_store
from lightning_gqsgd.reducers.base import ALL
from lightning_gqsgd.wire.communicator import CollectiveError, Communicator
from lightning_gqsgd.wire.pipeline import Job, Runner, StreamRunner, release, runner_for
from lightning_gqsgd.wire.plan import Plan
from lightning_gqsgd.wire.telemetry import Telemetry
from tests.gpu.card import CPU, DEVICE, STANDS_IN, difference, is_waiting, keep_busy, marks, synchronise
from tests.unit.test_kernels import gradient

pytestmark = marks

SEGMENTS = [Segment(0, 70_001, False), Segment(1, 300, True), Segment(4, 40_000, False)]
NUMEL = sum(one.numel for one in SEGMENTS)
#: Coordinates of a piece, so that a tensor has three.
PIECE = 40_000

CONFIGS = {
    "two_shot": GQSGDConfig(reducer="two_shot", sample_every=0),
    "two_shot, 3 bit": GQSGDConfig(bits=3, reducer="two_shot", sample_every=0),
    "two_shot, rotated": GQSGDConfig(bits=4, reducer="two_shot", rotation=True, sample_every=0),
    "gather": GQSGDConfig(reducer="gather", sample_every=0),
    "sum": GQSGDConfig(reducer="sum", sample_every=0),
    "exponential": GQSGDConfig(codec="exponential", mantissa=3, reducer="two_shot", sample_every=0),
    "sampled": GQSGDConfig(reducer="two_shot", sample_every=1),
}


class Alone(Communicator):
    """A communicator of one rank that has the groups of several, and starts its collectives in them."""

    _numbers = count()

    def __init__(self, device: torch.device, config: GQSGDConfig) -> None:
        super().__init__(device, dist.group.WORLD, f"alone/{next(self._numbers)}", timedelta(seconds=60))
        setting = setting_of(config, self.size, torch.float32)
        for stage, scopes in enumerate([(ALL,), *setting.reducer.scopes(setting)]):
            for scope in scopes:
                self._groups[stage, scope, 0] = self._group_for(stage, scope, 0)


class Bench:
    """A runner, with a plan for one tensor and without a memory."""

    def __init__(self, config: GQSGDConfig) -> None:
        self.config = resolve(config, 1)
        self.communicator = Alone(DEVICE, self.config)
        # Over Gloo, the same runner waits for every exchange.
        self.runner: Runner = StreamRunner([None]) if STANDS_IN else runner_for(self.communicator)
        self.plan, self.telemetry = _plan(self.config, 1, torch.float32), Telemetry()
        self.store = new_store(setting_of(self.config, 1, torch.float32), {}, DEVICE)

    def submit(self, x: Tensor, step: int, is_held: bool = False) -> Job:
        counters = self.telemetry.bucket(0)
        starts = self.plan.starts(x, 0, step, self.store, counters, self.telemetry)
        job = Job(x, starts, f"tensor {step}", counters, self.telemetry, ends_step=True, is_held=is_held)
        self.runner.submit(self.communicator, job)
        return job

    def close(self) -> None:
        self.runner.close(self.communicator)
        release(self.runner)
        self.communicator.close()


def _plan(config: GQSGDConfig, ranks: int, dtype: torch.dtype) -> Plan:
    return Plan(SEGMENTS, setting_of(config, ranks, dtype, PieceSize(PIECE, PIECE)))


def _expected(config: GQSGDConfig, x: Tensor, step: int) -> Tensor:
    """What one rank has after reducing its gradient, from the CPU."""
    config, result = resolve(config, 1), x.clone()
    _plan(config, 1, x.dtype).average([result], step, [new_store(setting_of(config, 1, x.dtype), {}, CPU)])
    return result


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The default group: this process."""
    path: Path = tmp_path_factory.mktemp("store") / "store"
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(backend, init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(params=list(CONFIGS))
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(CONFIGS[request.param])
    made.submit(gradient(0, NUMEL, torch.float32).to(DEVICE), 0).future.wait()  # compiles, and sends tables
    synchronise()
    yield made
    made.close()


def test_a_result_waits_for_a_late_gradient_and_the_host_for_nothing(bench: Bench) -> None:
    source = gradient(1, NUMEL, torch.float32)
    ready, x = source.to(DEVICE), torch.zeros(NUMEL, device=DEVICE)
    synchronise()
    keep_busy()
    x.copy_(ready)  # behind the slow kernel
    job = bench.submit(x, 3)
    assert is_waiting(), "submit came back only after the gradient's stream had ended: the host waited"
    mean = job.future.wait()
    seen = mean.clone()  # on this stream, which is to wait for the runner's
    assert is_waiting(), "waiting for the future made the host wait for the device"
    synchronise()
    assert difference(seen, _expected(bench.config, source, 3)) == "", "the result was read too early, or is wrong"
    assert mean.data_ptr() == x.data_ptr(), "the mean is not in the gradient's place"


def test_a_tensor_that_its_caller_keeps_is_waited_for_as_well(bench: Bench) -> None:
    source = gradient(4, NUMEL, torch.float32)
    ready, x = source.to(DEVICE), torch.zeros(NUMEL, device=DEVICE)
    synchronise()
    keep_busy()
    x.copy_(ready)
    job = bench.submit(x, 6, is_held=True)
    seen = job.wait().clone()
    assert is_waiting(), "the host waited for the device"
    del job, x
    synchronise()
    assert difference(seen, _expected(bench.config, source, 6)) == "", "the result was read too early, or is wrong"


def test_many_tensors_in_a_row(bench: Bench) -> None:
    """More than there are streams, each written just before, each freed once it has been read."""
    sources = [gradient(seed, NUMEL, torch.float32) for seed in range(3)]
    ready = [source.to(DEVICE) for source in sources]
    expected = {(seed, step): _expected(bench.config, sources[seed], step) for step in range(4) for seed in range(3)}
    futures = []
    for number in range(48):
        x = ready[number % 3] * 1  # memory that the tensors before may have had
        futures.append(bench.submit(x, number % 4).future)
        del x
    means = []
    for future in futures:
        means.append(future.wait().clone())
    synchronise()
    wrong = {
        number: text
        for number, mean in enumerate(means)
        if (text := difference(mean, expected[number % 3, number % 4]))
    }
    assert wrong == {}, f"{len(wrong)} of 48 tensors are wrong"


def test_blocks_that_are_not_finite_are_counted_without_waiting(bench: Bench) -> None:
    source = gradient(2, NUMEL, torch.float32)
    source[1000] = torch.nan
    before = bench.telemetry.totals()["nonfinite_blocks"]
    job = bench.submit(source.to(DEVICE, copy=True), 5)
    seen = job.future.wait().clone()
    synchronise()
    assert difference(seen, _expected(bench.config, source, 5)) == ""
    assert bench.telemetry.totals()["nonfinite_blocks"] == before + 1


def test_an_error_comes_out_of_the_future_and_leaves_nan() -> None:
    bench = Bench(CONFIGS["two_shot"])

    def broken() -> Steps:
        raise ValueError("broken on purpose")
        yield ()

    x, counters = torch.ones(1000, device=DEVICE), bench.telemetry.bucket(0)
    job = Job(x, [broken], "a tensor", counters, bench.telemetry, ends_step=True)
    bench.runner.submit(bench.communicator, job)
    with pytest.raises((CollectiveError, RuntimeError), match="broken on purpose"):
        job.future.wait()
    synchronise()
    assert x.isnan().all(), f"{int((~x.isnan()).sum())} coordinates are not NaN after an error"
    bench.close()


def _averaged(config: GQSGDConfig, gradients: list[list[Tensor]], device: torch.device) -> list[list[Tensor]]:
    """Every rank's result in every step, by virtual ranks with their memory."""
    ranks, dtype = len(gradients[0]), gradients[0][0].dtype
    plan = _plan(config, ranks, dtype)
    sizes = {one.parameter: one.numel for one in SEGMENTS if not one.raw}
    stores = [new_store(setting_of(config, ranks, dtype), sizes, device) for _ in range(ranks)]
    found = []
    for step, of_ranks in enumerate(gradients):
        results = [one.to(device, copy=True) for one in of_ranks]
        plan.average(results, step, stores)
        found.append([one.cpu() for one in results])
    return found


ON_GPUS = [name for name, preset in FIXED.items() if preset.config.coder == "fixed"]


@pytest.mark.filterwarnings("ignore::lightning_gqsgd.reducers.memory.StabilityWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ON_GPUS)
def test_every_preset_gives_the_bits_of_the_cpu(name: str, ranks: int, dtype: torch.dtype) -> None:
    """Three steps, so that what is remembered in one shows in the next: nearly the same then, because a GPU contracts
    the products and sums of `torch.add`."""
    config = resolve(FIXED[name].config, ranks)
    gradients = [[gradient(10 * step + rank, NUMEL, dtype) for rank in range(ranks)] for step in range(3)]
    expected, found = _averaged(config, gradients, CPU), _averaged(config, gradients, DEVICE)
    wrong = {}
    for step in range(3):
        differs = _distance if config.remembers and step else difference
        for rank in range(ranks):
            wrong[f"step {step}, rank {rank}"] = differs(found[step][rank], expected[step][rank])
    assert not any(wrong.values()), f"{name}: {wrong}"


def _distance(found: Tensor, expected: Tensor) -> str:
    """How far two tensors are apart, if that is more than a few codes at the edge of two levels."""
    distance = float((found.double() - expected.double()).norm() / expected.double().norm())
    return "" if distance < 1e-2 else f"{distance} of the norm"
