"""Calls of torch's loss functions, read: which loss, on what, with which options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fedaudit.modalities import NOTHING
from fedaudit.task.training import BCE

_F = nn.functional
_KNOWN: dict[Callable[..., Any], str] = {
    _F.cross_entropy: "cross-entropy",
    _F.nll_loss: "cross-entropy",  # of logarithms of probabilities, on which both are the same
    _F.binary_cross_entropy_with_logits: BCE,
    _F.mse_loss: "mse",
}
_OTHERS: tuple[Callable[..., Any], ...] = (
    _F.binary_cross_entropy,
    _F.l1_loss,
    _F.smooth_l1_loss,
    _F.huber_loss,
    _F.poisson_nll_loss,
    _F.kl_div,
    _F.soft_margin_loss,
    _F.multilabel_margin_loss,
    _F.multilabel_soft_margin_loss,
    _F.multi_margin_loss,
    _F.hinge_embedding_loss,
)
SIGNATURES: dict[Callable[..., Any], list[str]] = {f: [*inspect.signature(f).parameters] for f in (*_KNOWN, *_OTHERS)}


@dataclass(frozen=True)
class LossCall:
    """One call of a loss function.

    Attributes:
        name: registered name, or ``custom``.
        targets: on the CPU; of binary cross-entropy int64 (n,) where they are whole.
        label_smoothing, class_weights: of cross-entropy.
        terms: that its sum has: the sum is ``terms`` times the mean. 1 where the call returned the mean.
        mismatch: why it isn't the registered loss, in words; empty where it is.
    """

    name: str
    targets: Tensor
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    terms: float = 1.0
    mismatch: str = ""


def read_loss(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> LossCall:
    """Return what a call of one of ``SIGNATURES`` computes."""
    bound = dict(zip(SIGNATURES[function], args, strict=False)) | kwargs
    outputs, targets = bound["input"], bound["target"].detach().to("cpu", copy=True)
    name = _KNOWN.get(function, "custom")
    if name == "custom":
        return LossCall(name, targets, mismatch=f"the loss is {function.__name__}")
    smoothing, weight = float(bound.get("label_smoothing", 0.0)), bound.get("weight")
    weights = None if weight is None else weight.detach().cpu()
    terms, mismatch = 1.0, ""
    if name == "cross-entropy":
        classes = not targets.is_floating_point()
        asked = targets != bound.get("ignore_index", NOTHING)
        if classes and targets.ndim == 2:  # of sequences, of which a causal task leaves out what nothing follows
            targets = targets.where(asked, NOTHING)
        elif classes and not bool(asked.all()):
            mismatch = "the loss leaves out some targets (ignore_index)"
        if not mismatch and function is _F.nll_loss and not _normalised(outputs):
            mismatch = "the loss is nll_loss of something else than logarithms of probabilities"
        elif _reduction(bound) != "mean":
            terms = float(asked.sum() if classes else outputs.numel() // outputs.shape[1])
            if weights is not None and classes:
                terms = float(weights[targets[asked]].sum())
    else:
        if weights is not None or bound.get("pos_weight") is not None:
            mismatch = "the loss weighs examples or classes (weight, pos_weight)"
        terms = float(outputs.numel()) if _reduction(bound) != "mean" else 1.0
        if name == BCE:
            mismatch = mismatch or "the loss has several logits an example" * (outputs.numel() != len(outputs))
            whole = targets.long()
            targets = whole.reshape(-1) if not mismatch and bool((whole == targets).all()) else targets
        weights = None
    told = None if weights is None else tuple(weights.tolist())
    return LossCall(name, targets, smoothing, told, terms, mismatch)


def _reduction(bound: dict[str, Any]) -> str:
    average, reduce = bound.get("size_average"), bound.get("reduce")
    if average is None and reduce is None:
        return str(bound.get("reduction", "mean"))
    return "none" if reduce is False else "sum" if average is False else "mean"


def _normalised(outputs: Tensor) -> bool:
    return bool((outputs.detach().float().logsumexp(1).abs() < 1e-2).all())
