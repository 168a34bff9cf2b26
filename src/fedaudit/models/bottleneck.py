"""PRECODE's variational bottleneck, a module before the last layer whose noise travels back into every gradient."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from fedaudit.models.convnet import convnet_small
from fedaudit.models.families import MODELS
from fedaudit.models.small import lenet, lenet_5, mlp
from fedaudit.utils.errors import BadInput

_SIZE = 256  # k of the paper
_BETA = 1e-3  # β of the paper
_SHIFT = 5  # of the softplus: as in Alemi et al. 2017, deviations are small at first


class VariationalBottleneck(nn.Module):
    """Features go through a random code: z = μ + σ·ε with ε ~ N(0, 1), and back (Scheliga et al. 2022, PRECODE).

    One linear layer gives μ and s, σ = softplus(s − 5); another makes features of z. In training the gradient of
    β·KL(N(μ, σ²) ‖ N(0, 1)), summed over the code and averaged over the batch, is added to that of the loss, β = 1e-3;
    the loss itself is reported without it. In evaluation mode z = μ.

    Args:
        features: that come in, and go out.
        size: k, of the code.
    """

    def __init__(self, features: int, size: int = _SIZE) -> None:
        super().__init__()
        self.size = size
        self.encoder = nn.Linear(features, 2 * size)
        self.decoder = nn.Linear(size, features)

    def forward(self, features: Tensor) -> Tensor:
        """Return (n, features) of (n, features)."""
        mean, spread = torch.as_tensor(self.encoder(features)).chunk(2, dim=-1)
        if not self.training:
            return torch.as_tensor(self.decoder(mean))
        deviation = softplus(spread - _SHIFT)
        kl = (mean.square() + deviation.square() - 2 * deviation.log() - 1).sum(dim=-1).mean() / 2
        code = _WithTerm.apply(mean + deviation * torch.randn_like(mean), _BETA * kl)
        return torch.as_tensor(self.decoder(code))


class _WithTerm(torch.autograd.Function):
    """The first argument; a gradient that comes back through it brings the second's with it, as a term of the loss."""

    @staticmethod
    def forward(ctx: Any, code: Tensor, term: Tensor) -> Tensor:  # noqa: ARG004
        return code.view_as(code)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        return gradients[0], gradients[0].new_ones(())


def with_bottleneck(module: nn.Module, size: int = _SIZE) -> nn.Module:
    """Return ``module`` with a variational bottleneck before its last fully connected layer.

    Args:
        module: changed in place; its last ``nn.Linear`` becomes ``bottleneck`` and ``layer`` under the old name.
        size: k, of the code.

    Raises:
        BadInput: it has no fully connected layer within it.
    """
    names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear) and name]
    if not names:
        raise BadInput("a variational bottleneck stands before a fully connected layer, and this model has none")
    parent, _, own = names[-1].rpartition(".")
    layer = module.get_submodule(names[-1])
    assert isinstance(layer, nn.Linear)
    both = OrderedDict[str, nn.Module](bottleneck=VariationalBottleneck(layer.in_features, size), layer=layer)
    setattr(module.get_submodule(parent), own, nn.Sequential(both))
    return module


def from_bottleneck_on(module: nn.Module) -> set[str]:
    """Return the parameters of bottlenecks and of the layers behind them, whose gradients are mostly noise."""
    behind = [name for name, part in module.named_modules() if isinstance(part, nn.Sequential) and _begins(part)]
    return {name for name, _ in module.named_parameters() if any(name.startswith(f"{parent}.") for parent in behind)}


def _begins(part: nn.Sequential) -> bool:
    return isinstance(next(iter(part), None), VariationalBottleneck)


def _extended(builder: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    return lambda input_shape, outputs, w: with_bottleneck(builder(input_shape, outputs, w))


for _name, _input, _least, _width, _builder in (
    ("lenet", "image", 4, 12, lenet),
    ("lenet-5", "image", 16, 6, lenet_5),
    ("convnet-small", "image", 8, 16, convnet_small),
    ("mlp", "any", 1, 256, mlp),
):
    MODELS.register(
        f"{_name}-precode",
        f"{_name} with PRECODE's variational bottleneck of {_SIZE} before its last layer: random in training",
        input=_input,
        min_size=_least,
        width=_width,
        paper="Scheliga et al. 2022, PRECODE (WACV)",
    )(_extended(_builder))
