from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hydra.core.singleton import Singleton
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from recipes import run
from recipes.comparison.results import Run
from recipes.configuration import compose_configuration
from tests.ports import free_port
from tests.recipes.made_up_runs import made_up_run

ROOT = Path(__file__).resolve().parents[2]

#: A run of some seconds: three steps per epoch, two epochs. Not fewer channels: torch 2.15.0 writes beyond its memory
#: in convolutions of 4 channels on processors without AVX-512, also with nothing of this package imported.
TINY = (
    "+exp=quickstart",
    "data.train_samples=100",
    "data.val_samples=null",
    "data.batch_size=32",
    "model.blocks=[1,1]",
    "model.width=8",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
)


@pytest.fixture
def composed() -> Callable[..., DictConfig]:
    """The configuration of a command line."""

    def make(*overrides: str) -> DictConfig:
        return compose_configuration(overrides)

    return make


@pytest.fixture
def tiny(composed: Callable[..., DictConfig]) -> Callable[..., DictConfig]:
    """Configuration of a run of some seconds in this process."""

    def make(*overrides: str) -> DictConfig:
        cfg = composed(*TINY, "trainer.devices=1", "threads=1", *overrides)
        OmegaConf.resolve(cfg)
        return cfg

    return make


@contextmanager
def restored_process() -> Iterator[None]:
    """Take back what training in this process leaves behind: environment, process group, rank, threads."""
    environment, rank, threads = dict(os.environ), rank_zero_only.rank, torch.get_num_threads()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    rank_zero_only.rank = rank
    torch.set_num_threads(threads)


@pytest.fixture
def clean_process() -> Iterator[None]:
    """See `restored_process`."""
    with restored_process():
        yield


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No W&B credentials anywhere, and W&B's files below the test's own folder."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def refusal(
    clean_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """The line that run.py writes to stderr when it refuses a command line with exit code 2, in this process."""
    hydra_state = Singleton.get_state()
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def start(*arguments: str) -> str:
        # Hydra's loggers would outlive this test.
        quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none")
        monkeypatch.setattr(sys, "argv", ["recipes/run.py", *quiet, *arguments])
        with pytest.raises(SystemExit) as stopped:
            run.start()
        assert stopped.value.code == 2
        return capsys.readouterr().err.removesuffix("\n")

    yield start
    Singleton.set_state(hydra_state)


@pytest.fixture
def variants(tmp_path: Path) -> dict[str, list[Run]]:
    """Three strategies, three seeds; gqsgd steps take 0.4 of ddp's."""
    rng = np.random.default_rng(0)
    curve = 0.95 - 0.6 * np.exp(-np.arange(1, 21) / 4)
    return {
        name: [
            made_up_run(
                tmp_path / f"{name}{seed}",
                (curve + rng.normal(0, 0.01, 20)).clip(0, 1).tolist(),
                step,
                seed,
                codec=name != "ddp",
                final=0.94 + 0.01 * seed,
            )
            for seed in range(3)
        ]
        for name, step in (("ddp", 0.5), ("gqsgd", 0.2), ("gqsgd_4bit", 0.12))
    }


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder train/CLASS/*.jpg, test/CLASS/*.jpg: 3 classes, 12 and 4 images of 32x32 each, class = colour."""
    root = tmp_path / "pictures"
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for channel, label in enumerate(("blue", "green", "red")):
            folder = root / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                image = rng.integers(0, 60, (32, 32, 3), dtype=np.uint8)
                image[..., 2 - channel] += 150
                Image.fromarray(image).save(folder / f"{number:04}.jpg")
    return root


@pytest.fixture
def archive(pictures: Path, tmp_path: Path) -> Path:
    """The same as a tar below one more folder, with a member that tries to leave it, a link and a text file."""
    path = tmp_path / "pictures.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        tar.add(pictures, arcname="data/cifar")
        for name in ("../../escaped.jpg", "notes.txt"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"oops"))
        link = tarfile.TarInfo("data/cifar/train/red/link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return path


def run_script(
    script: str, *arguments: str, cwd: Path, timeout: float = 270, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A script of recipes/ in a process of its own, without traces of an earlier launch in its environment."""
    return subprocess.run(
        [sys.executable, str(ROOT / "recipes" / script), *arguments],
        cwd=cwd,
        env={**clean_environment(), **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_ranks(
    arguments: Sequence[str], ranks: Sequence[Mapping[str, str]], *, cwd: Path, timeout: float, **environment: str
) -> None:
    """Python with these arguments on every rank of one launch, as another launcher starts it: ends well on all of them.

    Args:
        arguments: of the interpreter.
        ranks: what each rank's environment has of its own, apart from RANK.
        cwd: where they run.
        timeout: in seconds.
        **environment: what they have in common, apart from the rendezvous.
    """
    common = {"WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **environment}
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            env={**clean_environment(), **common, "RANK": str(rank), **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, own in enumerate(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(ranks), outputs


def clean_environment() -> dict[str, str]:
    """The environment without what Lightning, launchers and W&B put there."""
    launch = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in launch and not name.startswith(("PL_", "WANDB_", "TORCHELASTIC_"))
    }
