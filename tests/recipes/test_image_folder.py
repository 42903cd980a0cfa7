"""Image folders that do not fit into memory, and the digits when there is none."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from PIL import Image
from torch import Tensor

from recipes.data import named_files
from recipes.data.image_folder import MEAN, STD, ImageFolderData
from recipes.data.named_files import check_stand_in
from recipes.errors import RecipeError
from recipes.measuring.metrics import ACCURACY
from recipes.tasks.image_classification import ImageClassifier
from recipes.training.train import train
from tests.recipes.conftest import run_script


def _data(root: Path | None, **settings: Any) -> ImageFolderData:
    defaults: dict[str, Any] = {
        "name": "pictures",
        "batch_size": 6,
        "root": None if root is None else str(root),
        "image_size": 32,
        "resize": 32,
        "num_classes": 3,
        "workers": 0,
    }
    return ImageFolderData(**{**defaults, **settings})


def _ready(root: Path | None, **settings: Any) -> ImageFolderData:
    data = _data(root, **settings)
    data.prepare_data()
    data.setup()
    return data


def _evaluated(data: ImageFolderData) -> tuple[Tensor, Tensor]:
    images, labels = zip(*data.val_dataloader(), strict=True)
    return torch.cat(images), torch.cat(labels)


# --- batches ---------------------------------------------------------------------------------------------------------


def test_evaluation_gives_the_files_normalised_and_mixed(pictures: Path) -> None:
    data = _ready(pictures)
    pixels, labels = _evaluated(data)
    assert pixels.dtype == torch.uint8
    assert Counter(labels.tolist()) == {0: 4, 1: 4, 2: 4}
    assert len(set(labels[:6].tolist())) == 3  # in the order of the files, it would be 2
    images, _ = data.on_after_batch_transfer((pixels, labels), 0)
    assert images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)
    expected: Counter[bytes] = Counter()
    for file in (pictures / "test").glob("*/*.jpg"):
        with Image.open(file) as picture:
            expected[np.asarray(picture).tobytes()] += 1
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    found = (255 * (images * std + mean)).round().to(torch.uint8).permute(0, 2, 3, 1)
    assert Counter(image.contiguous().numpy().tobytes() for image in found) == expected


@pytest.mark.parametrize("split", ["train", "test"])
def test_labels_are_the_classes_in_alphabetical_order(pictures: Path, split: str) -> None:
    data = _ready(pictures, batch_size=12)
    images, labels = next(iter(data.train_dataloader() if split == "train" else data.val_dataloader()))
    brightest = images.float().mean((2, 3)).argmax(1)
    assert torch.equal(2 - brightest, labels)


def test_workers_evaluate_the_same_and_augment_anew(pictures: Path) -> None:
    alone, helped = _ready(pictures), _ready(pictures, workers=1)
    (images, labels), (same_images, same_labels) = _evaluated(alone), _evaluated(helped)
    assert torch.equal(images, same_images)
    assert torch.equal(labels, same_labels)
    loader = helped.train_dataloader()
    assert loader.persistent_workers
    first, second = ({image.numpy().tobytes() for images, _ in loader for image in images} for _ in range(2))
    assert len(first) == len(second) == 36
    assert not first & second


def test_augmentation_follows_torchs_generator(pictures: Path) -> None:
    data = _ready(pictures)

    def epoch(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.cat([images for images, _ in data.train_dataloader()])

    assert torch.equal(epoch(0), epoch(0))
    assert not torch.equal(epoch(0), epoch(1))


def test_evaluation_takes_the_middle(tmp_path: Path) -> None:
    pixels = np.zeros((40, 80, 3), dtype=np.uint8)
    pixels[10:30, 30:50] = 255  # half the height, in the middle
    for split in ("train", "val"):
        (tmp_path / split / "only").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / split / "only" / "wide.png")
    settings = {"num_classes": 1, "batch_size": 1, "image_size": 16}
    (image,), _ = _evaluated(_ready(tmp_path, resize=32, **settings))
    assert image.shape == (3, 16, 16)
    assert image[:, 1:-1, 1:-1].min() > 200
    (whole,), _ = _evaluated(_ready(tmp_path, resize=16, **settings))
    assert whole[:, :3].max() < 50
    assert _data(tmp_path, image_size=224, resize=None)._resize == 256


def test_parts_are_stratified_and_the_same_in_every_run(pictures: Path) -> None:
    data = _ready(pictures, train_samples=9, test_samples=6)
    assert data.train_count == 9
    (images, labels), (again, _) = _evaluated(data), _evaluated(_ready(pictures, test_samples=6))
    assert Counter(labels.tolist()) == {0: 2, 1: 2, 2: 2}
    assert torch.equal(images, again)
    (_, training) = next(iter(_ready(pictures, train_samples=9, batch_size=9).train_dataloader()))
    assert Counter(training.tolist()) == {0: 3, 1: 3, 2: 3}
    with pytest.raises(RecipeError, match=r"data\.train_samples=37 is out of range: 1 to 36"):
        _ready(pictures, train_samples=37)
    with pytest.raises(RecipeError, match=r"9 training samples .*data\.batch_size=10"):
        _ready(pictures, train_samples=9, batch_size=10).train_dataloader()


def test_first_of_val_validation_and_test_is_evaluated(pictures: Path) -> None:
    for name, images_per_class in (("validation", 2), ("val", 1)):
        shutil.copytree(pictures / "test", pictures / name)
        for file in (pictures / name).glob("*/*.jpg"):
            if int(file.stem) >= images_per_class:
                file.unlink()
        assert len(_evaluated(_ready(pictures))[1]) == 3 * images_per_class


def test_companions_of_archives_are_no_images(pictures: Path) -> None:
    (pictures / "train" / "red" / "._0003.jpg").write_bytes(b"attributes")
    (pictures / "train" / "red" / "notes.txt").write_text("not an image")
    assert _ready(pictures).train_count == 36


# --- worker processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "processes", "workers"), [(8, 4, 1), (2, 2, 0), (1, 4, 0)])
def test_workers_have_the_cores_that_training_leaves(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, cores: int, processes: int, workers: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    data = _ready(pictures, workers=None)
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(num_devices=processes, world_size=processes, strategy=strategy)
    data.trainer = trainer
    training, evaluation = data.train_dataloader(), data.val_dataloader()
    assert training.num_workers == evaluation.num_workers == workers
    assert training.persistent_workers == (workers > 0)
    assert not training.pin_memory
    strategy.root_device = torch.device("cuda")
    assert data.train_dataloader().pin_memory


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_broken_image_is_named(pictures: Path, workers: int) -> None:
    broken = pictures / "test" / "red" / "0003.jpg"
    broken.write_bytes(broken.read_bytes()[:400])
    with pytest.raises(RecipeError, match=rf"{broken} cannot be decoded .*; replace or remove it"):
        _evaluated(_ready(pictures, workers=workers))


def test_files_of_another_kind_are_not_opened(pictures: Path) -> None:
    postscript = pictures / "test" / "red" / "0003.jpg"
    postscript.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EOF\n")
    with pytest.raises(RecipeError, match=f"{postscript} cannot be decoded"):
        _evaluated(_ready(pictures))


def test_other_number_of_classes_is_refused(pictures: Path) -> None:
    with pytest.raises(RecipeError, match=r"pictures has 3 classes, not 1000; set data\.num_classes=3"):
        _ready(pictures, num_classes=1000)


def test_class_without_images_is_refused(pictures: Path) -> None:
    for file in (pictures / "train" / "green").iterdir():
        file.unlink()
    with pytest.raises(RecipeError, match=r"green.* in .*pictures/train; .*at least one of \.jpg"):
        _ready(pictures)


def test_class_that_is_not_evaluated_is_refused(pictures: Path) -> None:
    shutil.rmtree(pictures / "test" / "green")
    with pytest.raises(RecipeError, match="pictures/train and .*pictures/test have different classes, green"):
        _ready(pictures)


def test_evaluation_images_without_classes_are_refused(pictures: Path) -> None:
    for folder in list((pictures / "test").iterdir()):
        for file in list(folder.iterdir()):
            file.rename(pictures / "test" / f"{folder.name}{file.name}")
        folder.rmdir()
    with pytest.raises(RecipeError, match=r"class folder.* in .*pictures/test; name a folder"):
        _ready(pictures)


@pytest.mark.parametrize("name", ["absent", "empty", "half", "file.tar"])
def test_a_root_that_is_no_such_folder_is_an_error_whatever_fallback_says(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "half" / "train").mkdir(parents=True)
    (tmp_path / "file.tar").write_bytes(b"")
    message = r"is a file; unpack it" if name == "file.tar" else "does not"
    with pytest.raises(RecipeError, match=rf"data\.root=.*{name} {message}.*data\.root=PATH"):
        _data(tmp_path / name, fallback=True).prepare_data()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_size": 0}, "data.image_size=0"),
        ({"resize": 31}, "data.resize=31 is less than data.image_size=32"),
        ({"channels": 1}, "data.channels=1"),
        ({"workers": -1}, "data.workers=-1"),
        ({"batch_size": 0}, "data.batch_size=0"),
    ],
)
def test_numbers_out_of_range_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        _data(None, **settings)


# --- no folder -------------------------------------------------------------------------------------------------------


def test_fallback_says_so_and_changes_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    data = _data(None, name="imagenet", image_size=224, resize=None, num_classes=1000)
    data.prepare_data()
    assert data.data_name == "digits64 (fallback)"
    message = capsys.readouterr().err
    assert "imagenet is not here: data.root is not set" in message
    assert "'digits64 (fallback)'" in message
    assert "data.root=PATH" in message
    data.setup()
    data.prepare_data()
    assert not capsys.readouterr().err  # once
    images, labels = next(iter(data.val_dataloader()))
    assert images.shape == (6, 3, 64, 64)
    assert set(labels.tolist()) <= set(range(10))
    assert data.train_count == 1437


def test_processes_that_did_not_prepare_find_the_fallback_too() -> None:
    data = _data(None, num_classes=10)
    data.setup()
    assert data.data_name == "digits32 (fallback)"
    assert next(iter(data.train_dataloader()))[0].shape == (6, 3, 32, 32)


def test_fewer_outputs_than_digits_are_refused() -> None:
    with pytest.raises(
        RecipeError, match=r"has 10 classes, more than data\.num_classes=9; raise it, or .*data\.root=PATH"
    ):
        _ready(None, num_classes=9)


@pytest.mark.parametrize("method", ["prepare_data", "setup"])
def test_without_fallback_absence_is_an_error(method: str) -> None:
    with pytest.raises(RecipeError, match=r"there is no pictures: .*data\.root=PATH"):
        getattr(_data(None, fallback=False), method)()


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("clean_process")
def test_resnet50_for_imagenet_trains_on_the_fallback(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    cfg = composed(
        *("+exp=resnet_imagenet", "trainer.devices=1", "threads=1", "checkpoint=false", "data.workers=0"),
        *("data.batch_size=8", "data.train_samples=12", "data.test_samples=10", "trainer.max_epochs=1"),
        *("data.image_size=32", "trainer.log_every_n_steps=1"),
    )
    train(cfg, tmp_path)
    facts = json.loads((tmp_path / "result.json").read_text())
    assert facts["data"] == "digits32 (fallback)"
    assert facts["parameters"] == 25_557_032  # with all 1000 outputs
    assert facts["steps"] == 1
    assert ACCURACY.test in facts["metrics"]
    assert facts["metrics"][ACCURACY.test] <= facts["metrics"]["test/acc5"] <= 1


@pytest.mark.parametrize("accelerator", ["gpu", "auto"])
def test_digits_are_no_stand_in_on_gpus(
    composed: Callable[..., DictConfig], accelerator: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cfg = composed("+exp=resnet_imagenet")
    monkeypatch.setattr(named_files, "gpus", lambda: 1)
    with pytest.raises(RecipeError, match=r"there is no imagenet: data\.root is not set; .*data\.fallback=true"):
        check_stand_in(cfg.data, accelerator)
    check_stand_in(cfg.data, "cpu")
    check_stand_in({**cfg.data, "root": str(tmp_path)}, accelerator)
    for fallback in (True, False):  # of the latter, the data speak themselves
        check_stand_in({**cfg.data, "fallback": fallback}, accelerator)
    check_stand_in(composed("+exp=quickstart").data, accelerator)
    monkeypatch.setattr(named_files, "gpus", lambda: 0)
    check_stand_in(cfg.data, "auto")


def test_the_rate_of_imagenet_belongs_to_256_images(composed: Callable[..., DictConfig]) -> None:
    optimizer = composed("+exp=resnet_imagenet").optimizer
    assert (optimizer.lr, optimizer.scale_lr) == (0.1, 256)


def test_top_5_counts_images_whose_class_is_among_the_5_likeliest() -> None:
    task = ImageClassifier(torch.nn.Identity(), None, num_classes=100)  # type: ignore[arg-type]
    outputs = torch.arange(100.0).expand(4, -1)
    task.top5["val"].update(outputs, torch.tensor([99, 95, 94, 0]))
    assert task.top5["val"].compute() == 0.5
    assert not hasattr(ImageClassifier(torch.nn.Identity(), None, num_classes=10), "top5")  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_processes_train_on_a_folder(pictures: Path, tmp_path: Path) -> None:
    finished = run_script(
        "run.py",
        *("+exp=resnet_imagenet", "strategy=gqsgd", "model=resnet50", "model.blocks=[1,1]", "model.width=8"),
        *(f"data.root={pictures}", "data.num_classes=3", "data.image_size=16", "data.batch_size=3", "data.workers=1"),
        *("trainer.max_epochs=4", "trainer.log_every_n_steps=1", f"hydra.run.dir={tmp_path / 'run'}"),
        cwd=tmp_path,
        timeout=250,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "resnet_imagenet on imagenet" in finished.stdout
    facts = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (facts["processes"], facts["steps"], facts["train_samples"]) == (2, 24, 36)
    assert facts["bits_per_coordinate"] < 20
    assert facts["metrics"][ACCURACY.test] > 0.6  # colours; 0.33 by chance


@pytest.mark.skipif(not os.environ.get("GQSGD_DATA"), reason="needs the real data: set GQSGD_DATA")
def test_real_images_unpacked_to_a_folder(tmp_path: Path) -> None:
    taken: Counter[str] = Counter()
    archive = Path(os.environ["GQSGD_DATA"]) / "cifar10" / "cifar10-jpeg.tar.xz"
    with tarfile.open(archive, "r|*") as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            stream = tar.extractfile(member)
            if path.suffix != ".jpg" or stream is None or taken[str(path.parent)] == 20:
                continue
            taken[str(path.parent)] += 1
            file = tmp_path.joinpath(*path.parts[-3:])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(stream.read())
    data = _ready(tmp_path, num_classes=10, image_size=64, resize=None, workers=1)
    assert data.train_count == 200
    images, labels = _evaluated(data)
    assert images.shape == (200, 3, 64, 64)
    assert Counter(labels.tolist()) == dict.fromkeys(range(10), 20)
    assert sum(len(labels) for _, labels in data.train_dataloader()) == 198  # in whole batches of 6
