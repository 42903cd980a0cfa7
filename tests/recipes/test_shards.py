"""Images in tar shards."""

from __future__ import annotations

import io
import sys
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import v2

from recipes import data_rate
from recipes.data.shards import ShardData, Shards, samples_in
from recipes.errors import RecipeError

TRAIN, TEST, PER_SHARD = 24, 10, 5


def _pack(folder: Path, split: str, count: int) -> None:
    """Shards of grey images, whose grey is 10 times the number of the image, which is its class."""
    for start in range(0, count, PER_SHARD):
        with tarfile.open(folder / f"{split}-{start:04}.tar", "w") as tar:
            for number in range(start, min(start + PER_SHARD, count)):
                image = io.BytesIO()
                Image.fromarray(np.full((12, 12, 3), 10 * number, np.uint8)).save(image, "PNG")
                for kind, content in (("png", image.getvalue()), ("cls", str(number).encode())):
                    member = tarfile.TarInfo(f"{number:05}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pytest.importorskip("webdataset")
    _pack(tmp_path, "train", TRAIN)
    _pack(tmp_path, "val", TEST)
    return tmp_path


def _data(root: Path | None, **settings: object) -> ShardData:
    given = {"train_samples": TRAIN, "num_classes": TRAIN, "image_size": 8, "workers": 0}
    return ShardData(root=None if root is None else str(root), name="packed", batch_size=4, **{**given, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_has_whole_batches_and_evaluation_every_sample(packed: Path, workers: int) -> None:
    data = _data(packed, workers=workers)
    data.setup()
    batches = list(data.train_dataloader())
    assert len(batches) == len(data.train_dataloader()) == TRAIN // 4
    assert {tuple(images.shape) for images, _ in batches} == {(4, 3, 8, 8)}
    for images, labels in batches:
        assert (images[:, 0, 0, 0] == 10 * labels).all()  # image and label belong together
    seen = Counter(int(label) for _, labels in data.val_dataloader() for label in labels)
    assert seen == dict.fromkeys(range(TEST), 1)


def test_the_rate_of_reading_is_measured(tmp_path: Path) -> None:
    images, seconds, name = data_rate.measure(["experiment=resnet_imagenet", "data.image_size=32"], tmp_path, 0.05)
    assert images > 0
    assert seconds > 0
    assert name == "made-up images"


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_share_the_evaluation(packed: Path, ranks: int) -> None:
    files = sorted(packed.glob("val-*.tar"))
    count, sizes = -(-TEST // ranks), [samples_in(file) for file in files]
    assert sizes == [5, 5]
    seen: Counter[int] = Counter()
    for rank in range(ranks):
        own = list(Shards(files, count, (rank, ranks), v2.PILToTensor(), sizes, 4))
        assert len(own) == count
        seen.update(label for _, label in own)
    assert {*seen} == {*range(TEST)}


def test_streams_of_ranks_and_epochs_differ_and_come_again_with_the_seed(packed: Path) -> None:
    files = sorted(packed.glob("train-*.tar"))

    def labels(rank: int, seed: int) -> list[list[int]]:
        stream = Shards(files, 12, (rank, 2), v2.PILToTensor(), (seed, 8), 4)
        return [[label for _, label in stream] for _ in range(2)]

    first, second = labels(0, seed=1)
    assert first != second
    assert labels(0, seed=1) == [first, second]
    assert labels(1, seed=1)[0] != first
    assert labels(0, seed=2)[0] != first


def test_what_is_missing_is_named(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match=r"holds 0 train-\*\.tar and 0 val-\*\.tar; name a folder"):
        _data(tmp_path / "empty").prepare_data()
    with pytest.raises(RecipeError, match=r"there is no packed: data\.root is not set"):
        _data(None).setup()
    with pytest.raises(RecipeError, match=r"data\.train_samples=0 must be an integer of at least 1"):
        _data(packed, train_samples=0)
    monkeypatch.setitem(sys.modules, "webdataset", None)
    with pytest.raises(RecipeError, match="needs webdataset; install it: uv sync --extra webdataset"):
        _data(packed)
