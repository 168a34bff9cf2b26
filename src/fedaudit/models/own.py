"""A user's own module, as people wrap and write them, made one that can be copied and called as a function."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fedaudit.models.initialise import BATCH_NORM
from fedaudit.utils.errors import BadInput

_KEPT = "_fedaudit_keeps_evaluation_mode"
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
    """Return a copy of a user's module without its wrappers, which can be copied again after it was called.

    The weights that ``torch.nn.utils.weight_norm`` and ``spectral_norm`` (the old ones) leave on a layer are parts of a
    graph, which can't be copied; they are computed anew in every pass, so a copy has their values only.

    Raises:
        BadInput: it can't be copied, or the shapes of its layers aren't known yet.
    """
    module = unwrapped(module)
    if any(nn.parameter.is_lazy(p) for p in [*module.parameters(), *module.buffers()]):
        raise BadInput("the model has lazy layers, whose shapes aren't known yet: run it on one batch first")
    memo: dict[int, Any] = {}
    for part in module.modules():
        for name in _renormed(part):
            weight = getattr(part, name)
            memo[id(weight)] = weight.detach().clone()
    try:
        made = copy.deepcopy(module, memo)
    except Exception as error:
        raise BadInput(f"the model can't be copied ({type(error).__name__}: {str(error)[:200]})") from error
    if any(map(_renormed, made.modules())):  # after the whole pass: tied layers read the weights of others, too
        made.register_forward_hook(_forget_graph, always_call=True)
    return made


def _renormed(part: nn.Module) -> list[str]:
    return [hook.name for hook in part._forward_pre_hooks.values() if isinstance(hook, _RENORMED)]


def _forget_graph(module: nn.Module, *_: Any) -> None:
    for part in module.modules():
        for name in _renormed(part):
            weight = getattr(part, name)
            wrapped = isinstance(weight, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(weight)
            setattr(part, name, torch.empty(0) if wrapped else weight.detach())


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
