"""scikit-learn's digits as a data module."""

from __future__ import annotations

from recipes.data.images import ImageDataModule
from workloads.digits import load_digits
from workloads.images import ImageSet


class DigitsData(ImageDataModule):
    """The digits of `workloads.digits`, with the arguments of `ImageDataModule`."""

    def load(self) -> ImageSet:
        """See `DataInMemory.load`."""
        return load_digits(self.data_name, self.image_size, self.channels)
