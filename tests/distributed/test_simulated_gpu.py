"""The hook on a simulated GPU, see `tests.simulated_cuda`: DDP's processes and buckets are real."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from lightning_gqsgd import LocalSteps, register_gqsgd
from lightning_gqsgd.ddp import hook
from lightning_gqsgd.ddp.hook import GQSGDState
from lightning_gqsgd.ddp.model import UnusedParameters
from lightning_gqsgd.frameworks.fsdp import GQSGDFSDPState, register_gqsgd_fsdp
from lightning_gqsgd.frameworks.fsdp_modules import ShardedGroup
from lightning_gqsgd.wire import communicator
from tests.distributed.local_models import WAYS
from tests.distributed.ranks import run
from tests.integrations.fsdp_models import mesh, needs_fsdp_hooks, sharded
from tests.simulated_cuda import DEVICE, GpuTensor, SimulatedCuda, paused, simulation


class Net(nn.Module):
    """A network with a layer that every second step leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(100, 100) for _ in range(4))
        self.left_out = nn.Linear(100, 100)

    def forward(self, x: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.left_out(x) if step % 2 == 0 else x


class _Bucket:
    """A bucket of DDP whose buffer is on the simulated GPU."""

    def __init__(self, bucket: dist.GradBucket, cuda: SimulatedCuda) -> None:
        self._bucket = bucket
        self._x = cuda.adopted(bucket.buffer())

    def buffer(self) -> Tensor:
        return self._x

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)


class _Results:
    """The results that DDP waits for at the end of a backward pass."""

    def __init__(self, patch: pytest.MonkeyPatch, cuda: SimulatedCuda) -> None:
        self._cuda = cuda
        self._waiting: list[tuple[Any, Tensor]] = []
        future_of_torch = torch._C.Future
        reduce = GQSGDState.reduce
        settle = UnusedParameters.settle

        def reduced(state: GQSGDState, bucket: dist.GradBucket) -> Any:
            with cuda.called_by_torch():
                own = _Bucket(bucket, cuda)
                self._waiting.append((reduce(state, own), own.buffer()))  # type: ignore[arg-type]
            done: Any = future_of_torch([])
            done.set_result(torch.zeros_like(bucket.buffer()))  # DDP reads it without waiting for a simulated stream
            return done

        def settled(unused: UnusedParameters) -> None:
            with cuda.called_by_torch():
                self.wait()
                settle(unused)

        patch.setattr(GQSGDState, "reduce", reduced)
        patch.setattr(UnusedParameters, "settle", settled)

    def wait(self) -> None:
        for future, bucket in self._waiting:
            future.wait()
            bucket.mul_(1.0)  # DDP reads it, and the next backward pass writes it
        self._waiting.clear()


def _trained(rank: int, fields: dict[str, Any], options: dict[str, Any], steps: int) -> list[str]:
    """Train on a simulated GPU; returns what has made the host wait in the later steps."""
    patch = pytest.MonkeyPatch()
    with patch.context() as patch, simulation(patch) as cuda:
        patch.setattr(hook, "device_of", lambda model: DEVICE)
        patch.setattr(communicator, "backend_for", lambda *_: "nccl")
        results = _Results(patch, cuda)
        leaves_out = options.get("find_unused_parameters", False)
        model = DistributedDataParallel(Net(), bucket_cap_mb=0.08, **options)
        state = register_gqsgd(model, **fields)
        for step in range(steps):
            if step == 4:
                cuda.host_waits.clear()
            with paused(cuda):  # the model is on the CPU
                model(torch.randn(8, 100), step if leaves_out else 0).square().mean().backward()
            results.wait()
            if step == 2:
                saved = [state.state_dict()]
                dist.broadcast_object_list(saved)
                state.load_state_dict(saved[0])
        waits = list(cuda.host_waits)
        assert state.telemetry.totals()["steps"] == steps
        assert cuda.launches["encode_kernel"]
        state.close()
        cuda.find_freed()
    return waits


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"preset": "dore"}, {"find_unused_parameters": True}),
        pytest.param({"bits": 4}, {}, marks=pytest.mark.slow),
        pytest.param({"bits": 4, "warmup_steps": 2}, {"gradient_as_bucket_view": True}, marks=pytest.mark.slow),
        pytest.param({"bits": {"*": 8, "layers.*.weight": 2}}, {"static_graph": True}, marks=pytest.mark.slow),
        pytest.param({"preset": "cd_adam"}, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_hooks_have_no_races(tmp_path: Path, fields: dict[str, Any], options: dict[str, Any]) -> None:
    assert run(_trained, 2, tmp_path, fields, options, 8) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"bits": "auto"}, {"auto": True}], ids=str)
def test_hooks_that_choose_have_no_races(tmp_path: Path, fields: dict[str, Any]) -> None:
    run(_trained, 2, tmp_path, fields, {}, 30)


#: Without compression, because ranks compare the results, and kernels compute nothing here.
BY_THE_CLOCK: list[dict[str, Any]] = [{"every": "100ms", "bits": 32}, {"every": "100ms", "bits": 32, "delay": 1}]


def _trained_locally(rank: int, number: int, steps: int) -> list[int]:
    """Train on a simulated GPU; returns the steps in which the host has waited for it."""
    waited = []
    patch = pytest.MonkeyPatch()
    with patch.context() as patch, simulation(patch) as cuda:
        patch.setattr(communicator, "backend_for", lambda *_: "nccl")
        by_the_clock = cuda.connected = number >= len(WAYS)
        model = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100))
        for layer in (model[0], model[2]):
            for name, parameter in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(cuda.on_gpu(parameter.data)))
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = LocalSteps(model, inner, **[*WAYS, *BY_THE_CLOCK][number])
        for step in range(steps):
            optimizer.zero_grad()
            with paused(cuda):
                model(torch.randn(8, 100)).square().mean().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = cuda.adopted(parameter.grad)
            cuda.host_waits.clear()
            optimizer.step()
            if cuda.host_waits:
                waited.append(step)
            if by_the_clock:
                time.sleep(0.05)
            elif step == 5:
                with paused(cuda):  # as if it were read from a file
                    saved = tree_map_only(GpuTensor, lambda one: one.as_subclass(Tensor), optimizer.state_dict())
                optimizer.load_state_dict(saved)
        assert optimizer.averages.averages
        assert cuda.launches or by_the_clock
        optimizer.finish()
        optimizer.close()
        del optimizer, inner, model, parameter
        cuda.find_freed()
    return waited


@pytest.mark.parametrize("number", [1, *(pytest.param(way, marks=pytest.mark.slow) for way in (0, 2, 3, 4, 5, 6))])
def test_local_steps_have_no_races(tmp_path: Path, number: int) -> None:
    waited = run(_trained_locally, 2, tmp_path, number, 12)
    if WAYS[number]["every"] == 4 and "fragments" not in WAYS[number]:
        # Apart from averages, and from what is compared in the first step and behind a checkpoint.
        assert waited == [[0, 3, 6, 7, 11]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BY_THE_CLOCK)))
def test_merges_by_the_clock_have_no_races(tmp_path: Path, number: int) -> None:
    run(_trained_locally, 2, tmp_path, len(WAYS) + number, 30)


class _Sharding:
    """FSDP2's streams: all-gathers, reduce-scatters and all-reduces have one each, which wait as FSDP's do.
    FSDP keeps the tensors of each until the next one."""

    def __init__(self, patch: pytest.MonkeyPatch, cuda: SimulatedCuda) -> None:
        self._cuda = cuda
        self._streams = {name: cuda.new_stream() for name in ("gather", "scatter", "average")}
        self._kept: dict[str, tuple[Tensor, ...]] = {}
        for name in self._streams:
            patch.setattr(GQSGDFSDPState, name, self._on_stream(name, getattr(GQSGDFSDPState, name)))

    def _on_stream(self, name: str, collective: Any) -> Any:
        stream = self._streams[name]

        def called(state: GQSGDFSDPState, group: Any, *arguments: Any) -> None:
            cuda = self._cuda
            with cuda.called_by_torch():
                cuda.default.wait_stream(stream)  # before the tensors of the last one are freed
                self._kept.pop(name, None)
                # An all-reduce follows its reduce-scatter, and the others follow the computation.
                after = self._streams["scatter"] if name == "average" else cuda.default
                with cuda.stream(after):
                    tensors = tuple(cuda.adopted(one) if isinstance(one, Tensor) else one for one in arguments)
                stream.wait_stream(after)
                with cuda.stream(stream):
                    collective(state, group, *tensors)
            self._kept[name] = tensors

        return called

    def end_step(self) -> None:
        """The computation waits for all of them at the end of a backward pass."""
        for name, stream in self._streams.items():
            self._cuda.default.wait_stream(stream)
            self._kept.pop(name, None)


def _trained_sharded(rank: int, replicas: int, hooks: dict[str, Any], steps: int) -> list[str]:
    patch = pytest.MonkeyPatch()
    with patch.context() as patch, simulation(patch) as cuda:
        patch.setattr(communicator, "backend_for", lambda *_: "nccl")
        patch.setattr(ShardedGroup, "device", property(lambda group: DEVICE, lambda group, device: None), raising=False)
        fsdp = _Sharding(patch, cuda)
        on = mesh(replicas)
        with paused(cuda):
            model = sharded(on["shard"] if replicas > 1 else on)
        state = register_gqsgd_fsdp(model, replicate=on["replicate"] if replicas > 1 else None, **hooks)
        for step in range(steps):
            if step == 3:
                cuda.host_waits.clear()
            with paused(cuda):
                model(torch.randn(8, 32)).square().mean().backward()
            fsdp.end_step()
        waits = list(cuda.host_waits)
        assert cuda.launches["encode_kernel"]
        assert state.telemetry.totals()["steps"] == steps
        state.close()
        cuda.find_freed()
    return waits


@needs_fsdp_hooks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "hooks"),
    [
        (1, {"reduce_scatter": True, "bits": 4}),
        (1, {"reduce_scatter": True, "all_gather_bits": 8}),
        (2, {"reduce_scatter": True, "warmup_steps": 2}),
        (2, {"bits": 4}),
    ],
    ids=str,
)
def test_fsdp_has_no_races(tmp_path: Path, replicas: int, hooks: dict[str, Any]) -> None:
    assert run(_trained_sharded, 2 * replicas, tmp_path, replicas, hooks, 6) == [[]] * (2 * replicas)
