"""What a site gives its guard beside settings: the agreed network, and examples of its own, as objects or by name."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fedaudit.modalities.packed import packed_alone
from fedaudit.task.training import LOSSES, Loss
from fedaudit.utils.errors import BadInput
from fedaudit.utils.objects import load_object

Examples = tuple[Tensor, Tensor]  # inputs as the model sees them, and their targets


def agreed_network(given: nn.Module | str | None) -> nn.Module | None:
    """Return the network that the federation agreed on: a module, or ``package.module:name`` of it or its maker."""
    made = _made(given, "agreed")
    if made is not None and not isinstance(made, nn.Module):
        raise BadInput(f"agreed is {type(made).__name__}; give a torch module, or package.module:name of what makes it")
    return made


def own_examples(given: Examples | str | None, what: str = "examples") -> Examples | None:
    """Return a site's examples, several inputs packed, and their classes, given or made by ``package.module:name``."""
    made = _made(given, what)
    if made is None:
        return None
    if isinstance(made, tuple | list) and len(made) == 2:  # of a model of several inputs
        made = packed_alone(made[0], f"{what}: input"), packed_alone(made[1], f"{what}: target", whole=True)
    pair = isinstance(made, tuple | list) and len(made) == 2 and all(isinstance(part, Tensor) for part in made)
    if not pair or not len(made[0]) or len(made[0]) != len(made[1]):
        raise BadInput(f"{what} must be two tensors of the same length, inputs and classes, or what returns them")
    return made[0], made[1]


def own_loss(given: str | Loss | None) -> str | Loss | None:
    """Return a site's loss: a registered name as it is, or a function, or what ``package.module:function`` names."""
    if isinstance(given, str) and given not in LOSSES:
        if ":" not in given:
            raise BadInput(f"loss is '{given}'; give one of {', '.join(LOSSES)}, or package.module:function")
        given = cast("Loss", load_object(given, "loss"))
    return given


def _made(given: Any, what: str) -> Any:
    if not isinstance(given, str):
        return given
    found = load_object(given, what)
    if isinstance(found, nn.Module | tuple | list) or not callable(found):
        return found
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):  # the site's training draws as without
            return found()
    except Exception as error:
        raise BadInput(f"{what} '{given}' can't be called without arguments: {type(error).__name__}: {error}") from None
