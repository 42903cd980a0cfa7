"""Experiments of systems of local steps on virtual workers, beside those of `gqsgd systems check`, with the numbers
that were found before.

A simulation of each system by itself gave the earlier numbers (one seed, other data); the objects of the product have
to give the same relations, and orders of magnitude.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.local_steps.fragments import Entry, fragments_of
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.local_steps.rules import MeanOf
from lightning_gqsgd.local_steps.rules.multi_step import MultiStep
from lightning_gqsgd.presets import LOCAL_PRESETS
from lightning_gqsgd.research.experiments.local import QSGD, Uneven, half_of_workers, predictive_run, uploads
from lightning_gqsgd.research.simulation import VirtualRanks, simulate
from lightning_gqsgd.research.simulation.problems import DigitsMLP, LogisticRegression, Quadratic
from lightning_gqsgd.research.simulation.record import Record


@pytest.mark.slow
def test_fedpaq() -> None:
    """Logistic regression, d = 100, 50 workers of which 25 take part in a round, 100 local steps; a bit takes 100/32
    times a step. At equal steps the loss rises mildly with H, and the time falls like 1/H; s = 10 is nearly as good as
    fp32, s = 1 is too coarse. Gap @ time found before: fp32 H = 1 .0100 @ 10100, fp32 H = 10 .0223 @ 1100, s = 10 H =
    10 .0215 @ 266, s = 10 H = 25 .0303 @ 166, s = 1 H = 10 .128 @ 172. The data of that table are not known, so the
    gaps differ; the times are those of the codes. On d = 100 a message is padded to a multiple of 16 bytes, which times
    leave out."""

    def levels(number: int, bits: int) -> dict[str, Any]:
        return {**QSGD, "levels": number, "bits": bits}

    every_step, plain = half_of_workers("ddp", 1, 32), half_of_workers("ddp", 10, 32)
    scale = 16 / 100
    ten = half_of_workers("gqsgd_fedpaq", 10, 5 + scale, **levels(10, 5))
    seldom = half_of_workers("gqsgd_fedpaq", 25, 5 + scale, **levels(10, 5))
    coarse = half_of_workers("gqsgd_fedpaq", 10, 2 + scale, **levels(1, 2))
    times = [time for _, time in (every_step, plain, ten, seldom, coarse)]
    assert times == pytest.approx([10100, 1100, 266, 166, 172], rel=0.1)
    assert every_step[0] < plain[0] < ten[0] < seldom[0] < coarse[0]
    assert ten[0] == pytest.approx(plain[0], rel=0.4)
    assert seldom[0] < 0.06
    assert coarse[0] > 4 * ten[0]


@pytest.mark.slow
def test_censored_gradient_descent() -> None:
    """Least squares, d = 50, 9 workers, L_i = (1.3^i + 1)², i = 0..8, until f - f* = 1e-7: about as many steps with at
    most half of the uploads, as with heavy ball, which needs fewer steps. Found before: heavy ball 227 steps and 2043
    uploads, censored 211 and 500; gradient descent 389 and 3501, censored 372 and 734."""
    problem = Uneven(dimension=50, rows=900, parts=9, noise=0.1, dtype=torch.float64)
    slow, slow_censored = uploads(problem, None, "sgd"), uploads(problem, 0.1, "sgd")
    assert slow[0] > 1.4 * uploads(problem, None, "heavy_ball")[0]
    assert slow_censored[0] < 1.15 * slow[0]
    assert slow_censored[1] < slow[1] / 2


@pytest.mark.slow
def test_sparseloco() -> None:
    """Digits, 4 workers with digits of their own, 480 steps. With more bytes than 1.6 % of changes at 2 bits, 2 bits of
    all coordinates, half as often, have a larger loss. Found with these data: H = 15 .348 at 91 kB, .405 at 109 kB."""
    problem = DigitsMLP(by_label=True)

    def run(preset: str, every: int, **fields: Any) -> Record:
        given: dict[str, Any] = {"local_steps": every, "record_every": 480, "progress": False, **fields}
        return simulate(preset, problem, workers=4, steps=480, lr=0.2, **given)

    seldom, dense = run("gqsgd_sparseloco", 15), run("gqsgd_fedpaq", 30, bits=2)
    assert seldom.bytes_sent[-1] < dense.bytes_sent[-1]
    assert seldom.last() < 0.95 * dense.last()


def test_censored_workers_that_are_at_rest_send_a_byte() -> None:
    problem = Quadratic(200, condition=1, dtype=torch.float64)
    record = simulate("gqsgd_chb", problem, workers=3, steps=60, lr=1.0, outer="sgd", record_every=1, progress=False)
    assert record.loss[-1] < 1e-20
    assert record.bytes_sent[-1] - record.bytes_sent[-11] == 10 * 2


def test_genqsgd_lets_slow_workers_make_fewer_steps() -> None:
    """10 workers, half of which make 4 steps in a round and half 1, with codes both ways. The anchor takes the mean of
    the changes. In as many rounds, that is better than 1 step of all workers, and worse than 4."""
    problem = LogisticRegression(dimension=100, rows=1000, parts=10, spread=0.3, regularisation=0.01)

    def loss(steps_of: list[int]) -> Record:
        rounds = 25
        given: dict[str, Any] = {"local_steps_of": steps_of, "reducer": "two_shot", "bits": 6}
        steps = rounds * max(steps_of)
        return simulate("gqsgd_fedpaq", problem, workers=10, steps=steps, lr=0.1, progress=False, **given)

    slow, mixed, fast = loss([1] * 10), loss([4] * 5 + [1] * 5), loss([4] * 10)
    assert slow.bytes_sent[-1] == mixed.bytes_sent[-1] == fast.bytes_sent[-1]
    assert fast.last() < mixed.last() < slow.last()


def test_multi_step_compression_loses_a_power_of_what_one_message_loses() -> None:
    """Top 5 of 100, R messages: at most (1 - k/d)^R of |x|² is left. Found before: .77, .41, .14, .006 for R = 1, 4, 8,
    16, below .95, .81, .66, .44."""
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    segments = [Segment(0, 100, raw=False)]
    left = []
    for messages in (1, 4, 8, 16):
        ranks = VirtualRanks(1, segments, preset="topk_ef", density=0.05, block_size=104)
        options = LocalOptions(every=1, rule=MultiStep(messages))
        bundle = fragments_of([Entry(segments[0], "x", torch.zeros(100), False)], [], options)[0].bundles[0]
        part, total, step = options.averaging.averager(bundle, 1).requests(x.clone()), None, 0
        request = next(part)
        while total is None:
            assert isinstance(request, MeanOf)
            try:
                request = part.send(ranks.mean([request.x], step))
            except StopIteration as end:
                total = end.value
            step += 1
        assert step == messages
        left.append(float((x - total).square().sum() / x.square().sum()))
    assert all(loss <= 0.95**messages for loss, messages in zip(left, (1, 4, 8, 16), strict=True))
    assert left == pytest.approx([0.77, 0.41, 0.14, 0.006], rel=0.4)


def test_the_way_back_of_several_messages_may_leave_out_more_than_the_power() -> None:
    """What 8 ranks send first cancels. Their last messages have places of their own, and get one answer, which has an
    eighth of them: 7/8 is left, and (1 - δ)^4 is 0.81."""
    numel, kept, messages, workers = 256, 13, 4, 8
    first = (messages - 1) * kept
    changes = torch.zeros(workers, numel)
    changes[:, :first] = torch.tensor([10.0, -10.0]).repeat(workers // 2)[:, None]
    changes[:, first : first + workers * kept] = torch.eye(workers).repeat_interleave(kept, dim=1)
    compression = LOCAL_PRESETS["gqsgd_neolithic"].compression.config
    ranks = VirtualRanks(workers, [Segment(0, numel, raw=False)], preset=compression, block_size=numel)
    requests = [changes, *[torch.zeros_like(changes)] * (messages - 1)]
    back = sum(ranks.mean(list(request), step) for step, request in enumerate(requests))
    sent = (changes - ranks.errors()).mean(0)
    assert not ranks.errors().any()
    left = float((sent - back).square().sum() / sent.square().sum())
    assert left == pytest.approx(1 - 1 / workers, abs=1e-6)
    assert left > (1 - kept / numel) ** messages


@pytest.mark.slow
def test_predictive_coding_costs_no_accuracy() -> None:
    """Digits, 5 workers, rounds of 10 local steps of Adam."""
    plain, predictive = predictive_run("mean"), predictive_run("predicted")
    assert predictive.last("accuracy", 3) > plain.last("accuracy", 3) - 0.01
