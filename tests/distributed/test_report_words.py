"""The report names what travels and nothing else, for every preset, with and without tables of sparse gradients."""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_gqsgd.ddp.hook import GQSGDState
from lightning_gqsgd.presets import FIXED
from lightning_gqsgd.reducers.link import Link
from lightning_gqsgd.research.systems import SYSTEMS
from lightning_gqsgd.sparse import gradients as sparse_gradients
from lightning_gqsgd.sparse.logarithmic import LogarithmicRows
from lightning_gqsgd.sparse.rows import RowsAsTheyAre, RowsOfBf16
from tests.distributed.models import wrapped
from tests.distributed.ranks import run

#: What a report calls each kind of message.
WORDS = {
    "linear": "(linear",
    "companded": "(companded",
    "eden": "(eden",
    "exponential": "(exponential",
    "sign": "(sign,",
    "top_k": "(top_k",
    "trellis": "(trellis",
    "powers": "signs and powers of two",
    "sketch": "sums of sketches",
    "rows": "as they are, in the compute dtype",
    "bf16 rows": "(bf16, stochastic rounding)",
}
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: dict(preset.fields) for name, preset in FIXED.items()},
    **{name: dict(SYSTEMS[name].fields) for name in ("fastsgd", "s2_reducer", "qcmd_adagrad")},
    "two bits": {"bits": 2},
}
SPARSE: dict[str, dict[str, Any]] = {
    "fastsgd": CONFIGS["fastsgd"],
    "s2_reducer": CONFIGS["s2_reducer"],
    "gather": {"sparse": "gather", "bits": 4},
    "gather, eden": {"sparse": "gather", "codec": "eden"},
    "gather, native": {"sparse": "gather", "reducer": "native"},
    "gather, bf16": {"sparse": "gather", "bits": 16},
    "excluded": {"sparse": "logarithmic", "exclude": ("words.weight",)},
    "whole": {"sparse": "logarithmic", "sparse_limit": 0},
    "by name": {"sparse": "gather", "bits": {"*": 4, "words.weight": 8}},
}


class Model(nn.Module):
    """A table and a layer, either of which may be missing."""

    def __init__(self, table: bool, layer: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(300, 8, sparse=True) if table else None
        self.head = nn.Linear(8, 256) if layer else None

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.functional.one_hot(x, 8).float() if self.words is None else self.words(x)
        return (rows if self.head is None else self.head(rows)).square().mean()


def _travelling(model: nn.Module, state: GQSGDState, rank: int) -> set[str]:
    """The kinds of messages of two steps."""
    seen: set[str] = set()

    def watch(owner: Any, name: str, kind: Any) -> Any:
        original = getattr(owner, name)

        @wraps(original)
        def watched(*args: Any, **named: Any) -> Any:
            seen.add(kind(args[0]) if callable(kind) else kind)
            return original(*args, **named)

        return mock.patch.object(owner, name, watched)

    with ExitStack() as stack:
        stack.enter_context(watch(Link, "outgoing", lambda link: link.codec.name))
        stack.enter_context(watch(LogarithmicRows, "write", "powers"))
        stack.enter_context(watch(RowsAsTheyAre, "write", "rows"))
        stack.enter_context(watch(RowsOfBf16, "write", "bf16 rows"))
        stack.enter_context(watch(sparse_gradients, "sketched_mean", "sketch"))
        for step in range(2):
            model(torch.arange(4) + 2 * rank + (step if hasattr(model.module, "words") else 0) % 2).backward()
    return seen


def _said_and_sent(rank: int, cases: list[tuple[str, bool, bool, dict[str, Any]]]) -> list[tuple[str, set[str], str]]:
    found = []
    for name, table, layer, fields in cases:
        torch.manual_seed(0)
        model, state = wrapped({}, fields, Model(table, layer))
        report = state.report()
        found.append((name, _travelling(model, state, rank), report))
        state.close()
    return found


def _check(cases: list[tuple[str, bool, bool, dict[str, Any]]], tmp_path: Path) -> None:
    for name, sent, report in run(_said_and_sent, 2, tmp_path, cases)[0]:
        said = {kind for kind, words in WORDS.items() if words in report}
        assert said == sent, (name, report)


# One launch for each preset: all kernels of all codecs, compiled one after the other, take longer than a launch may.
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_report_of_every_preset_names_the_codec_that_travels(name: str, tmp_path: Path) -> None:
    _check([(name, False, True, CONFIGS[name])], tmp_path)


@pytest.mark.parametrize("layer", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_report_names_what_is_sent_of_tables_and_no_codes_that_are_not(layer: bool, tmp_path: Path) -> None:
    _check([(name, True, layer, fields) for name, fields in SPARSE.items() if layer or name != "by name"], tmp_path)


def _two_bits(rank: int) -> list[str]:
    reports = []
    for fields in ({"codec": "companded", "bits": 2}, {"preset": "gqsgd_2bit"}, {"bits": 3}, {"bits": 2}):
        _, state = wrapped({}, fields)
        reports.append(state.report())
        state.close()
    return reports


def test_the_report_says_where_two_bits_are_another_codec_than_the_preset_of_that_name(tmp_path: Path) -> None:
    companded, preset, three, two = run(_two_bits, 2, tmp_path)[0]
    assert "preset='gqsgd_2bit' is another codec, eden, not companded" in companded
    assert "another codec" not in preset + three + two
    assert two == preset
