"""Predictions of models that are so large that neighbouring buckets and pieces run as one on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict import Bucket, Costs, Prediction, Timeline, advice, bunches, predict, sharded, timeline
from lightning_gqsgd.predict.costs import ESTIMATES, Link
from lightning_gqsgd.predict.model import BF16, NATIVE
from lightning_gqsgd.predict.sharded import Coordinates, ShardedMethod, ShardedModel, Unit, predict_sharded
from lightning_gqsgd.predict.timeline import bunch_length, estimated

NODES, PER_NODE = 16, 4
#: Bytes per second of a link on which steps wait, and of one on which the computation hides most.
SLOW, FAST = 1e9, 4e10
METHODS = {
    "fp32": NATIVE,
    "bf16": BF16,
    "4 bit": GQSGDConfig(bits=4, sample_every=0, reducer="two_shot"),
    "hierarchical": GQSGDConfig(bits=8, sample_every=0, reducer="hierarchical", node_size=PER_NODE),
}
UNDER_FSDP = {
    "fp32": ShardedMethod(torch.float32),
    "replicas": ShardedMethod(torch.bfloat16, 4, has_replicas=True),
    "both": ShardedMethod(torch.bfloat16, 4, 8, has_levels=True),
}


def on(rate: float, device: str) -> Costs:
    return advice.over_links(ESTIMATES[device], PER_NODE, Link(rate, 5e-5), Link(25e9, 5e-6))(NODES, 1.0)


def of_buckets(count: int, backward_s: float) -> Timeline:
    """Layers of three kinds of parameters, each of which is a bucket."""
    numels = (700_000, 900_000, 700_000)
    return Timeline(
        tuple(
            Bucket((Segment(count - number, numels[number % 3], raw=False),), backward_s * (number + 1) / count)
            for number in range(count)
        ),
        backward_s,
    )


def bunched_and_not(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Prediction]) -> tuple[Prediction, Prediction]:
    made = []
    for most in (256, 10**9):
        for module in (timeline, bunches, sharded):
            monkeypatch.setattr(module, "MOST", most)
        made.append(make())
    return made[0], made[1]


def assert_alike(few: Prediction, all_of_them: Prediction) -> None:
    assert len(few.events) < 0.8 * len(all_of_them.events)
    assert few.step_s == pytest.approx(all_of_them.step_s, rel=0.01)
    assert few.exposed_s == pytest.approx(all_of_them.exposed_s, rel=0.02, abs=0.002 * few.step_s)
    assert few.codec_s == pytest.approx(all_of_them.codec_s, rel=0.02)
    assert few.wire_s == pytest.approx(all_of_them.wire_s, rel=0.01)
    assert few.sent_bytes == pytest.approx(all_of_them.sent_bytes, rel=0.001)
    assert few.node_bytes == pytest.approx(all_of_them.node_bytes, rel=0.001)


@pytest.mark.parametrize("rate", [SLOW, FAST])
@pytest.mark.parametrize("device", ["h100", "cpu"])
@pytest.mark.parametrize("name", METHODS)
def test_bunches_take_as_long_as_their_buckets(
    name: str, device: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = on(rate, device)
    few, all_of_them = bunched_and_not(
        monkeypatch, lambda: predict(of_buckets(900, 6.0), costs, NODES * PER_NODE, METHODS[name])
    )
    assert_alike(few, all_of_them)


@pytest.mark.parametrize("rate", [SLOW, FAST])
def test_pieces_of_one_large_bucket_are_in_bunches(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Timeline((Bucket((Segment(0, 900 << 24, raw=False),), 0.5),), 1.0)
    costs = on(rate, "h100")
    few, all_of_them = bunched_and_not(monkeypatch, lambda: predict(line, costs, NODES * PER_NODE, METHODS["4 bit"]))
    assert_alike(few, all_of_them)


@pytest.mark.parametrize("rate", [SLOW, FAST])
@pytest.mark.parametrize("name", UNDER_FSDP)
def test_bunches_take_as_long_as_their_blocks_under_fsdp(
    name: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = Coordinates(12 << 24, 1 << 12)
    blocks = tuple(Unit(each, each, 0.9 / 60) for _ in range(60))
    root = Unit(Coordinates(1 << 24, 0), Coordinates(1 << 24, 0), 0.1)
    model = ShardedModel(blocks, root, replace(estimated(nn.Linear(2, 2), 8.0), forward_s=4.0))
    costs = on(rate, "h100")
    few, all_of_them = bunched_and_not(
        monkeypatch, lambda: predict_sharded(model, costs, NODES, PER_NODE, UNDER_FSDP[name])
    )
    assert few.step_s == pytest.approx(all_of_them.step_s, rel=0.02)
    assert few.sent_bytes == pytest.approx(all_of_them.sent_bytes, rel=1e-6)
    assert few.codec_s == pytest.approx(all_of_them.codec_s, rel=0.1)  # of which the computation takes a part


@pytest.mark.slow
def test_a_step_of_a_hundred_thousand_buckets_is_a_few_thousand_tasks() -> None:
    line = of_buckets(100_000, 60.0)
    assert len(line.bunches) < 2100
    assert sum(count for bunch in line.bunches for _, count in bunch.alike) == 100_000
    made = predict(line, on(SLOW, "h100"), NODES * PER_NODE, METHODS["4 bit"])
    assert len(made.events) < 20_000
    assert len(line.at_once().bunches) < 2100


def test_bunches_are_short_at_both_ends() -> None:
    lengths = []
    while sum(lengths) < 10_000:
        lengths.append(bunch_length(sum(lengths), 10_000))
    assert sum(lengths) == 10_000
    assert lengths[:128] == [1] * 128
    assert lengths[-127:] == [1] * 127
    assert max(lengths) == 40
