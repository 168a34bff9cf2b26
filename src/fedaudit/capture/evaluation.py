"""Watches an evaluation that wasn't written for it: examples that the model was tested on, and their targets."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from fedaudit.capture import estimators
from fedaudit.capture.capture import current_mode
from fedaudit.capture.language import transformers_call
from fedaudit.capture.passes import alike, tensors
from fedaudit.modalities import Packing
from fedaudit.modalities.tokens import of_one_length
from fedaudit.models import unwrapped
from fedaudit.models.of_transformers import adapters_names
from fedaudit.models.own import InOrder
from fedaudit.task.losses import SIGNATURES
from fedaudit.utils.errors import BadInput
from fedaudit.utils.plain_tensors import plain_copy

_ON_THE_WAY = {  # from outputs to guesses
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
    *(getattr(torch.Tensor, name) for name in ("argmax", "cpu", "detach", "log_softmax", "max", "softmax", "to")),
    *(torch.argmax, torch.log_softmax, torch.max, torch.softmax),
    *(nn.functional.log_softmax, nn.functional.softmax),
}
_COMPARED = {torch.eq, torch.Tensor.eq, torch.Tensor.__eq__}


class Evaluation(TorchFunctionMode):
    """Keeps what a model is given inside its with-block, and the targets that its outputs are compared with.

    That is by a loss of torch's, by a module of (outputs, targets), or by ``==`` with the greatest outputs' classes.
    Nothing of the evaluation is changed. Where nothing of that sort is done, nothing is kept, nor what other threads
    do. A pass in training mode with gradients on may be training, and isn't kept either.

    Args:
        module: that is evaluated, or a copy of it, or the shapes of all tensors of its state, or of its
            adapters', in their order; None: nothing is kept until it is set.
        most: examples that are kept, the first ones.
    """

    def __init__(self, module: nn.Module | Sequence[tuple[int, ...]] | None, most: int) -> None:
        super().__init__()
        self.module = module
        self.passes: list[tuple[Tensor, Tensor]] = []
        self._left = most
        self._given: Tensor | None = None  # what the model was last given
        self._outputs: list[Tensor] = []  # what it returned, and what was made of it
        # Of parts that are called in turn: what the first was given, what the last one returned, how many they are.
        self._turn: tuple[Tensor, Any, int] | None = None
        self._thread = 0
        self._resting = False
        self._hook: Any = None
        self._estimators: estimators.Listener | None = None

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._hook = module_hooks.register_module_forward_hook(self._after, with_kwargs=True)
        self._estimators = estimators.Listener(tested=self._tested)
        estimators.listen(self._estimators)
        super().__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """Keep no more, and leave the thread alone as far as that can be done from here and now."""
        self._hook.remove()
        if self._estimators is not None:
            estimators.forget(self._estimators)
            self._estimators = None
        self._left, self._given = 0, None
        if self.here and current_mode() is self:
            super().__exit__(None, None, None)

    def take(self, most: int) -> list[tuple[Tensor, Tensor]]:
        """Return what was kept, and forget it; ``most`` examples more are kept from now on."""
        found, self.passes, self._left = self.passes, [], most
        return found

    @property
    def full(self) -> bool:
        """Whether it keeps no more."""
        return self._left <= 0

    @property
    def here(self) -> bool:
        """Whether it watches the thread that asks."""
        return self._thread == threading.get_ident()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Watch nothing inside this block, which is in another thread or trains."""
        off = self.here and current_mode() is self
        if off:  # each call of torch's takes some microseconds less meanwhile
            super().__exit__(None, None, None)
        self._resting, self._given = True, None
        try:
            yield
        finally:
            self._resting = False
            if off:
                super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling() or self._given is None:
            return result
        if func in SIGNATURES:
            bound = dict(zip(SIGNATURES[func], args, strict=False)) | (kwargs or {})
            if self._is_output(bound.get("input")):
                self._keep(self._given, bound.get("target"))
        elif func in _ON_THE_WAY and self._is_output(args[0] if args else None):
            self._outputs += [made for made in tensors(result) if len(made.shape) and len(made) == len(self._given)]
        elif func in _COMPARED and len(args) == 2 and any(map(self._is_output, args)):
            guesses, targets = args if self._is_output(args[0]) else args[::-1]
            if not guesses.is_floating_point() and isinstance(targets, Tensor) and guesses.shape == targets.shape:
                self._keep(self._given, targets.flatten())
        return result

    def _tested(self, inputs: Tensor, targets: Tensor) -> None:
        if isinstance(self.module, estimators.FITTED) and not self.full and self.here and not self._resting:
            self._keep(inputs, targets)

    def _is_output(self, value: Any) -> bool:
        return any(value is known for known in self._outputs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.module is None or self.full or self._resting or not self.here:
            return
        own = unwrapped(module)
        if isinstance(self.module, InOrder) and not (own.training and torch.is_grad_enabled()):
            self._in_turn(self.module, own, args, output)
        if self._evaluates(own):
            trains = own.training and torch.is_grad_enabled()
            call = None if trains else transformers_call(own, args, kwargs, output)
            if call is not None:
                self._given, self._outputs = (None, []) if call.refused else (call.inputs, [call.logits])
                if self._given is not None and call.read is not None:
                    self._keep(self._given, call.read.targets)
                return
            given = _given(args, kwargs) if isinstance(output, Tensor) and not trains else None
            self._given, self._outputs = (None, []) if given is None else (given, [output])
        elif self._given is not None and len(args) == 2 and self._is_output(args[0]) and _is_loss(module):
            self._keep(self._given, args[1])

    def _in_turn(self, whole: InOrder, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take parts of a module that are called one after another for its call."""
        parts = [whole.get_submodule(name) for name, _ in whole.order]
        given, turn = args[0] if len(args) == 1 else None, self._turn
        place = turn[2] if turn is not None and given is turn[1] else 0
        if not isinstance(given, Tensor) or type(part) is not type(parts[place]) or not alike(part, parts[place]):
            return
        first = turn[0] if turn is not None and place else given
        last = place + 1 == len(parts)
        self._turn = None if last else (first, output, place + 1)
        self._given, self._outputs = (first, [output]) if last else (None, [])

    def _evaluates(self, module: nn.Module) -> bool:
        if isinstance(self.module, nn.Module):
            return type(module) is type(self.module) and alike(module, self.module)
        state = module.state_dict()
        adapters = (state[name] for name in adapters_names(module, state).values())
        wanted = [] if self.module is None else [*self.module]
        return any(wanted == [tuple(t.shape) for t in part] for part in (state.values(), adapters) if wanted)

    def _keep(self, inputs: Tensor, targets: Any) -> None:
        if isinstance(targets, Tensor) and len(targets) == len(inputs):
            own, theirs = (plain_copy(tensor)[: self._left] for tensor in (inputs, targets))
            self.passes.append((own, theirs))
            self._left -= len(own)
        self._given, self._outputs = None, []


def _is_loss(module: nn.Module) -> bool:
    """Whether a module may be a loss: another network has parameters."""
    return next(module.parameters(), None) is None


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return what a model was called with: one tensor, or several packed; None where it is something else."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        return args[0]
    if len(list(tensors((args, kwargs)))) < 2:
        return None
    try:
        return Packing.of_call(args, kwargs, "the model's input")[1]
    except BadInput:
        return None


def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
    """Return several passes as one, shorter texts filled up with ``NOTHING``; None: no pass, or shapes differ."""
    if parts and all(x.ndim == 2 and not x.is_floating_point() for x, _ in parts):
        longest = max(x.shape[1] for x, _ in parts)
        parts = [
            (of_one_length([x], longest), of_one_length([y], longest) if y.shape == x.shape else y) for x, y in parts
        ]
    if len({(x.shape[1:], y.shape[1:], x.dtype, y.dtype) for x, y in parts}) != 1:
        return None
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
