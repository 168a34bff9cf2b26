"""A user's own module, as people wrap and write them, made one that can be copied and called as a function."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fedaudit.modalities import Packing
from fedaudit.models.initialise import BATCH_NORM
from fedaudit.models.of_transformers import FEW_BITS, of_few_bits, of_one_input
from fedaudit.utils.errors import BadInput

_KEPT = "_fedaudit_keeps_evaluation_mode"
_PLACE = -1  # among a module's hooks, which torch counts from 0
_RENORMED = (WeightNorm, SpectralNorm)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers that leave what it computes as it is.

    ``DataParallel`` and ``DistributedDataParallel``, ``torch.compile``, Opacus' ``GradSampleModule``.
    """
    while True:
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        elif isinstance(inside := getattr(module, "_orig_mod", None), nn.Module) or (
            type(module).__name__.startswith("GradSampleModule")
            and isinstance(inside := getattr(module, "_module", None), nn.Module)
        ):
            module = inside
        else:
            return module


def own_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a user's module without wrappers and Opacus' hooks, which can be copied after it was called.

    A model of transformers then takes one tensor and returns its logits (:mod:`fedaudit.models.of_transformers`).

    The weights that ``torch.nn.utils.weight_norm`` and ``spectral_norm`` (the old ones) leave on a layer are parts of a
    graph, which can't be copied; they are computed anew in every pass, so a copy has their values only.

    Raises:
        BadInput: it is none, it can't be copied, or the shapes of its layers aren't known yet.
    """
    given: Any = module
    if not isinstance(given, nn.Module):
        got = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
        raise BadInput(
            f"model is {got}; give a torch.nn.Module that is made, or name one of fedaudit's own in the scenario"
        )
    module = unwrapped(module)
    if any(nn.parameter.is_lazy(p) for p in [*module.parameters(), *module.buffers()]):
        raise BadInput("the model has lazy layers, whose shapes aren't known yet: run it on one batch first")
    if of_few_bits(module):
        raise BadInput(FEW_BITS)
    memo: dict[int, Any] = {}
    for part in module.modules():
        for name in _renormed(part):
            weight = getattr(part, name)
            memo[id(weight)] = weight.detach().clone()
    try:
        made = without_opacus(copy.deepcopy(module, memo))
    except Exception as error:
        raise BadInput(f"the model can't be copied ({type(error).__name__}: {str(error)[:200]})") from error
    if any(map(_renormed, made.modules())):  # after the whole pass: tied layers read the weights of others, too
        made.register_forward_hook(_forget_graph, always_call=True)
    of_one_input(made)
    return made


def without_opacus(module: nn.Module) -> nn.Module:
    """Take off a module the hooks that Opacus leaves on its layers, and what they keep there; return it."""
    for part in module.modules():
        for hooks in (part._forward_hooks, part._backward_hooks):
            for key, hook in list(hooks.items()):
                if getattr(getattr(hook, "func", hook), "__module__", "").startswith("opacus."):
                    del hooks[key]
        if not part._backward_hooks:
            part._is_full_backward_hook = None
        for name in ("activations", "autograd_grad_sample_hooks", "ft_compute_sample_grad", "max_batch_len"):
            if "opacus" in sys.modules and name in vars(part):
                delattr(part, name)
    return module


def _renormed(part: nn.Module) -> list[str]:
    return [hook.name for hook in part._forward_pre_hooks.values() if isinstance(hook, _RENORMED)]


def _forget_graph(module: nn.Module, *_: Any) -> None:
    for part in module.modules():
        for name in _renormed(part):
            weight = getattr(part, name)
            wrapped = isinstance(weight, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(weight)
            setattr(part, name, torch.empty(0) if wrapped else weight.detach())


def twice_differentiable(module: nn.Module) -> None:
    """Let a module's ``nn.Hardsigmoid`` compute clip(x + 3, 0, 6) / 6 by operations that torch can derive twice.

    The fused one has no second derivative, which attacks need that go back through a gradient; MobileNetV3 has it.

    Args:
        module: changed in place; its values stay, up to rounding.
    """
    for part in module.modules():
        if isinstance(part, nn.Hardsigmoid):
            setattr(part, "forward", _hard_sigmoid)  # noqa: B010


def _hard_sigmoid(x: Tensor) -> Tensor:
    return nn.functional.relu6(x + 3) / 6


def keep_modes(module: nn.Module) -> int:
    """Let BatchNorm layers that are in evaluation mode, beside others in training mode, stay so; return how many."""
    norms = [part for part in module.modules() if isinstance(part, BATCH_NORM)]
    kept = [part for part in norms if not part.training]
    if len(kept) == len(norms):
        return 0
    for part in kept:
        setattr(part, _KEPT, True)
    return len(kept)


def keeps_evaluation_mode(part: nn.Module) -> bool:
    """Whether :func:`keep_modes` said so of a layer."""
    return bool(getattr(part, _KEPT, False))


class InOrder(nn.Module):
    """A user's module in whose place some of its parts are called in turn, as one module; its state's names stay.

    Args:
        order: the parts' names, and the shape of one example as each takes it.
    """

    def __init__(self, whole: nn.Module, order: Sequence[tuple[str, Sequence[int]]]) -> None:
        super().__init__()
        for own in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "training"):
            self.__dict__[own] = getattr(whole, own)
        self.order = tuple((name, tuple(shape)) for name, shape in order)
        self.called: str = whole._get_name()

    def _get_name(self) -> str:
        return self.called

    def forward(self, x: Tensor) -> Tensor:
        """Return what the last of the parts makes of it."""
        for name, shape in self.order:
            x = self.get_submodule(name)(x.reshape(len(x), *shape))
        return x


@dataclass(frozen=True)
class _Flattens:
    """After a pass: maps become one row an example."""

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.flatten(1)


@dataclass(frozen=True)
class _Unpacks:
    """Before a pass: the one tensor becomes the arguments that the module takes."""

    packing: Packing

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        return self.packing.arguments(args[0])


@dataclass(frozen=True)
class _Packs:
    """After a pass: the module's outputs become one tensor."""

    packing: Packing

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Tensor:
        return self.packing.pack(output, "the model's output")


def of_one_tensor(
    module: nn.Module,
    inputs: Packing | None,
    heads: Packing | None,
    order: Sequence[tuple[str, Sequence[int]]] | None = None,
    *,
    flat: bool = False,
) -> nn.Module:
    """Return a copy of a user's module that takes its inputs, and returns its outputs, packed into one tensor each.

    It does so by hooks, so that the names in its state stay as they are.

    Args:
        module: the user's own.
        inputs: as (n, size); None: it takes one tensor.
        heads: as (n, size); None: it returns one tensor.
        order: of its parts that are called in its place, as of :class:`InOrder`.
        flat: whether it returns maps that become one row an example.

    Raises:
        BadInput: as of :func:`own_copy`.
    """
    made = own_copy(module if order is None or isinstance(module, InOrder) else InOrder(module, order))
    if flat:
        made._forward_hooks[_PLACE] = _Flattens()
    # under one number, always: torch's own counts up, and a module's fingerprint would be another in every process
    if inputs is not None:
        made._forward_pre_hooks[_PLACE] = _Unpacks(inputs)
        made._forward_pre_hooks_with_kwargs[_PLACE] = True
    if heads is not None:
        made._forward_hooks[_PLACE] = _Packs(heads)
    return made


def packings_in(module: nn.Module) -> tuple[Packing | None, Packing | None]:
    """Return the packing of inputs and of outputs that :func:`of_one_tensor` gave a module."""
    inputs = (hook.packing for hook in module._forward_pre_hooks.values() if isinstance(hook, _Unpacks))
    heads = (hook.packing for hook in module._forward_hooks.values() if isinstance(hook, _Packs))
    return next(inputs, None), next(heads, None)


def packing_of(module: nn.Module, inputs: Packing | None, sample: Tensor) -> tuple[Packing | None, Packing | None]:
    """Return how a user's module takes several inputs, as arguments or as one, and its several outputs; None: one.

    It is tried on a few examples, in evaluation mode; what it returns where it fails otherwise is found elsewhere.

    Args:
        module: the user's own; its state and its mode stay as they are.
        inputs: of the examples; None: one tensor.
        sample: (n, ...) examples as the model sees them.

    Raises:
        BadInput: it takes the inputs neither as arguments nor as one, an output isn't a tensor (n, ...), or in training
            mode it returns others, which attacks, that run it without dropout's masks, don't see.
    """
    tried = own_copy(module).eval()
    ways = [inputs] if inputs is None else [replace(inputs, single=False), replace(inputs, single=True)]
    first: Exception | None = None
    for way in ways:
        args, kwargs = ((sample,), {}) if way is None else way.arguments(sample)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                outputs = tried(*args, **kwargs)
        except Exception as error:  # a user's own: it may raise anything
            first = first or error
            continue
        heads = None
        if isinstance(outputs, Mapping | tuple | list):
            heads = Packing.of(outputs, "the model's output")
            heads.pack(outputs, "the model's output")
        if module.training:
            _check_in_training(tried.train(), args, kwargs, heads)
        return way, heads
    if inputs is None:
        return None, None  # whoever checks the model says why
    raise BadInput(
        f"the model takes the inputs {inputs} neither as arguments nor as one tuple or dictionary: "
        f"{type(first).__name__}: {' '.join(str(first).split())[:300]}"
    )


def _check_in_training(tried: nn.Module, args: Any, kwargs: Any, heads: Packing | None) -> None:
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = tried(*args, **kwargs)
    except Exception:  # BatchNorm on a batch of one, say: its training tells why
        return
    if not isinstance(outputs, Mapping | tuple | list):
        return
    found = Packing.of(outputs, "the model's output in training mode")
    if found != heads:
        raise BadInput(
            f"in training mode the model returns several outputs, {found}, and in evaluation mode "
            f"{'one' if heads is None else heads}: make it without the auxiliary ones (aux_logits=False), wrap it in a "
            "module that returns one, or give it in evaluation mode, model.eval()"
        )
