"""Row numbers, rows and steps of sparse gradients, on virtual ranks in this process."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.reducers import StepKeys
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.research.experiments import tables
from lightning_gqsgd.research.experiments.tables import dense, exact_mean, gathered, sketched, some_rows
from lightning_gqsgd.sparse import row_numbers
from lightning_gqsgd.sparse.logarithmic import LogarithmicRows
from lightning_gqsgd.sparse.missing import empty_gradient
from lightning_gqsgd.sparse.rows import CodedRows, RowsAsTheyAre, RowsOfBf16, rows_for
from lightning_gqsgd.sparse.sketching import PARTS, places_of, rows_of, sketch_of
from lightning_gqsgd.sparse.tables import Table, Touched, gradient_of, touched_rows
from lightning_gqsgd.wire.telemetry import BucketCounters

# --- row numbers -----------------------------------------------------------------------------------------------------

HEIGHT = 10_000_000


def _row_numbers() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "none": np.zeros(0, dtype=np.int64),
        "the first": np.array([0]),
        "the last": np.array([HEIGHT - 1]),
        "all of the first 1000": np.arange(1000),
        "hashed": np.unique(generator.integers(0, HEIGHT, 5000)),
        "mostly neighbours": np.cumsum(1 + (generator.random(2000) < 0.05) * generator.integers(0, 2**16, 2000)),
        "32": np.arange(0, 320, 10),
        "33": np.arange(0, 330, 10),
        "far apart": np.array([0, HEIGHT // 2, HEIGHT - 1]),
    }


@pytest.mark.parametrize("kind", _row_numbers())
def test_row_numbers_come_back(kind: str) -> None:
    rows = _row_numbers()[kind]
    stream = row_numbers.write(rows)
    assert stream.dtype == np.uint8
    np.testing.assert_array_equal(row_numbers.read(stream, len(rows), HEIGHT), rows)


def test_the_shorter_form_is_taken() -> None:
    hashed, neighbours = _row_numbers()["hashed"], _row_numbers()["mostly neighbours"]
    assert row_numbers.write(hashed)[0] == 0
    assert row_numbers.write(neighbours)[0] == 1
    # 5000 of 10 million rows: the entropy of a gap is log2(2000 e) = 12.4 bits
    assert 8 * len(row_numbers.write(hashed)) / len(hashed) < 15
    assert 8 * len(row_numbers.write(np.arange(1000))) / 1000 < 1


def test_numbers_of_very_large_tables_come_back() -> None:
    rows = np.array([0, 2**40, 2**54 - 1, 2**54, 2**61])
    np.testing.assert_array_equal(row_numbers.read(row_numbers.write(rows), 5, 2**62), rows)
    np.testing.assert_array_equal(row_numbers._digits(np.array([0, 1, 2, 2**53 + 1, 2**54 - 1])), [0, 1, 2, 54, 54])


def test_of_forms_of_equal_length_the_packed_one_is_taken() -> None:
    assert row_numbers.write(np.array([0])).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("stream", "count"),
    [
        (row_numbers.write(np.array([0, 1000])), 2),  # one row beyond the last
        (np.append(row_numbers.write(np.array([5, 700])), 0), 2),  # packed, and one byte more
        (np.append(row_numbers.write(np.arange(1000)), 0), 1000),  # in Elias codes, and one byte more
        (np.append(0, row_numbers._write_packed(np.full(8, 2**61))), 8),  # the sum of these gaps is 0 in 64 bits
        (np.array([0, 64] + [255] * 256), 1),  # a gap of 64 bits, which is -1
        (np.array([1] + [0] * 8 + [128] + [0] * 8), 1),  # a gap of 64 digits, which is -1
    ],
    ids=["height", "packed", "gamma", "sum", "packed 64", "gamma 64"],
)
def test_streams_that_are_never_written_are_refused(stream: np.ndarray, count: int) -> None:
    with pytest.raises(RuntimeError, match="a message of row numbers is invalid"):
        row_numbers.read(stream.astype(np.uint8), count, 1000)


# --- rows ------------------------------------------------------------------------------------------------------------


def _mean(touched: Sequence[Touched], height: int, step: int = 0, number: int = 3, **fields: Any) -> Touched:
    """The mean of virtual ranks, which all of them have."""
    return _same_on_all_ranks(gathered(touched, height, step, number, **fields))


def _same_on_all_ranks(results: Sequence[Touched]) -> Touched:
    """What the first rank has ended with, after a check that all others have the same."""
    for other in results[1:]:
        assert torch.equal(other.rows, results[0].rows)
        assert torch.equal(other.values.nan_to_num(7), results[0].values.nan_to_num(7))
    return results[0]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"reducer": "native"}, 1e-7),
        ({"bits": 16}, 5e-3),
        ({}, 1e-2),
        ({"bits": 4}, 0.1),
        pytest.param({"bits": 4, "norm": "l2", "dither": "stochastic"}, 1.0, marks=pytest.mark.slow),
        pytest.param({"bits": 4, "rotation": True, "dither": "stochastic"}, 0.3, marks=pytest.mark.slow),
        pytest.param({"codec": "exponential", "bits": 8, "mantissa": 3}, 0.05, marks=pytest.mark.slow),
        ({"sparse": "logarithmic", "bits": 8}, 2**0.5 - 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [1, 10, 300])
def test_every_codec_gives_all_ranks_the_same_mean(fields: dict[str, Any], error: float, width: int) -> None:
    touched = [some_rows(rank, width=width) for rank in range(3)]
    exact, mean = exact_mean(touched, 100), _mean(touched, 100, **fields)
    assert (dense(mean, 100) - exact).norm() <= error * exact.norm()
    assert torch.equal(mean.rows, torch.cat([rows for rows, _ in touched]).unique())


@pytest.mark.parametrize(
    ("bits", "steps"), [(8, 100), *(pytest.param(b, 1000, marks=pytest.mark.slow) for b in (8, 4))]
)
def test_codes_of_rows_are_unbiased(bits: int, steps: int) -> None:
    touched = [some_rows(rank, count=20, height=30, width=9) for rank in range(2)]
    exact = exact_mean(touched, 30)
    errors = torch.stack([dense(_mean(touched, 30, step, bits=bits), 30) - exact for step in range(steps)])
    used = errors.std(0) > 0
    z = errors.mean(0)[used] / (errors.std(0)[used] / steps**0.5)
    assert used.sum() > 200
    assert z.abs().max() <= 4
    assert 0.65 < z.square().mean() < 1.4  # 234 numbers: 1, give or take 0.09


@pytest.mark.parametrize("fields", [{"bits": 4}, {"bits": 16}, {"sparse": "logarithmic", "bits": 8}], ids=str)
def test_a_row_does_not_depend_on_which_other_rows_are_touched(fields: dict[str, Any]) -> None:
    many = [some_rows(rank, count=60, width=200) for rank in range(2)]
    few = [Touched(rows[10:20], values[10:20]) for rows, values in many]
    whole, part = (_mean(touched, 100, **fields) for touched in (many, few))
    pairs = list(zip(many, few, strict=True))
    alone = [row for row in part.rows.tolist() if all((row in a.rows) == (row in b.rows) for a, b in pairs)]
    assert len(alone) > 5
    for row in alone:
        assert torch.equal(whole.values[whole.rows == row], part.values[part.rows == row])


def test_parameters_and_steps_and_rows_have_dither_of_their_own() -> None:
    block = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    same = Touched(torch.arange(4), block.repeat(4, 3))
    mean = _mean([same, same], 10, bits=4).values
    assert len({tuple(decoded) for decoded in mean.view(-1, 256).tolist()}) == 4 * 3
    assert not torch.equal(mean, _mean([same, same], 10, step=1, bits=4).values)
    assert not torch.equal(mean, _mean([same, same], 10, number=4, bits=4).values)


@pytest.mark.parametrize(
    "fields", [{}, {"bits": 16}, {"reducer": "native"}, {"sparse": "logarithmic", "bits": 4}], ids=str
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row_and_reaches_all_ranks(fields: dict[str, Any], bad: float) -> None:
    check_one_bad_row(partial(_mean, **fields), bad)


def check_one_bad_row(mean_of: Callable[[Sequence[Touched], int], Touched], bad: float) -> None:
    """A number of one rank that is not finite makes its row so, and no other."""
    touched = [some_rows(rank, count=50) for rank in range(2)]
    touched[1].values[7, 3] = bad
    mean = mean_of(touched, 100)
    is_bad = ~mean.values.isfinite().all(dim=1)
    assert mean.rows[is_bad].tolist() == [touched[1].rows[7].item()]


def test_large_rows_of_16_bits_are_not_cut_off() -> None:
    large = Touched(torch.arange(3), torch.full((3, 8), 6e37))
    mean = _mean([large] * 8, 5, bits=16)
    torch.testing.assert_close(mean.values, large.values, rtol=0.01, atol=0)


@pytest.mark.parametrize("bits", [4, 16])
def test_ranks_have_dither_of_their_own(bits: int) -> None:
    """Equal rows with independent roundings: the error falls by sqrt(2) from one rank to two."""
    rows = some_rows(0, count=60, width=200)
    one, two = ((_mean([rows] * ranks, 100, bits=bits).values - rows.values).norm() for ranks in (1, 2))
    assert 1.2 < one / two < 1.7


def test_large_numbers_stay_finite() -> None:
    large = Touched(torch.arange(3), torch.full((3, 8), 3e38))
    assert _mean([large] * 4, 5).values.isfinite().all()
    assert _mean([large] * 4, 5, sparse="logarithmic", bits=8).values.isfinite().all()
    larger = Touched(torch.arange(3), torch.full((3, 8), 1e300, dtype=torch.float64))
    for bits in (8, 16):
        assert _mean([larger] * 4, 5, bits=bits).values.isfinite().all()


@pytest.mark.parametrize(
    ("fields", "error"),
    [({}, 0.01), ({"bits": 16}, 0.01), ({"reducer": "native"}, 1e-6), ({"sparse": "logarithmic", "bits": 8}, 0.2)],
    ids=str,
)
def test_ranks_without_rows_take_part(fields: dict[str, Any], error: float) -> None:
    some, none = some_rows(0), some_rows(1, count=0)
    mean = _mean([none, some, none], 100, **fields)
    assert torch.equal(mean.rows, some.rows)
    assert (mean.values - some.values / 3).norm() < error * some.values.norm()


def test_fp64_rows_keep_their_precision() -> None:
    touched = [some_rows(rank, dtype=torch.float64) for rank in range(2)]
    exact = exact_mean(touched, 100)
    assert (dense(_mean(touched, 100, reducer="native"), 100) - exact).norm() < 1e-15 * exact.norm()


# --- logarithmic rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mantissa", range(4))
def test_logarithmic_rows_have_the_error_that_the_formula_says(mantissa: int) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(500, 10, generator=generator) * torch.rand(500, 1, generator=generator) ** 8
    touched = Touched(torch.arange(500), values)
    factor = 2 ** (0.5 / 2**mantissa)
    for bits in (3, 4, 8):
        decoded = _mean([touched], 500, sparse="logarithmic", bits=bits, mantissa=mantissa).values
        kept = decoded != 0
        assert (decoded[kept] / values[kept] >= 0.999 / factor).all()
        assert (decoded[kept] / values[kept] <= 1.001 * factor).all()
        error, dropped = (decoded - values).square().sum(), values[~kept].square().sum()
        assert error <= (factor - 1) ** 2 * values[kept].square().sum() + dropped + 1e-6
        smallest = 2.0 ** (values.abs().max().log2().ceil() - (2 ** (bits - 1) - 2) / 2**mantissa)
        assert (values[~kept].abs() <= smallest / factor * 1.001).all()


# --- sketches --------------------------------------------------------------------------------------------------------


def _sketched(touched: Sequence[Touched], height: int) -> Touched:
    """The mean of virtual ranks by sketches, which all of them have."""
    return _same_on_all_ranks(sketched(touched, height))


@pytest.mark.parametrize("width", [1, 10])
def test_sums_of_sketches_are_the_mean_to_rounding(width: int) -> None:
    touched = [some_rows(rank, count=200, height=1000, width=width) for rank in range(3)]
    exact, mean = exact_mean(touched, 1000), _sketched(touched, 1000)
    assert (dense(mean, 1000) - exact).norm() <= 1e-5 * exact.norm()
    assert torch.equal(mean.rows, torch.cat([rows for rows, _ in touched]).unique())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_of_large_finite_rows_of_a_sketch_is_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    mean = _sketched([Touched(torch.arange(200), torch.full((200, 2), largest, dtype=dtype))] * 3, 1000)
    assert mean.values.isfinite().all()
    assert (mean.values >= 0.99999 * largest).all()
    crowded = places_of(Table(0, 100, 1, False), torch.arange(6), 6, (0, 54321), dtype)
    crowded = crowded._replace(cells=crowded.cells * 0 + torch.arange(PARTS), total=PARTS)  # no row can be read
    estimates, _ = rows_of(torch.full((PARTS, 1), largest, dtype=dtype), crowded)
    assert estimates.isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row_of_a_sketch(bad: float) -> None:
    check_one_bad_row(_sketched, bad)


def _failures(rows: int, draws: int) -> int:
    """In how many of some draws a row was estimated, and not read."""
    table, numbers = Table(0, 10 * rows, 1, False), torch.arange(rows) * 7
    values, failures = torch.ones(rows, 1), 0
    for draw in range(draws):
        places = places_of(table, numbers, rows, (draw, 12345), torch.float32)
        read, exact = rows_of(sketch_of(values, places), places)
        assert torch.equal(read[exact], values[exact])
        failures += not exact.all()
    return failures


@pytest.mark.parametrize(
    ("rows", "draws"),
    [(40, 150), *(pytest.param(rows, 4_000, marks=pytest.mark.slow) for rows in (10, 40, 100, 300))],
)
def test_rows_are_hardly_ever_left_over_in_a_sketch(rows: int, draws: int) -> None:
    # The most that is stated is 8e-4 of all draws; 4,000 draws have 3 then, give or take 2.
    assert _failures(rows, draws) <= max(2, 8e-4 * draws + 4 * (8e-4 * draws) ** 0.5)


def test_rows_that_are_left_over_are_estimated_without_bias() -> None:
    table, values = Table(0, 100, 1, False), torch.arange(1.0, 7.0)[:, None]
    estimates = []
    for draw in range(300):
        places = places_of(table, torch.arange(6), 6, (draw, 54321), torch.float32)
        crowded = places._replace(cells=places.cells * 0 + torch.arange(PARTS), total=PARTS)  # all rows collide
        read, exact = rows_of(sketch_of(values, crowded), crowded)
        assert not exact.any()
        estimates.append(read[:, 0])
    found = torch.stack(estimates)
    z = (found.mean(0) - values[:, 0]) / (found.std(0) / len(found) ** 0.5)
    assert z.abs().max() < 4
    # The variance of the paper for one part is the sum of the squares of the other rows; here it is a quarter.
    expected = (values.square().sum() - values[:, 0].square()) / PARTS
    assert torch.allclose(found.var(0), expected, rtol=0.35)


def test_sent_bytes_are_those_of_all_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    counters: list[BucketCounters] = []

    def counted() -> BucketCounters:
        counters.append(BucketCounters())
        return counters[-1]

    monkeypatch.setattr(tables, "BucketCounters", counted)
    touched = [some_rows(rank, count=20 + rank) for rank in range(3)]
    gathered(touched, 100, reducer="native")
    longest = max(values.nbytes + len(row_numbers.write(rows.numpy())) for rows, values in touched)
    sent = 16 + -(-longest // 16) * 16  # two lengths of 8 bytes come first
    assert [(made.bytes_sent, made.message_bytes) for made in counters] == [(2 * sent, sent)] * 3

    counters.clear()
    union = _sketched(touched, 100).rows
    marks = 13  # a bit for each of 100 rows
    sketch = PARTS * (math.ceil(0.4 * len(union)) + 16) * 10 * 4
    expected = (2 * marks + ring_bytes(sketch, 3), marks + sketch)
    assert [(made.bytes_sent, made.message_bytes) for made in counters] == [expected] * 3


def test_uncompressed_tables_have_rows_of_16_bits_only_with_16_bits() -> None:
    def form(bits: int, raw: bool, compressed: bool = True, **fields: Any) -> type:
        config = resolve(GQSGDConfig(bits=bits, **{"sparse": "gather", **fields}), 2)
        keys = StepKeys.of(0, 0, 2)
        return type(rows_for(Table(3, 10, 4, raw), config, torch.float32, keys, compressed=compressed))

    assert form(4, raw=False) is CodedRows
    assert form(4, raw=False, sparse="logarithmic") is LogarithmicRows
    assert form(16, raw=False) is form(16, raw=True) is RowsOfBf16
    assert form(4, raw=True) is form(4, raw=True, sparse="logarithmic") is RowsAsTheyAre
    for bits in (4, 16):
        assert form(bits, raw=False, compressed=False) is RowsAsTheyAre


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_duplicate_rows_are_added_up_in_the_compute_dtype(dtype: torch.dtype) -> None:
    rows = torch.tensor([[5, 1, 5, 5]])
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [2.0**-12, 0.0], [2.0**-12, 0.0]]).to(dtype)
    touched = touched_rows(torch.sparse_coo_tensor(rows, values, (8, 2), check_invariants=True), 2)
    assert touched.rows.tolist() == [1, 5]
    assert touched.values.tolist() == [[3.0, 4.0], [1 + 2.0**-11, 2.0]]


def test_gradients_that_are_sparse_in_columns_as_well_are_taken_by_rows() -> None:
    dense = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]])
    touched = touched_rows(dense.to_sparse(2), 2)
    assert touched.rows.tolist() == [1, 2]
    assert torch.equal(touched.values, dense[1:])


def test_results_are_coalesced_gradients_of_the_table() -> None:
    table = torch.nn.Embedding(8, 2, sparse=True)
    like = empty_gradient(table.weight)
    made = gradient_of(torch.tensor([1, 5]), torch.ones(2, 2), like)
    assert made.is_coalesced()
    assert made.shape == table.weight.shape
    torch.sparse_coo_tensor(made.indices(), made.values(), made.shape, check_invariants=True)
    assert like._nnz() == 0
    assert like.is_coalesced()


# --- fields ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sparse": "gathr"}, "did you mean 'gather'"),
        ({"sparse": True}, "sparse=True is not one of 'refuse', 'gather'"),
        ({"sparse_limit": 0.5}, "leave it out"),
        ({"sparse": "gather", "sparse_limit": -1}, "out of range: 0 to"),
        ({"sparse": "gather", "codec": "sign", "memory": "ef"}, "leave memory and memory_down out"),
        ({"sparse": "gather", "scale": "global"}, "leave scale out"),
        (
            {"sparse": "gather", "scale_per": "parameter", "codec": "linear", "reducer": "two_shot"},
            "leave scale_per out",
        ),
        (
            {"sparse": "gather", "coder": "elias", "reducer": "gather", "dither": "stochastic", "bits": 4},
            "leave coder out",
        ),
        ({"sparse": "logarithmic", "bits": 16}, "2 to 8 bits, not bits=16"),
    ],
    ids=str,
)
def test_fields_that_cannot_work_are_refused_with_the_remedy(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GQSGDConfig(**fields)


def test_auto_keeps_what_is_said_of_sparse_gradients() -> None:
    config = GQSGDConfig(auto=True, sparse="gather", sparse_limit=0.5)
    assert {(made.sparse, made.sparse_limit) for made in config.candidates().values()} == {("gather", 0.5)}
