"""The kernels for GPUs without one: in Triton's interpreter, against those for the CPU, and compiled, but not run."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import compiled
from lightning_gqsgd import kernels
from lightning_gqsgd.codecs import (
    Codec,
    CompandedCodec,
    EdenCodec,
    ExponentialCodec,
    LinearCodec,
    SignCodec,
    TopKCodec,
    TrellisCodec,
)
from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels import cpu
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.presets import FIXED
from lightning_gqsgd.reducers import new_store
from lightning_gqsgd.wire.plan import Plan
from tests.unit import test_kernels as plain
from tests.unit import test_kernels_of_codecs as of_codecs
from tests.unit.interpreter import fast, rounds_like_a_gpu, without_ptx  # noqa: F401
from tests.unit.test_floats import check_rounding

if torch.cuda.is_available():
    pytest.skip("Triton compiles where there is a GPU: see tests/gpu", allow_module_level=True)

pytest.importorskip("triton", minversion=".".join(map(str, kernels.MIN_TRITON)))
pytest.importorskip("triton.runtime.interpreter")
from lightning_gqsgd.kernels import cuda
from lightning_gqsgd.kernels.cuda import launch
from lightning_gqsgd.kernels.protocol import Coding

PAIR = [cpu, cuda]
pytestmark = [
    pytest.mark.usefixtures("rounds_like_a_gpu", "fast"),
    # NumPy's, of infinity less infinity, within the interpreter.
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
random_cases = settings(max_examples=15)

BLOCKS = (16, 40, 64, 256)
#: A raw segment, an empty one, and lengths beside multiples of all block sizes.
RAGGED = [(300, False), (37, True), (0, False), (1, False), (81, False)]
#: For blocks of 256, tiles of 16 blocks each: aligned; with a raw block and full ones; full, but not aligned; the rest.
FULL = [Segment(0, 4096, False), Segment(1, 3, True), Segment(2, 8192, False)]


def case_of(number: int, bits: int = 8, dither: str = "subtractive", rows: list = RAGGED) -> dict:
    """A case for the checks in `test_kernels`. Of cases in a row, each has another dtype and another block size, and
    16 of them have all pairs of the two."""
    dtype, block = plain.DTYPES[number % 4], BLOCKS[(number + number // 4) % 4]
    fixed = {"seed": number, "bits": bits, "dither": dither, "rows": rows}
    return {**fixed, "dtype": dtype, "block": block, "ranks": 1 + number % 2}


#: Every number of bits with every dither.
LINEAR = [
    (number, bits, dither)
    for number, (bits, dither) in enumerate((bits, dither) for bits in range(1, 9) for dither in plain.DITHERS)
    if (bits, dither) != (1, "stochastic")
]


@pytest.mark.parametrize(
    ("number", "bits", "dither"),
    [pytest.param(*case, marks=() if case[1] == 4 else pytest.mark.slow) for case in LINEAR],
)
def test_linear_codes(number: int, bits: int, dither: str) -> None:
    """Under scales that are given or not, of blocks that are rotated or not, in turns."""
    case = case_of(number, bits, dither)
    rotation = {"rotation": (3, 4)} if number % 3 == 0 else {}
    q, scales = plain.quantiser(bits, dither, case["block"]), plain.norms if number % 2 else None
    plain.check_messages(*plain.drawn(case), q, scales, PAIR, **rotation)


@pytest.mark.parametrize(
    ("number", "q"),
    [pytest.param(*case, marks=pytest.mark.slow if case[0] % 2 else ()) for case in enumerate(plain.other_codecs())],
)
def test_other_codes(number: int, q: plain.Quantiser) -> None:
    case = case_of(number)
    q = replace(q, block_size=case["block"])
    plain.check_messages(*plain.drawn(case), q, plain.norms if number % 2 else None, PAIR)


#: One number of bits with each dither by default; the others take as long.
COMPANDED = [
    pytest.param(
        bits, dither, marks=() if (bits, dither) in ((2, "adaptive"), (5, "subtractive")) else pytest.mark.slow
    )
    for bits in range(2, 9)
    for dither in ("adaptive", "subtractive")
]


@pytest.mark.parametrize(("bits", "dither"), COMPANDED)
def test_companded_codes(bits: int, dither: str) -> None:
    """Under scales that are given or not, of blocks that are rotated or not, in turns."""
    case = case_of(bits, bits)
    rotation = {"rotation": (3, 4)} if bits % 3 == 0 else {}
    q, scales = CompandedCodec(bits, dither).quantiser(case["block"]), plain.norms if bits % 2 else None
    plain.check_messages(*plain.drawn(case), q, scales, PAIR, **rotation)


#: Codecs of rotated blocks with a block size and a dtype: one case of each by default; the others take as long.
ROTATING = [
    pytest.param(codec, block, dtype, marks=() if block == 128 else pytest.mark.slow)
    for codec, block, dtype in (
        (EdenCodec(1), 256, torch.float32),
        (EdenCodec(2), 128, torch.float32),
        (EdenCodec(2), 512, torch.float64),
        (EdenCodec(3), 256, torch.bfloat16),
        (EdenCodec(4), 256, torch.float16),
        (EdenCodec(4), 4096, torch.float32),
        (TrellisCodec(1), 256, torch.float32),
        (TrellisCodec(2), 128, torch.float32),
        (TrellisCodec(2), 1024, torch.float32),
        (TrellisCodec(2), 512, torch.float64),
        (TrellisCodec(3), 512, torch.bfloat16),
        (TrellisCodec(4), 256, torch.float16),
    )
]


@pytest.mark.parametrize(("codec", "block", "dtype"), ROTATING)
def test_codes_of_rotated_blocks(codec: EdenCodec | TrellisCodec, block: int, dtype: torch.dtype) -> None:
    """Of blocks of full length, of shorter ones, which are filled up with zeros or end earlier, and of raw ones."""
    rows = [*RAGGED, (129, False), (block, False)]
    case = {**case_of(codec.bits, rows=rows), "block": block, "dtype": dtype, "ranks": 2}
    plain.check_messages(*plain.drawn(case), codec.quantiser(block), None, PAIR)


@pytest.mark.parametrize("size", [3e38, pytest.param(1e-38, marks=pytest.mark.slow), 1e-43])
def test_eden_codes_at_both_ends_of_a_dtype(size: float) -> None:
    x = plain.gradient(0, 300, torch.float64)
    x = (x / x.abs().max() * size).float()
    x[200] = size
    plain.check_messages([Segment(0, 300, False)], [x], EdenCodec(2).quantiser(128), None, PAIR)


@pytest.mark.parametrize(
    "codec",
    [
        *(pytest.param(LinearCodec(bits, "adaptive"), marks=pytest.mark.slow) for bits in (1, 2, 3, 5, 6, 7)),
        *(pytest.param(codec, marks=pytest.mark.slow) for codec in (LinearCodec(8, "adaptive"), ExponentialCodec(8))),
        LinearCodec(4, "adaptive"),
        CompandedCodec(4),
        EdenCodec(2),
        ExponentialCodec(6, 1),
        SignCodec(),
    ],
    ids=lambda codec: f"{type(codec).__name__}-{codec.bits}",
)
def test_blocks_of_full_length(codec: Codec) -> None:
    """All tiles but the ones with a raw block, or the last one, go the fast way."""
    x = plain.gradient(codec.bits, sum(segment.numel for segment in FULL), torch.float32)
    plain.check_messages(FULL, [x], codec.quantiser(256), None, PAIR)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_blocks_of_full_length_that_are_rotated_or_have_given_scales(dtype: torch.dtype) -> None:
    q, x = LinearCodec(4, "adaptive").quantiser(256), plain.gradient(0, 4096 + 3 + 8192, dtype)
    plain.check_messages(FULL, [x], q, None, PAIR, rotation=(3, 4))
    plain.check_messages(FULL[:1], [x[:4096], x[-4096:]], q, plain.norms, PAIR)


@pytest.mark.parametrize("block", [24, *(pytest.param(block, marks=pytest.mark.slow) for block in (16, 1000, 4096))])
def test_sizes_of_blocks(block: int) -> None:
    x = plain.gradient(block, 2 * block + 7, torch.float32)
    for codec in (LinearCodec(5, "adaptive"), ExponentialCodec(4), SignCodec(), TopKCodec(0.002), TopKCodec(0.3)):
        plain.check_messages([Segment(5, len(x), False)], [x], codec.quantiser(block), None, PAIR)


@pytest.mark.slow
def test_the_largest_blocks() -> None:
    """Places in them fill 16 bits, without a sign."""
    x = torch.zeros(65536 + 7)
    x[[3, 40_000, 65_535, 65_540]] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    plain.check_messages([Segment(5, len(x), False)], [x], TopKCodec(1e-4).quantiser(65536), None, PAIR)
    x = plain.gradient(1, 65536 + 7, torch.float32)
    plain.check_messages([Segment(5, len(x), False)], [x], LinearCodec(5, "adaptive").quantiser(65536), None, PAIR)


@pytest.mark.parametrize("bits", [2, 4, 8, *(pytest.param(bits, marks=pytest.mark.slow) for bits in (3, 5, 6, 7))])
def test_sums(bits: int) -> None:
    """Codes in lanes of bytes and of words, of both dithers and of none, with and without blocks of full length."""
    for number, dither in enumerate(("subtractive", "stochastic", "nearest")):
        if (bits, dither) != (2, "stochastic"):  # too few bits for two ranks' codes
            plain.check_sums({**case_of(bits + number, bits, dither), "ranks": 2 + (bits > 4)}, PAIR)
    if 8 % bits == 0:
        rows = [(segment.numel, segment.raw) for segment in FULL[:2]] + [(4096, False)]
        plain.check_sums({**case_of(0, bits, rows=rows), "block": 256, "ranks": 2}, PAIR)


@pytest.mark.parametrize("number", [2, *(pytest.param(number, marks=pytest.mark.slow) for number in (0, 1, 3))])
def test_moments_and_rotations(number: int) -> None:
    plain.check_moments_and_rotations(case_of(number), PAIR)
    rows = [(segment.numel, segment.raw) for segment in FULL]
    plain.check_moments_and_rotations({**case_of(number, rows=rows), "block": 256}, PAIR)


@pytest.mark.parametrize("bits", range(2, 9))
def test_combined_codes(bits: int) -> None:
    of_codecs.check_combined(bits, bits, 301 - bits, PAIR)


@pytest.mark.slow
@random_cases
@given(plain.cases, st.booleans(), st.booleans())
def test_linear_codes_of_random_cases(case: dict, given_scales: bool, rotated: bool) -> None:
    try:
        q = plain.quantiser(case["bits"], case["dither"], case["block"])
    except ConfigError:
        return
    rotation = {"rotation": (3, 4)} if rotated else {}
    plain.check_messages(*plain.drawn(case), q, plain.norms if given_scales else None, PAIR, **rotation)


@pytest.mark.slow
@random_cases
@given(plain.cases, st.sampled_from(plain.other_codecs()), st.booleans())
def test_other_codes_of_random_cases(case: dict, q: plain.Quantiser, given_scales: bool) -> None:
    plain.check_messages(*plain.drawn(case), q, plain.norms if given_scales else None, PAIR)


@pytest.mark.slow
@random_cases
@given(plain.cases)
def test_sums_moments_and_rotations_of_random_cases(case: dict) -> None:
    plain.check_sums(case, PAIR)
    plain.check_moments_and_rotations(case, PAIR)


@pytest.mark.slow
@random_cases
@given(st.integers(0, 2**32), st.integers(2, 8), st.integers(1, 300))
def test_combined_codes_of_random_cases(seed: int, bits: int, numel: int) -> None:
    of_codecs.check_combined(seed, bits, numel, PAIR)


NOT_FINITE = [LinearCodec(4, "adaptive").quantiser(64), *plain.other_codecs()[:4]]


@pytest.mark.parametrize(
    ("q", "bad"), [*((q, torch.nan) for q in NOT_FINITE), (NOT_FINITE[0], torch.inf), (NOT_FINITE[2], -torch.inf)]
)
def test_what_is_not_finite_stays_so_and_touches_no_other_block(q: plain.Quantiser, bad: float) -> None:
    x = torch.randn(1024)
    x[70], x[1020] = bad, bad
    layout = plain.layout_of([Segment(0, 1000, False), Segment(1, 24, True)], q, x.dtype)
    maxima = cuda.block_maxima(x, layout.blocks)
    y = torch.zeros_like(x)
    wire = plain.message(cuda, x, layout, (1, 2), q, maxima)
    assert cuda.decode(wire[None], Coding(layout.blocks, q), y, [(1, 2)]) == 2
    assert y[64:128].isnan().all()
    assert y[:64].isfinite().all()
    assert y[128:1000].isfinite().all()
    assert torch.equal(y[1000:].isfinite(), x[1000:].isfinite())


def test_tensors_without_blocks_are_left_alone() -> None:
    q, x = LinearCodec(8, "adaptive").quantiser(64), torch.ones(5)
    layout = plain.layout_of([], q, x.dtype)
    wire = plain.message(cuda, x, layout, (1, 2), q)
    assert cuda.decode(wire[None], Coding(layout.blocks, q), x, [(1, 2)]) == 0
    assert (x == 1).all()


def average(config, ranks: int) -> list[Tensor]:
    """Gradients of virtual ranks after two steps."""
    segments = [Segment(0, 1030, False), Segment(1, 20, True), Segment(2, 300, False)]
    xs = [plain.gradient(rank, 1350, torch.bfloat16 if config.bits == 4 else torch.float32) for rank in range(ranks)]
    setting = setting_of(config, ranks, xs[0].dtype)
    stores = [new_store(setting, {0: 1030, 2: 300}, torch.device("cpu")) for _ in range(ranks)]
    for step in range(2):
        Plan(segments, setting).average(xs, step, stores if config.remembers else [None] * ranks)
    return xs


#: Each has kernels, or arguments of kernels, that the others have not.
DIFFERENT = ("gqsgd_sum", "gqsgd_exponential_tree", "dq_psgd")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in DIFFERENT else pytest.mark.slow)
        for name, preset in FIXED.items()
        if preset.config.coder == "fixed"
    ],
)
def test_presets_give_the_bits_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(FIXED[name].config, 2)
    expected = average(config, 2)
    monkeypatch.setitem(sys.modules, cpu.__name__, cuda)
    assert kernels.kernels_for(torch.device("cpu")) is cuda
    for of_cpu, of_cuda in zip(expected, average(config, 2), strict=True):
        assert torch.equal(of_cpu, of_cuda)


@pytest.mark.usefixtures("without_ptx")
@pytest.mark.parametrize("bits", [8, 4, pytest.param(2, marks=pytest.mark.slow)])
def test_companded_codes_for_amd(bits: int) -> None:
    """Also of blocks that are rounded stochastically."""
    q = CompandedCodec(bits, "adaptive").quantiser(256)
    gradient = plain.gradient(0, sum(segment.numel for segment in FULL), torch.float32)
    gradient[:2048] *= torch.arange(2048) % 3 == 0
    plain.check_messages(FULL, [gradient], q, None, PAIR)


@pytest.mark.slow
@pytest.mark.usefixtures("without_ptx")
@pytest.mark.parametrize("name", ["gqsgd", "gqsgd_exponential", "gqsgd_trellis", "dq_psgd"])
def test_presets_for_amd(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test_presets_give_the_bits_of_the_cpu(name, monkeypatch)


def test_keys_do_not_go_to_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []

    def pin_memory(table: Tensor) -> SimpleNamespace:
        pinned.append(table)
        return SimpleNamespace(to=lambda device, non_blocking: table)

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    torch.set_default_device("meta")
    try:
        for device in ("cpu", "cuda"):
            table = launch._sent_keys.__wrapped__(((1, 2), (2**32 - 1, 2**31)), torch.device(device), 0)
            assert table.device.type == "cpu", "only memory of the host can be pinned"
            assert table.tolist() == [1 | 2 << 32, (2**32 - 1 | 2**31 << 32) - 2**64]
    finally:
        torch.set_default_device(None)
    assert len(pinned) == 1


def test_stages_work_whatever_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    q, x = LinearCodec(4, "adaptive").quantiser(64), plain.gradient(0, 100, torch.float32)
    layout, y = plain.layout_of([Segment(0, 100, False)], q, x.dtype), torch.zeros(100)
    wire, shard = (torch.zeros(layout.message_bytes, dtype=torch.uint8) for _ in range(2))
    torch.set_default_device("meta")
    try:
        cuda.encode(x, Coding(layout.blocks, q), wire, (90, 91), cuda.block_maxima(x, layout.blocks))
        cuda.reduce(wire[None], Coding(layout.blocks, q), x, [(90, 91)], 0, shard, (92, 93))
        bad = cuda.decode(shard[None], Coding(layout.blocks, q, rotation=None), y, [(92, 93)])
    finally:
        torch.set_default_device(None)
    assert bad == 0
    assert 0 < float((y - x).abs().max()) < float(x.abs().max()) / 4


@pytest.mark.parametrize(("ranks", "block_size"), [(2, 1024), (3, 1024), (2, 256), (3, 4096)])
def test_rounding_to_bf16(ranks: int, block_size: int) -> None:
    check_rounding(ranks, PAIR, block_size)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # compilers take minutes, more on a busy machine
@pytest.mark.parametrize("cases", ["few", "table"])
def test_compiled_kernels_move_16_bytes_at_a_time(cases: str) -> None:
    """For Hopper, without a GPU: what the interpreter runs is no proof that it compiles, or to what."""
    facts = compiled.compile_with(compiled.INSTALLED, "--kernels", cases, "--counts")
    assert facts["failed"] == {}
    assert {one["kernel"] for one in facts["found"]} >= {"encode", "reduce", "decode"}
    for one in facts["found"]:
        assert one["inexact"] == one["contracted"] == 0, one
        if one["tiles"] == "aligned":
            assert one["spills"] == 0, one
            assert one["wide_loads"] + one["wide_stores"] > 0, one


@pytest.mark.slow
@pytest.mark.timeout(1800)  # as above
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_kernels_compile_for_amd(arch: str) -> None:
    facts = compiled.compile_with(compiled.INSTALLED, "--kernels", "few", "--arch", arch)
    assert facts["failed"] == {}
    assert facts["compiled"] >= 36


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
