"""Initialisation schemes. Which one a federation uses decides much of what it leaks, so it is always explicit.

Every number is drawn from the generator that is passed in, in float32 and in the order of ``model.named_modules()``:
the same seed gives the same tensors, and PyTorch's global generator is never touched.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
from torch import Tensor, nn

from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import Registry

INITIALISATIONS: Registry[Callable[[nn.Module], Callable[..., None] | None]] = Registry("initialisation")
"""Functions from a module to what fills its own parameters with draws, or None for a layer that the scheme lacks."""

CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORM = (nn.modules.batchnorm._BatchNorm,)
RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)
NORM = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


def initialise(model: nn.Module, scheme: str, generator: torch.Generator) -> None:
    """Draw every parameter of ``model`` anew, in place; running statistics return to mean 0, variance 1.

    Schemes: ``default`` (what PyTorch's own layers do), ``he``, ``uniform`` (DLG's), ``given`` (change nothing).

    Raises:
        BadInput: an unknown scheme, or a layer whose parameters the scheme does not know; then nothing is changed.
    """
    rule = INITIALISATIONS[scheme].value
    plan: list[tuple[nn.Module, Callable[..., None]]] = []
    for name, module in model.named_modules():
        if _own_parameters(module) or isinstance(module, NORM):
            fill = rule(module)
            if fill is None:
                known = "convolution, linear, recurrent, normalisation and embedding layers"
                raise BadInput(
                    f"initialisation '{scheme}' does not know the layer '{name or 'model'}' "
                    f"({type(module).__name__}), only {known}; initialise the model yourself and use 'given'"
                )
            plan.append((module, fill))
    with torch.no_grad():
        for module, fill in plan:
            fill(module, generator)


@INITIALISATIONS.register(
    "default",
    "PyTorch's default: U(-1/sqrt(fan_in), 1/sqrt(fan_in)), of recurrent layers by their hidden units; N(0, 1) for "
    "embeddings",
)
def _default(module: nn.Module) -> Callable[..., None] | None:
    if getattr(module, "starts_at_zero", False):  # an adapter's second half
        return _fill_zero
    if _is_plain(module, (*CONV, nn.Linear)):
        return _fill_default
    if isinstance(module, RECURRENT):
        return _fill_recurrent
    return _fill_normal if _is_plain(module, (nn.Embedding,)) else _norm(module)


@INITIALISATIONS.register("he", "He et al. 2015: convolutions N(0, 2/fan_out), their biases 0; linear as default")
def _he(module: nn.Module) -> Callable[..., None] | None:
    if _is_plain(module, CONV):
        return _fill_he
    return _default(module)


@INITIALISATIONS.register("uniform", "DLG (Zhu et al. 2019): U(-0.5, 0.5) for every weight and bias of every layer")
def _uniform(_module: nn.Module) -> Callable[..., None] | None:
    return _fill_uniform


@INITIALISATIONS.register("given", "leave the model as it is")
def _given(_module: nn.Module) -> Callable[..., None] | None:
    return lambda _module, _generator: None


def _fill_default(module: nn.Module, generator: torch.Generator) -> None:
    fan_in = _weight(module)[0].numel()  # also for transposed convolutions, where PyTorch takes the same dimension
    for parameter in _own_parameters(module).values():
        _draw_uniform(parameter, 1 / sqrt(fan_in) if fan_in else 0.0, generator)


def _fill_recurrent(module: nn.Module, generator: torch.Generator) -> None:
    for parameter in _own_parameters(module).values():
        _draw_uniform(parameter, 1 / sqrt(int(module.hidden_size)), generator)  # type: ignore[arg-type]


def _fill_he(module: nn.Module, generator: torch.Generator) -> None:
    weight = _weight(module)
    fan_out = weight.shape[0] * weight[0, 0].numel()
    draw = torch.empty(weight.shape, dtype=torch.float32, device=generator.device)
    weight.copy_(draw.normal_(0.0, sqrt(2 / fan_out), generator=generator))
    if isinstance(module.bias, Tensor):
        module.bias.zero_()


def _fill_normal(module: nn.Module, generator: torch.Generator) -> None:
    weight = _weight(module)
    draw = torch.empty(weight.shape, dtype=torch.float32, device=generator.device)
    weight.copy_(draw.normal_(generator=generator))


def _fill_uniform(module: nn.Module, generator: torch.Generator) -> None:
    for parameter in _own_parameters(module).values():
        _draw_uniform(parameter, 0.5, generator)
    _reset_running_statistics(module)


def _fill_norm(module: nn.Module, _generator: torch.Generator) -> None:
    for name, parameter in _own_parameters(module).items():
        parameter.fill_(1.0 if name == "weight" else 0.0)
    _reset_running_statistics(module)


def _fill_zero(module: nn.Module, _generator: torch.Generator) -> None:
    for parameter in _own_parameters(module).values():
        parameter.zero_()


def _norm(module: nn.Module) -> Callable[..., None] | None:
    known = isinstance(module, NORM) and set(_own_parameters(module)) <= {"weight", "bias"}
    return _fill_norm if known else None


def _is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether this is one of ``kinds`` with nothing but the usual parameters (no extra ones, none reparametrised)."""
    own = set(_own_parameters(module))
    return isinstance(module, kinds) and "weight" in own and own <= {"weight", "bias"}


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(recurse=False))


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _draw_uniform(target: Tensor, bound: float, generator: torch.Generator) -> None:
    draw = torch.empty(target.shape, dtype=torch.float32, device=generator.device)
    target.copy_(draw.uniform_(-bound, bound, generator=generator))


def _reset_running_statistics(module: nn.Module) -> None:
    if isinstance(module, nn.modules.batchnorm._NormBase):
        module.reset_running_stats()
