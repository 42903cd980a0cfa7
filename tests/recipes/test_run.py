"""`recipes/run.py` as users start it: real processes."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.measuring import names
from recipes.measuring.metrics import ACCURACY
from tests.recipes.conftest import ROOT, TINY, run_ranks, run_script
from tests.recipes.wandb_files import read_run


def _validations(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return [row for row in csv.DictReader(file) if row[ACCURACY.val]]


# One run of two processes is part of the default tests: that of tests/recipes/test_compare.py.
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["gqsgd", "ddp"])
def test_two_processes(tmp_path: Path, strategy: str) -> None:
    folder = tmp_path / "a folder, with = signs"
    overrides = ("data.batch_size=16", "model.width=16", f"strategy={strategy}", f"hydra.run.dir='{folder}'")
    finished = run_script("run.py", *TINY, *overrides, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "quickstart on digits" in finished.stdout
    assert finished.stdout.count("epoch 1/2") == 1  # rank 0 only
    assert str(folder / "metrics.csv") in finished.stdout
    facts = json.loads((folder / "result.json").read_text())
    assert facts["processes"] == 2
    assert facts["steps"] == 6
    assert facts["samples"] == 6 * 32
    if strategy == "ddp":
        # 6 steps, 4 bytes a coordinate, the ring's factor is 1.
        assert facts["mb_sent"] == pytest.approx(6 * 4 * facts["parameters"] / 1e6)
        assert facts["bits_per_coordinate"] == 32
    else:
        assert 8 < facts["bits_per_coordinate"] < 16  # small parameters are not compressed
        assert (
            finished.stdout.count("at 8 bits (companded, adaptive dither, blocks of 128) by gather over 2 ranks") == 1
        )
        assert finished.stdout.count("gqsgd: in 6 steps, rank 0 sent ") == 1
    assert not [path for path in folder.rglob("*") if path.is_file() and not path.stat().st_size]
    assert float(_validations(folder)[-1][names.MB_SENT]) == pytest.approx(facts["mb_sent"])
    assert (folder / "checkpoints" / "last.ckpt").is_file()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


@pytest.mark.slow
def test_processes_of_an_outside_launcher_share_one_folder_and_one_wandb_run(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    hardware = ("hardware=multi_node", "hardware.accelerator=cpu", "hardware.devices=1")
    overrides = (*TINY, "data.batch_size=16", *hardware, "strategy=ddp_bf16", "logger=wandb")
    run_ranks(
        [str(ROOT / "recipes" / "run.py"), *overrides],
        [{"LOCAL_RANK": "0", "GROUP_RANK": str(node)} for node in range(2)],
        cwd=tmp_path,
        timeout=150,
        OMP_NUM_THREADS="1",
        WANDB_MODE="offline",
        WANDB_CACHE_DIR=str(tmp_path_factory.mktemp("wandb")),
    )
    (result,) = tmp_path.rglob("result.json")
    assert result.parent.parent == tmp_path / "outputs" / "quickstart" / "ddp_bf16-seed0"
    assert [path.name for path in result.parent.parent.iterdir()] == [result.parent.name]
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    assert read_run(result.parent).run.job_type == "ddp_bf16"
    facts = json.loads(result.read_text())
    assert (facts["processes"], facts["nodes"], facts["threads"]) == (2, 2, 1)
    assert facts["bits_per_coordinate"] == 16
    assert (facts["hardware"]["profile"], facts["hardware"]["nodes"], facts["hardware"]["devices"]) == (
        "multi_node",
        2,
        1,
    )


MISTAKES = [
    (["data=cifar10", "data.root=/nowhere"], "RecipeError: data.root=/nowhere does not exist; name a folder"),
    (["strategy=gqsdg"], "RecipeError: strategy=gqsdg is not a strategy; did you mean 'gqsgd'"),
    (["strategy=gqsgd", "+strategy.reducer=ring"], "ConfigError: reducer='ring'"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_end_with_one_line_that_names_the_remedy(
    refusal: Callable[..., str], arguments: list[str], message: str
) -> None:
    line = refusal(*TINY, *arguments)
    assert line.startswith(message)
    assert "\n" not in line


@pytest.mark.slow
def test_mistakes_end_a_process_without_a_traceback(tmp_path: Path) -> None:
    for arguments, message in (MISTAKES[0], MISTAKES[-1]):
        finished = run_script("run.py", *TINY, *arguments, cwd=tmp_path)
        assert finished.returncode == 2
        assert "Traceback" not in finished.stderr
        assert finished.stderr.startswith(message)
        assert finished.stdout.startswith("run.py: one training with +exp=quickstart")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "gqsgd", "gqsgd_4bit"])
def test_quickstart_learns(tmp_path: Path, strategy: str) -> None:
    finished = run_script(
        "run.py", "+exp=quickstart", f"strategy={strategy}", f"hydra.run.dir={tmp_path}", cwd=tmp_path
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    facts = json.loads((tmp_path / "result.json").read_text())
    assert facts["metrics"][ACCURACY.test] >= 0.97


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("GQSGD_DATA"), reason="needs the real data: set GQSGD_DATA")
def test_resnet20_learns_from_the_real_archive(tmp_path: Path) -> None:
    root = Path(os.environ["GQSGD_DATA"]) / "cifar10" / "cifar10-jpeg.tar.xz"
    finished = run_script(
        "run.py",
        *("+exp=resnet_cifar", "model=resnet20", f"data.root={root}", f"data.cache_dir={tmp_path / 'cache'}"),
        *("trainer.max_steps=100", "trainer.limit_test_batches=4", "optimizer.lr=0.05", f"hydra.run.dir={tmp_path}"),
        cwd=tmp_path,
        timeout=290,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    facts = json.loads((tmp_path / "result.json").read_text())
    assert facts["data"] == "cifar10"
    assert facts["metrics"][ACCURACY.test] > 0.25  # 0.1 by chance
