"""Densely connected networks: Huang et al. 2017, "Densely Connected Convolutional Networks"."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from fedaudit.models.families import MODELS
from fedaudit.models.resnet import conv


class DenseLayer(nn.Module):
    """BatchNorm, ReLU, 1×1 convolution to 4k channels, BatchNorm, ReLU, 3×3 to k: joined to what went in."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.new = nn.Sequential(
            OrderedDict(
                bn1=nn.BatchNorm2d(inputs),
                relu1=nn.ReLU(),
                conv1=conv(inputs, 4 * growth, 1),
                bn2=nn.BatchNorm2d(4 * growth),
                relu2=nn.ReLU(),
                conv2=conv(4 * growth, growth, 3),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, inputs + growth, H, W)."""
        return torch.cat([x, self.new(x)], dim=1)


@MODELS.register(
    "densenet-121",
    "DenseNet-BC of 121 layers, growth rate 32, 7x7 stem: the network of CheXNet",
    input="image",
    min_size=32,
    width=64,
    paper="Huang et al. 2017, Densely Connected Convolutional Networks (CVPR); Rajpurkar et al. 2017, CheXNet",
)
def densenet_121(input_shape: tuple[int, ...], outputs: int, w: int) -> nn.Module:
    """Return the paper's ImageNet network: w channels after the stem, growth rate w/2, blocks of 6, 12, 24, 16 layers.

    Each transition halves the channels (θ = 0.5) and the resolution.
    """
    growth, channels = max(1, w // 2), w
    features = nn.Sequential(
        OrderedDict(
            conv=conv(input_shape[0], w, 7, 2),
            bn=nn.BatchNorm2d(w),
            relu=nn.ReLU(),
            pool=nn.MaxPool2d(3, stride=2, padding=1),
        )
    )
    for block, count in enumerate((6, 12, 24, 16), start=1):
        if block > 1:
            features.add_module(
                f"transition{block - 1}",
                nn.Sequential(
                    OrderedDict(
                        bn=nn.BatchNorm2d(channels),
                        relu=nn.ReLU(),
                        conv=conv(channels, channels // 2, 1),
                        pool=nn.AvgPool2d(2),
                    )
                ),
            )
            channels //= 2
        layers = [DenseLayer(channels + i * growth, growth) for i in range(count)]
        features.add_module(f"block{block}", nn.Sequential(*layers))
        channels += count * growth
    features.add_module("last_bn", nn.BatchNorm2d(channels))
    features.add_module("last_relu", nn.ReLU())
    return nn.Sequential(
        OrderedDict(
            features=features, mean=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(channels, outputs)
        )
    )
