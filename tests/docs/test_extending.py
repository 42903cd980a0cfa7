"""The codec and the reducer of docs/extending.md, taken from the page, run as any other."""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import pytest
import torch

from lightning_gqsgd import codecs, reducers
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.choosing import codec_of
from lightning_gqsgd.ddp.functional import all_reduce
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict import Bucket, Timeline, collectives_between, predict
from lightning_gqsgd.predict.costs import ESTIMATES, Gamma, Link
from lightning_gqsgd.research.simulation.virtual import average
from tests.distributed.ranks import on_ranks
from tests.unit import test_kernels
from tests.unit.test_kernels import check_messages, norms

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
RANKS = 4


def code_of(heading: str) -> str:
    """All indented code under a heading of the page, in order."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    return textwrap.dedent("\n".join(line for line in section.split("\n") if not line or line.startswith("    ")))


def add(*headings: str) -> ModuleType:
    """Run the page's code: the classes, and the lines that make a configuration know them."""
    module = ModuleType("extending")
    sys.modules[module.__name__] = module  # where dataclasses look for the names in annotations
    for heading in headings:
        exec(compile(code_of(heading), str(PAGE), "exec"), vars(module))  # noqa: S102
    return module


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    tables: tuple[dict[str, Any], ...] = (codecs.CODECS, reducers.REDUCERS)
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def gradients(numel: int = 3000) -> list[torch.Tensor]:
    return [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]


@pytest.mark.slow
def test_the_codec_is_unbiased_and_the_same_on_all_ranks() -> None:
    add("A codec")
    config = GQSGDConfig(codec="ternary")
    assert config.bits == 2
    assert "ternary" in config.describe()
    exact = torch.stack(gradients()).mean(0)
    for reducer in ("two_shot", "gather"):
        results = [average(gradients(), codec="ternary", reducer=reducer, step=step) for step in range(60)]
        assert all(torch.equal(first, other) for first, *others in results for other in others)
        # Of each draw, how long it is along the exact mean: 1 on average, as no single coordinate may be biased.
        lengths = torch.stack([(first @ exact) / (exact @ exact) for first, *_ in results])
        assert abs(float(lengths.mean()) - 1) < 5 * float(lengths.std()) / len(lengths) ** 0.5 < 0.05
    with pytest.raises(ConfigError, match="cannot add codes of codec=.ternary."):
        average(gradients(), codec="ternary", reducer="sum")
    with pytest.raises(ConfigError, match="leave bits out"):
        GQSGDConfig(codec="ternary", bits=4)


@pytest.fixture
def ternary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The codec of the page with its kernels, as a folder among the others."""
    folder = tmp_path / "codecs" / "ternary"
    folder.mkdir(parents=True)
    for name, code in (("__init__", ""), ("codec", code_of("A codec")), ("cpu", code_of("Fast kernels of a codec"))):
        (folder / f"{name}.py").write_text(code)
    monkeypatch.setattr(codecs, "__path__", [*codecs.__path__, str(folder.parent)])
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))  # kept machine code may be that of an older page
    package = "lightning_gqsgd.codecs.ternary"
    yield import_module(f"{package}.codec")
    for name in ("", ".codec", ".cpu"):
        sys.modules.pop(package + name, None)


#: Each compute dtype is compiled for itself, which takes seconds.
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16,),
        *(
            pytest.param(dtypes, marks=pytest.mark.slow)
            for dtypes in ((torch.float32, torch.float16), (torch.float64,))
        ),
    ],
    ids=str,
)
def test_the_fast_kernels_give_the_bits_of_the_quantiser(ternary: ModuleType, dtypes: tuple[torch.dtype, ...]) -> None:
    q = ternary.TernaryCodec.of(2).quantiser(64)
    assert q.kind.module("cpu").codec(q)
    segments = [Segment(100 * number, numel, number == 1) for number, numel in enumerate((300, 37, 1, 128))]
    for dtype, scales in itertools.product(dtypes, (None, norms)):
        xs = [test_kernels.gradient(rank, 466, dtype) for rank in range(3)]
        check_messages(segments, xs, q, scales)


def test_a_device_without_fast_kernels_of_the_codec_takes_the_readable_ones(ternary: ModuleType) -> None:
    assert ternary.TernaryQuantiser.kind.module("cuda") is None


@dataclass(frozen=True, kw_only=True)
class _WithBase(GQSGDConfig):
    """With the page's line in `Fields`."""

    base: float = 2.0


def test_a_number_of_the_codec_is_taken_by_it_alone() -> None:
    codecs.CODECS["based"] = add("A codec", "A codec with a number of its own").BasedCodec
    assert codec_of(_WithBase(codec="based", base=1.5)).base == 1.5  # type: ignore[attr-defined]
    assert codec_of(_WithBase(codec="based")).base == 2.0  # type: ignore[attr-defined]
    assert _WithBase(codec="linear").base == 2.0
    with pytest.raises(ConfigError, match="base=20 is out of range: 1 to 16"):
        _WithBase(codec="based", base=20)
    with pytest.raises(ConfigError, match="base=1.5 is for codec='based', not 'linear'; leave it out"):
        _WithBase(codec="linear", base=1.5)
    with pytest.raises(ConfigError, match=r"field 'base', .* add a line 'base: .*' to Fields .*spec/fields\.py"):
        GQSGDConfig(codec="based")


def test_what_is_not_finite_survives_the_codec() -> None:
    add("A codec")
    broken = gradients()
    broken[2][700] = torch.inf
    results = average(broken, codec="ternary", block_size=256)
    assert all(result[512:768].isnan().all() for result in results)
    assert all(result[:512].isfinite().all() for result in results)


def test_steps_with_the_codec_and_the_reducer_are_predicted() -> None:
    page = add("A codec", "A reducer")
    timeline = Timeline((Bucket((Segment(0, 1 << 22, False),), 1.0),), 1.0)
    collectives = collectives_between(RANKS, 1, Link(1.25e8), Link(1e9))
    costs = replace(ESTIMATES["cpu"], collectives=collectives)
    with pytest.raises(ConfigError, match="no time of the codec 'ternary/2', .* that .*gamma_of returns to gammas"):
        predict(timeline, costs, RANKS, GQSGDConfig(codec="ternary"))
    measured = page.with_times(costs, GQSGDConfig(codec="ternary")).gammas["ternary/2"]
    assert measured.encode_s > 0
    costs = replace(costs, gammas={**costs.gammas, "ternary/2": Gamma(1e-9, 1e-9, 1e-9)})
    native = predict(timeline, costs, RANKS, "native")
    coded = predict(timeline, costs, RANKS, GQSGDConfig(codec="ternary"))
    gathered = predict(timeline, costs, RANKS, GQSGDConfig(reducer="in_order"))
    assert 0 < coded.sent_bytes < native.sent_bytes / 15
    assert gathered.sent_bytes >= (RANKS - 1) * 4 * (1 << 22)
    assert gathered.step_s > native.step_s > coded.step_s


@on_ranks(2)
def test_both_run_between_processes(rank: int) -> list[list[float]]:
    """What one of two processes has after both reductions."""
    add("A codec")
    add("A reducer")
    mine = gradients()[rank]
    result = [all_reduce(mine, codec="ternary").tolist(), all_reduce(mine, reducer="in_order").tolist()]
    assert result[1] == ((gradients()[0] + gradients()[1]) / 2).tolist()
    return result


def test_the_reducer_adds_in_rank_order() -> None:
    add("A reducer")
    total = gradients()[0].clone()
    for gradient in gradients()[1:]:
        total += gradient
    results = average(gradients(), reducer="in_order")
    assert all(torch.equal(result, total / RANKS) for result in results)
