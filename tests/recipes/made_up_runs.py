"""Finished runs of comparisons, with made-up figures."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from recipes.comparison.results import Run
from recipes.configuration import compose_configuration
from recipes.files import metrics_bytes
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
    """A run with a validation every 10 steps of ``step_s`` seconds and 1 MB; validation K has the loss 1 / K.

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
        "judged_by": asdict(metric),
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
    columns = [names.TRAIN_TIME, names.SAMPLES, names.MB_SENT, metric.val, names.ENCODE_S, names.DECODE_S, "step"]
    columns += [names.MESSAGE_BITS, names.REL_L2, names.TRAIN_LOSS, names.VAL_LOSS]
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for number, accuracy in enumerate(accuracies, start=1):
            time = 10 * step_s * number
            totals = {names.TRAIN_TIME: time, names.SAMPLES: 500 * number, names.MB_SENT: 10 * number}
            losses = {names.TRAIN_LOSS: 2 / number, names.VAL_LOSS: 1 / number}
            writer.writerow({**totals, **losses, metric.val: accuracy, "step": 10 * number - 1})
            if codec:
                sampled = {names.MESSAGE_BITS: 6.0, names.REL_L2: rel_l2 * (1.5 if number <= 3 else 0.5)}
                seconds = {names.ENCODE_S: step_s / 10, names.DECODE_S: step_s / 20}
                writer.writerow({**seconds, **sampled, "step": 10 * number - 1})
    (folder / "result.json").write_text(json.dumps({**facts, "metrics_bytes": metrics_bytes(folder)}))
    return Run.load(folder)


def made_up_folder(
    folder: Path, *overrides: str, accuracies: list[float], step_s: float = 0.1, device: str = "a GPU", ended: int = 0
) -> Path:
    """The folder of a finished run as `run.py` leaves it, without weights.

    Args:
        folder: the folder.
        overrides: command line of the run; two processes on each node where it names no number.
        accuracies: of each validation.
        step_s: seconds of a step.
        device: what the run has found.
        ended: when the run ended, in seconds.
    """
    config = OmegaConf.to_container(compose_configuration(overrides), resolve=True)
    assert isinstance(config, dict)
    strategy, seed, hardware = config["strategy"]["name"], config["seed"], config["hardware"]
    made_up_run(folder, accuracies, step_s, seed, codec=strategy != "ddp", final=accuracies[-1])
    (folder / "hparams.yaml").write_text(yaml.safe_dump({**config, "machine": {"device": device}}))
    nodes, devices = config["trainer"]["num_nodes"], config["trainer"]["devices"]
    devices = devices if isinstance(devices, int) else 2
    found = {"profile": hardware["name"], "nodes": nodes, "devices": devices, "device": device}
    kept = {name: hardware[name] for name in ("rate", "link") if name in hardware}
    file = folder / "result.json"
    facts = {
        **json.loads(file.read_text()),
        **{"title": config["title"], "data": config["data"]["name"], "model": config["model"]["name"]},
        **{"strategy": strategy, "hardware": {**found, **kept, "env": {}}, "diverged": None},
        **{"processes": nodes * devices, "nodes": nodes, "device": device, "parameters": 1000},
        "ended": datetime.fromtimestamp(ended, timezone.utc).isoformat(),
    }
    file.write_text(json.dumps(facts))
    return folder
