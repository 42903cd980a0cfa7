"""Residual networks for small images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock


class ResNet(nn.Module):
    """ResNet of basic blocks with a 3x3 stem and no initial pooling (He et al., arXiv 1512.03385, section 4.2).

    ``blocks=(2, 2, 2, 2), width=64`` is torchvision's resnet18 with the stem that CIFAR needs;
    ``blocks=(3, 3, 3), width=16`` is the ResNet-20 for CIFAR with projection shortcuts.

    Args:
        blocks: number of blocks of each stage; every stage after the first halves the image and doubles the channels.
        width: channels of the first stage.
        channels: channels of the images.
        num_classes: number of outputs.
    """

    def __init__(self, blocks: Sequence[int], width: int, channels: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        if not blocks or min(blocks) < 1 or width < 1:
            raise ValueError(f"model.blocks={list(blocks)}, model.width={width}: need at least one block and channel")
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        widths = [width * 2**stage for stage in range(len(blocks))]
        stages = [_stage(width, width, blocks[0], stride=1)]
        stages += [_stage(after // 2, after, n, stride=2) for after, n in zip(widths[1:], blocks[1:], strict=True)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, num_classes) of images (N, channels, height, width)."""
        logits: Tensor = self.head(self.stages(self.stem(images)))
        return logits


def _stage(before: int, after: int, blocks: int, stride: int) -> nn.Sequential:
    shortcut = None
    if stride != 1 or before != after:
        shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
    first = BasicBlock(before, after, stride, shortcut)
    return nn.Sequential(first, *(BasicBlock(after, after) for _ in range(blocks - 1)))
