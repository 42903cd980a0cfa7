"""The sentence of `gqsgd advise` says what its numbers say, on all kinds of networks."""

from __future__ import annotations

import re
from itertools import product

import pytest

from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict import Bucket, Timeline, advice
from lightning_gqsgd.predict.costs import ESTIMATES, Link

LINE = Timeline(
    tuple(Bucket((Segment(number, numel, False),), 0.02 * number) for number, numel in enumerate((400_000, 5_000_000))),
    0.05,
    0.02,
)
GRID = list(product((1e6, 1e8, 1e9, 1e10, 1e11), (1e-6, 1e-4, 1e-2, 1.0), (2, 16, 1024), (1, 8), ("h100", "cpu")))


def _cluster(rate: float, latency_s: float, nodes: int, per_node: int, codec: str) -> advice.Cluster:
    links = (Link(rate / 8, latency_s), Link(25e9, 5e-6))
    return advice.Cluster(LINE, advice.over_links(ESTIMATES[codec], per_node, *links), nodes, per_node, 8)


def _seconds(words: str) -> float:
    number, unit = words.split()
    return float(number) * {"ms": 1e-3, "s": 1.0}[unit]


@pytest.mark.parametrize("codec", ["h100", pytest.param("cpu", marks=pytest.mark.slow)])
def test_no_sentence_contradicts_its_numbers(codec: str) -> None:
    kinds = set()
    for place in GRID:
        if place[-1] != codec:
            continue
        choices = advice.candidates(_cluster(*place), widths=(8, 4))
        said, best = advice.recommendation(choices), advice.best_of(choices)
        plain, made = choices[0].prediction, best.prediction
        waits = re.search(r"plain DDP waits (\S+ m?s) of (\S+ m?s) for", said)
        assert waits is not None
        assert [_seconds(word) for word in waits.groups()] == pytest.approx(
            [plain.exposed_s, plain.step_s], rel=6e-3, abs=1e-12
        )
        assert "hide" not in said
        hook = next(choice for choice in choices if choice.name == "bf16")
        for other, words in ((choices[0], "than DDP"), (hook, "than its bf16 hook")):
            ratio = re.search(rf"([\d.]+) times (faster|slower) {words}", said)
            assert (ratio is None) == (best is choices[0] or best is other)
            if ratio is not None:
                shown = float(ratio[1]) if ratio[2] == "faster" else 1 / float(ratio[1])
                assert shown == pytest.approx(other.prediction.step_s / made.step_s, rel=6e-3)
        kinds.add(best.name)
        if best is choices[0]:
            continue
        left = re.search(rf"with {best.name} it waits (\S+ m?s), (\d+)% of the step", said)
        assert left is not None, said
        assert _seconds(left[1]) == pytest.approx(made.exposed_s, rel=6e-3, abs=1e-12)
        assert int(left[2]) == pytest.approx(100 * made.exposed_s / made.step_s, abs=0.51)
        assert ("latency" in said) == (made.exposed_s > 2 * (made.wire_s + made.codec_s)), said
        further = advice.advice_on_local_steps(choices, advice.with_local_steps(_cluster(*place)))
        assert further is None or further.startswith(f"If {left[2]}% of a step are too long")
    assert {"fp32", "bf16"} < kinds
