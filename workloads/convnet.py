"""A plain convolutional network that learns CIFAR-10 within minutes of two CPU cores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Edge of the patches that the first layer sees, in pixels.
PATCH = 2


class ConvNet(nn.Module):
    """Groups of two 3x3 convolutions and a pooling, behind a first layer that decorrelates small patches.

    The design follows Keller Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (arXiv 2404.00498): few layers,
    wide where images are small, pooling instead of strides, and convolutions that start as the identity. That network
    starts from the principal components of patches of the training images. Those of natural images are close to the
    cosines of a patch times sum and differences of the colours (`patch_cosines`), so this network needs no data for
    its start; a normalisation without parameters gives every component the same variance.

    Args:
        widths: channels of each group; every group halves the image.
        channels: channels of the images.
        num_classes: number of outputs.
        logit_scale: factor of the outputs. A small one lets the network begin with a large learning rate.

    Raises:
        ValueError: there is no group, or a width is less than 1.
    """

    def __init__(
        self, widths: Sequence[int], channels: int = 3, num_classes: int = 10, logit_scale: float = 1 / 9
    ) -> None:
        super().__init__()
        if not widths or min(widths) < 1:
            raise ValueError(f"model.widths={list(widths)}: needs at least one group, and every width at least 1")
        filters = patch_cosines(channels)
        self.register_buffer("filters", filters.contiguous(memory_format=torch.channels_last), persistent=False)
        self.filters: Tensor
        self.norm = nn.BatchNorm2d(len(filters), affine=False)
        befores = [2 * len(filters), *widths[:-1]]
        self.groups = nn.Sequential(*(_group(before, after) for before, after in zip(befores, widths, strict=True)))
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        self.logit_scale = logit_scale
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, num_classes) of images, float (N, channels, height, width)."""
        components = self.norm(F.conv2d(images, self.filters))
        # Both signs, because the activation behind them lets only one pass.
        features = self.groups(F.relu(torch.cat([components, -components], 1)))
        logits: Tensor = self.head(features.amax((2, 3))) * self.logit_scale
        return logits


def patch_cosines(channels: int) -> Tensor:
    """Filters that are orthonormal: cosines of a patch (DCT-II) times cosines over the channels.

    Over three colours, the cosines are their sum, red minus blue, and green against both others.

    Returns:
        float32 (channels * PATCH * PATCH, channels, PATCH, PATCH), for images of ``channels`` channels.
    """
    rows, colours = _cosines(PATCH), _cosines(channels)
    filters = torch.einsum("cd,ui,vj->cuvdij", colours, rows, rows)
    return filters.reshape(channels * PATCH * PATCH, channels, PATCH, PATCH)


def _cosines(count: int) -> Tensor:
    """The orthonormal DCT-II: row u holds the cosine of frequency u, float32 (count, count)."""
    places = torch.arange(count) + 0.5
    rows = torch.stack([torch.cos(math.pi * u * places / count) for u in range(count)])
    return rows / rows.norm(dim=1, keepdim=True)


def _group(before: int, after: int) -> nn.Sequential:
    first, second = (nn.Conv2d(channels, after, 3, padding=1, bias=False) for channels in (before, after))
    for convolution in (first, second):
        passed = convolution.weight[: convolution.in_channels]  # the filters beyond keep torch's start
        nn.init.dirac_(passed.data)
    return nn.Sequential(
        first,
        nn.MaxPool2d(2),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
        second,
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    )
