"""What a model of transformers was called with, ``model(**batch)``, and the loss that it computes itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.modalities import NOTHING
from fedaudit.models import is_of_transformers, logits_of, padding_of
from fedaudit.task.losses import LossCall
from fedaudit.utils.plain_tensors import plain_copy

_TOLERANCE = 1e-4  # of a loss that is computed once more


@dataclass(frozen=True)
class TokensCall:
    """One call.

    Attributes:
        tokens: (n, length), on the CPU.
        logits: as the model returned them.
        shape: of the logits: (n, classes), or (n, outputs, length) of each token.
        loss: that it returned; None: it was given no labels.
        read: what that is; None where there is none.
        refused: why tokens alone don't give the same; empty where they do.
    """

    tokens: Tensor
    logits: Tensor
    shape: tuple[int, ...]
    loss: Tensor | None
    read: LossCall | None
    refused: str


def tokens_call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> TokensCall | None:
    """Return what a call of a model of transformers was; None: it is another model, or isn't given tokens."""
    logits = logits_of(output) if is_of_transformers(module) else None
    given = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
    tokens = args[0] if len(args) == 1 else given.pop("input_ids", None)
    if logits is None or len(args) > 1 or not isinstance(tokens, Tensor) or tokens.is_floating_point():
        return None
    labels, mask = given.pop("labels", None), given.pop("attention_mask", None)
    kinds = given.get("token_type_ids")
    if kinds is not None and not bool(kinds.any()):
        del given["token_type_ids"]
    refused = f"the model is given {', '.join(given)} beside its tokens" if given else ""
    if mask is not None and not refused:
        padding = padding_of(module)
        hidden = tokens[mask == 0] if mask.shape == tokens.shape else None
        if hidden is None or not bool((hidden == padding).all() if padding is not None else not len(hidden)):
            refused = "the attention_mask hides tokens that aren't padding: say config.pad_token_id, and hide no others"
    loss = getattr(output, "loss", None) if labels is not None else None
    read = None if labels is None or loss is None else _read(logits.detach(), labels, loss.detach())
    return TokensCall(plain_copy(tokens), output.logits, tuple(logits.shape), loss, read, refused)


def _read(logits: Tensor, labels: Tensor, loss: Tensor) -> LossCall:
    """Return which loss of logits and labels a model computed, told by its value."""
    targets = labels
    if logits.ndim == 3:  # the label of each token is asked of the one before
        targets = nn.functional.pad(labels[:, 1:], (0, 1), value=NOTHING)
    fits = not targets.is_floating_point() and targets.shape == (logits.shape[0], *logits.shape[2:])
    if fits:
        with torch.no_grad():
            value = nn.functional.cross_entropy(logits.float(), targets)
        if bool((value - loss).abs() <= _TOLERANCE * loss.abs()):
            return LossCall("cross-entropy", plain_copy(targets))
    what = "of the next token" if logits.ndim == 3 else "of the classes"
    return LossCall(
        "custom", plain_copy(targets), mismatch=f"the loss that the model computes isn't the mean cross-entropy {what}"
    )
