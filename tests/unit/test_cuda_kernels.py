"""The kernels for GPUs without one: in Triton's interpreter, against those for the CPU, and compiled, but not run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gqsgd import kernels
from lightning_gqsgd.codecs import ExponentialCodec, LinearCodec, SignCodec, TopKCodec
from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.kernels import cpu
from lightning_gqsgd.layout import Segment
from lightning_gqsgd.plan import Plan
from lightning_gqsgd.presets import PRESETS
from lightning_gqsgd.reducers import Setting, new_store, resolve
from tests.unit import test_kernels as plain

if torch.cuda.is_available():
    pytest.skip("Triton compiles where there is a GPU: see tests/gpu", allow_module_level=True)

pytest.importorskip("triton", minversion=".".join(map(str, kernels.MIN_TRITON)))
tl = pytest.importorskip("triton.language")
interpreter = pytest.importorskip("triton.runtime.interpreter")
from lightning_gqsgd.kernels import cuda  # noqa: E402

PAIR = [cpu, cuda]
#: NumPy's, of infinity less infinity, within the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def _rounds_to_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts what it makes bf16 of; a GPU rounds."""
    convert = interpreter._convert_float

    def rounded(data, source, target, mode):  # type: ignore[no-untyped-def]
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return values.to(torch.bfloat16).view(torch.int16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


few = settings(max_examples=15, deadline=None)


@few
@given(plain.cases, st.booleans(), st.booleans())
def test_linear_codes(case: dict, given_scales: bool, rotated: bool) -> None:
    try:
        q = plain.quantiser(case["bits"], case["dither"], case["block"])
    except ConfigError:
        return
    turn = {"rotation": (3, 4)} if rotated else {}
    plain.check_messages(*plain.drawn(case), q, plain.norms if given_scales else None, PAIR, **turn)


@few
@given(plain.cases, st.sampled_from(plain.other_codecs()), st.booleans())
def test_other_codes(case: dict, q: plain.Quantiser, given_scales: bool) -> None:
    plain.check_messages(*plain.drawn(case), q, plain.norms if given_scales else None, PAIR)


@pytest.mark.parametrize("bits", range(1, 9))
def test_blocks_of_full_length(bits: int) -> None:
    """All tiles but the last one go the fast way, one of them with a misaligned beginning."""
    q = LinearCodec(bits, "adaptive").quantiser(256)
    segments = [Segment(0, 8192, False), Segment(1, 3, True), Segment(2, 8192, False)]
    x = plain.gradient(bits, sum(segment.numel for segment in segments), torch.float32)
    plain.check_messages(segments, [x, x.flip(0)], q, None, PAIR)
    plain.check_messages(segments[:1], [x[:8192].bfloat16()], q, None, PAIR, rotation=(3, 4))


@pytest.mark.parametrize("block", [16, 24, 1000, 4096, 65536])
def test_sizes_of_blocks(block: int) -> None:
    x = plain.gradient(block, 2 * block + 7, torch.float32)
    for codec in (LinearCodec(5, "adaptive"), ExponentialCodec(4), SignCodec(), TopKCodec(0.01)):
        q = codec.quantiser(block)
        plain.check_messages([Segment(5, len(x), False)], [x], q, None, PAIR)


@few
@given(plain.cases)
def test_sums(case: dict) -> None:
    plain.check_sums(case, PAIR)


@few
@given(plain.cases)
def test_moments_and_rotations(case: dict) -> None:
    plain.check_moments_and_rotations(case, PAIR)


@few
@given(st.integers(0, 2**32), st.integers(2, 8), st.integers(1, 300))
def test_combined_codes(seed: int, bits: int, numel: int) -> None:
    plain.check_combined(seed, bits, numel, PAIR)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("q", [LinearCodec(4, "adaptive").quantiser(64), *plain.other_codecs()[:4]])
def test_what_is_not_finite_stays_so_and_touches_no_other_block(q: plain.Quantiser, bad: float) -> None:
    x = torch.randn(1024)
    x[70], x[1020] = bad, bad
    layout = plain.layout_of([Segment(0, 1000, False), Segment(1, 24, True)], q, x.dtype)
    maxima = cuda.block_maxima(x, layout.blocks)
    y = torch.zeros_like(x)
    wire = plain.message(cuda, x, layout, (1, 2), q, maxima)
    assert cuda.decode(wire[None], layout.blocks, y, q, [(1, 2)]) == 2
    assert y[64:128].isnan().all()
    assert y[:64].isfinite().all()
    assert y[128:1000].isfinite().all()
    assert torch.equal(y[1000:].isfinite(), x[1000:].isfinite())


def test_tensors_without_blocks_are_left_alone() -> None:
    q, x = LinearCodec(8, "adaptive").quantiser(64), torch.ones(5)
    layout = plain.layout_of([], q, x.dtype)
    wire = plain.message(cuda, x, layout, (1, 2), q)
    assert cuda.decode(wire[None], layout.blocks, x, q, [(1, 2)]) == 0
    assert (x == 1).all()


def average(config, ranks: int) -> list[Tensor]:
    """Gradients of virtual ranks after a step."""
    segments = [Segment(0, 1500, False), Segment(1, 20, True), Segment(2, 700, False)]
    xs = [plain.gradient(rank, 2220, torch.bfloat16 if config.bits == 4 else torch.float32) for rank in range(ranks)]
    setting = Setting(config, ranks, xs[0].dtype)
    stores = [new_store(config, ranks, {0: 1500, 2: 700}, setting.dtype, torch.device("cpu")) for _ in range(ranks)]
    for step in range(2):
        Plan(segments, setting).average(xs, step, stores if config.remembers else [None] * ranks)
    return xs


@pytest.mark.parametrize("name", [name for name, one in PRESETS.items() if one.config.coder == "fixed"])
def test_presets_give_the_bits_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(PRESETS[name].config, 3)
    expected = average(config, 3)
    monkeypatch.setattr(kernels, "cpu", cuda)
    for one, other in zip(expected, average(config, 3), strict=True):
        assert torch.equal(one, other)


def test_compiled_kernels_move_16_bytes_at_a_time() -> None:
    """For Hopper, without a GPU: what the interpreter runs is no proof that it compiles, or to what."""
    script = Path(__file__).with_name("compile_for_gpu.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    for name, found in json.loads(done.stdout.splitlines()[-1]).items():
        assert found["v4 loads"] > 0, name
        assert found["v4 stores"] > 0 or name.startswith("3 bit"), name  # whose rows are shorter
        assert found["inexact divisions"] == 0, name
        assert found["contracted"] == 0, name


def missing(_: str) -> None:
    raise ImportError("no such module")


@pytest.mark.parametrize(
    ("found", "importing"), [("3.3.1", lambda _: SimpleNamespace(__version__="3.3.1")), ("none", missing)]
)
def test_a_gpu_needs_a_triton_that_has_what_kernels_use(found: str, importing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "import_module", importing)
    kernels._check_triton.cache_clear()
    with pytest.raises(ConfigError, match=f"need Triton 3.4 or newer, found {found}: .* upgrade torch"):
        kernels.kernels_for(torch.device("cuda"))
    kernels._check_triton.cache_clear()
