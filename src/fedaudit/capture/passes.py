"""One forward pass and one step of a training that is watched, and what can be read off them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedaudit.capture.gradients import Edits, GradientWatch
from fedaudit.capture.private import PrivateStep
from fedaudit.modalities import Packing
from fedaudit.models import BATCH_NORM
from fedaudit.models.own import InOrder
from fedaudit.task.losses import LossCall
from fedaudit.task.training import Precision, WeightsPrecision

SEVERAL = "the model takes several tensors in a form that can't be recorded"
_SAME = ("ToCopy", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Alias", "Clone")  # that keep every element


_SELECT = ("Select", "Slice")


@dataclass(eq=False)
class ForwardPass:
    """One forward pass, and what became of it.

    Attributes:
        inputs: on the CPU; None: no tensor was found.
        random_state: of torch's CPU generator, before.
        backward: whether a backward pass came back to its output.
        criterion: the module of the user's own that computes the loss; None: functions of torch's compute all of it.
        target: second argument of a module that isn't torch's, called on the output; of several outputs all of it.
        asked: of several outputs the targets that losses of torch's were given, by the output's number.
        after, way: the pass of another part whose output it was given, and the operations on the way; None: it wasn't.
        items: over how many targets a Trainer's loss is divided; None: as many as there are.
        filling: the token that fills texts up, where the model's configuration tells none; None: not known.
    """

    inputs: Tensor | None
    random_state: Tensor
    precision: Precision
    modes: dict[str, bool]
    drew: bool = False
    shape: tuple[int, ...] = ()
    backward: bool = False
    loss: LossCall | None = None
    losses: int = 0
    criterion: nn.Module | None = None
    mismatch: str = ""
    target: Any = None
    packing: Packing | None = None
    refused: str = ""
    heads: Packing | None = None
    args: tuple[Any, ...] = ()
    asked: dict[int, Tensor] = field(default_factory=dict)
    weights: list[Tensor] = field(default_factory=list)
    items: float | None = None
    filling: int | None = None
    part: nn.Module | None = None
    after: ForwardPass | None = None
    way: list[str] = field(default_factory=list)

    @property
    def targets(self) -> Tensor | None:
        """What the loss of one output was given."""
        return self.target if self.loss is None else self.loss.targets

    @property
    def head_targets(self) -> Any:
        """What the losses were given, formed as the outputs, or one tensor for all; None: not all was seen."""
        assert self.heads is not None
        if self.target is not None:
            return self.target
        found = [self.asked[i] for i in sorted(self.asked)]
        if found and all(other.dtype == found[0].dtype and other.equal(found[0]) for other in found):
            return found[0]
        if len(found) != len(self.heads.parts):
            return None
        if self.heads.parts[0].name.isdigit():
            return tuple(found)
        return dict(zip((part.name for part in self.heads.parts), found, strict=True))

    @property
    def examples(self) -> int:
        """How many it was of."""
        return len(self.inputs) if self.inputs is not None and self.inputs.ndim else 1

    def weight(self, factor: float) -> float | None:
        """Return the weight of its mean loss in the step's total; None where the mean's terms weigh differently."""
        if not self.weights:
            return 1.0
        total = 0.0
        for weight in self.weights:
            first = float(weight.flatten()[0])
            if weight.numel() > 1 and bool((weight - first).abs().max() > 1e-6 * abs(first)):
                return None
            total += first * (self.loss.terms if self.loss else 1.0)
        total *= factor
        return 1.0 if abs(total - 1) < 1e-6 else total


@dataclass(eq=False)
class Step:
    """One step of the optimiser: each group's rate, its passes, what was done to its gradients."""

    rates: tuple[float, ...]
    passes: list[ForwardPass]
    edits: Edits
    scale: Tensor | None  # a fused optimiser divides by it
    private: PrivateStep | None = None

    @property
    def empty(self) -> bool:
        """Whether Poisson sampling drew no example for it."""
        return self.private is not None and not any(p.examples for p in self.passes)


@dataclass(eq=False)
class Watched:
    """A module that may be the one that is trained."""

    module: nn.Module
    start: dict[str, Tensor]
    parameters: dict[str, nn.Parameter]
    versions: list[int]
    gradients: GradientWatch
    passes: list[ForwardPass] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)  # parameters, as the last step by hand left them
    taken: tuple[list[Tensor | None], Edits] | None = None  # gradients by which weights are changed by hand
    loaded: dict[str, Tensor] = field(default_factory=dict)  # its state, where weights were changed since the last step
    norms: list[nn.Module] = field(init=False)  # found once: a module may hold hundreds
    drops: list[_DropoutNd] = field(init=False)

    def __post_init__(self) -> None:
        self.norms = [m for m in self.module.modules() if isinstance(m, BATCH_NORM)]
        self.drops = [m for m in self.module.modules() if isinstance(m, _DropoutNd)]


def whole_of(parts: list[nn.Module], held: set[int]) -> nn.Module | None:
    """Return the smallest module that has all of these parts, and parameters (by id); None: there is none."""
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), nn.Module) and not isinstance(thing, InOrder):
            own, size = set(map(id, thing.modules())), set(map(id, thing.parameters()))
            if own >= set(map(id, parts)) and size >= held:
                found.append((len(size), len(own), thing))
    return min(found, key=lambda one: one[:2], default=(0, 0, None))[2]


def chained(passes: list[ForwardPass], whole: nn.Module) -> tuple[list[ForwardPass], tuple[Any, ...]] | None:
    """Return passes of parts, called in turn, as the whole's, and the order; None: more than views lie between."""
    names = {id(part): name for name, part in whole.named_modules()}
    given = {id(p.after) for p in passes}
    made, orders = [], set()
    for last in (p for p in passes if id(p) not in given):
        chain = [last]
        while chain[0].after is not None:
            chain.insert(0, chain[0].after)
        whole_way = all(p.inputs is not None and p.packing is None and same_elements(p.way) for p in chain)
        if not whole_way or any(p.heads or id(p.part) not in names for p in chain):
            return None
        orders.add(tuple((names[id(p.part)], tuple(p.inputs.shape[1:])) for p in chain if p.inputs is not None))
        first = chain[0]
        drew = any(p.drew for p in chain)
        made.append(replace(last, inputs=first.inputs, random_state=first.random_state, drew=drew))
    return (made, orders.pop()) if len(orders) == 1 else None


def tag(tensor: Tensor, key: str, value: Any) -> None:
    """Mark what made a tensor; the mark lives as long as autograd's graph, and keeps none alive."""
    if tensor.grad_fn is not None:
        _marks(tensor.grad_fn)[key] = value


def _marks(node: Any) -> dict[str, Any]:
    marks: dict[str, Any] = node.metadata
    return marks


def tagged(tensor: Tensor, key: str) -> tuple[Any, list[str]]:
    """Return the nearest mark in what made a tensor, or None, and the operations on the way."""
    queue: list[tuple[Any, list[str]]] = [(tensor.grad_fn, [])]
    for _ in range(64):
        if not queue:
            break
        node, way = queue.pop(0)
        if node is None:
            continue
        if key in (marks := _marks(node)):
            return marks[key], way
        name = node.name().rstrip("0123456789").removesuffix("Backward")
        queue.extend((following, [*way, name]) for following, _ in node.next_functions)
    return None, []


def same_elements(way: list[str], *, whole: bool = False) -> bool:
    """Whether the operations named change only type and place; with ``whole``, as many elements come out as went in."""
    return all(name in _SAME or (whole and name in _SELECT) for name in way)


def reaches_leaf(tensor: Tensor, key: str, mark: Any, leaves: set[int], limit: int = 5000) -> bool:
    """Whether a tensor depends on leaves (by id) on a way without a mark."""
    queue: list[Any] = [tensor.grad_fn]
    seen = set[Any]()
    while queue and len(seen) < limit:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _marks(node).get(key) is mark:
            continue
        if id(getattr(node, "variable", None)) in leaves:
            return True
        queue.extend(following for following, _ in node.next_functions)
    return False


def state_of(module: nn.Module, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a module's state on the CPU: what is ``known`` and nobody changes, as it is, of all else a copy."""
    found = {k: v.detach() for k, v in module.state_dict().items() if isinstance(v, Tensor)}
    return {
        k: known[k] if k in known and _same(v.cpu(), known[k]) else v.to("cpu", copy=True) for k, v in found.items()
    }


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.equal(other)


def alike(module: nn.Module, other: nn.Module) -> bool:
    """Whether a module is another one, or could be its copy."""
    if module is other:
        return True
    shapes = [
        {name: p.shape for name, p in m.named_parameters()} if type(m) is type(other) else {} for m in (module, other)
    ]
    return shapes[0] == shapes[1]


def tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors(v, depth - 1)
    elif depth and hasattr(value, "values") and callable(value.values):
        for v in value.values():
            yield from tensors(v, depth - 1)


def precision(device: str) -> Precision:
    """Return autocast's on a kind of device."""
    if not torch.is_autocast_enabled(device):
        return "float32"
    return "float16" if torch.get_autocast_dtype(device) == torch.float16 else "bfloat16"


def weights_precision(parameters: Mapping[str, nn.Parameter]) -> WeightsPrecision | None:
    """Return that of a model's weights; None where they aren't all of one."""
    found = {str(p.dtype).removeprefix("torch.") for p in parameters.values()}
    return next((name for name in get_args(WeightsPrecision) if found == {name}), None)


def modes(watched: Watched) -> dict[str, bool]:
    """Return which parts of a module are in training mode."""
    norms = {m.training for m in watched.norms}
    drops = {m.training for m in watched.drops if m.p > 0}
    found = {
        "masks": any(drops),
        "rest": any(drops) if drops else watched.module.training,
        "mixed": len(norms) > 1 or len(drops) > 1,
    }
    return {**found, "batch_norm": any(norms)} if norms else found


def versions(parameters: dict[str, nn.Parameter]) -> list[int]:
    """Return the version counter of each parameter: every change in place raises it."""
    return [p._version for p in parameters.values()]


def still(watched: Watched) -> list[bool]:
    """Return of each parameter whether it is frozen."""
    return [not p.requires_grad for p in watched.parameters.values()]
