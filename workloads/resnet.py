"""Residual networks for small images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck


class ResNet(nn.Module):
    """ResNet with a 3x3 stem and no initial pooling (He et al., arXiv 1512.03385, section 4.2).

    * ``blocks=(2, 2, 2, 2), width=64`` is torchvision's resnet18 with the stem that CIFAR-10 needs;
    * ``blocks=(3, 4, 6, 3), width=64, bottleneck=True`` is torchvision's resnet50 with that stem;
    * ``blocks=(3, 3, 3), width=16`` is the ResNet-20 for CIFAR-10 with projection shortcuts.

    Args:
        blocks: number of blocks of each stage; every stage after the first halves the image and doubles the channels.
        width: channels of the first stage, at least 1.
        channels: channels of the images.
        num_classes: number of outputs.
        bottleneck: True for bottleneck blocks, with four times the channels at their ends; False for basic blocks.

    Raises:
        ValueError: a stage has no block, or the width is less than 1.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        width: int,
        channels: int = 3,
        num_classes: int = 10,
        bottleneck: bool = False,
    ) -> None:
        super().__init__()
        if not blocks or min(blocks) < 1 or width < 1:
            raise ValueError(
                f"model.blocks={list(blocks)}, model.width={width}: every stage needs at least one block, and the "
                "width has to be at least 1"
            )
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        block = Bottleneck if bottleneck else BasicBlock
        stages, before = [], width
        for stage, count in enumerate(blocks):
            stages.append(_stage(block, before, width * 2**stage, count, stride=1 if stage == 0 else 2))
            before = width * 2**stage * block.expansion
        self.stages = nn.Sequential(*stages)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, num_classes) of images, float (N, channels, height, width)."""
        logits: Tensor = self.head(self.stages(self.stem(images)))
        return logits


def _stage(
    block: type[BasicBlock] | type[Bottleneck], before: int, width: int, count: int, stride: int
) -> nn.Sequential:
    """``count`` blocks, the first of which goes from ``before`` channels to those of the stage."""
    after = width * block.expansion
    shortcut = None
    if stride != 1 or before != after:
        shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
    first = block(before, width, stride, shortcut)
    return nn.Sequential(first, *(block(after, width) for _ in range(count - 1)))
