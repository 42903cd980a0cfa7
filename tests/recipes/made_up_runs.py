"""Finished runs of comparisons, with made-up figures."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from recipes.comparison.results import Run
from recipes.measuring import names
from recipes.measuring.metrics import ACCURACY, Metric


def made_up_run(
    folder: Path,
    accuracies: list[float],
    step_s: float = 0.1,
    seed: int = 0,
    codec: bool = False,
    final: float = 0.9,
    rel_l2: float = 0.1,
    metric: Metric = ACCURACY,
) -> Run:
    """A run with a validation every 10 steps of ``step_s`` seconds and 1 MB.

    With a codec, messages of 6 bits per coordinate and samples of 1.5 and 0.5 times ``rel_l2``, logged repeatedly.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {
        **{
            "model": "net",
            "data": "digits",
            "processes": 2,
            "nodes": 1,
            "device": "cpu",
            "samples": 500 * len(accuracies),
        },
        "metric": metric.key,
        "train_samples": 1000,
        "steps": 10 * len(accuracies),
        "train_time": 10 * step_s * len(accuracies),
        "step_s": {"median": step_s},
        "exposed_s": {"median": step_s / 4},
        "mb_sent": 10.0 * len(accuracies),
        "bits_per_coordinate": 8.5,
        "metrics": {metric.test: final},
        "seed": seed,
    }
    (folder / "result.json").write_text(json.dumps(facts))
    columns = [names.TRAIN_TIME, names.SAMPLES, names.MB_SENT, metric.val, names.ENCODE_S, names.DECODE_S, "step"]
    columns += [names.MESSAGE_BITS, names.REL_L2]
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for number, accuracy in enumerate(accuracies, start=1):
            time = 10 * step_s * number
            totals = {names.TRAIN_TIME: time, names.SAMPLES: 500 * number, names.MB_SENT: 10 * number}
            writer.writerow({**totals, metric.val: accuracy, "step": 10 * number - 1})
            if codec:
                sampled = {names.MESSAGE_BITS: 6.0, names.REL_L2: rel_l2 * (1.5 if number <= 3 else 0.5)}
                seconds = {names.ENCODE_S: step_s / 10, names.DECODE_S: step_s / 20}
                writer.writerow({**seconds, **sampled, "step": 10 * number - 1})
    return Run.load(folder)
