"""Plain convolutional networks: the ConvNet of the fragmented-FL paper, and small ones for CPU audits."""

from __future__ import annotations

from collections import OrderedDict
from math import ceil, prod

from torch import nn

from fedaudit.models.families import MODELS

CONV_OF = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}  # by the number of axes beside the channels'
BATCH_NORM_OF = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_MEAN = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}


def _conv_bn_relu(inputs: int, outputs: int, stride: int = 1, dims: int = 2) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=CONV_OF[dims](inputs, outputs, 3, stride=stride, padding=1),
            bn=BATCH_NORM_OF[dims](outputs),
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


_SMALL_PAPER = "none: a small network on which gradient inversion is quick on a CPU"
_SMALL = "six convolutions of {} (16 to 64 channels) with biases, BatchNorm and ReLU, one linear layer"


@MODELS.register("cnn-1d", _SMALL.format("3 steps"), input="signal", min_size=8, width=16, paper=_SMALL_PAPER)
@MODELS.register("cnn-3d", _SMALL.format("3x3x3"), input="volume", min_size=8, width=16, paper=_SMALL_PAPER)
@MODELS.register(
    "convnet-small",
    "six 3x3 convolutions (16 to 64 channels) with biases, BatchNorm and ReLU, one linear layer",
    input="image",
    min_size=8,
    width=16,
    paper=_SMALL_PAPER,
)
def convnet_small(input_shape: tuple[int, ...], outputs: int, w: int) -> nn.Module:
    """Return the six-layer ConvNet: w, w, 2w, 2w, 4w, 4w channels, stride 2 at the third and fifth, mean of 2.

    Convolutions and means go over as many axes as an example has beside its channels.
    """
    dims = len(input_shape) - 1
    features = nn.Sequential()
    channels = input_shape[0]
    for i, (out, stride) in enumerate([(w, 1), (w, 1), (2 * w, 2), (2 * w, 1), (4 * w, 2), (4 * w, 1)], start=1):
        features.add_module(f"layer{i}", _conv_bn_relu(channels, out, stride, dims))
        channels = out
    features.add_module("pool", _MEAN[dims](2))
    pixels = prod(ceil(n / 4) // 2 for n in input_shape[1:])
    return _with_classifier(features, channels * pixels, outputs)
