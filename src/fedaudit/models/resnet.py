"""Residual networks: He et al. 2016, "Deep Residual Learning for Image Recognition"."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fedaudit.models.families import MODELS

PAPER = "He et al. 2016, Deep Residual Learning for Image Recognition (CVPR)"
LARGEST_SMALL_IMAGE = 64  # pixels; above, the stem of the paper's ImageNet networks divides the resolution by 4


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Return a convolution that keeps the resolution (divided by ``stride``), without bias: a BatchNorm follows."""
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)


class ResidualBlock(nn.Module):
    """``relu(residual(x) + shortcut(x))``; the shortcut is a 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, channels: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = channels * (4 if bottleneck else 1)
        self.relu = nn.ReLU()
        self.residual = nn.Sequential()
        if bottleneck:  # the stride sits on the 3×3 convolution, as in every current implementation ("v1.5")
            plan = [(inputs, channels, 1, 1), (channels, channels, 3, stride), (channels, outputs, 1, 1)]
        else:
            plan = [(inputs, channels, 3, stride), (channels, channels, 3, 1)]
        for i, (a, b, kernel, step) in enumerate(plan, start=1):
            if i > 1:
                self.residual.add_module(f"relu{i - 1}", nn.ReLU())
            self.residual.add_module(f"conv{i}", conv(a, b, kernel, step))
            self.residual.add_module(f"bn{i}", nn.BatchNorm2d(b))
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.add_module("conv", conv(inputs, outputs, 1, stride))
            self.shortcut.add_module("bn", nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, outputs, H/stride, W/stride)."""
        residual: Tensor = self.residual(x)
        return self.relu(residual + self.shortcut(x))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """Stem, stages of residual blocks that double the channels and halve the resolution, global mean, one linear layer.

    Args:
        width: channels of the first stage.
        bottleneck: 1×1, 3×3, 1×1 blocks with fourfold outputs, instead of two 3×3 convolutions.
        large_images: 7×7 stride-2 stem with max-pooling, instead of one 3×3 convolution.
    """

    def __init__(
        self, channels: int, outputs: int, width: int, blocks: Sequence[int], *, bottleneck: bool, large_images: bool
    ) -> None:
        super().__init__()
        self.conv = conv(channels, width, 7, 2) if large_images else conv(channels, width, 3)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if large_images else nn.Identity()
        self.stages = nn.Sequential()
        features = width
        for stage, count in enumerate(blocks):
            layers = nn.Sequential()
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                block = ResidualBlock(features, width * 2**stage, stride, bottleneck)
                features = width * 2**stage * (4 if bottleneck else 1)
                layers.append(block)
            self.stages.append(layers)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(features, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) -> logits (N, outputs)."""
        x = self.pool(self.relu(self.bn(self.conv(x))))
        logits: Tensor = self.fc(self.mean(self.stages(x)).flatten(1))
        return logits


def _register(
    name: str, summary: str, blocks: Sequence[int], width: int, *, bottleneck: bool = False, stem: bool = False
) -> None:
    """Register a ResNet of so many blocks a stage; ``stem``: images above 64 pixels get the ImageNet stem."""

    @MODELS.register(name, summary, input="image", min_size=8, width=width, paper=PAPER)
    def build(input_shape: tuple[int, ...], outputs: int, width: int) -> nn.Module:
        channels, *size = input_shape
        large = stem and max(size) > LARGEST_SMALL_IMAGE
        return ResNet(channels, outputs, width, blocks, bottleneck=bottleneck, large_images=large)


_CIFAR = "CIFAR ResNet, {} layers, {} to {} channels, 1x1 convolutions on the shortcuts"
_register("resnet20", _CIFAR.format(20, 16, 64), (3, 3, 3), 16)
_register("resnet20-4", _CIFAR.format(20, 64, 256) + ": ResNet20 four times as wide", (3, 3, 3), 64)
_register("resnet32", _CIFAR.format(32, 16, 64), (5, 5, 5), 16)
_register("resnet56", _CIFAR.format(56, 16, 64), (9, 9, 9), 16)
_register("resnet18", "ResNet18; images up to 64 pixels get a 3x3 stem without pooling", (2, 2, 2, 2), 64, stem=True)
_register(
    "resnet50",
    "ResNet50 (bottleneck blocks); images up to 64 pixels get a 3x3 stem without pooling",
    (3, 4, 6, 3),
    64,
    stem=True,
    bottleneck=True,
)
