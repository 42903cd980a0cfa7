from __future__ import annotations

import os
import pwd
import socket
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from recipes.data import cifar10, image_cache
from recipes.data.augmentation import augment, hashed
from recipes.data.cifar10 import Cifar10Data
from recipes.data.click_features import mixed
from recipes.data.digits import DigitsData
from recipes.data.sources import cache_folder, unreachable
from recipes.data.splits import stratified
from recipes.errors import RecipeError
from workloads.digits import load_digits
from workloads.images import ImageSet


def _cifar(tmp_path: Path, **settings: Any) -> Cifar10Data:
    defaults: dict[str, Any] = {
        "name": "cifar10",
        "batch_size": 4,
        "image_size": 32,
        "channels": 3,
        "num_classes": 3,
        "shift": 4,
        "flip": True,
        "download": False,
        "cache_dir": str(tmp_path / "cache"),
    }
    return Cifar10Data(**{**defaults, **settings})


def _ready(data: Cifar10Data | DigitsData) -> ImageSet:
    data.prepare_data()
    data.setup()
    return data.splits


# --- digits ----------------------------------------------------------------------------------------------------------


def test_digits_split_is_fixed_and_stratified() -> None:
    images = load_digits("digits", 8, 1)
    assert images.train_images.shape == (1437, 8, 8, 1)
    assert images.test_images.shape == (360, 8, 8, 1)
    assert images.train_images.dtype == np.uint8
    assert images.train_images.max() == 255
    assert np.ptp(np.bincount(images.test_labels)) <= 2
    again = load_digits("digits", 8, 1)
    assert np.array_equal(images.test_images, again.test_images)


def test_digits_grow_to_coloured_32x32() -> None:
    images = load_digits("digits", 32, 3)
    assert images.train_images.shape == (1437, 32, 32, 3)
    assert np.array_equal(images.train_images[..., 0], images.train_images[..., 2])


def test_batches_are_normalised_channels_first() -> None:
    data = DigitsData("digits", batch_size=1437, image_size=8, channels=1, num_classes=10)
    _ready(data)
    batch = next(iter(data.train_dataloader()))
    images, labels = data.on_after_batch_transfer(batch, 0)
    assert images.shape == (1437, 1, 8, 8)
    assert labels.dtype == torch.int64
    assert abs(float(images.mean())) < 0.01
    assert float(images.std()) == pytest.approx(1, abs=0.01)


def test_images_that_are_kept_for_validation_are_not_trained_on_and_the_test_split_stays_apart() -> None:
    def ready(val_samples: int | float | None) -> DigitsData:
        data = DigitsData("digits", 64, image_size=8, channels=1, num_classes=10, val_samples=val_samples)
        _ready(data)
        return data

    def images_of(loader: DataLoader) -> set[bytes]:
        return {image.numpy().tobytes() for batch in loader for image in batch[0]}

    whole, data = ready(None), ready(200)
    assert data.train_count == 1437 - 200
    everything = {image.tobytes() for image in whole.splits.train_images}
    kept = images_of(data.val_dataloader())
    trained = {image.tobytes() for image in data.splits.train_images}
    assert len(kept) == 200
    assert not kept & trained
    assert kept | trained == everything
    assert images_of(data.test_dataloader()) == images_of(whole.test_dataloader()) == images_of(whole.val_dataloader())
    assert ready(0.1).train_count == 1437 - 144
    assert ready(1e-4).train_count == 1437 - 1


@pytest.mark.parametrize("count", [0, -1, 1437, 5000, 0.0, -0.1, 0.9999, 1.0, 100.5])
def test_a_part_for_validation_that_leaves_nothing_is_refused(count: int | float) -> None:
    data = DigitsData("digits", 64, image_size=8, channels=1, num_classes=10, val_samples=count)
    with pytest.raises(
        RecipeError, match=rf"data\.val_samples={count} is out of range: 1 to 1436, of 1437 training samples"
    ):
        data.setup()


def test_too_few_samples_for_a_step_are_refused() -> None:
    data = DigitsData("digits", batch_size=64, image_size=8, channels=1, num_classes=10, train_samples=50)
    _ready(data)
    with pytest.raises(RecipeError, match=r"50 training samples .*data\.batch_size=64"):
        data.train_dataloader()


def test_other_shape_or_classes_than_configured_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"set data\.num_classes=10"):
        _ready(DigitsData("digits", batch_size=8, image_size=8, channels=1, num_classes=7))
    with pytest.raises(RecipeError, match="setup"):
        _ = DigitsData("digits", batch_size=8, image_size=8, channels=1, num_classes=10).splits


# --- subsets ---------------------------------------------------------------------------------------------------------


def test_stratified_parts_keep_proportions_and_nest() -> None:
    labels = np.repeat(np.arange(4), [400, 200, 100, 100])
    some, more = stratified(labels, 80, "data.train_samples"), stratified(labels, 200, "data.train_samples")
    assert np.bincount(labels[some]).tolist() == pytest.approx([40, 20, 10, 10], abs=1)
    assert np.bincount(labels[more]).tolist() == pytest.approx([100, 50, 25, 25], abs=1)
    assert set(some) <= set(more)
    assert len(set(some)) == 80


@pytest.mark.parametrize("count", [0, 11])
def test_impossible_parts_are_refused(count: int) -> None:
    with pytest.raises(RecipeError, match=rf"data\.test_samples={count} is out of range: 1 to 10"):
        stratified(np.zeros(10, dtype=np.int64), count, "data.test_samples")


# --- augmentation ----------------------------------------------------------------------------------------------------


def test_augmentation_depends_on_seed_epoch_and_image_only() -> None:
    images = torch.randint(0, 256, (8, 6, 6, 3), dtype=torch.uint8)
    indices = torch.arange(8)

    def draw(rows: Any = slice(None), seed: int = 0, epoch: int = 0) -> torch.Tensor:
        return augment(images[rows], indices[rows], seed=seed, epoch=epoch, shift=2, flip=True)

    assert torch.equal(draw(), draw())
    assert torch.equal(draw([5, 2]), draw()[[5, 2]])
    assert not torch.equal(draw(), draw(epoch=1))
    assert not torch.equal(draw(), draw(seed=1))


def test_augmentation_shifts_and_mirrors() -> None:
    image = torch.zeros(1, 5, 5, 1, dtype=torch.uint8)
    image[0, 2, 2] = 1
    many = augment(image.expand(2000, -1, -1, -1), torch.arange(2000), seed=0, epoch=0, shift=2, flip=False)
    rows, columns = many[..., 0].nonzero()[:, 1:].unbind(1)
    assert len(rows) == 2000  # shifts by at most 2 never lose the middle
    counts = torch.bincount(rows * 5 + columns, minlength=25)
    assert counts.min() > 40  # 25 places, 80 each expected
    assert counts.max() < 130
    image[0, 2, 2], image[0, 2, 4] = 0, 1
    mirrored = augment(image.expand(2000, -1, -1, -1), torch.arange(2000), seed=0, epoch=0, shift=0, flip=True)
    assert 900 < int(mirrored[:, 2, 0, 0].sum()) < 1100


def test_alternating_mirror_images_are_those_of_every_second_epoch() -> None:
    images = torch.randint(0, 256, (400, 4, 6, 3), dtype=torch.uint8)

    def draw(epoch: int, seed: int = 0) -> torch.Tensor:
        drawn = augment(images, torch.arange(400), seed=seed, epoch=epoch, shift=0, flip="alternating")
        return (drawn != images).any((1, 2, 3))  # which images are mirrored

    assert torch.equal(draw(1), ~draw(0))
    assert torch.equal(draw(2), draw(0))
    assert not torch.equal(draw(0, seed=1), draw(0))
    assert 150 < int(draw(0).sum()) < 250


@pytest.mark.parametrize("shift", [1, 3])
def test_mirrored_edges_are_those_of_numpys_reflection(shift: int) -> None:
    images = torch.randint(0, 256, (50, 4, 5, 3), dtype=torch.uint8)
    shifted = augment(images, torch.arange(50), seed=0, epoch=0, shift=shift, flip=False, edges="mirrored")
    for image, found in zip(images.numpy(), shifted.numpy(), strict=True):
        padded = np.pad(image, ((shift, shift), (shift, shift), (0, 0)), mode="reflect")
        windows = [
            padded[row : row + 4, column : column + 5] for row, column in np.ndindex(2 * shift + 1, 2 * shift + 1)
        ]
        assert any(np.array_equal(window, found) for window in windows)
    assert len({shifted[i].numpy().tobytes() for i in range(50)}) == 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shift": -1}, r"data.shift=-1 is out of range: 0 \(none\) to 7"),
        ({"shift": 8}, r"data.shift=8 is out of range"),
        ({"flip": "sometimes"}, r"data.flip=sometimes is not one of false, true, alternating"),
        ({"edges": "white"}, r"data.edges=white is not one of black, mirrored"),
    ],
)
def test_unknown_augmentations_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        DigitsData("digits", 32, 8, 1, 10, **options)


def test_a_square_is_hidden_at_any_place_and_may_lie_outside_in_part() -> None:
    images = torch.zeros(2000, 8, 8, 1, dtype=torch.uint8)
    options: dict[str, Any] = {"seed": 0, "shift": 0, "flip": False}
    hidden = augment(images, torch.arange(2000), epoch=0, cutout=4, **options)[..., 0] > 0
    areas = hidden.sum((1, 2))
    assert int(areas.max()) == 16
    assert int(areas.min()) == 4  # a corner
    share = hidden.float().mean(0)
    assert 0.2 < share[4, 4] < 0.3  # 16 of 64 centres
    assert 0.04 < share[0, 0] < 0.15  # 6 of 64
    other = augment(images, torch.arange(2000), epoch=1, cutout=4, **options)[..., 0] > 0
    assert not torch.equal(hidden, other)
    assert torch.equal(augment(images[5:6], torch.tensor([5]), epoch=0, cutout=4, **options)[0, ..., 0] > 0, hidden[5])


def test_a_square_that_is_larger_than_the_image_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"data.cutout=9 is out of range: 0 \(none\) to data.image_size=8"):
        DigitsData("digits", 32, 8, 1, 10, cutout=9)


def test_augmentation_without_shift_and_flip_changes_nothing() -> None:
    images = torch.randint(0, 256, (4, 5, 7, 3), dtype=torch.uint8)
    assert torch.equal(augment(images, torch.arange(4), seed=3, epoch=9, shift=0, flip=False), images)


def test_hashes_are_splitmix64s() -> None:
    """Twice, and the second time without the generator's step; the sign bit is left out."""
    first = mixed(np.array([0, 1], dtype=np.uint64))
    expected = mixed(first - np.uint64(0x9E3779B97F4A7C15)) % np.uint64(2**63)
    assert hashed(torch.tensor([0, 1]), 0).tolist() == expected.tolist()


# --- CIFAR-10 from files ---------------------------------------------------------------------------------------------


def test_folder_and_archive_give_the_same_images(pictures: Path, archive: Path, tmp_path: Path) -> None:
    folder = _ready(_cifar(tmp_path, root=str(pictures)))
    packed = _ready(_cifar(tmp_path, root=str(archive)))
    assert folder.classes == packed.classes == ("blue", "green", "red")
    assert np.array_equal(folder.train_images, packed.train_images)
    assert np.array_equal(folder.test_labels, packed.test_labels)
    assert folder.train_images.shape == (36, 32, 32, 3)
    brightest = folder.train_images.mean((1, 2)).argmax(1)
    assert np.array_equal(2 - brightest, folder.train_labels)


def test_members_are_never_extracted(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("extract", "extractall"):
        monkeypatch.setattr(tarfile.TarFile, name, lambda *_: pytest.fail("extracted to disk"))
    _ready(_cifar(tmp_path, root=str(archive)))
    assert not list(tmp_path.rglob("escaped.jpg"))


def test_decoding_happens_once_until_the_archive_changes(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Path] = []
    original = image_cache.decode

    def counting(path: Path, *rest: Any) -> ImageSet:
        decoded.append(path)
        return original(path, *rest)

    monkeypatch.setattr(image_cache, "decode", counting)
    first = _ready(_cifar(tmp_path, root=str(archive)))
    second = _ready(_cifar(tmp_path, root=str(archive)))
    assert len(decoded) == 1
    assert np.array_equal(first.train_images, second.train_images)
    os.utime(archive, (1, 1))
    _ready(_cifar(tmp_path, root=str(archive)))
    assert len(decoded) == 2


def test_first_images_are_of_several_classes(pictures: Path, tmp_path: Path) -> None:
    images = _ready(_cifar(tmp_path, root=str(pictures)))
    assert len(set(images.train_labels[:12])) == 3


def test_images_of_another_size_are_resized(pictures: Path, tmp_path: Path) -> None:
    assert _ready(_cifar(tmp_path, root=str(pictures), image_size=16)).test_images.shape == (12, 16, 16, 3)
    assert _ready(_cifar(tmp_path, root=str(pictures), channels=1)).test_images.shape == (12, 32, 32, 1)


@pytest.mark.parametrize("kept", [0, 1000])
def test_damaged_cache_names_the_remedy(archive: Path, tmp_path: Path, kept: int) -> None:
    _ready(_cifar(tmp_path, root=str(archive)))
    (cached,) = (tmp_path / "cache").glob("*.npz")
    cached.write_bytes(cached.read_bytes()[:kept])
    with pytest.raises(RecipeError, match="delete it"):
        _ready(_cifar(tmp_path, root=str(archive)))


def test_truncated_archive_is_refused(archive: Path, tmp_path: Path) -> None:
    archive.write_bytes(archive.read_bytes()[:-2000])
    with pytest.raises(RecipeError, match="is the download complete"):
        _ready(_cifar(tmp_path, root=str(archive)))


def test_broken_image_is_refused(pictures: Path, tmp_path: Path) -> None:
    (pictures / "train" / "red" / "0003.jpg").write_bytes(b"no image")
    with pytest.raises(RecipeError, match=r"train/red cannot be decoded"):
        _ready(_cifar(tmp_path, root=str(pictures)))


def test_class_without_test_images_is_refused(pictures: Path, tmp_path: Path) -> None:
    for file in (pictures / "test" / "green").iterdir():
        file.unlink()
    with pytest.raises(RecipeError, match="no images in test/green"):
        _ready(_cifar(tmp_path, root=str(pictures)))


@pytest.mark.parametrize("name", ["absent", "empty", "file.zip"])
def test_a_root_that_is_nothing_known_is_an_error_whatever_fallback_says(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.zip").write_bytes(b"")
    with pytest.raises(RecipeError, match=r"data\.root=.*name it with data\.root"):
        _cifar(tmp_path, root=str(tmp_path / name), fallback=True).prepare_data()


def test_incomplete_torchvision_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(RecipeError, match="incomplete or damaged"):
        _cifar(tmp_path, root=str(tmp_path)).prepare_data()


# --- CIFAR-10 that is nowhere ----------------------------------------------------------------------------------------


def test_fallback_says_so_and_changes_the_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = _cifar(tmp_path, num_classes=10)
    data.prepare_data()
    assert data.data_name == "digits32 (fallback)"
    message = capsys.readouterr().err
    assert "CIFAR-10 is not here" in message
    assert "digits32 (fallback)" in message
    assert "data.root=PATH" in message
    data.setup()
    assert data.splits.name == "digits32 (fallback)"
    assert data.splits.train_images.shape == (1437, 32, 32, 3)
    data.prepare_data()
    assert not capsys.readouterr().err  # once


def test_processes_that_did_not_prepare_find_the_fallback_too(tmp_path: Path) -> None:
    data = _cifar(tmp_path, num_classes=10)
    data.setup()
    assert data.data_name == "digits32 (fallback)"


def test_digits_are_not_mirrored(tmp_path: Path) -> None:
    data = _cifar(tmp_path, num_classes=10, flip=True)
    _ready(data)
    assert data._augment["flip"] is False


def test_without_fallback_absence_is_an_error(tmp_path: Path) -> None:
    data = _cifar(tmp_path, fallback=False)
    with pytest.raises(RecipeError, match=r"there is no CIFAR-10: .*data\.root=PATH"):
        data.prepare_data()
    with pytest.raises(RecipeError, match="there is no CIFAR-10"):
        data.setup()


@pytest.fixture
def silent_server() -> Iterator[str]:
    """URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/cifar.tar.gz"


def test_a_network_that_never_answers_does_not_hang(
    silent_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar10.CIFAR10, "url", silent_server)
    data = _cifar(tmp_path, num_classes=10, download=True, download_timeout=0.3)
    finished = threading.Event()
    threading.Thread(target=lambda: (data.prepare_data(), finished.set()), daemon=True).start()
    assert finished.wait(20)
    assert data.data_name == "digits32 (fallback)"


def test_a_name_look_up_that_blocks_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = threading.Event()

    def look_up(*_: Any, **__: Any) -> None:
        blocked.wait(30)
        raise OSError("released")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert unreachable("http://cifar.invalid/", timeout=0.2) == "no answer within 0.2 s"
    blocked.set()


def test_a_refused_connection_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    reason = unreachable(f"http://127.0.0.1:{port}/", timeout=5)
    assert reason is not None
    assert "refused" in reason


# --- the real thing --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("GQSGD_DATA"), reason="needs the real data: set GQSGD_DATA")
def test_real_cifar10_archive(tmp_path: Path) -> None:
    root = Path(os.environ["GQSGD_DATA"]) / "cifar10" / "cifar10-jpeg.tar.xz"
    images = _ready(_cifar(tmp_path, root=str(root), num_classes=10, fallback=False))
    assert images.train_images.shape == (50_000, 32, 32, 3)
    assert np.bincount(images.test_labels).tolist() == [1000] * 10
    assert images.classes[0] == "airplane"


def test_a_user_without_a_home_is_told_where_to_name_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)  # as for a user whom the system does not know

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(RecipeError, match="set HOME, or data.cache_dir=FOLDER"):
        cache_folder(None)
