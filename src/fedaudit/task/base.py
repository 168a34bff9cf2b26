"""What a task is, and the registry of tasks."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from fedaudit.modalities import NOTHING
from fedaudit.task.training import BCE, class_logits
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import Registry

Shape = tuple[int, ...]


class Task:
    """What a model is asked for of every example. What is not overridden holds for k real numbers.

    Data sets and files name the task, and whoever needs to know more asks the task itself. Nobody compares names.

    In arguments ``count`` is how many there are: classes, of an example or a mask's pixel, else values an example.

    Class attributes:
        name: in data sets and files.
        targets: of several examples, in words.
        said: of a data set, what its targets are, in words; "" where that is plain.
        losses: names in ``LOSSES`` that fit, to which a new task adds its own; the first is the usual one.
        one_output: the same of a model of one output, of a mask at each pixel, where these are others.
        instead: what to do where somebody wants binary cross-entropy, which doesn't fit.
        otherwise: how targets may be given, too, where whole numbers of some shape were wanted; {}: that of masks.
        fewer_outputs: how many less than ``count`` the model has.
        dtype: of targets.
        real: targets are real numbers: none is right or wrong, only near.
        one_class: an example has one of ``num_classes`` classes.
        label_sets: an example has several labels, each 0 or 1.
        dense: each pixel, voxel or sample of an example has a class.
        ignores: ``NOTHING`` stands in targets where a loss leaves a value out.
    """

    name: ClassVar[str]
    targets: ClassVar[str]
    said: ClassVar[str] = ""
    losses: ClassVar[tuple[str, ...]]
    one_output: ClassVar[tuple[str, ...]] = ()
    instead: ClassVar[str] = f", or for the classes 0 and 1 Dataset.from_tensors(…, classes=True) and {BCE}"
    otherwise: ClassVar[str] = ""
    fewer_outputs: ClassVar[int] = 0
    dtype: ClassVar[torch.dtype] = torch.float32
    real: ClassVar[bool] = True
    one_class: ClassVar[bool] = False
    label_sets: ClassVar[bool] = False
    dense: ClassVar[bool] = False
    ignores: ClassVar[bool] = False

    def positions(self, input_shape: Shape) -> Shape:  # noqa: ARG002
        """Return the shape of the places at which an example is asked about: () for the whole of it."""
        return ()

    def target_shape(self, count: int, input_shape: Shape) -> Shape:  # noqa: ARG002
        """Return the shape of one example's target."""
        return (count,)

    def target_values(self, count: int) -> int:
        """Return how many values a target can have; of real numbers, how many there are."""
        return count

    def fitting_losses(self, outputs: int) -> tuple[str, ...]:
        """Return the registered losses of a model with so many outputs, the usual one first."""
        return (outputs == 1 and self.one_output) or self.losses

    def check_loss(self, loss: str, outputs: int, num_classes: int | None = None) -> None:
        """Raise BadInput, which says what fits, where a registered loss doesn't fit the task and the outputs."""
        if loss not in (fits := self.fitting_losses(outputs)):
            what = f"{num_classes} classes" if num_classes else self.targets
            what += " of one logit a pixel" * (self.dense and outputs == 1)
            use = ", ".join(fits) + self.instead * (loss == BCE)
            raise BadInput(f"the loss '{loss}' doesn't fit targets that are {what}; use {use}")

    def read(self, targets: Tensor, shape: Shape, where: str) -> Tensor:  # noqa: ARG002
        """Return targets from an array, float64 (n, k) or int64; BadInput where they can't be. ``shape``: of inputs."""
        if targets.ndim not in (1, 2) or targets.shape[1:] == (0,):
            raise BadInput(f"{where}: {self.name} targets of shape {tuple(targets.shape)}; give (n,) or (n, k)")
        return targets.reshape(len(targets), -1).to(torch.float64)

    def count(self, train: Tensor, test: Tensor, where: str) -> int:  # noqa: ARG002
        """Return ``count`` of targets as :meth:`read` left them."""
        return train.shape[1]

    def prepare(self, train: Tensor, test: Tensor, count: int, *, raw: bool) -> tuple[Tensor, Tensor, str]:  # noqa: ARG002
        """Return both splits as a data set holds them, and what they are in words."""
        return train.to(self.dtype), test.to(self.dtype), self.said.format(count)

    def fault(self, targets: Tensor, count: int, shape: Shape) -> str | None:
        """Return why targets (n, ...) can't be a data set's or a file's, each of ``shape``; None where they can."""
        if targets.dtype != self.dtype or tuple(targets.shape[1:]) != shape or not targets.ndim:
            wanted = f"{str(self.dtype).removeprefix('torch.')} {of_n(shape)}"
            return f"{self.name} targets must be {wanted}, not {targets.dtype} {tuple(targets.shape)}"
        return self.value_fault(targets, count)

    def value_fault(self, targets: Tensor, count: int) -> str | None:  # noqa: ARG002
        """Return why targets of the right type and shape have values that can't be."""
        return None if bool(torch.isfinite(targets).all()) else f"{self.name} targets must be finite"

    def as_given(self, seen: Tensor, shape: Shape) -> Tensor:
        """Return targets (n, ...) as data sets have them, of those that a loss was given; ``shape``: of one.

        Probabilities are read as what is likelier: of classes the largest, of labels and of masks of one logit from
        above one half. BadInput: they can't be of this task.
        """
        if seen[:1].numel() != math.prod(shape):
            raise BadInput(
                f"clients trained on targets of shape {tuple(seen.shape)}, and {self.targets} of this model are "
                f"{of_n(shape)}; of maps of pixels masks alone can be audited, of whole numbers"
            )
        return seen.to(self.dtype).view(len(seen), *shape)

    def soft(self, logits: Tensor) -> Tensor:
        """Return differentiable targets of (n, outputs, ...) variables, as a registered loss takes them."""
        return logits

    def hard(self, logits: Tensor) -> Tensor:
        """Return the targets (n, ...), of their own type, that such variables stand for."""
        return logits

    def right(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Return which of the m answers are right, bool (m,), and the class or label that each is about, int64 (m,)."""
        raise TypeError(f"{self.targets} are neither right nor wrong")

    def unlearnt(self, outputs: Tensor, targets: Tensor, element: str) -> str:  # noqa: ARG002
        """Return why outputs are no better than one answer for all; "" if they are. ``element``: a pixel, in words."""
        better = (self.soft(outputs) - targets).square().sum() < (targets - targets.mean(dim=0)).square().sum()
        return "" if better else "it predicts no better than the mean of all targets"


class Categorical(Task):
    """A task whose targets are whole numbers from 0, one at each position."""

    dtype = torch.int64
    real = False

    def target_shape(self, count: int, input_shape: Shape) -> Shape:  # noqa: ARG002
        return self.positions(input_shape)

    def target_values(self, count: int) -> int:
        return max(count, 2)  # one logit is of two classes

    def asked(self, targets: Tensor) -> Tensor:
        """Return the targets that a loss counts."""
        return targets[targets != NOTHING] if self.ignores else targets

    def read(self, targets: Tensor, shape: Shape, where: str) -> Tensor:
        wanted, what = self.positions(shape), self.targets if self.dense else "class targets"
        if tuple(targets.shape[1:]) != wanted or targets.is_floating_point() or (self.dense and not wanted):
            given = f"{where}: {what} of shape {tuple(targets.shape)} for examples of {shape}"
            otherwise = self.otherwise.format(f", {of_n(shape[1:])}" * bool(shape[1:]))
            raise BadInput(f"{given}; give whole numbers of shape {of_n(wanted)}{otherwise}")
        targets = targets.long()
        asked = self.asked(targets)
        if asked.numel() and int(asked.min()) < 0:
            ignored = f", and ignored pixels are {NOTHING}" if self.ignores else ""
            raise BadInput(f"{where}: class target {int(asked.min())} is negative; classes count from 0{ignored}")
        return targets

    def count(self, train: Tensor, test: Tensor, where: str) -> int:  # noqa: ARG002
        return int(max(train.max(), test.max())) + 1

    def value_fault(self, targets: Tensor, count: int) -> str | None:
        targets = self.asked(targets)
        least, most = (int(targets.min()), int(targets.max())) if targets.numel() else (0, 0)
        fault = f"class target {most if most >= count else least} is not in 0..{count - 1}; check the labels"
        return None if 0 <= least <= most < count else fault

    def as_given(self, seen: Tensor, shape: Shape) -> Tensor:
        if seen.is_floating_point():
            chances, own = bool(((seen >= 0) & (seen <= 1)).all()), tuple(seen.shape[1:])
            if not chances and not bool((seen == seen.round()).all()):
                raise BadInput(f"the targets are real numbers, and {self.targets} are whole numbers or probabilities")
            if chances:  # of each class, as of mixed or one-hot labels, or of class 1
                of_each = len(own) == len(shape) + 1 and own[1:] == shape and own[0] > 1
                seen = seen.argmax(dim=1) if of_each else seen > 0.5
        return super().as_given(seen, shape)

    def soft(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(dim=1)

    def hard(self, logits: Tensor) -> Tensor:
        return class_logits(logits).argmax(dim=1)

    def right(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        asked = targets >= 0  # of sequences and masks the rest is left out
        return (self.hard(outputs) == targets)[asked], targets[asked]

    def unlearnt(self, outputs: Tensor, targets: Tensor, element: str) -> str:
        right, true = self.right(outputs, targets)
        better = right.double().mean() > true.bincount().max() / true.numel()
        return "" if better else f"it does no better than one class for every {element if self.dense else 'example'}"


def of_n(shape: Shape) -> str:
    """Return the shape of n targets, as the documentation writes it."""
    return str(("n", *shape)).replace("'", "")


TASKS: Registry[Task] = Registry("task", "fedaudit.tasks")


def register(task: Task) -> Task:
    """Add a task to ``TASKS`` under its own name, and return it; ValueError: the name is taken."""
    return TASKS.register(task.name, task.targets)(task)
