"""Losses, read: which of torch's functions a call is, and which registered loss a user's own one computes."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedaudit.modalities import NOTHING, Packing
from fedaudit.task.info import TaskInfo
from fedaudit.task.targets import BCE, DICE, DICE_CROSS_ENTROPY, Task
from fedaudit.task.training import Loss, loss_function
from fedaudit.utils.plain_tensors import plain, plain_copy

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
        targets: on the CPU; of binary cross-entropy of one logit int64 (n,), or of one logit a pixel in their own
            shape, where they are whole. Of sequences and masks ``NOTHING`` stands for what the loss leaves out.
        label_smoothing: of cross-entropy.
        class_weights: of cross-entropy; of binary cross-entropy what each label or pixel weighs where it is 1.
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
    outputs, targets = plain(bound["input"]), plain_copy(bound["target"])
    name = _KNOWN.get(function, "custom")
    if name == "custom":
        return LossCall(name, targets, mismatch=f"the loss is {function.__name__}")
    smoothing, weight = float(bound.get("label_smoothing", 0.0)), bound.get("weight")
    weights = None if weight is None else plain_copy(weight)
    terms, mismatch = 1.0, ""
    if name == "cross-entropy":
        classes = not targets.is_floating_point()
        asked = targets != bound.get("ignore_index", NOTHING)
        if classes and targets.ndim > 1:  # of sequences a causal task leaves out what nothing follows, of masks pixels
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
        positive, single = bound.get("pos_weight"), outputs.numel() == len(outputs)
        several = name == BCE and outputs.ndim == 2 and outputs.shape == targets.shape and outputs.shape[1] > 1
        masks = name == BCE and outputs.ndim > 1 and outputs.shape == targets.shape and not single
        count = 0 if positive is None else positive.numel()
        fits = (several and count == outputs.shape[1]) or (masks and count == 1)
        if weights is not None or (positive is not None and not fits):
            mismatch = "the loss weighs examples or classes (weight, pos_weight)"
        if outputs.shape != targets.shape and name != BCE:
            shapes = f"{tuple(outputs.shape)} and {tuple(targets.shape)}"
            mismatch = mismatch or f"the loss is of outputs and targets of different shapes, {shapes}, which broadcast"
        terms = float(outputs.numel()) if _reduction(bound) != "mean" else 1.0
        if name == BCE:
            mismatch = mismatch or "the loss has several logits an example, and not as many labels" * (
                not (several or single or masks)
            )
            whole = targets.long()
            if (single or (masks and not several)) and not mismatch:
                targets = whole if bool((whole == targets).all()) else targets
                targets = targets.reshape(-1) if single else targets
        weights = plain_copy(positive).flatten() if fits and positive is not None else None
    told = None if weights is None else tuple(weights.tolist())
    return LossCall(name, targets, smoothing, told, terms, mismatch)


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
    loss: Loss, outputs: int, classes: int | None, task: Task | None = None, axes: int = 2
) -> LossOptions | None:
    """Return which registered loss a user's own one computes, a function, a module or a lambda; None: none of them.

    The functions of torch that it calls on a small batch say which it may be; it is that where both give the same
    values on batches of different sizes.

    Args:
        loss: of outputs (n, ``outputs``) and targets, (n,) for ``classes``, or labels or real values (n, ``outputs``),
            of one (n, 1) or (n,); or of outputs (n, ``outputs``, *spatial) and masks (n, *spatial).
        classes: how many; None for other tasks.
        task: None: regression where there are no classes.
        axes: that masks have.
    """
    batches = _batches(outputs, classes, task, axes)
    if task == "segmentation":
        others: list[LossOptions] = [LossOptions(DICE), LossOptions(DICE_CROSS_ENTROPY)]  # which torch doesn't have
        forms = _MASKS if outputs == 1 else (None, _one_channel)
        ways = [loss if form is None else _InForm(loss, form) for form in forms]
        return next((read for way in ways if (read := _recognised(way, batches, batches, others)) is not None), None)
    flat = [(made, wanted.flatten()) for made, wanted in batches]
    return _recognised(loss, batches, batches) or (_recognised(loss, flat, batches) if classes is None else None)


@contextmanager
def _trying() -> Iterator[None]:
    """What a loss draws or warns of meanwhile is nobody's."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_Batches = list[tuple[Tensor, Tensor]]


def _batches(outputs: int, classes: int | None, task: Task | None = None, axes: int = 2) -> _Batches:
    source = torch.Generator().manual_seed(0)
    spatial = (3,) * axes if task == "segmentation" else ()
    found = []
    for count in (*_TRIED, min(max(classes or 0, _TRIED[-1]), _MOST)):
        made = torch.randn(count, outputs, *spatial, generator=source)
        wanted = torch.rand(count, outputs if classes is None else 1, generator=source)
        if task == "segmentation":
            wanted = torch.randint(max(outputs, 2), (count, *spatial), generator=source)
        elif task == "multi-label":
            wanted = wanted.round()
        found.append((made, wanted if classes is None else torch.arange(count) % classes))
    return found


def _recognised(
    loss: Loss, batches: _Batches, standard: _Batches, others: Sequence[LossOptions] = ()
) -> LossOptions | None:
    """Return what ``loss`` computes of ``batches``: the same as a registered one of the ``standard`` ones.

    That is the one that it calls, or one of the ``others``.
    """
    with _trying():
        try:
            with _Calls() as calls:
                loss(*batches[-1])
            called = calls.seen if len(calls.seen) == 1 and not calls.seen[0].mismatch else []
            tried = [LossOptions(one.name, one.label_smoothing, one.class_weights) for one in called]
            for option, summed in itertools.product([*tried, *others], (False, True)):
                found = option._replace(summed=summed)
                known = loss_function(*found)
                if all(_equal(loss(*one), known(*two)) for one, two in zip(batches, standard, strict=True)):
                    return found
        except Exception:  # a user's own: it may raise anything, and says so where it is trained with
            return None
    return None


@dataclass(frozen=True)
class _OfFlatTargets:
    """A loss that is given real-valued targets as (n,)."""

    loss: Loss

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets.flatten())


def _one_channel(masks: Tensor) -> Tensor:
    return masks.unsqueeze(1)


def _real(masks: Tensor) -> Tensor:
    return masks.float()


def _real_channel(masks: Tensor) -> Tensor:
    return masks.unsqueeze(1).float()


_MASKS = (_real_channel, _real)  # in which form a loss of one logit a pixel may want masks (n, *spatial)


@dataclass(frozen=True)
class _InForm:
    """A loss that is given masks in another form than (n, *spatial); probabilities are in their own."""

    loss: Loss
    form: Callable[[Tensor], Tensor]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets if targets.ndim == outputs.ndim else self.form(targets))


@dataclass(frozen=True)
class _OfMasks:
    """A registered loss of masks, as the user's own computes it: to the last bit where targets are classes."""

    loss: Loss
    registered: Loss

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (self.registered if targets.is_floating_point() else self.loss)(outputs, targets)


@dataclass(frozen=True)
class _OfHeads:
    """A loss that is given outputs and targets as they were before they were packed."""

    loss: Loss
    heads: Packing
    targets: Packing

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.heads.unpack(outputs), self.targets.unpack(targets))


def _works(loss: Loss, outputs: Tensor, targets: Tensor) -> bool:
    with _trying():
        try:
            return bool(torch.isfinite(loss(outputs, targets)).all())
        except Exception:
            return False


def as_called(loss: Loss, task_info: TaskInfo) -> Loss:
    """Return a user's own loss as it is called with the task's targets: those of a regression are (n, 1) here.

    Of masks it may be a registered one, which it then stands for. That of several outputs gets them, and the targets,
    as the user has them: as a tuple, or by name.

    Of masks (n, *spatial) one may want (n, 1, *spatial), of one logit a pixel real numbers. One that takes the column
    out of the outputs (``squeeze(1)``) wants (n,): beside (n, 1) it would broadcast each target over all outputs,
    without an error. Then it doesn't matter to it which target is whose, as it does for (n,).
    """
    if task_info.heads and task_info.packed_targets:
        return _OfHeads(loss, task_info.heads, task_info.packed_targets)
    if task_info.task_kind == "segmentation":
        made, masks = _batches(task_info.outputs, None, "segmentation", len(task_info.target_shape))[-1]
        if task_info.outputs == 1:
            forms = [_InForm(loss, form) for form in _MASKS]
            loss = next((one for one in forms if _tells_pairs(one, made.sigmoid(), masks)), loss)
        else:
            one = _InForm(loss, _one_channel)
            loss = one if not _works(loss, made, masks) and _works(one, made, masks) else loss
        return loss if task_info.loss == "custom" else _OfMasks(loss, loss_function(task_info.loss))
    if task_info.num_classes is not None or task_info.num_targets > 1:
        return loss
    made, values = _batches(1, None)[-1]
    made = made.sigmoid()  # some losses take probabilities alone
    if _tells_pairs(loss, made, values):
        return loss
    flat = _OfFlatTargets(loss)
    return flat if _tells_pairs(flat, made, values) else loss


def _tells_pairs(loss: Loss, outputs: Tensor, targets: Tensor) -> bool:
    """Whether the value of a loss changes where targets change places."""
    with _trying():
        try:
            return not _equal(loss(outputs, targets).sum(), loss(outputs, targets.roll(1, 0)).sum())
        except Exception:
            return False


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
