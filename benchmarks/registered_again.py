"""What this version's model says of steps that were predicted and measured before it was made.

    python -m benchmarks.registered_again --save

That predicts nothing: the steps were known when the model was changed. See `benchmarks.registered`, whose last set is
the test of it.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.registered import SPEEDS, chosen, ends_of, read
from benchmarks.registered_settings import SETS, settings_of
from benchmarks.report import Cell, Report, command_line, present
from lightning_gqsgd.predict.device_times import codec_of_bits
from lightning_gqsgd.predict.timeline import Timeline

#: The set whose intervals the others are given: the first one that this model has predicted.
LIKE = 4


def measure(options: argparse.Namespace) -> Report:
    """Returns the table of the sets before `LIKE`."""
    report = Report(
        "registered_again",
        "Steps of earlier sets as this version's model has them, which predicts nothing",
        {
            "set": "d",
            "steps": "d",
            "inside, registered": "d",
            "error, registered (%)": ".1f",
            "width, registered (%)": ".0f",
            "inside, now": "d",
            "error, now (%)": ".1f",
            "width, now (%)": ".0f",
        },
        notes=[
            "These steps were known when the model was changed: they are what it was made with, and no test of it. "
            "registered: what had been committed before the steps were measured. now: the same probes, with this "
            f"version's model and the intervals of set {LIKE}.",
            "error: median of the absolute errors. width: of the interval over the predicted step, the median.",
        ],
        machine=read(1, "measured")["machine"],
    )
    report.rows = [_row(number) for number in SETS if number < LIKE]
    return report


def _row(number: int) -> list[Cell]:
    """Returns a set's row of the table."""
    measured = read(number, "measured")
    medians = [float(np.median(measured["seconds"][str(setting.number)])) for setting in settings_of(number)]
    rows = [chosen(number, row, measured) for row in read(number, "predictions")["rows"]]
    registered = [(row["step_s"], row["shortest_s"], row["longest_s"]) for row in rows]
    return [number, len(rows), *_judged(registered, medians), *_judged(_now(number), medians)]


def _now(number: int) -> list[tuple[float, float, float]]:
    """Returns the seconds of the steps of a set and of their intervals' ends, at the speed that the machine had."""
    measured = read(number, "measured")
    probed = read(number, "probe")
    for found in probed["hosts"].values():  # until set 2, codes of 2 bits were companded ones
        gammas = found["probe"]["costs"]["gammas"]
        gammas.setdefault(codec_of_bits(2), gammas.get("companded/2"))
    faster, slower = SPEEDS[LIKE]
    made = []
    for setting in settings_of(number):
        line = Timeline.from_dict(probed["hosts"][setting.lab.of.name]["timelines"][setting.lab.model])
        alone = measured.get("alone", {}).get(str(setting.number), [line.compute_s])
        length = float(np.median(alone)) / line.compute_s
        least, usual, most = (ends_of(setting, line, probed, factor * length) for factor in (faster, 1.0, slower))
        made.append((usual[0], least[1], most[2]))
    return made


def _judged(rows: list[tuple[float, float, float]], medians: list[float]) -> list[Cell]:
    """Returns how many measured steps lie inside, the median error and the median width, both in percent."""
    pairs = list(zip(rows, medians, strict=True))
    inside = sum(shortest <= took <= longest for (_, shortest, longest), took in pairs)
    errors = [100 * abs(step / took - 1) for (step, _, _), took in pairs]
    widths = [100 * (longest - shortest) / step for step, shortest, longest in rows]
    return [inside, float(np.median(errors)), float(np.median(widths))]


if __name__ == "__main__":
    present(command_line(__doc__), measure)
