"""Small networks: DLG's LeNet, and the models of tables (any input is flattened)."""

from __future__ import annotations

from collections import OrderedDict
from math import ceil, prod

from torch import nn

from fedaudit.models.families import MODELS


@MODELS.register(
    "lenet",
    "three 5x5 convolutions of 12 channels with sigmoids, one linear layer (twice differentiable)",
    input="image",
    min_size=4,
    width=12,
    paper="Zhu et al. 2019, Deep Leakage from Gradients (NeurIPS)",
)
def lenet(input_shape: tuple[int, ...], outputs: int, width: int | None) -> nn.Module:
    """Return DLG's LeNet: strides 2, 2, 1, no BatchNorm; DLG initialises it with the scheme ``uniform``."""
    channels, height, breadth = input_shape
    w = 12 if width is None else width
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, w, 5, stride=2, padding=2),
            sigmoid1=nn.Sigmoid(),
            conv2=nn.Conv2d(w, w, 5, stride=2, padding=2),
            sigmoid2=nn.Sigmoid(),
            conv3=nn.Conv2d(w, w, 5, padding=2),
            sigmoid3=nn.Sigmoid(),
            flatten=nn.Flatten(),
            fc=nn.Linear(w * ceil(height / 4) * ceil(breadth / 4), outputs),
        )
    )


@MODELS.register(
    "mlp",
    "one hidden layer with ReLU",
    input="any",
    width=256,
    paper="Rumelhart et al. 1986, Learning representations by back-propagating errors (Nature)",
)
def mlp(input_shape: tuple[int, ...], outputs: int, width: int | None) -> nn.Module:
    """Return flatten, linear, ReLU, linear."""
    w = 256 if width is None else width
    layers = OrderedDict(
        flatten=nn.Flatten(), hidden=nn.Linear(prod(input_shape), w), relu=nn.ReLU(), fc=nn.Linear(w, outputs)
    )
    return nn.Sequential(layers)


def _flat_linear(input_shape: tuple[int, ...], outputs: int, _width: int | None) -> nn.Module:
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(prod(input_shape), outputs)))


MODELS.register(
    "logistic",
    "multinomial logistic regression: one linear layer, one output a class",
    input="any",
    width=None,
    paper="Cox 1958, The regression analysis of binary sequences (JRSS B)",
)(_flat_linear)

MODELS.register(
    "linear",
    "linear regression: one linear layer, one output for a real-valued target",
    input="any",
    width=None,
    paper="Legendre 1805, least squares",
)(_flat_linear)
