"""torchvision's residual networks for images of ImageNet's size."""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models import resnet

#: The networks that `torchvision_resnet` builds.
ARCHITECTURES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "wide_resnet50_2", "wide_resnet101_2")


def torchvision_resnet(architecture: str, num_classes: int, zero_init_residual: bool = False) -> nn.Module:
    """A network of torchvision for ImageNet, one of `ARCHITECTURES`, with random weights.

    ``zero_init_residual`` starts the last normalisation of each block at zero, and so the block as the identity.

    Raises:
        ValueError: an unknown architecture.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"model.architecture={architecture!r} is not one of {', '.join(ARCHITECTURES)}")
    network: nn.Module = getattr(resnet, architecture)(num_classes=num_classes, zero_init_residual=zero_init_residual)
    return network.to(memory_format=torch.channels_last)
