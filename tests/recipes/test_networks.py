from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torchvision
from torch import nn

from recipes.models.imagenet import torchvision_resnet
from recipes.tasks.schedules import make_schedule
from workloads.convnet import ConvNet, patch_cosines
from workloads.resnet import ResNet


def _parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


@pytest.mark.parametrize(
    ("name", "blocks", "bottleneck", "numel"),
    [("resnet18", (2, 2, 2, 2), False, 11_173_962), ("resnet50", (3, 4, 6, 3), True, 23_520_842)],
)
def test_a_resnet_is_torchvisions_with_another_stem(name: str, blocks: Sequence[int], bottleneck, numel: int) -> None:
    with torch.device("meta"):
        theirs = getattr(torchvision.models, name)(num_classes=10)
        theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        ours = ResNet(blocks, width=64, bottleneck=bottleneck)
    assert _parameters(ours) == _parameters(theirs) == numel
    assert sorted(p.shape for p in ours.parameters()) == sorted(p.shape for p in theirs.parameters())


@pytest.mark.parametrize(
    ("architecture", "millions"), [("resnet50", 25.557), ("resnet101", 44.549), ("wide_resnet101_2", 126.887)]
)
def test_networks_for_imagenet_have_their_published_size(architecture: str, millions: float) -> None:
    with torch.device("meta"):
        network = torchvision_resnet(architecture, num_classes=1000)
    assert _parameters(network) == pytest.approx(millions * 1e6, abs=500)


def test_blocks_of_networks_for_imagenet_start_as_the_identity_if_asked() -> None:
    last = [
        torchvision_resnet("resnet18", num_classes=7, zero_init_residual=zero).layer4[1].bn2.weight
        for zero in (False, True)
    ]
    assert [weight.detach().sum().item() for weight in last] == [512, 0]


@pytest.mark.parametrize("architecture", ["vgg16", "ResNet", "load_state_dict_from_url"])
def test_other_networks_are_refused(architecture: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.architecture='{architecture}' is not one of resnet18"):
        torchvision_resnet(architecture, num_classes=10)


def test_the_first_layer_of_the_convnet_decorrelates_patches_and_needs_no_data() -> None:
    filters = patch_cosines(3).flatten(1)
    assert torch.allclose(filters @ filters.T, torch.eye(12), atol=1e-6)
    assert torch.allclose(filters[0], torch.full((12,), 12**-0.5))  # the mean brightness
    assert filters[1:].sum(1).abs().max() < 1e-6  # the others do not see it


def test_the_convnet_has_its_size_and_starts_with_every_convolution_as_the_identity() -> None:
    network = ConvNet((64, 128, 256))
    assert _parameters(network) == 1_160_960
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    image = torch.randn(2, 64, 8, 8)
    assert torch.allclose(network.groups[0][4](image), image)
    assert "filters" not in network.state_dict()  # every process makes the same ones


@pytest.mark.parametrize("widths", [(), (64, 0)])
def test_a_convnet_without_channels_is_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"model\.widths=.* every width at least 1"):
        ConvNet(widths)


def test_resnet20_has_the_papers_size() -> None:
    network = ResNet((3, 3, 3), width=16)
    assert _parameters(network) == pytest.approx(0.27e6, rel=0.02)
    assert sum(isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3) for m in network.modules()) == 19


@pytest.mark.parametrize(("blocks", "width", "channels", "size"), [((1, 1, 1), 16, 1, 8), ((2, 2, 2, 2), 8, 3, 32)])
@pytest.mark.parametrize("bottleneck", [False, True])
def test_output_shape(blocks: tuple[int, ...], width: int, channels: int, size: int, bottleneck: bool) -> None:
    with torch.device("meta"):
        network = ResNet(blocks, width, channels, num_classes=7, bottleneck=bottleneck)
        assert network(torch.randn(2, channels, size, size)).shape == (2, 7)


def test_width_scales_the_network() -> None:
    assert _parameters(ResNet((1, 1), 8)) < _parameters(ResNet((1, 1), 16)) / 3


@pytest.mark.parametrize(("blocks", "width"), [((), 16), ((1, 0), 16), ((1,), 0)])
def test_empty_networks_are_refused(blocks: tuple[int, ...], width: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        ResNet(blocks, width)


def _rates(name: str, steps: int, warmup: float, milestones: Sequence[float] = ()) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = make_schedule(optimizer, name, steps, warmup, milestones)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("warmup", [0.1, 0.3])
def test_onecycle_is_torchs(warmup: float) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.5, total_steps=60, pct_start=warmup, cycle_momentum=False
    )
    expected = []
    for _ in range(60):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert _rates("onecycle", 60, warmup) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_cosine_rises_linearly_and_falls_towards_zero() -> None:
    rates = _rates("cosine", 100, 0.1)
    assert rates[:10] == pytest.approx([0.05 * (step + 1) for step in range(10)])
    assert rates[10] == 0.5
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.001


def test_step_is_torchs_after_the_warm_up() -> None:
    rates = _rates("step", 90, 0.0556, [0.3333, 0.6667, 0.8889])
    assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60, 80])
    expected = []
    for _ in range(90):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert rates[5:] == pytest.approx(expected[5:])


@pytest.mark.parametrize("milestones", [[], [0.5, 0.4], [0.5, 0.5], [0.1, 0.5], [0.5, 1.0]])
def test_impossible_milestones_are_refused(milestones: list[float]) -> None:
    with pytest.raises(ValueError, match=r"milestones=.*from optimizer\.warmup=0\.2 to less than 1"):
        _rates("step", 10, 0.2, milestones)


@pytest.mark.parametrize("name", ["onecycle", "cosine", "step"])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("warmup", [0.0, 0.5, 0.9])
def test_shortest_runs(name: str, steps: int, warmup: float) -> None:
    assert all(0 <= rate <= 0.5 for rate in _rates(name, steps, warmup, milestones=[0.95]))


@pytest.mark.parametrize(
    ("name", "steps", "warmup", "message"),
    [
        ("linear", 10, 0.1, "schedule='linear'"),
        ("cosine", 10, 1.0, "warmup=1.0"),
        ("cosine", float("inf"), 0.1, "max_"),
    ],
)
def test_impossible_schedules_are_refused(name: str, steps: float, warmup: float, message: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    with pytest.raises(ValueError, match=message):
        make_schedule(optimizer, name, steps, warmup)
