"""What everybody in the federation knows."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from pydantic import ConfigDict
from torch import Tensor

from fedaudit.modalities import EXAMPLE_KINDS, ExampleKind, Packing, TokenInfo, example_kind, register
from fedaudit.modalities.columns import Column, check_columns
from fedaudit.task.base import TASKS, Task
from fedaudit.task.targets import CLASSIFICATION, NEXT_TOKEN, REGRESSION, task_named
from fedaudit.task.training import BCE, CROSS_ENTROPY, LOSSES
from fedaudit.utils.errors import BadInput
from fedaudit.utils.validation import LARGEST, SMALLEST

# Beyond these a number in a file is an error or an attack on this machine's memory.
_LARGEST_INPUT = 100_000_000
_MOST_CLASSES = 1_000_000
_WIDEST = 65_536


@dataclass(frozen=True)
class InsertedModule:
    """Layers that a malicious server put before the agreed network (:mod:`fedaudit.models.inserted_module`).

    Attributes:
        limit: the most that a unit passes on, which it reaches at the end of its bin; None: it has none.
        sets: of convolution kernels before that layer, one a client, each of as many as the image has channels; 0: the
            inputs go into it as they are.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # where it is read from a file

    kind: Literal["imprint", "loki"]
    units: int
    limit: float | None = None
    sets: int = 0

    def __post_init__(self) -> None:
        limited = self.limit is None or (math.isfinite(self.limit) and self.limit > 0)
        if not 2 <= self.units <= _WIDEST or not limited:
            raise BadInput(
                f"an inserted module of {self.units} units, limit {self.limit}; it must have 2 to {_WIDEST:,}, and a "
                "limit above 0"
            )
        if not 0 <= self.sets <= _WIDEST:
            raise BadInput(f"an inserted module of {self.sets} sets of kernels; it must have 0 to {_WIDEST:,}")


@dataclass(frozen=True)
class TaskInfo:
    """What everybody in the federation knows beforehand: architecture, loss, preprocessing, classes.

    Attributes:
        model: registered name of the architecture, or ``custom`` for a user's own module.
        width: the architecture's width, or None for its own default.
        batch_norm: ``eval`` or ``train``: how clients run BatchNorm in local training.
        loss: registered name of the loss, or ``custom``.
        kind: of the examples: ``image``, ``table``, or another of :data:`fedaudit.modalities.EXAMPLE_KINDS`.
        input_shape: of one example, (C, H, W), (d,), or what the kind says.
        num_classes: of a classification, one class an example; None for every other task.
        mean, std: of the preprocessing, per channel; x_normalised = (x − mean) / std, unless the kind says otherwise.
        dropout: whether clients train with the model's dropout on, if it has any.
        label_smoothing, class_weights: of cross-entropy, as in ``torch.nn.functional.cross_entropy``; of a multi-label
            task's binary cross-entropy ``class_weights`` is what each label weighs where it is 1, and of masks of one
            logit what its pixels do (``pos_weight``).
        summed: the loss is the sum over the batch, not the mean.
        extra_classes: outputs of the model beyond one a class, for labels that no example of the data set has.
        columns: of a table, their names, types and categories; none where they aren't known.
        tokens: of text, its vocabulary and task; None for other examples.
        inserted: the module that a malicious server put before the network; None: nothing.
        task: what the model is asked for, one of :data:`fedaudit.task.TASKS`; None: classification where there
            are classes, else regression.
        num_targets: labels or numbers that an example has, or classes that a mask's pixel can have; 1 of a mask: the
            model returns one logit a pixel, of class 1 against class 0.
        packed_inputs: what stands where in examples of several inputs; None: a model of one.
        heads: the same of several outputs, which the model returns as one (n, outputs) here; None: it has one.
        packed_targets: the same of the targets that the loss of several outputs takes.

    Raises:
        BadInput: these don't fit together, or there is no such kind.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # where it is read from a file

    model: str
    width: int | None
    batch_norm: Literal["eval", "train"]
    loss: str
    kind: str
    input_shape: tuple[int, ...]
    num_classes: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    dropout: bool = True
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None
    extra_classes: int = 0
    columns: tuple[Column, ...] = ()
    tokens: TokenInfo | None = None
    inserted: InsertedModule | None = None
    summed: bool = False
    task: str | None = None
    num_targets: int = 1
    packed_inputs: Packing | None = None
    heads: Packing | None = None
    packed_targets: Packing | None = None

    def __post_init__(self) -> None:
        self._check_task()
        self._check_packing()
        self._check_loss_options()
        if self.inserted is not None and self.example_kind.discrete:
            raise BadInput(f"an inserted module is for real values, not for {self.example_kind.described}")
        if self.inserted is not None and self.inserted.sets and len(self.input_shape) != 3:
            raise BadInput(f"an inserted module with kernels is for images, not for {self.example_kind.described}")
        check_columns(self.columns, self.input_shape, "the task")
        shape, kind = self.input_shape, self.example_kind
        if not kind.fits(shape) or math.prod(shape) > _LARGEST_INPUT:
            wanted = f"({', '.join(kind.axes)}{',' * (len(kind.axes) == 1)})"
            raise BadInput(
                f"input_shape is {shape}; {self.kind} data have {wanted}, with up to {_LARGEST_INPUT:,} values"
            )
        self._check_tokens()
        if self.num_classes is not None and not 2 <= self.num_classes <= _MOST_CLASSES:
            raise BadInput(
                f"num_classes is {self.num_classes}; it must be 2 to {_MOST_CLASSES:,}, or none for other tasks"
            )
        if self.width is not None and not 1 <= self.width <= _WIDEST:
            raise BadInput(f"width is {self.width}; it must be 1 to {_WIDEST:,}")
        if self.loss in LOSSES:
            self.task_kind.check_loss(self.loss, self.outputs, self.num_classes)
        if self.loss == BCE and self.num_classes not in (2, None):
            raise BadInput(f"the loss '{BCE}' is for the two classes 0 and 1, not for {self.num_classes} classes")
        channels = kind.channels(shape)
        if len(self.mean) != channels or len(self.std) != channels:
            raise BadInput(f"mean has {len(self.mean)} values and std {len(self.std)}; both must have {channels}")
        if not all(abs(value) <= LARGEST for value in (*self.mean, *self.std)) or min(self.std) < SMALLEST:
            raise BadInput(
                f"mean {self.mean} and std {self.std} must be finite, and every std above 0 (from {SMALLEST:g} to "
                f"{LARGEST:g})"
            )

    def _check_task(self) -> None:
        if not 1 <= self.num_targets <= _WIDEST or (self.num_classes is not None and self.num_targets != 1):
            raise BadInput(f"num_targets is {self.num_targets}; it must be 1 to {_WIDEST:,}, and 1 beside classes")
        if self.task_kind.one_class != (self.num_classes is not None):
            raise BadInput(f"num_classes is {self.num_classes}, which doesn't fit {self.task_kind.targets}")
        if self.task_kind.dense and len(self.input_shape) < 2:
            raise BadInput(f"masks are of images, volumes and signals, not of {self.example_kind.described}")

    def _check_packing(self) -> None:
        size, shape = self.packed_inputs.size if self.packed_inputs else None, self.input_shape
        if self.example_kind.packed != (size is not None) or size not in (None, *shape):
            raise BadInput(f"inputs {self.packed_inputs} don't fit {self.example_kind.described} of {shape}")
        if (self.heads is None) != (self.packed_targets is None):
            raise BadInput("several outputs and their targets belong together")
        if self.packed_targets and (not self.task_kind.real or self.packed_targets.size != self.num_targets):
            raise BadInput(f"targets {self.packed_targets} don't fit {self.num_targets} {self.task_kind.targets}")
        if self.heads and self.loss != "custom":
            raise BadInput(f"a model of several outputs trains with a user's own loss, not with '{self.loss}'")

    @property
    def asked(self) -> str:
        """What the model predicts, in words."""
        return f"several outputs ({self.heads})" if self.heads else self.task_kind.targets

    @property
    def task_kind(self) -> Task:
        """What the model is asked for."""
        if self.causal:
            return NEXT_TOKEN
        return task_named(self.task) if self.task else REGRESSION if self.num_classes is None else CLASSIFICATION

    @property
    def target_shape(self) -> tuple[int, ...]:
        """The shape of one example's target: () for a class, (k,) for labels and numbers, that of a mask."""
        return self.task_kind.target_shape(self.num_targets, self.input_shape)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of what the model returns of one example."""
        return (self.outputs, *self.task_kind.positions(self.input_shape))

    def _check_tokens(self) -> None:
        if self.example_kind.discrete != (self.tokens is not None):
            raise BadInput(f"a vocabulary belongs to {self.kind} data" if self.tokens else "tokens need a vocabulary")
        vocabulary = self.tokens.vocabulary if self.tokens else None
        other = self.num_classes != vocabulary or (self.task and not task_named(self.task).one_class)
        if self.causal and (other or self.extra_classes or self.loss == BCE):
            raise BadInput(
                "a causal task has a class for each token of the vocabulary, and cross-entropy as its loss: set "
                "extra_classes to 0, and model.loss to auto"
            )

    @property
    def causal(self) -> bool:
        """Whether the model predicts at every position the token that follows."""
        return self.tokens is not None and self.tokens.causal

    def _check_loss_options(self) -> None:
        if not (math.isfinite(self.label_smoothing) and 0 <= self.label_smoothing <= 1):
            raise BadInput(f"label_smoothing is {self.label_smoothing}; it must lie in [0, 1]")
        weights = self.class_weights
        if self.extra_classes and (self.loss == BCE or self.num_classes is None or weights is not None):
            raise BadInput("extra_classes are for cross-entropy over classes, without class_weights; set it to 0")
        if weights is not None and (
            len(weights) != (self.num_classes or self.outputs) or not all(math.isfinite(w) and w >= 0 for w in weights)
        ):
            raise BadInput(f"class_weights has {len(weights)} values; it must have one from 0 for each class or label")
        positive = self.num_classes is None and self.loss == BCE and not self.label_smoothing
        if (
            (self.label_smoothing or weights is not None)
            and self.loss not in (CROSS_ENTROPY, "custom")
            and not positive
        ):
            raise BadInput(f"label_smoothing and class_weights belong to cross-entropy, not to the loss '{self.loss}'")

    def __reduce__(self) -> tuple[Any, ...]:
        """Let kind and task, perhaps a user's own, travel with their names: worker processes don't know of them."""
        task = task_named(self.task) if self.task else None
        return _received, (self.example_kind, task, tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def example_kind(self) -> ExampleKind:
        """The kind of the examples."""
        return example_kind(self.kind)

    @property
    def outputs(self) -> int:
        """Outputs of the model, of a mask for each pixel: one per class, and extra ones; one per label or number.

        Of several outputs their values, all together.
        """
        if self.num_classes is None:
            return self.heads.size if self.heads else self.num_targets - self.task_kind.fewer_outputs
        return 1 if self.loss == BCE else self.num_classes + self.extra_classes

    @property
    def target_values(self) -> int:
        """How many classes an example, or a mask's pixel, can have; of other tasks the numbers an example has."""
        return self.task_kind.target_values(self.num_classes or self.num_targets)

    def blank(self, count: int) -> tuple[Tensor, Tensor]:
        """Return examples (count, ...) of zeros as the model sees them, and targets for them, of class 0 (or 0.0)."""
        inputs = self.normalise(torch.zeros((count, *self.input_shape), dtype=self.example_kind.dtype))
        return inputs, torch.zeros((count, *self.target_shape), dtype=self.task_kind.dtype)

    def normalise(self, inputs: Tensor) -> Tensor:
        """Turn examples (n, ...), as they stand in a data set, into what the model sees."""
        return self.example_kind.normalise(inputs, self.mean, self.std)

    def denormalise(self, inputs: Tensor) -> Tensor:
        """Undo :meth:`normalise`."""
        return self.example_kind.denormalise(inputs, self.mean, self.std)

    def pixel_range(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised values of the kind's bounds (black and white), broadcastable to (n, ...) ``like``.

        They are infinite for a kind without bounds.
        """
        low, high = self.example_kind.bounds or (-math.inf, math.inf)
        return self.normalise(torch.full_like(like[:1], low)), self.normalise(torch.full_like(like[:1], high))


def _received(kind: ExampleKind, task: Task | None, values: tuple[Any, ...]) -> TaskInfo:
    """Return the task info that was sent to this process, where kind and task may be new."""
    if kind.name not in EXAMPLE_KINDS:
        register(kind)
    if task is not None and task.name not in TASKS:
        TASKS.register(task.name, task.targets)(task)
    return TaskInfo(*values)
