"""What is compiled for GPUs, and when: before the first step, and to code within its bounds."""

from __future__ import annotations

import inspect
import itertools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import compiled
from lightning_gqsgd import kernels
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels import cpu
from lightning_gqsgd.kernels.layout import PieceSize, Segment
from lightning_gqsgd.kernels.wire import SCALE_FORMATS
from lightning_gqsgd.presets import FIXED
from lightning_gqsgd.reducers import Setting, new_store
from lightning_gqsgd.wire import compiling
from lightning_gqsgd.wire.plan import GatherPlan, Plan, ScatterPlan
from tests.processes import ended_well
from tests.unit import ptx
from tests.unit.interpreter import fma_32

if torch.cuda.is_available():
    pytest.skip("tests/gpu asks Triton itself", allow_module_level=True)
pytest.importorskip("triton", minversion=".".join(map(str, kernels.MIN_TRITON)))
from lightning_gqsgd.kernels import cuda
from lightning_gqsgd.kernels.cuda import launch, tiles
from lightning_gqsgd.kernels.cuda.constants import constants_of

CPU = torch.device("cpu")


class Compilations:
    """Takes the place of launches, and keeps what Triton compiles a kernel for: each entry is a compilation.

    Attributes:
        known: what was compiled: kernels, their constants, types, and what Triton knows of addresses and numbers.
    """

    def __init__(self) -> None:
        self.known: set[Any] = set()

    def __call__(self, kernel: Any, c: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        values = dict(zip(kernel.arg_names, arguments, strict=False))
        # A kernel is compiled anew for an integer that is 1, or a multiple of 16, unless it says that it is not.
        excepted = re.search(r"do_not_specialize=(\[.*?\])", inspect.getsource(kernel.fn))
        integers = {name for name, value in values.items() if type(value) is int}
        assert integers <= set(json.loads(excepted[1]) if excepted else ()), kernel.fn.__name__
        kinds = tuple(self._kind(name, value) for name, value in values.items())
        functions = tuple((name, str(value)) for name, value in sorted(constants.items()))
        self.known.add((kernel.fn.__module__, kernel.fn.__name__, c, kinds, functions))

    @staticmethod
    def _kind(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return name, value.dtype, value.data_ptr() % 16 == 0
        return name, type(value)


def _step(plan: type[Plan], setting: Setting, part: list[Segment], before: int, step: int) -> None:
    """Average gradients that begin so many elements behind a multiple of 16 bytes."""
    segments = part * plan.parts(setting.ranks)
    numel = sum(segment.numel for segment in segments)
    sizes = {segment.parameter: segment.numel for segment in segments if not segment.raw}
    ranks = range(setting.ranks)
    stores = [new_store(setting, sizes, CPU) for _ in ranks]
    gradients = [torch.ones(numel + before, dtype=setting.dtype)[before:] for _ in ranks]
    plan(segments, setting).average(gradients, step, stores)


def _cases() -> list[Any]:
    """A preset of each codec of our own and one with memories both ways; the others as slow tests."""
    names = [name for name, preset in FIXED.items() if preset.config.coder == "fixed"]
    cases = [(name, torch.float32 if number % 2 else torch.bfloat16) for number, name in enumerate(names)]
    usual = ("gqsgd", "gqsgd_2bit", "gqsgd_exponential", "gqsgd_trellis", "dore")
    assert set(usual) < set(names)
    return [case if case[0] in usual else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.filterwarnings("ignore::lightning_gqsgd.reducers.memory.StabilityWarning")
@pytest.mark.parametrize(("name", "dtype"), _cases(), ids=str)
def test_no_step_compiles_what_the_warm_up_has_not(name: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    """Whatever the sizes of parameters are, and wherever buckets and pieces begin."""
    _compare_compilations(resolve(FIXED[name].config, 4), dtype, Plan, monkeypatch)


def _of_shards() -> list[Any]:
    """Every configuration once, and every plan and every dtype at least once; the others as slow tests."""
    fields = ({}, {"bits": 4, "warmup_steps": 2}, {"codec": "eden", "bits": 3})
    cases = itertools.product(enumerate((ScatterPlan, GatherPlan)), enumerate(fields), (torch.bfloat16, torch.float32))
    return [
        pytest.param(plan, each, dtype, marks=[] if usual else pytest.mark.slow)
        for (row, plan), (column, each), dtype in cases
        for usual in [row == column % 2 and (dtype == torch.float32) == (column == 1)]
    ]


@pytest.mark.parametrize(("plan", "fields", "dtype"), _of_shards())
def test_no_collective_of_shards_compiles_what_the_warm_up_has_not(
    plan: type[Plan], fields: Any, dtype: torch.dtype, monkeypatch: Any
) -> None:
    config = GQSGDConfig(**fields, reducer="two_shot", memory_down="none")
    _compare_compilations(config, dtype, plan, monkeypatch)


def _compare_compilations(config: GQSGDConfig, dtype: torch.dtype, plan: type[Plan], monkeypatch: Any) -> None:
    compilations = Compilations()
    monkeypatch.setattr(launch, "start", compilations)
    monkeypatch.setitem(sys.modules, cpu.__name__, cuda)
    device = torch.device("cuda")
    for setting in compiling.settings_of(config, dtype, device, 4):
        compiling.run_once(setting, device, plan, on=CPU)
    warm = set(compilations.known)
    assert warm
    setting = setting_of(config, 4, dtype, PieceSize(3000, 3000))
    small = [Segment(0, 10, False), Segment(1, 5000, False), Segment(2, 7, True), Segment(3, 9000, False)]
    for step, before in enumerate((0, 1, 3, 5)):
        _step(plan, setting, small, before, step)
        _step(plan, setting, [Segment(0, 1, False)], before, step)
        _step(plan, setting, [Segment(0, 16384, False)], before, step)
    assert compilations.known - warm == set()


@pytest.mark.parametrize(("warp_size", "has_ptx"), [(32, True), (32, False), (64, False)])
def test_a_program_has_as_many_threads_whatever_the_size_of_a_warp(
    warp_size: int, has_ptx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = SimpleNamespace(get_current_target=lambda: SimpleNamespace(warp_size=warp_size))
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=target))
    monkeypatch.setattr(launch.ptx, "AVAILABLE", has_ptx)
    for block_size in (16, 1024, 32768):
        found = launch.options(constants_of(torch.float32, block_size), tiles.RAGGED.value)
        assert found["num_warps"] * warp_size == (1024 if block_size > 4096 else 256)
        # Triton refuses options of other makers' GPUs.
        assert ("maxnreg" in found) == has_ptx


@pytest.mark.slow
def test_the_root_without_branches_is_exact_over_all_mantissas() -> None:
    """As `floats.positive_root` computes it, of both parities of the exponent."""
    mantissas = np.arange(1 << 23, dtype=np.int32)
    for exponent in (127, 128):
        x = ((exponent << 23) | mantissas).astype(np.int32).view(np.float32)
        inverse = (1 / np.sqrt(x.astype(np.float64))).astype(np.float32)
        y = x * inverse
        assert np.array_equal(fma_32(fma_32(-y, y, x), inverse * np.float32(0.5), y), np.sqrt(x))


@pytest.mark.parametrize("bits", range(2, 9))
def test_distances_of_levels_are_exact_for_all_scales_that_are_sent(bits: int) -> None:
    """As `floats.quotient` computes them, from the inverses that `linear.cuda.step_and_limit` has."""
    form = SCALE_FORMATS[torch.float32]
    sent = np.arange(form.tiny >> form.shift, form.infinity >> form.shift) << form.shift
    scales = np.append(sent, form.infinity - 1).astype(np.int32).view(np.float32)
    for levels in (1 << bits, (1 << bits) - 1):
        middle, inverse = np.full_like(scales, (levels - 1) / 2), np.float32(2 / (levels - 1))
        about = scales * inverse
        assert np.array_equal(fma_32(fma_32(-about, middle, scales), inverse, about), scales / middle)


@pytest.mark.parametrize("middle", [0.5, 1, 3.5, 7.5, 127, 127.5])
def test_levels_per_unit_are_exact_quotients(middle: float) -> None:
    """As `floats.divided_by_scale` computes them, whatever the last bit of a GPU's reciprocal is. For powers of two
    over a scale whose mantissa is all ones it counts, as in what NVIDIA's compiler makes of a division."""
    form = SCALE_FORMATS[torch.float32]
    sent = np.arange(form.tiny >> form.shift, form.infinity >> form.shift) << form.shift
    others = np.random.default_rng(1).integers(form.tiny, form.infinity, 1 << 20)
    scales = np.concatenate([sent, others, [form.tiny, form.infinity - 1]]).astype(np.int32).view(np.float32)
    x = np.full_like(scales, middle) * np.float32(2**-8)
    y = scales * np.float32(2**-8)
    for last_bit in (-1, 0, 1) if middle > 1 else (0,):
        inverse = ((np.float32(1) / y).view(np.int32) + last_bit).view(np.float32)
        inverse = fma_32(fma_32(-y, inverse, np.ones_like(y)), inverse, inverse)
        about = x * inverse
        assert np.array_equal(fma_32(fma_32(-about, y, x), inverse, about), np.float32(middle) / scales)


def test_a_sum_is_rounded_downwards() -> None:
    """As the tests' interpreter computes PTX's ``fma.rm.f32``, on which codes depend."""
    rng = np.random.default_rng(1)
    rounder = np.full(4096, 1.5 * 2**23 + 128, np.float32)
    x = np.concatenate([rng.uniform(-128, 128, 4000), np.arange(-48, 48)]).astype(np.float32)
    x[:8] = [2**-149, -(2.0**-149), 1e-30, -1e-30, 0, -0.0, 127.99999, -127.99999]
    words = [one.view(np.uint32) for one in (x, np.ones_like(x), rounder)]
    (found,) = ptx.run("fma.rm.f32 $0, $1, $2, $3;", words, [np.dtype(np.int32)], 1)
    assert np.array_equal(found & 0xFF, np.floor(x).astype(np.int64) + 128)


#: Per coordinate, in tiles without the ends of parameters.
MOST_INSTRUCTIONS = {"encode": 35, "reduce": 32, "decode": 37}
#: The same where blocks also begin at multiples of 16 bytes.
MOST_IF_ALIGNED = {"encode": 34, "reduce": 27, "decode": 27}
#: Above 64, half as many threads fit at once. A thread of an aligned reduction has twice as many coordinates.
MOST_REGISTERS = {"encode": 64, "reduce": 96, "decode": 64}
RESULTS = Path(compiled.__file__).parent / "results" / "compiled.json"


def test_the_table_of_compiled_code_keeps_its_bars() -> None:
    for one in json.loads(RESULTS.read_text())["found"]:
        if one["tiles"] == "ragged":
            continue
        assert one["spills"] == 0, one
        assert one["registers"] <= MOST_REGISTERS[one["kernel"]], one
        most = MOST_IF_ALIGNED if one["tiles"] == "aligned" else MOST_INSTRUCTIONS
        assert one["instructions"] <= most[one["kernel"]], one


@pytest.mark.slow
@pytest.mark.timeout(1800)  # compilers take minutes on a busy machine
def test_the_table_of_compiled_code_is_what_the_kernels_compile_to() -> None:
    table = json.loads(RESULTS.read_text())
    facts = compiled.compile_with(compiled.INSTALLED, "--kernels", "default", "--counts")
    if facts["triton"] != table["triton"]:
        pytest.skip(f"the table is of Triton {table['triton']}; python -m benchmarks.compiled --save writes it anew")
    assert facts["found"] == [one for one in table["found"] if one["case"] == "gqsgd, fp32"]


HOST_TIME = RESULTS.with_name("host_time.json")
#: Microseconds of processor for a bucket, beyond the driver's and NCCL's.
MOST_HOST_US = 70


def test_the_table_of_host_time_keeps_its_bar() -> None:
    for one in json.loads(HOST_TIME.read_text())["facts"]:
        assert one["us"] <= MOST_HOST_US, one


@pytest.mark.slow
@pytest.mark.timeout(600)  # compilers take longer on a busy machine
def test_a_bucket_takes_as_many_function_calls_as_the_table_of_host_time_says() -> None:
    """Not its time, which depends on the machine. The numbers differ by a few between versions of Python and Triton."""
    program = "import json; from benchmarks import host_time as h; h.stand_in(); print(json.dumps(h.facts(30)))"
    done = ended_well("-c", program, timeout=580, TRITON_INTERPRET="0", PYTHONPATH=str(RESULTS.parents[2]))
    table = json.loads(HOST_TIME.read_text())["facts"]
    for found, expected in zip(json.loads(done.stdout.splitlines()[-1]), table, strict=True):
        assert found["calls"] <= 1.1 * expected["calls"], found
