"""What the benchmark of goodput counts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import goodput
from benchmarks.goodput import (
    DOWN_S,
    EVERY_S,
    WAYS,
    are_equal,
    are_under_way,
    bound,
    longest_return,
    main,
    samples_per_second,
    schedule,
)
from benchmarks.goodput_rank import ROUND_S
from benchmarks.goodput_rank import WAYS as RANKS


def _line(second: float, merge: int, samples: int = 10, digest: str = "a") -> dict[str, object]:
    return {"time": second, "merge": merge, "samples": samples, "loss": 1.0, "digest": digest}


def test_every_way_has_a_script() -> None:
    assert set(WAYS) < set(RANKS)


def test_a_seed_names_the_hosts_that_are_killed() -> None:
    kills = schedule(3, 600, 4)
    assert kills == schedule(3, 600, 4) != schedule(4, 600, 4)
    assert len(kills) == 29
    assert all(abs(second - EVERY_S * number) <= ROUND_S / 2 for number, (second, _) in enumerate(kills, start=1))
    assert {host for _, host in kills} == {0, 1, 2, 3}
    assert schedule(3, 60, 4)[-1][0] + DOWN_S < 60


def test_samples_of_a_merge_that_was_made_again_count_once() -> None:
    journals = [[_line(0.0, 1), _line(1.0, 2), _line(2.0, 3), _line(4.0, 3)], [_line(3.0, 2, 20), _line(10.0, 3)]]
    assert samples_per_second(journals, 0.0, 10.0) == (10 + 10 + 20 + 10) / 10


def test_a_merge_after_the_end_counts_by_the_part_of_its_time_before() -> None:
    entered = [{**_line(second, merge), "entered": 100 * merge} for merge, second in enumerate((1.0, 3.0, 7.0, 11.0))]
    late = {**_line(8.0, 1), "entered": 100}
    assert samples_per_second([entered, [late]], 2.0, 7.0) == (200 + 50 - 50) / 7
    assert samples_per_second([[_line(1.0, 1), _line(3.0, 2), _line(7.0, 3)]], 2.0, 3.0) == (10 * 2 / 4 + 10 / 2) / 3


def test_what_members_have_learnt_while_they_joined_does_not_count() -> None:
    joined = {**_line(1.0, 1), "entered": 0, "members": 4}
    alone = {**joined, "members": 1}
    assert not are_under_way([], 4)
    assert are_under_way([_line(1.0, 1)], 4)  # of a way that counts steps
    assert not are_under_way([alone, alone, joined], 4)
    assert are_under_way([alone, joined, joined], 4)


def test_members_are_equal_if_the_last_merge_that_several_know_is() -> None:
    one = [_line(1.0, 1), _line(2.0, 2), _line(3.0, 3, digest="c")]
    assert are_equal([one, [_line(1.0, 1, digest="b"), _line(2.0, 2)]])
    assert not are_equal([one, [_line(2.0, 2), _line(3.0, 3, digest="d")]])
    assert not are_equal([one])  # nobody to compare with


def test_a_host_that_is_away_and_what_it_has_learnt_are_all_that_must_be_lost() -> None:
    assert bound([], [3.0, 1.0], 100.0) == 1.0
    lost_s = DOWN_S + ROUND_S / 2
    assert bound([(20.0, 0), (40.0, 1)], [3.0, 1.0], 100.0) == 1 - lost_s / 100
    assert bound([(99.0, 0)], [3.0, 1.0], 100.0) == 1 - (1 + ROUND_S / 2) * 0.75 / 100


def test_a_member_that_has_merged_with_nobody_yet_is_not_back() -> None:
    joined = {**_line(27.0, 7), "members": 1}
    merged = {**_line(28.5, 8), "members": 4}
    assert longest_return([[_line(1.0, 1), joined, merged]], 0.0, [(20.0, 0)]) == 28.5 - 25.0


def test_the_number_of_steps_with_the_best_goodput_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:

    def measured(name: str, way: goodput.Way, *_: object) -> goodput.Measured:
        journal = [_line(0.0, 1), _line(1.0, 2, way.every % 256)]
        return goodput.Measured(0.0, [journal, [], [], []], [1.0] * 4)

    monkeypatch.setattr(goodput, "measure", measured)
    report = goodput.Report("goodput", "", {})
    way = goodput.tuned(report, "torchft_diloco", WAYS["torchft_diloco"], 0)
    assert way.every == 64
    assert [row[0] for row in report.rows] == [f"torchft_diloco, trial of {every}" for every in goodput.TRIALS]


def test_a_curve_has_the_first_loss_of_each_merge_since_the_run_began() -> None:
    unsaid = {name: value for name, value in _line(2.0, 2).items() if name != "loss"}
    journals = [[_line(-1.0, 0), _line(1.0, 1), unsaid, _line(3.0, 3)], [{**_line(0.5, 1), "loss": 2.0}]]
    assert goodput.curve(0.0, journals) == {"seconds": [0.5, 3.0], "losses": [2.0, 1.0]}


def test_every_schedule_is_kept_and_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    axes = pytest.importorskip("matplotlib.axes", reason="pictures need matplotlib")
    drawn: list[list[float]] = []
    plot = axes.Axes.plot

    def noted(axis: object, seconds: list[float], losses: list[float], **look: object) -> object:
        drawn.append(losses)
        return plot(axis, seconds, losses, **look)

    def measured(name: str, way: object, kills: Sequence[tuple[float, int]], _: float) -> goodput.Measured:
        journal = [{**_line(second, merge), "loss": merge + kills[0][1]} for merge, second in enumerate((1.0, 60.0))]
        return goodput.Measured(0.0, [journal] * 4, [1.0] * 4)

    monkeypatch.setattr(goodput, "measure", measured)
    monkeypatch.setattr(goodput, "SEEDS", [0, 3])
    monkeypatch.setattr(axes.Axes, "plot", noted)
    monkeypatch.setattr(goodput, "WAYS", {name: WAYS[name] for name in ("elastic", "ddp")})
    report = goodput._measure(argparse.Namespace(seconds=60.0))
    assert report.draw is not None
    report.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    assert list(report.raw["curves"]) == ["elastic", "ddp"]
    assert list(report.raw["curves"]["elastic"]) == [str(seed) for seed in goodput.SEEDS]
    assert drawn == [one["losses"] for way in report.raw["curves"].values() for one in way.values()]
    assert len(drawn) == len(goodput.SEEDS) + 1


@pytest.mark.parametrize("text", ["-5", "0", "5.9", "nan", "inf", "long"])
def test_too_few_seconds_are_refused(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["goodput", "--seconds", text])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"'{text}' is not a number of at least 6 seconds, which are two rounds" in capsys.readouterr().err
