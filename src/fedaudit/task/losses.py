"""Losses, read: which of torch's functions a call is, and which registered loss a user's own one computes."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedaudit.modalities import NOTHING, Packing
from fedaudit.task.base import Task
from fedaudit.task.info import TaskInfo
from fedaudit.task.targets import CLASSIFICATION, REGRESSION, task_named
from fedaudit.task.training import BCE, CROSS_ENTROPY, MSE, Loss, loss_function
from fedaudit.utils.plain_tensors import plain, plain_copy

_F = nn.functional
KNOWN: dict[Callable[..., Any], str] = {
    _F.cross_entropy: CROSS_ENTROPY,
    _F.nll_loss: CROSS_ENTROPY,  # of logarithms of probabilities, on which both are the same
    _F.binary_cross_entropy_with_logits: BCE,
    _F.mse_loss: MSE,
}
_OTHERS = (
    "binary_cross_entropy l1_loss smooth_l1_loss huber_loss poisson_nll_loss kl_div soft_margin_loss "
    "multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss hinge_embedding_loss"
)
SIGNATURES: dict[Callable[..., Any], list[str]] = {
    f: [*inspect.signature(f).parameters] for f in (*KNOWN, *(getattr(_F, name) for name in _OTHERS.split()))
}


@dataclass(frozen=True)
class LossCall:
    """One call of a loss function.

    Attributes:
        name: registered name, or ``custom``.
        targets: on the CPU. For binary cross-entropy with one logit per example: int64 (n,). With one logit per pixel:
            the targets' own shape, if whole. In sequences and masks the loss leaves out ``NOTHING``.
        class_weights: of cross-entropy; for binary cross-entropy the weight of each label or pixel where it is 1.
        terms: number of terms in its sum, which is so many times the mean; 1 where the call returned the mean.
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
    call = dict(zip(SIGNATURES[function], args, strict=False)) | kwargs
    outputs, targets = plain(call["input"]), plain_copy(call["target"])
    name = KNOWN.get(function)
    if name is None:
        return LossCall("custom", targets, mismatch=f"the loss is {function.__name__}")
    if name == CROSS_ENTROPY:
        read = _cross_entropy(outputs, targets, call, of_logs=function is _F.nll_loss)
    elif name == BCE:
        read = _binary_cross_entropy(outputs, targets, call)
    else:
        read = _squared_error(outputs, targets, call)
    return read if _reduction(call) != "mean" else replace(read, terms=1.0)


def _cross_entropy(outputs: Tensor, targets: Tensor, call: dict[str, Any], *, of_logs: bool) -> LossCall:
    """Return a sum of cross-entropy of classes (n, ...), or of probabilities of them; ``of_logs``: of their logs."""
    weights = None if call.get("weight") is None else plain_copy(call["weight"])
    terms, mismatch = float(outputs.numel() // outputs.shape[min(1, outputs.ndim - 1)]), ""
    if not targets.is_floating_point():
        asked = targets != call.get("ignore_index", NOTHING)
        terms = float(asked.sum() if weights is None else weights[targets[asked]].sum())
        if targets.ndim > 1:  # next tokens leave out what nothing follows, masks pixels
            targets = targets.where(asked, NOTHING)
        elif not bool(asked.all()):
            mismatch = "the loss leaves out some targets (ignore_index)"
    if not mismatch and of_logs and not _normalised(outputs):
        mismatch = "the loss is nll_loss of something else than logarithms of probabilities"
    smoothing = float(call.get("label_smoothing", 0.0))
    return LossCall(CROSS_ENTROPY, targets, smoothing, _numbers(weights), terms, mismatch)


def _squared_error(outputs: Tensor, targets: Tensor, call: dict[str, Any]) -> LossCall:
    mismatch = _WEIGHS if call.get("weight") is not None else ""
    if not mismatch and outputs.shape != targets.shape:
        shapes = f"{tuple(outputs.shape)} and {tuple(targets.shape)}"
        mismatch = f"the loss is of outputs and targets of different shapes, {shapes}, which broadcast"
    return LossCall(MSE, targets, terms=float(outputs.numel()), mismatch=mismatch)


def _binary_cross_entropy(outputs: Tensor, targets: Tensor, call: dict[str, Any]) -> LossCall:
    """Return a sum of it: of one logit an example, which is a class; of several labels; or of one logit a pixel."""
    one_each, alike = outputs.numel() == len(outputs), outputs.shape == targets.shape and outputs.ndim > 1
    labels, pixels = (alike and not one_each and (outputs.ndim == 2) == flat for flat in (True, False))
    positive, mismatch = call.get("pos_weight"), ""
    fits = (labels or pixels) and (positive is None or positive.numel() in {1, outputs.shape[1] if labels else 1})
    if call.get("weight") is not None or (positive is not None and not fits):
        mismatch = _WEIGHS
    elif not (one_each or labels or pixels):
        mismatch = "the loss has several logits an example, and not as many labels"
    elif one_each or pixels:
        whole = targets.long()
        targets = whole if bool((whole == targets).all()) else targets
        targets = targets.reshape(-1) if one_each else targets
    weights = plain_copy(positive).flatten() if fits and positive is not None else None
    return LossCall(BCE, targets, 0.0, _numbers(weights), float(outputs.numel()), mismatch)


_WEIGHS = "the loss weighs examples or classes (weight, pos_weight)"


def _numbers(weights: Tensor | None) -> tuple[float, ...] | None:
    return None if weights is None else tuple(weights.tolist())


def _reduction(bound: dict[str, Any]) -> str:
    average, reduce = bound.get("size_average"), bound.get("reduce")
    if average is None and reduce is None:
        return str(bound.get("reduction", "mean"))
    return "none" if reduce is False else "sum" if average is False else "mean"


def _normalised(outputs: Tensor) -> bool:
    return bool((outputs.detach().float().logsumexp(1).abs() < 1e-2).all())


class LossOptions(NamedTuple):
    """A registered loss with its options, as of :func:`~fedaudit.task.training.loss_function`."""

    name: str
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    summed: bool = False


class _Calls(TorchFunctionMode):
    """Notes calls of the functions of ``SIGNATURES``, outermost only."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[LossCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SIGNATURES:
            self.seen.append(read_loss(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


_TRIED = (1, 2, 5)  # examples of the batches on which a loss is compared with what it was read as, beside all classes
_MOST = 1000
_TOLERANCE = 1e-5


def recognise(
    loss: Loss, outputs: int, classes: int | None, task: str | None = None, axes: int = 2
) -> LossOptions | None:
    """Return which registered loss a user's own one, any callable, computes; None: none of them.

    The functions of torch that it calls on a small batch suggest which; a task's losses that torch lacks are tried.
    Both must give the same values on batches of different sizes. ``axes``: of masks; no ``task``, no ``classes``:
    regression.
    """
    asked = task_named(task) if task else REGRESSION if classes is None else CLASSIFICATION
    batches = [_trial(asked, outputs, axes, count, classes) for count in (*_TRIED, min(max(classes or 0, 5), _MOST))]
    others = [LossOptions(name) for name in asked.losses if name not in KNOWN.values()]
    ways = _ways(loss, asked, outputs)
    return next((read for way in ways if (read := _recognised(way, batches, others)) is not None), None)


def _trial(task: Task, outputs: int, axes: int, count: int, classes: int | None = None) -> tuple[Tensor, Tensor]:
    """Return outputs of so many examples, and targets for them, on which a loss is tried."""
    source = torch.Generator().manual_seed(count)
    made, other = torch.randn(2, count, outputs, *task.positions((1, *(3,) * axes)), generator=source)
    if task.one_class:
        return made, torch.arange(count) % (classes or outputs)
    return made, torch.rand(count, outputs, generator=source) if task.real else task.hard(other)


def _ways(loss: Loss, task: Task, outputs: int) -> list[Loss]:
    """Return a user's own loss as it may want its targets, in the order of trial."""
    if task.dense and outputs == 1:
        return [partial(_in_form, loss, _real_channel), partial(_in_form, loss, Tensor.float)]
    if task.dense:
        return [loss, partial(_in_form, loss, _one_channel)]
    return [loss, partial(_in_form, loss, torch.flatten)] if outputs == 1 and task.dtype.is_floating_point else [loss]


def _in_form(loss: Loss, form: Callable[[Tensor], Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    return loss(outputs, form(targets))


def _one_channel(masks: Tensor) -> Tensor:
    return masks if masks.is_floating_point() else masks.unsqueeze(1)  # probabilities have channels already


def _real_channel(masks: Tensor) -> Tensor:
    return _one_channel(masks).float()


def _of_masks(own: Loss, registered: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a registered loss as the user's own computes it: to the last bit where targets are classes."""
    return (registered if targets.is_floating_point() else own)(outputs, targets)


def _of_heads(loss: Loss, heads: Packing, asked: Packing, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a loss of outputs and targets as they were before they were packed."""
    return loss(heads.unpack(outputs), asked.unpack(targets))


@contextmanager
def _trying() -> Iterator[None]:
    """What a loss draws or warns of meanwhile is nobody's."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _recognised(
    loss: Loss, batches: Sequence[tuple[Tensor, Tensor]], others: Sequence[LossOptions]
) -> LossOptions | None:
    """Return which registered loss gives the same values: the one that ``loss`` calls, or one of the ``others``."""
    with _trying(), suppress(Exception):  # a user's own may raise anything, and says so where it is trained with
        with _Calls() as calls:
            loss(*batches[-1])
        called = calls.seen if len(calls.seen) == 1 and not calls.seen[0].mismatch else []
        tried = [LossOptions(one.name, one.label_smoothing, one.class_weights) for one in called]
        for option, summed in itertools.product([*tried, *others], (False, True)):
            found = option._replace(summed=summed)
            known = loss_function(*found)
            with suppress(Exception):  # one that doesn't take such targets
                if all(_equal(loss(*batch), known(*batch)) for batch in batches):
                    return found
    return None


def as_called(loss: Loss, task_info: TaskInfo) -> Loss:
    """Return a user's own loss, called with the task's targets: for regression, (n, 1) here.

    For masks it may want (n, 1, *spatial), with one logit a pixel real numbers. With several outputs it gets them, and
    the targets, as the user has them. One that takes the column out of the outputs (``squeeze(1)``) wants (n,): beside
    (n, 1) it would broadcast each target over all outputs, without an error, and not tell which target is whose.
    """
    if task_info.heads and task_info.packed_targets:
        return partial(_of_heads, loss, task_info.heads, task_info.packed_targets)
    task = task_info.task_kind
    if len(ways := _ways(loss, task, task_info.outputs)) > 1:
        outputs, targets = _trial(task, task_info.outputs, len(task_info.input_shape) - 1, _TRIED[-1])
        outputs = outputs.sigmoid()  # some losses take probabilities alone
        loss = next((way for way in ways if _tells_pairs(way, outputs, targets)), loss)
    registered = task.dense and task_info.loss != "custom"
    return partial(_of_masks, loss, loss_function(task_info.loss)) if registered else loss


def _tells_pairs(loss: Loss, outputs: Tensor, targets: Tensor) -> bool:
    """Whether the value of a loss changes where targets change places."""
    with _trying(), suppress(Exception):
        return not _equal(loss(outputs, targets).sum(), loss(outputs, targets.roll(1, 0)).sum())
    return False


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
