"""Steps that were predicted before they were measured: a file of predictions, committed, and what came afterwards.

    python -m benchmarks.registered probe --save       # what this machine computes, and what messages take it
    python -m benchmarks.registered predict --save     # commit the file that this writes
    python -m benchmarks.registered measure --save     # refuses if the file is not committed as it is
    python -m benchmarks.registered table --save       # the page of all sets

The benchmark needs Linux, root and iproute2, see `netlab`. A prediction knows the model, the rate and the latency of
the links, and the probe: the steps of all models without communication, the speed of kernels, and what Gloo's
collectives take between hosts whose links have no limit. No link with a limit, and no step with communication, was
measured for it. From set 3 on, predictions are tables over the speed of the machine (see `registered_speed`). The
length of a step without communication, which is measured in turns with the others, says which place of the table
counts. ``--only 5..12`` takes a part of the settings, and what was measured before is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import registered_rank, registered_speed
from benchmarks.hosts import in_lab
from benchmarks.registered_picture import Point, draw
from benchmarks.registered_settings import SETS, Setting, settings_of
from benchmarks.report import RESULTS, Cell, Report, machine
from benchmarks.shaped_links import on_link
from lightning_gqsgd.errors import counted
from lightning_gqsgd.predict.costs import Costs, Gamma, Link
from lightning_gqsgd.predict.device_times import codec_of_bits
from lightning_gqsgd.predict.model import predict
from lightning_gqsgd.predict.probe import Probe
from lightning_gqsgd.predict.timeline import Timeline
from netlab.lab import NetLab, NetLabError, parse_rate
from netlab.units import parse_delays

PROGRAM = "python -m benchmarks.registered"
FOLDER = RESULTS / "registered"
TIMEOUT_S = 280.0
#: Bytes of each parameter that an average of models reads or writes besides codes: the change, whether it is finite,
#: the anchor's step, and the copy of the anchor (`local_steps.averages`).
AVERAGE_BYTES = 40
#: Ends of intervals, over predictions at the ends of what is known of the link; `NOTES` has those of earlier sets.
#: Those of `predict.intervals`, 0.972 and 1.16, are for a machine and a link that were probed just before; here,
#: the probe is of other hosts, and older.
SHORTEST, LONGEST = 0.94, 1.12
#: Lengths of a step without communication, over the measured one, at which the ends of a set's intervals are taken: a
#: median of a few such steps says the speed of other steps only so well. What computes is in this part of an interval,
#: and what sends is in `SHORTEST` and `LONGEST`. Sets without an entry take both at 1.
SPEEDS = {4: (0.8, 1.25)}


class RegisteredError(ValueError):
    """What was asked for would not be a prediction."""


def path_of(number: int, what: str) -> Path:
    """Returns the file of a set's ``"probe"``, ``"predictions"`` or ``"measured"``."""
    return FOLDER / f"set_{number}_{what}.json"


def read(number: int, what: str) -> dict[str, Any]:
    """Returns what a file of `path_of` has; empty where there is none."""
    path = path_of(number, what)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def probe(options: argparse.Namespace) -> None:
    """Probe this machine as each number of hosts of a set that was not probed yet."""
    found = read(options.set, "probe") or {"machine": machine(), "hosts": {}}
    several = dict.fromkeys(lab.of for lab in SETS[options.set])
    for place, hosts in enumerate(several, start=1):
        if hosts.name in found["hosts"] or place not in options.only:
            continue
        with NetLab(hosts.hosts, "none", hosts.ranks_per_host) as lab:
            found["hosts"][hosts.name] = _run(lab, {"probe": hosts.ranks_per_host}, hosts.name)
        print(f"probed: {hosts.name}", flush=True)
        _save(options, "probe", found)


def register(options: argparse.Namespace) -> None:
    """Predict the settings of a set from its probe."""
    if read(options.set, "measured"):
        raise RegisteredError(
            f"set {options.set} was measured already, so that new predictions of it would be none; add another set to "
            "benchmarks/registered_settings.py and give its number to --set"
        )
    probed = read(options.set, "probe")
    rows = [_predicted(options.set, setting, probed) for setting in settings_of(options.set)]
    _save(options, "predictions", {"machine": probed["machine"], "rows": rows})


def _predicted(number: int, setting: Setting, probed: dict[str, Any]) -> dict[str, Any]:
    """Returns a setting in words, with the seconds of its step and of its interval's ends."""
    lab = setting.lab
    found = probed.get("hosts", {}).get(lab.of.name)
    if found is None:
        raise RegisteredError(
            f"{lab.of.name} hosts and ranks were not probed; run `{PROGRAM} probe --save` before `predict`"
        )
    line = Timeline.from_dict(found["timelines"][lab.model])
    table = [ends_of(setting, line, probed, length) for length in registered_speed.LENGTHS]
    usual = _named(_at_speed(number, table, 1.0))
    return {**describe(setting), **usual, "alone_s": line.compute_s, "by_length": table}


def ends_of(setting: Setting, line: Timeline, probed: dict[str, Any], length: float) -> list[float]:
    """Returns the seconds of a step and of its interval's ends on a machine that takes ``length`` times as long as the
    probed one."""
    costs = _costs(probed, setting, length)
    step_s, shortest_s, longest_s = _step(setting, registered_speed.slower_timeline(line, length), costs)
    return [step_s, SHORTEST * shortest_s, LONGEST * longest_s]


def _named(three: Sequence[float]) -> dict[str, float]:
    return dict(zip(("step_s", "shortest_s", "longest_s"), three, strict=True))


def describe(setting: Setting) -> dict[str, Any]:
    """Returns what a setting is, as plain values."""
    lab = setting.lab
    where = {"model": lab.model, "hosts": lab.of.name, "rate": lab.rate, "latency": lab.latency, "seed": lab.seed}
    return {"number": setting.number, **where, "way": setting.way.name}


def _costs(probed: dict[str, Any], setting: Setting, length: float) -> Costs:
    """Returns the costs of a setting, on a machine that takes ``length`` times as long as the probed one.

    Codes of 8 and 4 bits take kernels equally long, so that each has the mean of both.
    """
    hosts = setting.lab.of
    costs = Probe.from_dict(probed["hosts"][hosts.name]["probe"]).costs
    eight, four = (asdict(costs.gammas[codec_of_bits(bits)]) for bits in (8, 4))
    both = Gamma(**{name: (eight[name] + four[name]) / 2 for name in eight})
    gammas = {**costs.gammas, **{codec_of_bits(bits): both for bits in (8, 4)}}
    slower = registered_speed.slower_costs(replace(costs, gammas=gammas), length)
    return on_link(slower, hosts.hosts, hosts.ranks_per_host, _link(setting))


def _link(setting: Setting) -> Link:
    bits_per_s = parse_rate(setting.lab.rate)
    assert bits_per_s is not None
    return Link(bits_per_s / 8, parse_delays(setting.lab.latency, "none")[0])


def _step(setting: Setting, line: Timeline, costs: Costs) -> tuple[float, float, float]:
    """Returns the seconds of a mean step, and those at the ends of what is known of the link."""
    assert costs.terms is not None
    usual, least, most = (
        _seconds(setting, line, costs.at(factors))
        for factors in (costs.terms.usual, costs.terms.least, costs.terms.most)
    )
    return usual, least, most


def _seconds(setting: Setting, line: Timeline, costs: Costs) -> float:
    """Returns the seconds of a mean step; of local steps, those from one average to the next over their number."""
    hosts = setting.lab.of
    method = setting.way.method(hosts.ranks_per_host)
    if setting.way.every == 1:
        return predict(line, costs, hosts.ranks, method).step_s
    own_s = AVERAGE_BYTES * line.numel * costs.touch_s / costs.speed
    alone = replace(line.at_once(), update_s=own_s)
    return line.compute_s + predict(alone, costs, hosts.ranks, method).step_s / setting.way.every


def committed(path: Path) -> str:
    """Returns the commit that a file was last changed in."""
    git = partial(subprocess.run, cwd=path.parent, capture_output=True, text=True, check=False)
    differs = git(["git", "diff", "--quiet", "HEAD", "--", path.name]).returncode
    commit = git(["git", "log", "-1", "--format=%H", "--", path.name]).stdout.strip()
    if differs or not commit:
        raise RegisteredError(
            f"{path} is not committed as it is, so nobody could tell that it was there before the measurements; commit "
            "it, then measure"
        )
    return commit


def check_registered(number: int) -> str:
    """Returns the commit of a set's predictions, which have to be of the settings that are measured.

    Raises:
        RegisteredError: there are none, they are not committed, or they are of other settings.
    """
    predictions = read(number, "predictions")
    if not predictions:
        raise RegisteredError(f"set {number} has no predictions; run `{PROGRAM} predict --save`, and commit its file")
    said = [{key: row[key] for key in describe(setting)} for setting, row in _pairs(number, predictions)]
    if said != [describe(setting) for setting in settings_of(number)]:
        raise RegisteredError(
            f"the predictions of set {number} are of other settings than benchmarks/registered_settings.py has; take "
            "the settings back to what was predicted"
        )
    commit = committed(path_of(number, "predictions"))
    earlier = read(number, "measured").get("predictions", commit)
    if earlier != commit:
        raise RegisteredError(
            f"set {number} was measured against the predictions of commit {earlier}, and these are of {commit}; take "
            "the earlier file back"
        )
    return commit


def _pairs(number: int, predictions: dict[str, Any]) -> list[tuple[Setting, dict[str, Any]]]:
    return list(zip(settings_of(number), predictions["rows"], strict=True))


def run(options: argparse.Namespace) -> None:
    """Measure the settings of a set that were not measured yet."""
    commit = check_registered(options.set)
    found = read(options.set, "measured") or {"machine": machine(), "predictions": commit, "seconds": {}, "alone": {}}
    missing = [
        setting
        for setting in settings_of(options.set)
        if setting.number in options.only and str(setting.number) not in found["seconds"]
    ]
    for lab, group in groupby(missing, key=lambda setting: setting.lab):
        settings = list(group)
        ways = [lab.ways.index(setting.way) for setting in settings]
        task = {"set": options.set, "lab": SETS[options.set].index(lab), "ways": ways}
        where = f"{lab.model}, {lab.of.name}, {lab.rate}, {lab.latency}"
        with NetLab(lab.of.hosts, lab.rate, lab.of.ranks_per_host, latency=lab.latency) as netlab:
            seconds = _run(netlab, task, where)
        alone = [each for values in seconds[len(settings) :] for each in values]
        for setting, values in zip(settings, seconds, strict=False):  # those alone come last
            found["seconds"][str(setting.number)] = values
            found["alone"][str(setting.number)] = alone
            print(f"{setting.number}: {where}, {setting.way.name}: {1e3 * np.median(values):.0f} ms", flush=True)
        _save(options, "measured", found)


def _run(lab: NetLab, task: dict[str, Any], where: str) -> Any:
    os.environ[registered_rank.TASK] = json.dumps(task)
    return in_lab(lab, registered_rank.PROGRAM, where, TIMEOUT_S)


def _save(options: argparse.Namespace, what: str, values: dict[str, Any]) -> None:
    if options.save:
        FOLDER.mkdir(parents=True, exist_ok=True)
        path_of(options.set, what).write_text(json.dumps(values, indent=1) + "\n")


def report_of(numbers: list[int]) -> Report:
    """Returns the table of all settings of some sets that were predicted."""
    report = Report(
        "registered",
        "Steps that were predicted before they were measured",
        {
            "set": "d",
            "no.": "d",
            "model": "",
            "hosts × ranks": "",
            "link": "",
            "latency": "",
            "way": "",
            "predicted (ms)": ".0f",
            "interval (ms)": "",
            "measured (ms)": ".0f",
            "10 to 90 % (ms)": "",
            "error (%)": "+.1f",
            "inside": "",
        },
    )
    notes = []
    pictured = {}
    for number in numbers:
        predictions = read(number, "predictions")
        measured = read(number, "measured")
        seconds = measured.get("seconds", {})
        said = [chosen(number, row, measured) for row in predictions["rows"]]
        rows = [_row(number, row, seconds) for row in said]
        report.rows += rows
        report.machine = measured.get("machine", predictions["machine"])
        notes.append(in_words(number, rows, measured.get("predictions", "")))
        pictured[number] = [_point(row, seconds[str(row["number"])]) for row in said if str(row["number"]) in seconds]
    report.notes = [*notes, *NOTES]
    report.draw = partial(draw, {number: points for number, points in pictured.items() if points})
    return report


def _point(row: dict[str, Any], seconds: Sequence[float]) -> Point:
    """Returns a measured setting's place in the picture."""
    step_s = row["step_s"]
    return Point(float(np.median(seconds)) / step_s, row["shortest_s"] / step_s, row["longest_s"] / step_s)


def chosen(number: int, row: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """Returns a set's prediction at the speed that the machine had, if the prediction is a table over speeds."""
    alone = measured.get("alone", {}).get(str(row["number"]))
    if alone is None:
        return row
    length = float(np.median(alone)) / row["alone_s"]
    return {**row, **_named(_at_speed(number, row["by_length"], length))}


def _at_speed(number: int, table: Sequence[Sequence[float]], length: float) -> tuple[float, float, float]:
    """Returns the seconds of a step and of its interval's ends, where a step without communication takes ``length``
    times as long as the probe's; ``table``: see `registered_speed.at_length`."""
    faster, slower = SPEEDS.get(number, (1.0, 1.0))
    step_s, _, _ = registered_speed.at_length(table, length)
    _, shortest_s, _ = registered_speed.at_length(table, faster * length)
    _, _, longest_s = registered_speed.at_length(table, slower * length)
    return step_s, shortest_s, longest_s


def _row(number: int, row: dict[str, Any], seconds: dict[str, list[float]]) -> list[Cell]:
    """Returns a setting's row of the table; seconds: of all settings that were measured."""
    ends = f"{1e3 * row['shortest_s']:.0f} to {1e3 * row['longest_s']:.0f}"
    said = [number, row["number"], row["model"], row["hosts"], row["rate"], row["latency"], row["way"]]
    values = seconds.get(str(row["number"]))
    if values is None:
        return [*said, 1e3 * row["step_s"], ends, None, None, None, None]
    low, median, high = np.quantile(values, (0.1, 0.5, 0.9))
    inside = "yes" if _point(row, values).is_inside else "no"
    error = 100 * (row["step_s"] / median - 1)
    return [*said, 1e3 * row["step_s"], ends, 1e3 * median, f"{1e3 * low:.0f} to {1e3 * high:.0f}", error, inside]


def in_words(number: int, rows: list[list[Cell]], commit: str) -> str:
    """Returns how many of a set's settings lie inside of their intervals."""
    measured = [row for row in rows if row[-1] is not None]
    if not measured:
        return f"Set {number}: {counted(len(rows), 'setting')}, of which none was measured yet."
    inside = sum(row[-1] == "yes" for row in measured)
    errors = np.abs([float(row[-2] or 0) for row in measured])
    return (
        f"Set {number}: of {len(measured)} measured settings, {inside} lie inside of their intervals. The median of "
        f"the absolute errors is {np.median(errors):.1f} %, and the worst is {errors.max():.1f} %. The predictions are "
        f"those of commit {commit[:10]}, which is older than the measurements."
    )


NOTES = (
    "Predictions know the model, the rate and the latency of the links, and a probe of the machine on hosts whose "
    "links have no limit (`benchmarks/results/registered/`): steps without communication, kernels, and Gloo's "
    "collectives. No link with a limit was measured for them, except in a rehearsal of 11 other settings "
    "(`rehearsal.json`), after which kernels were taken from several probes, and pauses between gathers were added.",
    "Intervals begin and end at 0.92 and 1.18 times what is predicted for the ends of what is known of the link in set "
    "1, and at 0.82 and 1.25 times in sets 2 and 3: those of set 1 had been too narrow for this machine. Sets 1 and 2 "
    "have the same probe and the same model.",
    "Sets 3 and 4: predictions are tables over the speed of the machine. The median length of a step without "
    "communication, which was measured in turns with the ways of the lab, says which place of a table counts; before "
    "it was measured, the row shows the prediction at the probe's speed. Collectives inside of a host are no longer "
    "charged for processors that several ranks share.",
    "Set 4: the model knows that a process group of Gloo runs two collectives at once, and that each segment of a ring "
    "takes one latency of the link. That was measured with messages alone, at 80 Mbit/s and 20 ms and at 140 Mbit/s "
    "and 25 ms. Kernels take what they took on as many hosts and ranks. An interval begins at 0.94 times what is "
    "predicted for a machine that takes 0.8 times as long as its step without communication says, and ends at 1.12 "
    "times that of one that takes 1.25 times as long. These four numbers were chosen by the steps of sets 1 to 3.",
    "measured = median over rounds of the slowest rank's time; of local steps, a mean over the steps from one average "
    "to the next. Ways of one lab run in turns. hosts × ranks: hosts, and ranks of each; ranks share two cores. "
    "Latency: one way.",
)


def table(options: argparse.Namespace) -> None:
    """Print the table of all sets, and write its page."""
    report = report_of([number for number in SETS if read(number, "predictions")])
    report.show()
    if options.save:
        report.save(PROGRAM)


def numbers_of(text: str) -> range:
    """Returns the numbers of a text such as ``"5..12"`` or ``"7"``."""
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of numbers; write e.g. 5..12")
    return range(int(match[1]), int(match[2] or match[1]) + 1)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.split("\n")[0])
    actions = {"probe": probe, "predict": register, "measure": run, "table": table}
    parser.add_argument("action", choices=list(actions))
    parser.add_argument(
        "--set", type=int, choices=list(SETS), default=max(SETS), help="of settings (default: the last)"
    )
    parser.add_argument(
        "--only", type=numbers_of, default=range(1, 1000), help="numbers of settings, e.g. 5..12; of a probe, of hosts"
    )
    parser.add_argument("--save", action="store_true", help="write files below benchmarks/results")
    options = parser.parse_args()
    try:
        actions[options.action](options)
    except (RegisteredError, NetLabError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
