"""Small networks: DLG's LeNet, LeNet-5, R-GAP's CNN6, CAFE's, and the models of tables (any input is flattened)."""

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
def lenet(input_shape: tuple[int, ...], outputs: int, w: int) -> nn.Module:
    """Return DLG's LeNet: strides 2, 2, 1, no BatchNorm; DLG initialises it with the scheme ``uniform``."""
    channels, height, breadth = input_shape
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
    "lenet-5",
    "two 5x5 convolutions with ReLU and max-pooling, three linear layers",
    input="image",
    min_size=16,
    width=6,
    paper="LeCun et al. 1998, Gradient-based learning applied to document recognition (Proc. IEEE)",
)
def lenet_5(input_shape: tuple[int, ...], outputs: int, w: int) -> nn.Module:
    """Return w and 8w/3 channels, 120 and 84 hidden units, with today's ReLU and max-pooling (as in Ma et al. 2023)."""
    pixels = prod(((side - 4) // 2 - 4) // 2 for side in input_shape[1:])
    return _pooled(input_shape[0], (w, 8 * w // 3), pixels, (120, 84), outputs)


@MODELS.register(
    "cafe-cnn",
    "two 5x5 convolutions with ReLU and max-pooling, three linear layers: a party's network in a vertical federation",
    input="image",
    min_size=4,
    width=64,
    paper="Jin et al. 2021, CAFE (NeurIPS), a worker's network of its published code",
)
def cafe_cnn(input_shape: tuple[int, ...], outputs: int, w: int) -> nn.Module:
    """Return w and 2w channels (padded, pooled by 2, rounded up), 256 and 64 hidden units."""
    pixels = prod(ceil(ceil(n / 2) / 2) for n in input_shape[1:])
    return _pooled(input_shape[0], (w, 2 * w), pixels, (256, 64), outputs, padding=2, up=True)


def _pooled(
    channels: int,
    maps: tuple[int, int],
    pixels: int,
    hidden: tuple[int, int],
    outputs: int,
    *,
    padding: int = 0,
    up: bool = False,
) -> nn.Module:
    """Return two 5×5 convolutions, each with ReLU and max-pooling (rounded ``up``), and three linear layers."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, maps[0], 5, padding=padding),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2, ceil_mode=up),
            conv2=nn.Conv2d(maps[0], maps[1], 5, padding=padding),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2, ceil_mode=up),
            flatten=nn.Flatten(),
            fc1=nn.Linear(maps[1] * pixels, hidden[0]),
            relu3=nn.ReLU(),
            fc2=nn.Linear(hidden[0], hidden[1]),
            relu4=nn.ReLU(),
            fc=nn.Linear(hidden[1], outputs),
        )
    )


@MODELS.register(
    "leaky-cnn",
    "six convolutions without biases, LeakyReLU 0.2, one linear layer: can be inverted in closed form",
    input="image",
    min_size=4,
    width=12,
    paper="Zhu & Blaschko 2021, R-GAP (ICLR), the CNN6, with one output a class",
)
def leaky_cnn(input_shape: tuple[int, ...], outputs: int, w: int) -> nn.Module:
    """Return R-GAP's CNN6: w, 3w, 3w, 3w, 16w/3, 32w/3 channels, stride 2 at the first, second and fifth."""
    channels, height, breadth = input_shape
    layers = OrderedDict[str, nn.Module]()
    plan = [(w, 4, 2, 2), (3 * w, 3, 2, 1), (3 * w, 3, 1, 1), (3 * w, 3, 1, 1), (16 * w // 3, 3, 2, 1)]
    for i, (out, kernel, stride, padding) in enumerate([*plan, (32 * w // 3, 3, 1, 1)], start=1):
        layers[f"conv{i}"] = nn.Conv2d(channels, out, kernel, stride=stride, padding=padding, bias=False)
        layers[f"leaky{i}"] = nn.LeakyReLU(0.2)
        channels = out
    pixels = prod(ceil(ceil((n // 2 + 1) / 2) / 2) for n in (height, breadth))
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(channels * pixels, outputs, bias=False)
    return nn.Sequential(layers)


@MODELS.register(
    "strided-cnn",
    "two 4x4 convolutions of stride 2, LeakyReLU 0.2, two linear layers, no BatchNorm: a discriminator",
    input="image",
    min_size=8,
    width=16,
    paper="none: after DCGAN's discriminator (Radford et al. 2016), without its BatchNorm",
)
def strided_cnn(input_shape: tuple[int, ...], outputs: int, w: int) -> nn.Module:
    """Return w and 2w channels, 4w hidden units; nothing but strides and LeakyReLU between image and hidden layer.

    Against it a generator gets a gradient in every pixel: max-pooling and ReLU pass it on in few.
    """
    channels, height, breadth = input_shape
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, w, 4, stride=2, padding=1),
            leaky1=nn.LeakyReLU(0.2),
            conv2=nn.Conv2d(w, 2 * w, 4, stride=2, padding=1),
            leaky2=nn.LeakyReLU(0.2),
            flatten=nn.Flatten(),
            hidden=nn.Linear(2 * w * (height // 2 // 2) * (breadth // 2 // 2), 4 * w),
            leaky3=nn.LeakyReLU(0.2),
            fc=nn.Linear(4 * w, outputs),
        )
    )


@MODELS.register(
    "mlp",
    "one hidden layer with ReLU",
    input="any",
    width=256,
    paper="Rumelhart et al. 1986, Learning representations by back-propagating errors (Nature)",
)
def mlp(input_shape: tuple[int, ...], outputs: int, w: int) -> nn.Module:
    """Return flatten, linear, ReLU, linear."""
    layers = OrderedDict(
        flatten=nn.Flatten(), hidden=nn.Linear(prod(input_shape), w), relu=nn.ReLU(), fc=nn.Linear(w, outputs)
    )
    return nn.Sequential(layers)


@MODELS.register(
    "fcn-3",
    "two hidden layers with ReLU",
    input="any",
    width=300,
    paper="LeCun et al. 1998, Gradient-based learning applied to document recognition (Proc. IEEE)",
)
def fcn_3(input_shape: tuple[int, ...], outputs: int, w: int) -> nn.Module:
    """Return flatten and three linear layers with ReLU between them (FCN-3 of Ma et al. 2023)."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            hidden1=nn.Linear(prod(input_shape), w),
            relu1=nn.ReLU(),
            hidden2=nn.Linear(w, w),
            relu2=nn.ReLU(),
            fc=nn.Linear(w, outputs),
        )
    )


@MODELS.register(
    "fcn-3-dropout",
    "the same with dropout 0.5 after each hidden layer",
    input="any",
    width=300,
    paper="Srivastava et al. 2014, Dropout (JMLR), on FCN-3",
)
def fcn_3_dropout(input_shape: tuple[int, ...], outputs: int, w: int) -> nn.Module:
    """Return FCN-3 with half of the hidden units dropped."""
    plain = dict(fcn_3(input_shape, outputs, w).named_children())
    layers = OrderedDict[str, nn.Module]()
    for name, layer in plain.items():
        layers[name] = layer
        if isinstance(layer, nn.ReLU):
            layers[name.replace("relu", "dropout")] = nn.Dropout(0.5)
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
