"""The layers of any model in the order in which they run, and after which of them a ReLU cuts the gradient.

Both come from one real forward pass, so they hold for a user's own module: the order from hooks, the ReLUs from the
autograd graph (where ``nn.ReLU``, ``F.relu`` and an in-place ReLU after a residual addition look the same).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedaudit.models.initialise import CONV, NORM

# Autograd nodes that may stand between a layer and "its" ReLU, without the suffix "Backward0".
_SCALE = "Add Sub Rsub Neg Mul Div Sum Mean"
_NORMALISE = "NativeBatchNorm CudnnBatchNorm MiopenBatchNorm NativeGroupNorm NativeLayerNorm FusedRmsNorm"
_POOL = (
    "MaxPool1D MaxPool2D MaxPool2DWithIndices MaxPool3DWithIndices MkldnnMaxPool2D AvgPool1D AvgPool2D AvgPool3D "
    "AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D MkldnnAdaptiveAvgPool2D"
)
_RESHAPE = (
    "View UnsafeView ReshapeAlias ReshapeCopy Alias Permute Transpose T Squeeze Unsqueeze Expand Repeat Clone Copy "
    "CopySlices ToCopy Slice Select Index IndexSelect Gather Split SplitWithSizes Unbind Cat Stack AsStrided Unfold "
    "Unflatten PixelShuffle PixelUnshuffle ConstantPadNd ReflectionPad1D ReflectionPad2D ReplicationPad2D "
    "UpsampleNearest2D UpsampleBilinear2D NativeDropout FusedDropout"
)
_TRANSPARENT = frozenset(f"{_SCALE} {_NORMALISE} {_POOL} {_RESHAPE}".split())


@dataclass(frozen=True)
class Layer:
    """One layer: a module with parameters of its own.

    Attributes:
        name: of the module, as in ``named_modules()`` ("" for the model itself).
        kind: ``conv``, ``linear``, ``norm`` or ``other``.
        parameters: names as in ``named_parameters()``.
        relu_follows: a ReLU takes this layer's output, directly or through normalisation, addition, scaling, pooling
            or a change of shape: its gradient may then hold exact zeros.
    """

    name: str
    kind: str
    parameters: tuple[str, ...]
    relu_follows: bool


@dataclass
class _Trace:
    """What one forward pass showed: names in the order of the first call, and which modules put out which node."""

    order: list[str] = field(default_factory=list)
    owners: dict[Any, list[str]] = field(default_factory=dict)
    outputs: list[Any] = field(default_factory=list)

    def note_call(self, name: str, *_: Any) -> None:
        if name not in self.order:
            self.order.append(name)

    def note_output(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in _tensors(output):  # noted now: an in-place ReLU would replace grad_fn later
            if tensor.grad_fn is not None:
                self.owners.setdefault(tensor.grad_fn, []).append(name)


def layer_groups(model: nn.Module, inputs: Tensor) -> list[Layer]:
    """Return the layers of ``model`` in the order in which a forward pass of ``inputs`` first calls them.

    Every parameter of ``named_parameters()`` is in exactly one layer. A parameter whose own module is never called (one
    that a parent uses directly, or not at all) goes to the nearest module above it that is. The pass runs in evaluation
    mode on copies of the buffers: parameters, running statistics, modes, gradients and PyTorch's global random state
    stay as they were. A ReLU inside compiled, scripted or hand-written autograd functions is not seen.

    Args:
        model: any module that takes one tensor.
        inputs: a batch that it accepts, (N, ...); its values do not matter.
    """
    trace = _forward(model, inputs)
    groups: dict[str, list[str]] = {name: [] for name in trace.order}
    for parameter, _ in model.named_parameters():
        owner = parameter.rpartition(".")[0]
        while owner not in groups:  # ends at "", the model itself, which was called
            owner = owner.rpartition(".")[0]
        groups[owner].append(parameter)
    modules = dict(model.named_modules())
    kinds = {name: _kind(modules[name]) for name, parameters in groups.items() if parameters}
    before_relu = _before_relu(trace, kinds)
    return [Layer(name, kind, tuple(groups[name]), name in before_relu) for name, kind in kinds.items()]


def _kind(module: nn.Module) -> str:
    if isinstance(module, CONV):
        return "conv"
    if isinstance(module, nn.Linear):
        return "linear"
    return "norm" if isinstance(module, NORM) else "other"


def _forward(model: nn.Module, inputs: Tensor) -> _Trace:
    trace = _Trace()
    # Leaves of their own: frozen parameters are in the graph too, and what the pass writes to buffers is dropped.
    state: dict[str, Tensor] = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    state |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.enable_grad())
        for name, module in model.named_modules():
            stack.callback(setattr, module, "training", module.training)
            stack.callback(module.register_forward_pre_hook(partial(trace.note_call, name)).remove)
            stack.callback(module.register_forward_hook(partial(trace.note_output, name)).remove)
        for module in model.modules():
            module.training = False
        output = functional_call(model, state, (inputs.detach(),))
    trace.outputs = [tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None]
    return trace


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _before_relu(trace: _Trace, kinds: Mapping[str, str]) -> set[str]:
    """Walk the graph from the output back to the input and name the layers met under a ReLU, before anything opaque."""
    found: set[str] = set()
    seen: set[tuple[Any, bool]] = set()
    todo = [(node, False) for node in trace.outputs]
    while todo:
        node, under = todo.pop()
        if node is None or (node, under) in seen:
            continue
        seen.add((node, under))
        owners = [name for name in trace.owners.get(node, ()) if name in kinds]
        is_relu = _is_relu(node)  # also of the layer that ends with it (a convolution subclass with its own ReLU)
        if under or is_relu:
            found.update(owners)
        through = _base(node) in _TRANSPARENT and all(kinds[name] == "norm" for name in owners)
        todo += [(child, is_relu or (under and through)) for child, _ in node.next_functions]
    return found


def _base(node: Any) -> str:
    name: str = node.name().rpartition("::")[2]
    return name.rstrip("0123456789").removesuffix("Backward")


def _is_relu(node: Any) -> bool:
    """Whether the gradient of ``node`` is exactly zero wherever its input is negative."""
    match _base(node):
        case "Relu":
            return True
        case "Threshold":  # also ReLU under other names
            return float(node._saved_threshold) == 0
        case "Hardtanh":  # ReLU6
            return float(node._saved_min_val) == 0
        case "Clamp" | "ClampMin":
            low = node._saved_min
            return low is not None and not isinstance(low, Tensor) and float(low) == 0
    return False
