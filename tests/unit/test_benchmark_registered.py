"""Predictions are registered before they are measured, and links of which only the rate is known."""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import registered, registered_rank, registered_speed
from benchmarks.registered_settings import SETS, settings_of
from benchmarks.shaped_links import MANY_PAIRS, RING, on_link
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict.costs import KINDS, Collective, Costs, Gamma, Link
from lightning_gqsgd.predict.timeline import Bucket, Timeline

OPTIONS = argparse.Namespace(set=1, only=range(1, 1000), save=True)
TIMES = {"step_s": 1.0, "shortest_s": 0.9, "longest_s": 1.2}


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)  # noqa: S607


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with predictions of the first set that nobody has committed yet."""
    monkeypatch.setattr(registered, "FOLDER", tmp_path)
    git(tmp_path, "init")
    predict(tmp_path, 1)
    return tmp_path


def write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values))


def predict(folder: Path, number: int) -> None:
    rows = [{**registered.describe(setting), **TIMES} for setting in settings_of(number)]
    write(folder / f"set_{number}_predictions.json", {"machine": "one", "rows": rows})


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "predictions")


def test_nothing_is_measured_before_predictions_are_committed(folder: Path) -> None:
    with pytest.raises(registered.RegisteredError, match="not committed as it is"):
        registered.check_registered(1)
    commit(folder)
    assert len(registered.check_registered(1)) == 40


def test_nothing_is_measured_against_predictions_that_were_changed(folder: Path) -> None:
    commit(folder)
    file = folder / "set_1_predictions.json"
    file.write_text(file.read_text().replace("1.2", "9.9", 1))
    with pytest.raises(registered.RegisteredError, match="not committed as it is"):
        registered.check_registered(1)


def test_measurements_belong_to_one_commit(folder: Path) -> None:
    commit(folder)
    first = registered.check_registered(1)
    write(folder / "set_1_measured.json", {"predictions": first, "seconds": {}})
    file = folder / "set_1_predictions.json"
    file.write_text(file.read_text().replace("1.2", "9.9", 1))
    commit(folder)
    with pytest.raises(registered.RegisteredError, match=f"against the predictions of commit {first}"):
        registered.check_registered(1)


def test_nothing_is_predicted_once_it_was_measured(folder: Path) -> None:
    write(folder / "set_1_measured.json", {"predictions": "", "seconds": {"1": [1.0]}})
    with pytest.raises(registered.RegisteredError, match="set 1 was measured already"):
        registered.register(OPTIONS)


def test_predictions_have_to_be_of_the_settings_that_are_measured(folder: Path) -> None:
    file = folder / "set_1_predictions.json"
    values = json.loads(file.read_text())
    values["rows"][3]["rate"] = "1gbit"
    write(file, values)
    commit(folder)
    with pytest.raises(registered.RegisteredError, match="of other settings"):
        registered.check_registered(1)


@pytest.mark.parametrize("number", [number for number in SETS if registered.read(number, "predictions")])
def test_what_was_registered_is_still_what_the_settings_say(number: int) -> None:
    rows = registered.read(number, "predictions")["rows"]
    said = [registered.describe(setting) for setting in settings_of(number)]
    assert [{key: row[key] for key in said[0]} for row in rows] == said
    assert len(rows) == 60


def test_a_row_says_whether_the_median_is_inside() -> None:
    row = {**registered.describe(settings_of(1)[0]), **TIMES}
    found = [registered._row(1, row, {"1": values})[-1] for values in ([1.3, 1.1, 0.5], [1.3, 1.3, 1.0], [0.8])]
    assert found == ["yes", "no", "no"]
    assert registered._row(1, row, {})[-1] is None


def table_of(length: float) -> list[float]:
    return [length, 0.9 * length, 1.2 * length]


def test_a_prediction_counts_at_the_speed_that_the_machine_had() -> None:
    row = {
        **registered.describe(settings_of(3)[0]),
        **registered._named(table_of(1.0)),
        "alone_s": 0.2,
        "by_length": [table_of(length) for length in registered_speed.LENGTHS],
    }
    unmeasured = registered.chosen(3, row, {})
    assert unmeasured["step_s"] == 1.0
    # A step without communication took 1.2 times as long as the probe's; the slow round does not count.
    chosen = registered.chosen(3, row, {"alone": {"1": [0.24, 0.23, 0.9]}})
    assert chosen["step_s"] == pytest.approx(1.2)
    assert chosen["longest_s"] == pytest.approx(1.44)
    wider = registered.chosen(4, row, {"alone": {"1": [0.24, 0.23, 0.9]}})
    faster, slower = registered.SPEEDS[4]
    assert wider["step_s"] == chosen["step_s"]
    assert wider["shortest_s"] == pytest.approx(faster * chosen["shortest_s"])
    assert wider["longest_s"] == pytest.approx(slower * chosen["longest_s"])
    beyond = registered.chosen(3, row, {"alone": {"1": [1e9]}})
    assert beyond["step_s"] == registered_speed.LENGTHS[-1]


def test_a_slower_machine_is_slower_at_everything_but_the_link() -> None:
    line = Timeline((Bucket((Segment(0, 4, raw=False),), 1.0),), 2.0, forward_s=1.0, update_s=0.5)
    slow = registered_speed.slower_timeline(line, 1.5)
    assert slow.compute_s == pytest.approx(1.5 * line.compute_s)
    assert slow.buckets[0].ready_s == pytest.approx(1.5)
    probed = replace(costs(1e-9), gammas={"companded/8": Gamma(1.0, 2.0, 3.0)}, touch_s=1.0, launch_s=2.0, stage_s=3.0)
    made = registered_speed.slower_costs(probed, 2.0)
    assert made.gammas["companded/8"] == Gamma(2.0, 4.0, 6.0)
    assert (made.touch_s, made.launch_s, made.stage_s) == (2.0, 4.0, 6.0)
    limited = on_link(made, 2, 1, Link(1e8)).collectives["all sum/float32"]
    assert limited.beta_s == pytest.approx(RING / 1e8)
    assert limited.alpha_s == pytest.approx(2e-3)


def test_ranges_of_settings_are_read() -> None:
    assert list(registered.numbers_of("5..7")) == [5, 6, 7]
    assert list(registered.numbers_of("3")) == [3]
    with pytest.raises(argparse.ArgumentTypeError, match=r"write e\.g\. 5\.\.12"):
        registered.numbers_of("5-7")


def costs(beta_s: float) -> Costs:
    each = Collective(alpha_s=1e-3, beta_s=beta_s)
    return Costs({f"{scope} {kind}": each for scope in ("all", "node", "peers") for kind in KINDS}, {})


def test_a_byte_takes_what_the_slower_of_link_and_machine_takes() -> None:
    link = Link(bytes_per_s=1e8, latency_s=0.01)
    slow = on_link(costs(1e-9), 4, 1, link).collectives
    assert slow["all sum/float32"].beta_s == pytest.approx(RING / 1e8)
    assert slow["all all_to_all"].beta_s == pytest.approx(MANY_PAIRS / 1e8)
    fast = on_link(costs(1e-6), 4, 1, link).collectives
    assert fast["all sum/float32"].beta_s == 1e-6


def test_ranks_of_a_host_share_its_link_and_need_none_among_themselves() -> None:
    made = on_link(costs(1e-9), 2, 2, Link(1e8)).collectives
    assert made["node sum/float32"] == costs(1e-9).collectives["node sum/float32"]
    assert made["peers sum/float32"].beta_s == pytest.approx(2 * RING / 1e8)
    # In a ring, a host's link has the bytes of one rank; between pairs, two thirds of the bytes of each.
    assert made["all sum/float32"].beta_s == pytest.approx(RING / 1e8)
    assert made["all all_to_all"].beta_s == pytest.approx(MANY_PAIRS * 4 / 3 / 1e8)


def test_a_link_has_its_latency_beside_what_collectives_take_to_begin() -> None:
    made = on_link(costs(1e-9), 4, 1, Link(1e8, latency_s=1.0))
    assert made.latency_s == 1.0
    assert made.collectives["all sum/float32"].alpha_s == pytest.approx(1e-3)


def test_the_interval_of_a_link_begins_without_headers() -> None:
    made = on_link(costs(1e-9), 2, 1, Link(1e8))
    assert made.terms is not None
    least = made.at(made.terms.least).wire_seconds("all", "sum/float32", 10**8, is_beside_backward=True)
    assert least == pytest.approx(1.0)


def test_a_lab_times_several_steps_without_communication(folder: Path, monkeypatch: Any) -> None:
    predict(folder, 4)
    commit(folder)

    class Lab:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> Lab:
            return self

        def __exit__(self, *_: object) -> None: ...

    def run(_: Any, task: dict[str, Any], __: str) -> list[list[float]]:
        return [[1.0]] * len(task["ways"]) + [[0.5]] * registered_rank.ALONE_CASES

    monkeypatch.setattr(registered, "NetLab", Lab)
    monkeypatch.setattr(registered, "_run", run)
    registered.run(argparse.Namespace(set=4, only=range(1, 5), save=True))
    found = json.loads((folder / "set_4_measured.json").read_text())
    assert found["seconds"]["1"] == [1.0]
    assert found["alone"]["4"] == [0.5] * registered_rank.ALONE_CASES
