"""Compiles kernels before the first step, and compares them with the readable kernels."""

from __future__ import annotations

import platform
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import metadata

import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import setting_of
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels import readable_kernels, triton_version
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.reducers import REDUCERS, Setting, new_store, setting_for
from lightning_gqsgd.wire.announcing import compilation_is_announced
from lightning_gqsgd.wire.plan import Plan

#: Parameters of the first run on a CPU: one is compressed, the other is not.
_SEGMENTS = (Segment(0, 64, raw=False), Segment(1, 8, raw=True))

#: The largest number of virtual ranks. Their gradients and messages take memory and time.
MOST_VIRTUAL = 4
#: Coordinates of all ranks together up to which kernels are compared. The readable kernels take about a second
#: for so many.
MOST_COMPARED = 1 << 22
#: A coordinate is wrong if its error exceeds this share of the largest magnitude. If a device rounds the last bit of a
#: scale differently, one coordinate in thousands may get another code, so a share of them may be wrong.
_TOLERANCE = 1e-3
_SHARE_ALLOWED = 1 / 50


def compile_kernels(
    config: GQSGDConfig, dtype: torch.dtype, device: torch.device, ranks: int, plan: type[Plan] = Plan
) -> None:
    """Run the kernels that ``ranks`` ranks need once, on virtual ranks, so that no step waits for a compiler.

    Kernels of a GPU are compiled for a number of ranks, so the first of so many ranks are run; otherwise there are two.

    One line says that kernels are compiled, see `announcing.compilation_is_announced`. If all kernels are in the cache,
    nothing is printed.

    The kernels are compared with the readable ones at every start, whether they were compiled or found in the cache.
    Otherwise, a compiler's mistake for one processor would train a model on wrong gradients. On a CPU, this takes about
    10 ms.

    Args:
        config: the configuration with the chosen reducer.
        dtype: dtype of the gradients.
        device: device of the gradients. For devices other than CPUs and CUDA, nothing is done.
        ranks: number of ranks.
        plan: what is done with a tensor, an all-reduce or a reduce-scatter, which need different kernels.

    Raises:
        ConfigError: if the kernels give other numbers than the readable ones.
    """
    if not REDUCERS[config.reducer].compresses or device.type not in ("cpu", "cuda"):
        return
    with current(device), compilation_is_announced(dtype, device):
        for setting in settings_of(config, dtype, device, ranks):
            check(setting, device, run_once(setting, device, plan), plan)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which a GPU is the current device, on which Triton launches. It does nothing for other
    devices."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def settings_of(config: GQSGDConfig, dtype: torch.dtype, device: torch.device, ranks: int) -> list[Setting]:
    """Returns the settings that `compile_kernels` runs: those of the configuration, for fewer ranks. It takes the same
    arguments.

    Returns:
        The setting for compressed parameters, and the setting for the steps before compression starts, if there are
        such steps.
    """
    setting = setting_of(config, ranks, dtype)
    setting = setting.between or setting  # nothing is compressed inside a node
    settings = [replace(setting, ranks=max(2, setting.ranks) if device.type == "cuda" else 2)]
    if config.warmup_steps:
        settings.append(setting_for(settings[0], compressed=False))
    return settings


def run_once(
    setting: Setting, device: torch.device, plan: type[Plan] = Plan, *, on: torch.device | None = None
) -> Tensor:
    """Average gradients of virtual ranks once.

    Args:
        setting: reducer, codec, number of ranks and dtype. Up to `MOST_VIRTUAL` of the ranks are virtual ranks, and
            all others send zeros.
        device: device of the gradients.
        plan: an all-reduce or a reduce-scatter.
        on: device of the virtual ranks' gradients; None means ``device``.

    Returns:
        The mean, [coordinates], in the setting's dtype; of a reduce-scatter, the parts of the virtual ranks.
    """
    count = min(setting.ranks, MOST_VIRTUAL)
    parts = plan.parts(setting.ranks)
    part = _SEGMENTS if device.type == "cpu" else every_tile(setting.block_size, setting.ranks // parts)
    segments = part * parts
    numel = sum(segment.numel for segment in segments)
    sizes = {segment.parameter: segment.numel for segment in segments if not segment.raw}
    where = on or device
    stores = [new_store(setting, sizes, where) for _ in range(count)]
    gradients = [_gradient(rank, numel).to(where, setting.dtype) for rank in range(count)]
    plan(segments, setting).average(gradients, 0, stores, only_first=parts == 1)
    # Each part of the mean is taken from a rank that has it.
    return torch.cat([gradients[rank].view(parts, -1)[rank] for rank in range(min(parts, count))])


def check(setting: Setting, device: torch.device, mean: Tensor, plan: type[Plan] = Plan) -> None:
    """Check that the mean of `run_once` equals the mean that the readable kernels compute.

    If the readable kernels would take seconds, nothing is checked.

    Raises:
        ConfigError: if the means differ.
    """
    if len(mean) * setting.ranks > MOST_COMPARED:
        return
    with readable_kernels():
        expected = run_once(setting, device, plan, on=torch.device("cpu")).double()
    found = mean.cpu().double()
    # A NaN counts as wrong.
    wrong = int((~((found - expected).abs() <= _TOLERANCE * expected.abs().max())).sum())
    if wrong > _SHARE_ALLOWED * len(expected):
        on_gpu = device.type == "cuda"
        where = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or "this CPU"
        compiler = f"Triton {triton_version()}" if on_gpu else f"Numba {metadata.version('numba')}"
        raise ConfigError(
            f"the kernels for {where} average {wrong} of {len(expected)} coordinates to other numbers than the "
            f"readable kernels do, with {setting.codec} and gradients in {setting.dtype}: {compiler} has "
            "compiled them wrongly. Install another version of it, or keep this model on plain DDP"
        )


def _gradient(rank: int, numel: int) -> Tensor:
    """Returns the gradient of a virtual rank, the same on every device: numbers of both signs and many magnitudes, and
    zeros."""
    places = torch.arange(numel, dtype=torch.float64, device="cpu")  # not the default device
    return (places * (rank + 1)).sin() ** 3 * ((places + rank) % 7 != 0)


def every_tile(block_size: int, ranks: int) -> tuple[Segment, ...]:
    """Returns parameters whose blocks need every kind of tile of a GPU, on every rank that owns a shard.

    Kernels are compiled for each kind, see `kernels.cuda.tiles`: blocks of full length that begin at multiples of 16
    bytes, others that begin elsewhere, and shorter and uncompressed ones.
    """
    full = block_size * ranks
    short = block_size // 2 + 1
    ends = tuple(Segment(3 + number, short, raw=False) for number in range(2 * ranks))
    return (Segment(0, full, raw=False), Segment(1, 3, raw=True), Segment(2, full, raw=False), *ends)
