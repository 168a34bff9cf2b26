"""What a model is asked for of every example: a class, several labels, numbers, or a mask; what targets look like."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fedaudit.modalities import NOTHING
from fedaudit.utils.errors import BadInput

Task = Literal["classification", "multi-label", "regression", "segmentation"]

CROSS_ENTROPY, BCE, MSE, DICE, DICE_CROSS_ENTROPY = (
    "cross-entropy",
    "bce-with-logits",
    "mse",
    "dice",
    "dice-cross-entropy",
)
ONE_LOGIT = (BCE, DICE, DICE_CROSS_ENTROPY)  # of masks with one logit a pixel


class TaskKind(NamedTuple):
    """A kind of task.

    Attributes:
        targets: of one example, in words, for several of them.
        losses: registered ones that fit it; the first is the usual one. Of masks with one logit a pixel these are
            ``ONE_LOGIT``.
        letters: the shape of n examples' targets, as the documentation writes it.
        dtype: of targets.
    """

    targets: str
    losses: tuple[str, ...]
    letters: str
    dtype: torch.dtype


TASKS: dict[Task, TaskKind] = {
    "classification": TaskKind("classes", (CROSS_ENTROPY, BCE), "(n,)", torch.int64),
    "multi-label": TaskKind("labels, each 0 or 1", (BCE, MSE), "(n, k)", torch.float32),
    "regression": TaskKind("real values (regression)", (MSE,), "(n, k)", torch.float32),
    "segmentation": TaskKind("masks", (CROSS_ENTROPY, DICE, DICE_CROSS_ENTROPY), "(n, *spatial)", torch.int64),
}


def target_shape(task: Task, num_targets: int, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one example's target; a mask has that of the input, less its channels."""
    if task == "segmentation":
        return input_shape[1:]
    return () if task == "classification" else (num_targets,)


def soft_targets(logits: Tensor, task: Task) -> Tensor:
    """Return differentiable targets of (n, outputs, ...) variables, as a registered loss takes them."""
    if task == "multi-label" or (task == "segmentation" and logits.shape[1] == 1):
        return logits.sigmoid()
    return logits if task == "regression" else logits.softmax(dim=1)


def hard_targets(logits: Tensor, task: Task) -> Tensor:
    """Return the targets (n, ...), of their own type, that such variables stand for."""
    if task == "segmentation" and logits.shape[1] == 1:
        return (logits[:, 0] > 0).long()
    if task in ("classification", "segmentation"):
        return logits.argmax(dim=1)
    return soft_targets(logits, task).round() if task == "multi-label" else logits


def target_fault(targets: Tensor, task: Task, count: int, shape: tuple[int, ...]) -> str | None:
    """Return why targets (n, ...) can't be those of such a task; None where they can.

    Args:
        targets: of any type; of masks ``NOTHING`` where a pixel is ignored.
        count: classes of a classification or of a mask's pixels, else values an example.
        shape: of one example's target.
    """
    kind = TASKS[task]
    if targets.dtype != kind.dtype or tuple(targets.shape[1:]) != shape or not targets.ndim:
        wanted = f"{str(kind.dtype).removeprefix('torch.')} {('n', *shape)}".replace("'", "")
        return f"{task} targets must be {wanted}, not {targets.dtype} {tuple(targets.shape)}"
    if kind.dtype == torch.int64:
        targets = targets[targets != NOTHING] if task == "segmentation" else targets
        if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < count:
            worst = int(targets.max()) if int(targets.max()) >= count else int(targets.min())
            return f"class target {worst} is not in 0..{count - 1}; check the labels"
    elif not bool(torch.isfinite(targets).all()):
        return f"{task} targets must be finite"
    elif task == "multi-label" and not bool(((targets == 0) | (targets == 1)).all()):
        return "labels of a multi-label task are 0 or 1"
    return None


def check_loss(task: Task, num_classes: int | None, loss: str, outputs: int) -> None:
    """Check that a registered loss fits a task and ``outputs``, of a mask for each pixel; BadInput says which does."""
    kind, one_logit = TASKS[task], task == "segmentation" and outputs == 1
    losses = ONE_LOGIT if one_logit else kind.losses
    if loss in losses:
        return
    what = f"{num_classes} classes" if num_classes else kind.targets
    what = "masks of one logit a pixel" if one_logit else what
    fits = ", ".join(losses[:1] if task == "classification" else losses)
    if loss == BCE and task == "segmentation":
        fits += f", or {BCE} with a model of one logit a pixel where there is one thing to find"
    elif loss == BCE:
        fits += f", or for the classes 0 and 1 Dataset.from_tensors(…, classes=True) and {BCE}"
    raise BadInput(f"the loss '{loss}' doesn't fit targets that are {what}; use {fits}")


def observed_task(targets: Tensor, input_shape: tuple[int, ...], loss: str | None, outputs: int | None) -> Task | None:
    """Return what a model is asked for that was seen with these targets; None where they don't tell.

    Args:
        targets: (n, ...) as the loss was given them, of all batches that were seen.
        loss: registered name, or ``custom``.
    """
    spatial, shape = input_shape[1:], tuple(targets.shape[1:])
    masks = spatial and (shape in (spatial, (1, *spatial)) or shape == (outputs, *spatial))
    pictures = masks and loss == "custom" and outputs == 1 and not _of_two_classes(targets)
    if masks and not pictures and loss != MSE and (loss != BCE or outputs == 1):
        return "segmentation"
    several = len(shape) == 1 and shape[0] == outputs and shape[0] > 1
    if loss == BCE:
        return "multi-label" if several else "classification"
    if loss == MSE:
        return "regression"
    if several and loss == "custom":
        return "multi-label" if bool(((targets == 0) | (targets == 1)).all()) else "regression"
    return None


def _of_two_classes(targets: Tensor) -> bool:
    """Return whether these can be masks of one logit: 0 and 1, or what is ignored (below 0, or 255)."""
    return bool(((targets == 0) | (targets == 1) | (targets < 0) | (targets == 255)).all())


def usual_task(loss: str, outputs: int) -> Task:
    """Return what a model is asked for by a loss whose targets don't tell, or weren't seen."""
    if loss == MSE or (loss == "custom" and outputs == 1):
        return "regression"
    return "multi-label" if loss == BCE and outputs > 1 else "classification"


def read_targets(seen: Tensor, task: Task, shape: tuple[int, ...]) -> Tensor:
    """Return targets (n, ...) as data sets have them, of those (n, ...) that a loss was given.

    Probabilities are read as what is likelier: of classes the largest, of labels and of masks of one logit from above
    one half.

    Args:
        seen: of any type; of masks ``NOTHING`` where a pixel is ignored.
        shape: of one example's target.
    """
    kind, own = TASKS[task], tuple(seen.shape[1:])
    if task in ("classification", "segmentation") and seen.is_floating_point():
        chances = bool(((seen >= 0) & (seen <= 1)).all())
        if len(own) == len(shape) + 1 and own[1:] == shape and own[0] > 1 and chances:
            return seen.argmax(dim=1)  # as of mixed or one-hot labels
        if not chances and not bool((seen == seen.round()).all()):
            raise BadInput(f"the targets are real numbers, and {kind.targets} are whole numbers or probabilities")
        seen = (seen > 0.5).long() if chances else seen
    if seen[:1].numel() != math.prod(shape):
        raise BadInput(
            f"clients trained on targets of shape {tuple(seen.shape)}, and {kind.targets} of this model are "
            f"{('n', *shape)}".replace("'", "")
            + "; of maps of pixels masks alone can be audited, of whole numbers"
        )
    if task == "multi-label":
        if not bool(((seen >= 0) & (seen <= 1)).all()):
            least, most = float(seen.min()), float(seen.max())
            raise BadInput(f"labels of a multi-label task are 0 or 1, or between, and these are {least:g} to {most:g}")
        seen = seen > 0.5
    return seen.to(kind.dtype).view(len(seen), *shape)
