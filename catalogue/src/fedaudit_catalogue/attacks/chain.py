"""A network as a chain of affine steps and invertible activations, or the reason why it isn't one.

A recursive attack (``r_gap``) goes back through the chain, and the rank analysis (``rank``) counts it. The chain is
read from the traced module (``torch.fx``), so a user's own module needs no change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd

from fedaudit.utils import NotApplicable

Function = Callable[[Tensor], Tensor]
Kind = Literal["conv", "linear", "norm", "plain"]

_EDGE = 1e-12  # how near to the end of its range an activation's output may come before it is inverted


@dataclass(frozen=True)
class Step:
    """One affine operation on a batch; ``conv``, ``linear`` and ``norm`` may have parameters, ``plain`` has none."""

    name: str
    kind: Kind
    module: nn.Module | None
    run: Function


@dataclass(frozen=True)
class Block:
    """Affine steps in forward order, then an activation of a batch, the identity if there is none, and its inverse."""

    steps: tuple[Step, ...]
    activation: Function
    inverse: Function
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Names of the steps that have parameters (of all, where none has)."""
        named = [step.name for step in self.steps if step.kind != "plain"]
        return " + ".join(named or [step.name for step in self.steps])

    @property
    def unknowns(self) -> int:
        """Number of the block's inputs."""
        return math.prod(self.input_shape)

    def affine(self, inputs: Tensor) -> Tensor:
        """Return what the activation will see, (n, *output_shape), of (n, *input_shape)."""
        for step in self.steps:
            inputs = step.run(inputs)
        return inputs

    def slope(self, before: Tensor) -> Tensor:
        """Return the activation's derivative where its input is ``before``."""
        with torch.enable_grad():
            leaf = before.detach().clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.activation(leaf * 1).sum(), leaf)
        return slope


def chain(module: nn.Module, input_shape: tuple[int, ...]) -> list[Block]:
    """Return the blocks, in forward order, of a module on the CPU in float64, in the mode of the client's training."""
    try:
        graph = fx.symbolic_trace(module)
    except Exception as error:  # whatever a user's forward raises under a tracer
        refuse("the model's forward can't be traced as a fixed sequence of operations", f"({error})")
    modules = dict(graph.named_modules())
    inputs = torch.zeros((2, *input_shape), dtype=torch.float64)
    values: dict[fx.Node, Any] = {}
    previous: fx.Node | None = None
    blocks: list[Block] = []
    shape = tuple(input_shape)
    steps: list[Step] = []
    used: set[Any] = set()
    begin = shape
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node], previous = inputs, node
            continue
        if node.op == "output":
            if node.args[0] is not previous:
                refuse("the model returns something else than its last layer's outputs")
            break
        if node.op == "get_attr":
            refuse(f"'{node.target}' is used outside of a layer of its own", "which isn't supported")
        data = [other for other in node.all_input_nodes if isinstance(values[other], Tensor)]
        with torch.no_grad():
            values[node] = _evaluate(node, modules, values)
        if not isinstance(values[node], Tensor):  # the size of something
            continue
        if data != [previous]:
            refuse(
                f"'{node.name}' takes what several paths give (a residual connection, a sum or a concatenation)",
                "so its inputs can't be told apart",
            )
        if node.op == "call_module" and node.target in used and list(modules[str(node.target)].parameters()):
            refuse(f"'{node.target}' is used twice", "and its gradient is the sum of both uses")
        used.add(node.target)
        previous = node
        shape = tuple(values[node].shape[1:])
        inverse = _inverse(node, modules)
        if inverse is None:
            steps.append(_affine_step(node, modules, values))
            continue
        if inverse is not identity:
            blocks.append(Block(tuple(steps), _runner(node, modules, values), inverse, begin, shape))
            steps, begin = [], shape
    if steps:
        blocks.append(Block(tuple(steps), identity, identity, begin, shape))
    return blocks


def refuse(what: str, why: str = "which can't be undone") -> NoReturn:
    """Raise the NotApplicable of all that go back through a network."""
    raise NotApplicable(
        f"{what}, {why}: the network can't be gone back through layer by layer; run an attack that optimises "
        "(invg, agic), or use a chain of convolutions and linear layers with invertible activations (model leaky-cnn)"
    )


def _evaluate(node: fx.Node, modules: Mapping[str, nn.Module], values: Mapping[fx.Node, Any]) -> Any:
    args = fx.node.map_arg(node.args, lambda other: values[other])
    kwargs = fx.node.map_arg(node.kwargs, lambda other: values[other])
    if node.op == "call_module":
        return modules[str(node.target)](*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _runner(node: fx.Node, modules: Mapping[str, nn.Module], values: Mapping[fx.Node, Any]) -> Function:
    """Return the operation of ``node`` on a batch of any size."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        return lambda x: torch.as_tensor(module(x))
    if node.target in _RESHAPES:
        shape = tuple(values[node].shape[1:])
        return lambda x: x.reshape(len(x), *shape)
    (data,) = [other for other in node.all_input_nodes if isinstance(values[other], Tensor)]
    return lambda x: torch.as_tensor(_evaluate(node, modules, {**values, data: x}))


# Affine steps --------------------------------------------------------------------------------------------------------

_RESHAPES = (torch.flatten, torch.reshape, torch.squeeze, "flatten", "view", "reshape", "squeeze", "contiguous")
_PLAIN_FUNCTIONS = (*_RESHAPES, F.avg_pool2d, F.adaptive_avg_pool2d, torch.mean, "mean")
_PLAIN_MODULES = (nn.Flatten, nn.Unflatten, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.ZeroPad2d, _DropoutNd)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def _affine_step(node: fx.Node, modules: Mapping[str, nn.Module], values: Mapping[fx.Node, Any]) -> Step:
    """Return the affine step at ``node``."""
    run, name = _runner(node, modules, values), str(node.target)
    if node.op != "call_module":
        if node.target not in _PLAIN_FUNCTIONS:
            _refuse_operation(getattr(node.target, "__name__", name), "")
        if node.target in (torch.mean, "mean") and len(values[node]) != 2:
            refuse("the model averages over the examples of a batch")
        return Step(node.name, "plain", None, run)
    module = modules[name]
    if isinstance(module, _DropoutNd) and module.p > 0 and module.training:
        refuse(f"dropout ('{name}', p={module.p:g})", "whose masks only the client knows")
    if isinstance(module, _PLAIN_MODULES):
        return Step(name, "plain", module, run)
    if type(module) is nn.Conv2d:
        if module.padding_mode != "zeros":
            refuse(f"'{name}' pads with '{module.padding_mode}'", "which isn't supported; only zeros are")
        return Step(name, "conv", module, run)
    if type(module) is nn.Linear:
        (data,) = node.all_input_nodes
        if values[data].ndim != 2:
            refuse(f"'{name}' is applied to several positions", "which isn't supported")
        return Step(name, "linear", module, run)
    if isinstance(module, _BATCH_NORMS):
        if module.training or module.running_mean is None:
            refuse(
                f"BatchNorm ('{name}') uses the batch's own statistics (batch_norm: train)",
                "which only the client knows",
            )
        return Step(name, "norm", module, run)
    return _refuse_operation(type(module).__name__, f" ('{name}')")


def _refuse_operation(kind: str, where: str) -> NoReturn:
    text = kind.lower().replace("_", "")
    if text.startswith(("relu", "threshold", "hardtanh", "clamp", "hardsigmoid", "hardswish")):
        refuse(f"{kind}{where} loses what it cuts off")
    if "maxpool" in text:
        refuse(f"{kind}{where} keeps one value of each window")
    if text.startswith(("gelu", "silu", "mish")):
        refuse(f"{kind}{where} takes the same value at two places")
    refuse(f"{kind}{where} isn't an affine layer or an invertible activation known here")


# Activations ---------------------------------------------------------------------------------------------------------


def identity(x: Tensor) -> Tensor:
    """Return ``x``."""
    return x


def _unleaky(y: Tensor, slope: float = 0.01) -> Tensor:
    return torch.where(y >= 0, y, y / slope)


def _unelu(y: Tensor, alpha: float = 1.0, rate: float = 1.0) -> Tensor:
    return torch.where(y > 0, y, torch.log1p((y / alpha).clamp(min=_EDGE - 1)) / rate)


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805  # torch's constants


def _unselu(y: Tensor) -> Tensor:
    return _unelu(y / _SELU_SCALE, _SELU_ALPHA)


def _unsoftplus(y: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    scaled = (beta * y).clamp(min=_EDGE)
    return torch.where(scaled > threshold, y, torch.log(torch.expm1(scaled.clamp(max=threshold))) / beta)


def _unsigmoid(y: Tensor) -> Tensor:
    return torch.logit(y, eps=_EDGE)


def _untanh(y: Tensor) -> Tensor:
    return torch.atanh(y.clamp(_EDGE - 1, 1 - _EDGE))


def _unprelu(module: nn.PReLU) -> Function | None:
    slope = module.weight.detach()
    if bool((slope <= 0).any()):
        return None
    return lambda y: torch.where(y >= 0, y, y / (slope if len(slope) == 1 else slope.view(-1, *[1] * (y.ndim - 2))))


# Module type to what undoes it; None from the function: it can't be undone with these settings.
_MODULES: dict[type[nn.Module], Callable[[Any], Function | None]] = {
    nn.Identity: lambda _: identity,
    nn.LeakyReLU: lambda m: (lambda y: _unleaky(y, m.negative_slope)) if m.negative_slope > 0 else None,
    nn.PReLU: _unprelu,
    nn.Sigmoid: lambda _: _unsigmoid,
    nn.Tanh: lambda _: _untanh,
    nn.ELU: lambda m: (lambda y: _unelu(y, m.alpha)) if m.alpha > 0 else None,
    nn.CELU: lambda m: (lambda y: _unelu(y, m.alpha, 1 / m.alpha)) if m.alpha > 0 else None,
    nn.SELU: lambda _: _unselu,
    nn.Softplus: lambda m: lambda y: _unsoftplus(y, m.beta, m.threshold),
}
_FUNCTIONS: dict[Any, Function] = {
    **dict.fromkeys([torch.sigmoid, F.sigmoid, "sigmoid"], _unsigmoid),
    **dict.fromkeys([torch.tanh, F.tanh, "tanh"], _untanh),
    F.selu: _unselu,
}


def _inverse(node: fx.Node, modules: Mapping[str, nn.Module]) -> Function | None:
    """Return what undoes the activation at ``node``, or None if it is no invertible activation."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        make = _MODULES.get(type(module))
        if isinstance(module, _DropoutNd) and (module.p == 0 or not module.training):
            return identity
        return make(module) if make else None
    if node.target in _FUNCTIONS:
        return _FUNCTIONS[node.target]
    if node.target in (F.leaky_relu, F.elu):
        given = [*node.args[1:2], *(node.kwargs[key] for key in ("negative_slope", "alpha") if key in node.kwargs)]
        number = float(str(given[0])) if given else None
        undo: Callable[..., Tensor] = _unleaky if node.target is F.leaky_relu else _unelu
        if number is None:
            return undo
        return (lambda y: undo(y, number)) if number > 0 else None
    return None
