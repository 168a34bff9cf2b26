"""The tasks, and which of them targets are of: as arrays have them, or as a loss was given them."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import AfterValidator
from torch import Tensor

from fedaudit.modalities import NOTHING
from fedaudit.modalities.table import standardise
from fedaudit.task.base import TASKS as TASKS
from fedaudit.task.base import Categorical, Shape, Task, register
from fedaudit.task.training import BCE, CROSS_ENTROPY, DICE, DICE_CROSS_ENTROPY, MSE
from fedaudit.utils.errors import BadInput


class Classification(Categorical):
    name = "classification"
    targets = "classes"
    losses = (CROSS_ENTROPY,)
    one_output = (CROSS_ENTROPY, BCE)
    otherwise = (
        ", several labels as 0 and 1 of shape (n, k), or masks of the shape of the inputs without their channels{}"
    )
    one_class = True


class NextToken(Classification):
    """The token that follows at every position, but where none does. No data set names it: a ``TokenInfo`` says so."""

    name = "causal"
    ignores = True

    def positions(self, input_shape: Shape) -> Shape:
        return input_shape


class Segmentation(Categorical):
    name = "segmentation"
    targets = "masks"
    said = "masks of {} classes"
    losses = (CROSS_ENTROPY, DICE, DICE_CROSS_ENTROPY)
    one_output = (BCE, DICE, DICE_CROSS_ENTROPY)
    instead = f", or {BCE} with a model of one logit a pixel where there is one thing to find"
    otherwise = ", the class of every pixel"
    dense = True
    ignores = True

    def positions(self, input_shape: Shape) -> Shape:
        return input_shape[1:]

    def count(self, train: Tensor, test: Tensor, where: str) -> int:
        """Return it, and refuse classes with numbers far above how many there are, as pictures of masks have them."""
        values = self.asked(torch.cat([train.flatten().unique(), test.flatten().unique()]).unique())
        most, found = int(values[-1]) if len(values) else 0, len(values)
        if most > 1 and most + 1 >= 2 * found:
            shown = ", ".join(map(str, values[:5].tolist())) + (", …" if found > 5 else "")
            raise BadInput(
                f"{where}: masks have the values {shown} up to {most}, which would be {most + 1} classes; number them "
                f"from 0 (0 and 255: masks > 0; ignored pixels: {NOTHING}, which no loss counts), or say num_classes"
            )
        return super().count(train, test, where)


class MultiLabel(Task):
    name = "multi-label"
    targets = "labels, each 0 or 1"
    said = "{} labels, each 0 or 1"
    losses = (BCE, MSE)
    real = False
    label_sets = True

    def value_fault(self, targets: Tensor, count: int) -> str | None:
        whole = bool(((targets == 0) | (targets == 1)).all())
        return super().value_fault(targets, count) or (None if whole else "labels of a multi-label task are 0 or 1")

    def as_given(self, seen: Tensor, shape: Shape) -> Tensor:
        seen = super().as_given(seen, shape)
        if not bool(((seen >= 0) & (seen <= 1)).all()):
            least, most = float(seen.min()), float(seen.max())
            raise BadInput(f"labels of a multi-label task are 0 or 1, or between, and these are {least:g} to {most:g}")
        return (seen > 0.5).to(self.dtype)

    def soft(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def hard(self, logits: Tensor) -> Tensor:
        return logits.sigmoid().round()

    def right(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        labels = torch.arange(outputs.shape[1]).expand(outputs.shape)
        return ((outputs > 0) == (targets > 0)).flatten(), labels.flatten()


class Regression(Task):
    name = "regression"
    targets = "real values (regression)"
    said = "{} real values (regression)"
    losses = (MSE,)

    def prepare(self, train: Tensor, test: Tensor, count: int, *, raw: bool) -> tuple[Tensor, Tensor, str]:
        if raw:
            return train.float(), test.float(), "targets as given"
        said = f"targets standardised (mean {float(train.mean()):.4g}, deviation {float(train.std(correction=0)):.4g})"
        return *standardise(train, test), said if count == 1 else f"{count} numbers an example, each standardised"


CLASSIFICATION, MULTI_LABEL = register(Classification()), register(MultiLabel())
REGRESSION, SEGMENTATION = register(Regression()), register(Segmentation())
NEXT_TOKEN = NextToken()


def task_named(name: str) -> Task:
    """Return the task ``name``; BadInput: there is none."""
    return TASKS[name].value


TaskName = Annotated[str, AfterValidator(lambda name: task_named(name).name)]


def read_targets(
    array: Tensor, shape: Shape, where: str, name: str | None = None, *, classes: bool = False, raw: bool = False
) -> tuple[Task, Tensor]:
    """Return the task that the targets in an array are of, and the targets: int64, or float64 where they are numbers.

    Args:
        shape: of one example.
        name: of the task; None: what the targets' type, shape and values say, if that is one task alone.
        classes: floating-point targets are the classes 0 and 1.
        raw: a loss gives floating-point targets their meaning, 0 and 1 as any others.
    """
    task = None if name is None else task_named(name)
    if not array.ndim or not len(array):
        raise BadInput(f"{where}: targets of shape {tuple(array.shape)}; give one for each example, at least one")
    if classes and array.is_floating_point():
        if not bool(((array == 0) | (array == 1)).all()):
            raise BadInput(f"{where}: binary cross-entropy is for the targets 0 and 1, and there are others")
        array = array.long()
    if bool((missing := ~torch.isfinite(array)).any()):
        count = int(missing.reshape(len(array), -1).any(dim=1).sum())
        raise BadInput(f"{where}: targets that are not finite or missing, of {count:,} examples; leave these out")
    spatial, whole = shape[1:], not array.is_floating_point()
    if (whole and array.shape[1:] == (1,)) or (spatial and array.shape[1:] == (1, *spatial)):
        array = array[:, 0]  # an axis of one column or channel
    if (task is None or task.dense) and not whole and spatial and array.shape[1:] == spatial:
        array = array.long() if bool((array == array.round()).all()) else array
    task = task or _guessed(array, spatial, where, raw=raw)
    return task, task.read(array, shape, where)


def _guessed(targets: Tensor, spatial: Shape, where: str, *, raw: bool) -> Task:
    """Return the task of targets of which nobody says it; BadInput where they may be of several."""
    binary = bool(((targets == 0) | (targets == 1)).all())
    columns = targets.ndim == 2 and targets.shape[1] > 1
    if spatial and tuple(targets.shape[1:]) == spatial and not targets.is_floating_point():
        if columns and binary:
            say = "Dataset.from_tensors(…, task='multi-label') or 'segmentation'"
            raise BadInput(f"{where}: 0 and 1 of shape {tuple(targets.shape)} are labels or masks; say which: {say}")
        return SEGMENTATION
    if columns and not binary and bool(((targets == 0) | (targets.abs() == 1)).all()):
        raise BadInput(
            f"{where}: targets of -1, 0 and 1 in {targets.shape[1]} columns are no labels, which are 0 or 1; give -1 "
            "(uncertain) one of these, or say what they are: task='regression'"
        )
    if columns and binary:
        if bool((targets.sum(dim=1) == 1).all()):
            raise BadInput(
                f"{where}: targets with a single 1 in every row look like one-hot classes; give their numbers, "
                "targets.argmax(1), or say that they are labels: task='multi-label'"
            )
        return MULTI_LABEL
    if targets.is_floating_point() and not raw and binary and targets.ndim < 3 and len(targets.unique()) == 2:
        raise BadInput(
            f"{where}: targets of 0.0 and 1.0 are two classes or numbers; give classes as whole numbers "
            "(targets.long()), or say that they are numbers: task='regression'"
        )
    return REGRESSION if targets.is_floating_point() else CLASSIFICATION


def observed_task(seen: Tensor, input_shape: Shape, loss: str | None, outputs: int | None) -> Task | None:
    """Return what a model is asked for whose ``loss`` was given these targets (n, ...); None where they don't tell."""
    spatial, shape, binary = input_shape[1:], tuple(seen.shape[1:]), (seen == 0) | (seen == 1)
    if spatial and shape in (spatial, (1, *spatial), (outputs, *spatial)) and loss != MSE:
        pictures = loss == "custom" and not bool((binary | (seen < 0) | (seen == 255)).all())  # or what is ignored
        if loss != BCE if outputs != 1 else not pictures:
            return SEGMENTATION
    several = shape == (outputs,) and shape[0] > 1
    if several and (loss == BCE or (loss == "custom" and bool(binary.all()))):
        return MULTI_LABEL
    if loss == MSE or (several and loss == "custom"):
        return REGRESSION
    return CLASSIFICATION if loss == BCE else None


def usual_task(loss: str, outputs: int, name: str | None = None) -> Task:
    """Return what a model is asked for: the task ``name``, or by a loss whose targets don't tell, or weren't seen."""
    if name is not None:
        return task_named(name)
    if loss == MSE or (loss == "custom" and outputs == 1):
        return REGRESSION
    return MULTI_LABEL if loss == BCE and outputs > 1 else CLASSIFICATION
