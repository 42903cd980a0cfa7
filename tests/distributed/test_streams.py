"""The way of CUDA tensors over NCCL, with CPU tensors and Gloo in their places: one group for all stages, large pieces,
and the thread that brings a bucket issues all its work. The bits are those of the other way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_gqsgd.wire import communicator, pipeline
from lightning_gqsgd.wire.pipeline import Job, StreamRunner
from tests.distributed.models import means_of, trained_under
from tests.distributed.ranks import run


def _as_over_nccl() -> list[Job]:
    """Take that way from here on; returns the jobs to come."""
    jobs: list[Job] = []
    submit = StreamRunner.submit

    def noted(runner: StreamRunner, wire: Any, job: Job) -> None:
        jobs.append(job)
        submit(runner, wire, job)

    communicator.backend_for = lambda *_: "nccl"
    dist.ProcessGroupNCCL = dist.ProcessGroupGloo
    pipeline.torch.cuda.Stream = lambda *_: None
    StreamRunner.submit = noted
    return jobs


def _both_ways(rank: int, cases: list[dict[str, Any]], hooks: list[dict[str, Any]]) -> bool:
    expected = means_of(cases), trained_under(hooks)
    jobs = _as_over_nccl()
    found = means_of(cases), trained_under(hooks)
    assert len(jobs) > 20
    assert all(len(job.pieces) <= 1 for job in jobs)  # none in a job that compares cards only
    return found == expected


@pytest.mark.slow
def test_flat_reducers(tmp_path: Path) -> None:
    cases = [{"reducer": name} for name in ("two_shot", "gather", "sum", "native")]
    hooks = [{"bits": 4}, {"reducer": "sum"}, {"memory": "ef", "codec": "sign", "bits": 1}, {"memory": "diana"}]
    assert all(run(_both_ways, 2, tmp_path, cases, hooks))


@pytest.mark.slow
def test_two_levels_and_a_tree(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [{"reducer": "hierarchical", "node_size": 2}]
    hooks: list[dict[str, Any]] = [{"reducer": "hierarchical", "node_size": 2}, {"reducer": "tree"}]
    hooks[1]["codec"] = "exponential"
    assert all(run(_both_ways, 4, tmp_path, cases, hooks))
