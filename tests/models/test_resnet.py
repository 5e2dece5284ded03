"""ResNet: its size, its FLOPs (which tell v1.5 from v1), and a block against its definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from fuseline.models.resnet import Bottleneck, ResNet, ResNetConfig


def test_resnet_50_has_torchvisions_parameters() -> None:
    with torch.device("meta"):
        model = ResNet(ResNetConfig())
    assert sum(p.numel() for p in model.parameters()) == 25_557_032
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert len(shapes) == 320
    assert shapes["layer3.0.downsample.0.weight"] == (1024, 512, 1, 1)
    assert shapes["layer4.2.bn3.running_var"] == (2048,)
    assert shapes["fc.weight"] == (1000, 2048)


def test_an_image_takes_the_4_09_billion_multiply_adds_of_v1_5() -> None:
    with torch.device("meta"):
        model, images = ResNet(ResNetConfig()), torch.empty(1, 3, 224, 224)
    with FlopCounterMode(display=False) as counter:
        model(images)
    assert round(counter.get_total_flops() / 2 / 1e6) == 4089


def test_a_block_is_three_normalized_convolutions_and_a_shortcut() -> None:
    torch.manual_seed(0)
    block = Bottleneck(6, 4, stride=2).double()
    x = torch.randn(5, 6, 8, 8, dtype=torch.float64)

    def normalized(y: torch.Tensor) -> torch.Tensor:
        mean = y.mean((0, 2, 3), keepdim=True)
        return (y - mean) / ((y - mean).square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()

    y = normalized(F.conv2d(x, block.conv1.weight)).clamp(min=0)
    y = normalized(F.conv2d(y, block.conv2.weight, stride=2, padding=1)).clamp(min=0)
    y = normalized(F.conv2d(y, block.conv3.weight))
    shortcut = normalized(F.conv2d(x, block.downsample.get_submodule("0").weight, stride=2))
    torch.testing.assert_close(block(x), (y + shortcut).clamp(min=0))


def test_the_loss_is_the_cross_entropy_of_the_logits_and_reaches_every_parameter() -> None:
    torch.manual_seed(0)
    model = ResNet(ResNetConfig(depths=(1, 2, 1, 1), width=4, num_classes=5))
    images, labels_B = torch.randn(4, 3, 64, 64), torch.tensor([0, 4, 2, 2])
    loss = model(images, labels_B)
    torch.testing.assert_close(loss, F.cross_entropy(model(images), labels_B))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
