"""Reads what W&B has written offline."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class WandbFile:
    """The records of one run's ``.wandb`` file.

    Attributes:
        run: the run's record: group, job type, tags, configuration.
        rows: history, one dict per row.
        step_metrics: what each metric is plotted against.
        globs: patterns that metrics were defined for.
        artifacts: their records.
        summary: the latest value of each number, with what was set at the end.
    """

    def __init__(self, file: Path) -> None:
        records = list(_records(file))
        (self.run,) = (record.run for record in records if record.HasField("run"))
        self.rows: list[dict[str, Any]] = [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.HasField("history")
        ]
        metrics = [record.metric for record in records if record.HasField("metric")]
        self.step_metrics = {metric.name: metric.step_metric for metric in metrics if metric.name}
        self.globs = [metric.glob_name for metric in metrics if metric.glob_name]
        self.artifacts = [
            record.artifact if record.HasField("artifact") else record.request.log_artifact.artifact
            for record in records
            if record.HasField("artifact") or record.request.HasField("log_artifact")
        ]
        self.summary: dict[str, Any] = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for record in records
            if record.HasField("summary")
            for item in record.summary.update
        }
        self._updates = [(self.run.config.update), *(r.config.update for r in records if r.HasField("config"))]

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, with what was added later."""
        config: dict[str, Any] = {}
        for update in self._updates:
            config |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in update}
        return config


def read_run(folder: Path) -> WandbFile:
    """The only offline run below ``folder``/wandb."""
    (file,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    return WandbFile(file)


def _records(file: Path) -> Iterator[Any]:
    """LevelDB's log format, blocks of 32 KiB, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    contents = file.read_bytes()
    assert contents[:4] == b":W&B"
    place, record = 7, b""
    while place + 7 <= len(contents):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", contents, place)
        part = contents[place + 7 : place + 7 + length]
        place += 7 + length
        record = part if kind in (1, 2) else record + part  # 1: whole, 2: first, 3: middle, 4: last
        if kind in (1, 4):
            message = Record()
            message.ParseFromString(record)
            yield message
