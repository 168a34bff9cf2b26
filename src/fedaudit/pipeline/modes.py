"""The mode in which clients train: what the scenario says, else the mode of a user's own module, else the default."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from fedaudit.models import BATCH_NORM
from fedaudit.scenario.scenario import ModelSpec
from fedaudit.utils.errors import BadInput

Mode = Literal["eval", "train"]


def with_modes(spec: ModelSpec, module: nn.Module | None) -> ModelSpec:
    """Return ``spec`` with BatchNorm's mode and dropout spelled out.

    Args:
        spec: as it was read.
        module: a user's own, in the mode that it was given in; None: a registered model.

    Raises:
        BadInput: some of the module's BatchNorm layers are in another mode than the others, and nobody says which
            counts.
    """
    batch_norm, dropout = spec.batch_norm, spec.dropout
    if batch_norm is None:
        batch_norm = "eval" if module is None else _one_of(module, BATCH_NORM)
        if batch_norm is None:
            raise BadInput(
                "some of the model's BatchNorm layers are in train mode and some in eval mode; "
                "say which it shall be: batch_norm='train' or 'eval'"
            )
    if dropout is None:
        dropout = module is None or _dropout_mode(module) != "eval"
    return spec.model_copy(update={"batch_norm": batch_norm, "dropout": dropout})


def mode_in_words(batch_norm: str, dropout: str, module: nn.Module | None) -> str | None:
    """Return in which mode clients train and whether the module was given so; None where there is no choice.

    Args:
        batch_norm: the mode that is used, or ``none`` where the model has no BatchNorm.
        dropout: ``on``, ``off`` or ``none``.
        module: as of :func:`with_modes`.
    """
    parts = []
    if batch_norm != "none":
        used = f"BatchNorm in {batch_norm} mode"
        parts.append((used, module is None or _one_of(module, BATCH_NORM) == batch_norm))
    if dropout != "none":
        mode = "train" if dropout == "on" else "eval"
        parts.append((f"dropout {dropout}", module is None or _dropout_mode(module) == mode))
    if not parts:
        return None
    if module is None:
        return f"Clients train with {' and '.join(text for text, _ in parts)}."
    origin = {True: "as the module was given", False: "as set, not as the module was given"}
    if len({as_given for _, as_given in parts}) == 1:
        return f"Clients train with {' and '.join(text for text, _ in parts)}, {origin[parts[0][1]]}."
    return f"Clients train with {' and '.join(f'{text} ({origin[as_given]})' for text, as_given in parts)}."


def _one_of(module: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> Mode | None:
    """Return the mode of the layers of that kind, ``eval`` where there are none; None: not all are in one."""
    modes = {part.training for part in module.modules() if isinstance(part, kind)}
    return None if len(modes) > 1 else "train" if modes == {True} else "eval"


def _dropout_mode(module: nn.Module) -> Mode:
    """Return the mode of the dropout layers, ``train`` if any is; of a module without such layers its own."""
    modes = [part.training for part in module.modules() if isinstance(part, _DropoutNd)]
    return "train" if (any(modes) if modes else module.training) else "eval"
