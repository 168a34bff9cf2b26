"""What happens to a module's gradients between the backward pass and the optimiser's step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

# autograd's own, as DistributedDataParallel uses it; a hook on every parameter costs ten times as much
_at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

Kind = Literal["scale", "norm", "value", "low", "high", "zero", "other"]


def _in_place() -> dict[Callable[..., Any], Kind]:
    """Every function of torch that changes its first argument, or the tensors in it, and what that is to gradients."""
    named: dict[str, Kind] = {"mul_": "scale", "div_": "scale", "zero_": "zero", "clamp_": "value", "clip_": "value"}
    named |= {"__imul__": "scale", "__itruediv__": "scale", "clamp_min_": "value", "clamp_max_": "value"}
    found: dict[Callable[..., Any], Kind] = {}
    for owner, prefix in ((torch.Tensor, ""), (torch, "_foreach_")):
        for name in dir(owner):
            short = name.removeprefix(prefix)
            changes = short.endswith("_") and not short.endswith("__") and not short.startswith("_")
            if name.startswith(prefix) and (changes or short in ("__iadd__", "__isub__", "__imul__", "__itruediv__")):
                found[getattr(owner, name)] = named.get(short, "other")
    for name in ("requires_grad_", "retain_grad", "share_memory_"):  # that change no element
        found.pop(getattr(torch.Tensor, name), None)
    found[torch._amp_foreach_non_finite_check_and_unscale_] = "scale"
    return found


IN_PLACE = _in_place()
IN_PLACE_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_  # GradScaler's
NORMS = (torch.linalg.vector_norm, torch.norm)


def _place(gradient: Tensor) -> tuple[int, int]:
    """Where a gradient lies (0: it is sparse, or of another kind without memory of its own) and its version."""
    strided = gradient.layout == torch.strided
    return gradient.data_ptr() if strided else 0, gradient._version


def _bounds(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    name = function.__name__
    if "min" in name or "max" in name:
        bound = args[1] if len(args) > 1 else next(iter(kwargs.values()))
        return (bound, None) if "min" in name else (None, bound)
    return kwargs.get("min", args[1] if len(args) > 1 else None), kwargs.get("max", args[2] if len(args) > 2 else None)


def _factor(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if function is IN_PLACE_UNSCALE:
        return args[2]
    if len(args) < 2 or isinstance(args[1], (list, tuple)):
        return None
    return 1 / args[1] if "div" in function.__name__ else args[1]


@dataclass
class Edit:
    """One change of gradients: by a factor; a coefficient that a norm was given for; a bound on elements; another."""

    kind: Kind
    value: Tensor | float | None
    norm: Tensor | None
    touched: set[int]


@dataclass
class Edits:
    """What was done to one step's gradients, in order; ``changed``: in a way that wasn't seen, too."""

    edits: list[Edit] = field(default_factory=list)
    changed: bool = False
    with_gradient: frozenset[int] = frozenset()


class GradientWatch:
    """Follows the gradients of parameters: when they are cleared, accumulated, and changed by something else.

    Nothing is copied: each gradient is known by its memory and its version counter, which every change in place raises.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._known: dict[int, tuple[int, int]] = {}  # position -> memory, version as accumulated or as an edit left it
        self._zero: dict[int, tuple[int, int]] = {}
        self._position: dict[int, int] = {}  # memory -> position
        self._now = Edits()
        self._norm: Tensor | None = None
        self._accumulated = False
        self._spent = False  # a step has used what is there
        self._under_way = False  # a backward pass, which may have come to several outputs
        self._clear: frozenset[int] = frozenset()  # positions whose gradients were, before the last backward pass
        self.trained: frozenset[int] | None = None  # positions of those that the optimiser holds; None: not known yet

    @classmethod
    def of_parts(cls, parameters: Sequence[nn.Parameter], parts: Iterable[GradientWatch]) -> GradientWatch:
        """Return what several have seen, each of some of these parameters, as one."""
        made, places = cls(parameters), {id(p): i for i, p in enumerate(parameters)}
        for one in parts:
            at = [places[id(p)] for p in one._parameters]
            made._known |= {at[i]: place for i, place in one._known.items()}
            made._zero |= {at[i]: place for i, place in one._zero.items()}
            made._position |= {memory: at[i] for memory, i in one._position.items()}
            for edit in one._now.edits:
                made._add(Edit(edit.kind, edit.value, edit.norm, {at[i] for i in edit.touched}))
            made._now.changed |= one._now.changed
            made._accumulated |= one._accumulated
        return made

    def begin(self) -> bool:
        """A backward pass has reached the module's output; return whether what was accumulated before is void."""
        if self._under_way:
            return False
        self._under_way = True
        _at_end_of_backward(self._end)
        self._clear = frozenset(filter(self._cleared, range(len(self._parameters))))
        if self._clear.issuperset(self._own()):
            void = self._accumulated
            self._now, self._accumulated, self._spent = Edits(), False, False
            self._known.clear()
            return void
        if self._spent or not self._accumulated:
            self._now.changed, self._spent = True, False  # what an earlier step left takes part in this one
        elif self._now.edits or self._unseen():
            self._now.changed = True  # changed, and accumulated upon
        return False

    def fresh(self) -> None:
        """Another backward pass begins; the last one may have ended with an exception, half done."""
        self._accumulated |= self._under_way
        self._under_way = False

    def _end(self) -> None:
        """The backward pass is over: what lies in the gradients now is its work."""
        self._under_way = False
        try:
            for i, p in enumerate(self._parameters):
                if p.grad is not None and (place := _place(p.grad)) != self._known.get(i):
                    self._known[i] = place
                    self._position[place[0]] = i
                    self._accumulated = True
        except Exception:  # of ours must not end the user's backward pass
            self._now.changed = True

    def step(self) -> Edits:
        """A step uses the gradients; return what was done to them since the backward pass."""
        now = self._now
        now.changed = now.changed or self._unseen()
        now.with_gradient = frozenset(i for i, p in enumerate(self._parameters) if p.grad is not None)
        self._now, self._accumulated, self._spent, self._norm, self._under_way = Edits(), False, True, None, False
        return now

    @property
    def edited(self) -> bool:
        """Whether something changed the gradients since the last step used them."""
        return bool(self._now.edits) or self._now.changed

    def turn(self, positions: Iterable[int]) -> None:
        """From the backward pass on that was just made, these parameters are trained."""
        self.trained = frozenset(positions)
        if self.trained <= self._clear:
            own = [edit for edit in self._now.edits if edit.touched & self.trained]
            self._now = Edits(own)

    def also(self, positions: Iterable[int]) -> None:
        """Another optimiser steps these parameters, beside the others."""
        self.trained = (self.trained or frozenset()) | frozenset(positions)

    def norm(self, value: Any) -> None:
        """A norm was computed; it may be that of the gradients."""
        if isinstance(value, Tensor) and value.ndim == 0 and self._known:
            self._norm = value.detach()

    def edit(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A function of ``IN_PLACE`` was called."""
        if not self._position or not args:
            return
        touched = {
            at
            for t in (args[0] if isinstance(args[0], (list, tuple)) else [args[0]])
            if isinstance(t, Tensor)
            and t.layout == torch.strided
            and (at := self._position.get(t.data_ptr())) is not None
            and self._is_gradient(t, at)
        }
        if not touched:
            return
        kind = IN_PLACE[function]
        for i in touched:
            if (grad := self._parameters[i].grad) is not None:
                (self._zero if kind == "zero" else self._known)[i] = _place(grad)
        if kind == "value":
            low, high = _bounds(function, args, kwargs)
            for bound, kind in ((low, "low"), (high, "high")):
                if bound is not None:
                    self._add(Edit(kind if isinstance(bound, (int, float)) else "other", bound, None, set(touched)))
        elif kind == "scale":
            factor, norm = _factor(function, args), None
            if isinstance(factor, Tensor) and factor.ndim == 0 and IN_PLACE_UNSCALE is not function:
                norm = self._norm
            known = isinstance(factor, (int, float)) or (isinstance(factor, Tensor) and factor.numel() == 1)
            kind = "other" if not known else "scale" if norm is None else "norm"
            self._add(Edit(kind, factor if known else None, norm, touched))
        elif kind == "other":
            self._add(Edit(kind, None, None, touched))

    def _add(self, edit: Edit) -> None:
        for earlier in reversed(self._now.edits):  # one operation, parameter by parameter
            if earlier.touched & edit.touched:
                break
            if earlier.kind != edit.kind or edit.value is None or earlier.value is None:
                continue
            if earlier.value is edit.value or float(earlier.value) == float(edit.value):
                earlier.touched |= edit.touched
                return
        self._now.edits.append(edit)

    def _is_gradient(self, tensor: Tensor, i: int) -> bool:
        grad = self._parameters[i].grad  # memory is used again
        return grad is not None and grad.data_ptr() == tensor.data_ptr() and grad.numel() == tensor.numel()

    def _own(self) -> Iterable[int]:
        return range(len(self._parameters)) if self.trained is None else self.trained

    def _cleared(self, i: int) -> bool:
        grad = self._parameters[i].grad
        if grad is None:
            return True
        place = _place(grad)
        if place in (self._zero.get(i), self._known.get(i)):
            return place == self._zero.get(i)
        return grad.layout == torch.strided and not bool(grad.count_nonzero())  # changed unseen, or from before

    def _unseen(self) -> bool:
        """Whether a gradient isn't as the backward pass, or an edit that was seen, left it."""
        for i in self._own():
            grad = self._parameters[i].grad
            now = None if grad is None else _place(grad)
            if now != self._known.get(i) and not (now is not None and now == self._zero.get(i)):
                return True
        return False


def clipping(steps: Iterable[Edits], trained: frozenset[int]) -> tuple[float | None, float | None, list[float], bool]:
    """Return the norm that steps were clipped to, the elements' bound, each step's factor before, and any other change.

    None stands for a norm or bound that wasn't there, or never bit.
    """
    read = [_read(step, step.with_gradient & trained) for step in steps]
    norms = [norm for _, norm, _, _ in read if norm is not None]
    bounds = {bound for _, _, bound, _ in read}
    biting = [norm for norm in norms if norm > 0]
    other = any(changed for *_, changed in read) or len(bounds) > 1
    other |= bool(biting) and (len(norms) < len(read) or max(biting) - min(biting) > 1e-5 * min(biting))
    norm = rounded(sum(biting) / len(biting)) if biting else None
    return norm, max((b for b in bounds if b), default=None), [factor for factor, *_ in read], other


def _read(step: Edits, own: frozenset[int]) -> tuple[float, float | None, float | None, bool]:
    """One step's factor, norm (0 where a clip didn't bite), bound, and whether there was anything else."""
    factor, norm, sides, other = 1.0, None, dict[str, float](), step.changed
    for edit in step.edits:
        whole, first = edit.touched >= own, norm is None and not sides
        if edit.kind == "scale" and whole and first:
            factor *= float(edit.value or 0)
        elif edit.kind == "norm" and edit.touched == own and first and edit.norm is not None:
            coefficient = float(edit.value or 0)
            norm = coefficient * (float(edit.norm) + 1e-6) if 0 < coefficient < 1 else 0.0
            other |= not 0 < coefficient <= 1
        elif edit.kind in ("low", "high") and whole and edit.kind not in sides:
            sides[edit.kind] = float(edit.value or 0)
        else:
            other |= bool(edit.touched & own)
    low, high = sides.get("low"), sides.get("high")
    other |= (low is None) != (high is None) or (low is not None and high is not None and low != -high)
    return factor, norm, high, other


def rounded(value: float) -> float:
    """The number that a person wrote, which float32 arithmetic has blurred."""
    short = float(f"{value:.5g}")
    return short if abs(short - value) <= 2e-6 * value else value
