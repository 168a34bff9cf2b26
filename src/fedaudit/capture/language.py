"""What a model of transformers was called with, ``model(**batch)``, and the loss that it or its Trainer computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.modalities import NOTHING
from fedaudit.models import is_of_transformers, logits_of, padding_of
from fedaudit.models.of_transformers import arguments_of
from fedaudit.task.losses import LossCall, read_loss
from fedaudit.utils.plain_tensors import plain_copy

_TOLERANCE = 1e-4  # of a loss that is computed once more
_BESIDE = ("labels", "attention_mask", "token_type_ids", "num_items_in_batch")  # beside what the model is about


@dataclass(frozen=True)
class TransformersCall:
    """One call.

    Attributes:
        inputs: tokens (n, length), or images or what else the model takes, on the CPU.
        shape: of the logits: (n, classes), or (n, outputs, length) of each token.
        loss: that it returned; None: it was given no labels.
        refused: why the inputs alone don't give the same; empty where they do.
        filling: the token that fills texts up behind their end, where the configuration tells none; None: not known.
        items: over how many targets its loss is divided; None: as many as there are.
    """

    inputs: Tensor
    logits: Tensor
    shape: tuple[int, ...]
    loss: Tensor | None
    read: LossCall | None
    refused: str
    items: float | None
    filling: int | None = None


def transformers_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> TransformersCall | None:
    """Return a call of a model of transformers, or of a user's own around one; None: another model, input or output."""
    own = logits_of(output)
    logits = output if isinstance(output, Tensor) and output.ndim == 2 else own
    if logits is None or not is_of_transformers(module):
        return None
    names = arguments_of(module) if len(args) != 1 else []
    given = {name: value for name, value in (*zip(names, args, strict=False), *kwargs.items()) if value is not None}
    labels, mask, kinds, items = (given.pop(name, None) for name in _BESIDE)
    given = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    inputs = args[0] if len(args) == 1 else given.pop(next(iter(given), ""), None)
    if not isinstance(inputs, Tensor) or len(args) > len(names) > 0 or (own is None and inputs.is_floating_point()):
        return None
    if kinds is not None and bool(kinds.any()):
        given["token_type_ids"] = kinds
    refused = f"the model is given {', '.join(given)} beside its input" if given else ""
    loss = getattr(output, "loss", None) if labels is not None else None
    count = None if items is None else float(items)
    read = None if labels is None or loss is None else read_by_value(logits.detach(), labels, loss.detach(), count)
    filling = None
    if mask is not None and not refused:
        padding = padding_of(module)
        if padding is None and logits.ndim == 3 and read is not None and not read.mismatch:
            filling = _filling(inputs, mask)  # what follows a token changes nothing of a model of the next token
        padding = filling if padding is None else padding
        hidden = inputs[mask == 0] if mask.shape == inputs.shape else None
        if hidden is None or not bool((hidden == padding).all() if padding is not None else not len(hidden)):
            refused = "the attention_mask hides tokens that aren't padding: say config.pad_token_id, and hide no others"
    made = output if own is None else output.logits
    return TransformersCall(plain_copy(inputs), made, tuple(logits.shape), loss, read, refused, count, filling)


def _filling(inputs: Tensor, mask: Tensor) -> int | None:
    """Return the one token that a mask hides, where it hides ends of texts alone; None: none, or others."""
    if mask.shape != inputs.shape or bool((mask[:, 1:] > mask[:, :-1]).any()):
        return None
    found = inputs[mask == 0].unique().tolist()
    return int(found[0]) if len(found) == 1 else None


def read_by_value(
    logits: Tensor, labels: Tensor, loss: Tensor, items: float | None = None, label_smoothing: float = 0.0
) -> LossCall:
    """Return which loss of logits and labels a model of transformers computed, recognised by its value.

    These are cross-entropy, of the next token where each has logits, and by the labels and ``config.problem_type``
    binary cross-entropy or the squared error.

    Args:
        logits: (n, classes), or (n, outputs, length).
        items: over how many targets a sum is divided; None: it is the mean.
    """
    targets, tries = labels, list[tuple[Callable[..., Tensor], Tensor]]()
    if logits.ndim == 3 and labels.ndim == 2:  # the label of each token is asked of the one before
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=NOTHING)
    if not targets.is_floating_point() and targets.shape == (logits.shape[0], *logits.shape[2:]):
        tries.append((nn.functional.cross_entropy, targets))
    elif not targets.is_floating_point() and targets.numel() == len(logits) > 0 and logits.shape[1] > 1:
        tries.append((nn.functional.cross_entropy, targets.flatten()))
    if logits.ndim == 2 and targets.numel() == logits.numel():
        real = targets.view(logits.shape).float()
        tries += [(nn.functional.binary_cross_entropy_with_logits, real), (nn.functional.mse_loss, real)]
    near = max(_TOLERANCE, 4 * torch.finfo(loss.dtype).eps)
    for function, asked in tries:
        options = {"label_smoothing": label_smoothing} if label_smoothing else {}
        with torch.no_grad():
            value = function(logits.float(), asked, **options)
        count = float((asked != NOTHING).sum()) if function is nn.functional.cross_entropy else float(asked.numel())
        for terms in (1.0, *([] if items is None else [count / items])):
            if bool((value * terms - loss).abs() <= near * loss.abs()):
                return replace(read_loss(function, (logits, asked), options), terms=terms)
    what = "mean cross-entropy of the next token" if logits.ndim == 3 else "one that transformers documents"
    return LossCall("custom", plain_copy(targets), mismatch=f"the loss that the model computes isn't the {what}")
