"""How many images a core reads: ``python recipes/data_rate.py experiment=resnet_imagenet data.root=PATH``.

One process decodes and transforms training images as in a training, on one thread. Its processor seconds are counted,
so that other programs do not matter. Without ``data.root``, the images are made up: 500 x 375 pixels of smooth noise.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `recipes` is importable from every folder

#: Images that are made up of each of two classes, and their size in pixels.
MADE_UP, SIZE = 64, (500, 375)
#: Seconds of reading before the measurement, and of the measurement.
WARM_S, MEASURED_S = 1.0, 10.0


def main(arguments: Sequence[str]) -> int:
    """Measure, and print a line; returns the exit code."""
    from recipes.launch.command_line import refusals_in_one_line

    with refusals_in_one_line(), tempfile.TemporaryDirectory() as folder:
        images, seconds, name = measure(arguments, Path(folder), MEASURED_S)
    print(f"{images / seconds:.0f} images/s per core: {images} images of {name} in {seconds:.1f} processor seconds")
    return 0


def measure(arguments: Sequence[str], folder: Path, seconds: float) -> tuple[int, float, str]:
    """Read training images for about so many processor seconds; those that are made up go to an empty folder.

    Returns their number, the processor seconds, and the name of the data.
    """
    from recipes.errors import RecipeError
    from recipes.overrides import composed

    cfg = composed(arguments)
    if "root" not in cfg.data or "workers" not in cfg.data:
        raise RecipeError(
            f"data={cfg.data.name} is not a folder of images; name an experiment that reads one, "
            "e.g. experiment=resnet_imagenet"
        )
    words = ["data.workers=0"]
    if cfg.data.root is None:
        make_up(folder)
        words += [f"data.root='{folder}'", "data.num_classes=2", "data.name='made-up images'"]
    cfg = composed([*(word for word in arguments if not word.startswith("data.workers=")), *words])
    import torch

    from recipes.training.building import build_data

    torch.set_num_threads(1)
    data = build_data(cfg.data)
    data.batch_size = min(data.batch_size, 16)  # so that a batch takes less than a second
    data.prepare_data()
    data.setup("fit")
    begun, images = time.process_time(), 0
    measured_from = begun
    while True:
        for batch in data.train_dataloader():
            now = time.process_time()
            if now < begun + min(WARM_S, seconds):
                measured_from = now
                continue
            images += len(batch[1])
            if now > measured_from + seconds:
                return images, now - measured_from, data.data_name


def make_up(folder: Path) -> None:
    """Write an image folder of two classes."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
            for number in range(MADE_UP if split == "train" else 1):
                coarse = Image.fromarray(rng.integers(0, 256, (SIZE[1] // 5, SIZE[0] // 5, 3), dtype=np.uint8))
                coarse.resize(SIZE, Image.Resampling.BICUBIC).save(folder / split / name / f"{number}.jpg", quality=90)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
