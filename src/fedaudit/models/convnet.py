"""Plain convolutional networks: the ConvNet of the fragmented-FL paper, and a small one for CPU audits."""

from __future__ import annotations

from collections import OrderedDict
from math import ceil, prod

from torch import nn

from fedaudit.models.families import MODELS


def _conv_bn_relu(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1),
            bn=nn.BatchNorm2d(outputs),
            relu=nn.ReLU(),
        )
    )


def _with_classifier(features: nn.Sequential, inputs: int, outputs: int) -> nn.Sequential:
    layers = OrderedDict(features=features, flatten=nn.Flatten(), fc=nn.Linear(inputs, outputs))
    return nn.Sequential(layers)


@MODELS.register(
    "convnet",
    "nine 3x3 convolutions with biases, BatchNorm and ReLU, two 3x3 max-pools, one linear layer",
    input="image",
    min_size=9,
    width=64,
    paper="Na et al. 2022, the ConvNet of the fragmented federated learning (FFL) paper",
)
def convnet(input_shape: tuple[int, ...], outputs: int, w: int) -> nn.Module:
    """Return the nine-layer ConvNet: w, 2w, 2w, 4w ×6 channels; max-pool 3×3 after the sixth and ninth convolution."""
    features = nn.Sequential()
    channels = input_shape[0]
    for i, out in enumerate([w, 2 * w, 2 * w] + [4 * w] * 6, start=1):
        features.add_module(f"layer{i}", _conv_bn_relu(channels, out))
        if i in (6, 9):
            features.add_module(f"pool{i}", nn.MaxPool2d(3))
        channels = out
    pixels = prod(n // 3 // 3 for n in input_shape[1:])
    return _with_classifier(features, channels * pixels, outputs)


@MODELS.register(
    "convnet-small",
    "six 3x3 convolutions (16 to 64 channels) with biases, BatchNorm and ReLU, one linear layer",
    input="image",
    min_size=8,
    width=16,
    paper="none: a small network on which gradient inversion is quick on a CPU",
)
def convnet_small(input_shape: tuple[int, ...], outputs: int, w: int) -> nn.Module:
    """Return the six-layer ConvNet: w, w, 2w, 2w, 4w, 4w channels, stride 2 at the third and fifth, 2×2 mean."""
    features = nn.Sequential()
    channels = input_shape[0]
    for i, (out, stride) in enumerate([(w, 1), (w, 1), (2 * w, 2), (2 * w, 1), (4 * w, 2), (4 * w, 1)], start=1):
        features.add_module(f"layer{i}", _conv_bn_relu(channels, out, stride))
        channels = out
    features.add_module("pool", nn.AvgPool2d(2))
    pixels = prod(ceil(n / 4) // 2 for n in input_shape[1:])
    return _with_classifier(features, channels * pixels, outputs)
