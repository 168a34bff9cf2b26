"""What a data set is here: two splits of tensors, checked once, with what the rest needs to know."""

from __future__ import annotations

import reprlib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from fedaudit.data.cells import check_classes
from fedaudit.modalities import ExampleKind, TokenInfo, example_kind, kind_of
from fedaudit.modalities.columns import Column, check_cells, check_columns, declared
from fedaudit.modalities.packed import PACKED, Packing, Part, several
from fedaudit.task.base import Task
from fedaudit.task.targets import CLASSIFICATION, NEXT_TOKEN, REGRESSION, read_targets, task_named
from fedaudit.utils.errors import BadInput, unknown_name
from fedaudit.utils.plain_tensors import plain

Array = Tensor | np.ndarray[Any, Any]
Channels = Literal["first", "last"]

Several = tuple[Any, ...] | list[Any] | Mapping[str, Any]  # arrays, each with a value of every example
WAY_IN = "several inputs of an example are given as ((x1, x2), targets) or ({'image': x1, 'age': x2}, targets)"


@dataclass(frozen=True, eq=False)
class Split:
    """Examples and their targets.

    inputs: float32; images (n, C, H, W) and volumes (n, C, D, H, W) in [0, 1], signals (n, C, T), tables (n, d)
        standardised by the train split, or of another kind.
    targets: int64 (n,) for classification; float32 (n, k) of 0 and 1 for several labels; float32 (n, k) for regression,
        standardised by the train split; int64 (n, *spatial) classes for segmentation, -100 where a pixel is ignored; of
        a causal task int64 (n, length), at each position the token that follows, -100 where none does.
    groups: int64 (n,) whose example it is, where the data set itself says so (partition ``natural``): a client's number
        from 0, or -1 for examples that are nobody's in particular.
    attributes: by name, int64 (n,) which of the values of the data set's :class:`Attribute` each example has.
    persons: int64 (n,) of which person each example is, the same numbers in both splits; None: that isn't known. All
        examples of one are shared out together, and none of them passes for one that nobody trained on.
    """

    inputs: Tensor
    targets: Tensor
    groups: Tensor | None = None
    attributes: Mapping[str, Tensor] = field(default_factory=dict)
    persons: Tensor | None = None

    def __repr__(self) -> str:
        return f"Split({len(self)} examples of {tuple(self.inputs.shape[1:])})"

    def __len__(self) -> int:
        return int(self.inputs.shape[0])

    def __getitem__(self, index: Tensor | Sequence[int] | slice) -> Split:
        """Return the split of the chosen rows, in the order asked for."""
        rows = index if isinstance(index, (Tensor, slice)) else torch.as_tensor(index, dtype=torch.int64)
        groups = None if self.groups is None else self.groups[rows]
        persons = None if self.persons is None else self.persons[rows]
        attributes = {name: v[rows] for name, v in self.attributes.items()}
        return Split(self.inputs[rows], self.targets[rows], groups, attributes, persons)


@dataclass(frozen=True, eq=False)
class Attribute:
    """Something about every example that isn't what models are trained for.

    values: their names.
    columns: of a table that hold it; none where it isn't one of the inputs.
    codes: float32 (values, columns): what stands in these columns for each value.
    """

    values: tuple[str, ...]
    columns: tuple[int, ...] = ()
    codes: Tensor = field(default_factory=lambda: torch.zeros(0, 0))


def with_column(whole: Dataset, name: str, columns: Sequence[int], values: Sequence[str]) -> Dataset:
    """Return the table with an attribute in some of its columns, of which every example must have a value.

    That is one column of numbers, whose ``values`` are ascending, or one of 0 and 1 for each value.
    """
    chosen = list(columns)
    codes = torch.eye(len(chosen)) if len(chosen) > 1 else whole.train.inputs[:, chosen].unique(dim=0)
    splits = []
    for split in (whole.train, whole.test):
        equal = (split.inputs[:, None, chosen] == codes).all(dim=2)
        if len(codes) != len(values) or not bool(equal.any(dim=1).all()):
            raise BadInput(f"data set '{whole.name}': not every example has one of the values of '{name}'")
        splits.append(replace(split, attributes={**split.attributes, name: equal.long().argmax(dim=1)}))
    added = {**whole.attributes, name: Attribute(tuple(values), tuple(chosen), codes)}
    return replace(whole, train=splits[0], test=splits[1], attributes=added)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set with a train and a test split.

    kind: of the examples, one of :data:`fedaudit.modalities.EXAMPLE_KINDS`. mean, std: per channel over the train split
    for images, volumes and signals; (0.,) and (1.,) for tables, which are standardised already. source: where the
    examples come from, and their licence. attributes: what an adversary may ask about. columns: of a table, where
    their types are known.
    tokens: of text, its vocabulary and task; words: what each token stands for, if that is known. num_classes: of a
    classification; num_targets: labels or numbers of an example, or classes of a mask's pixels; class_names: of classes
    or labels. packed_inputs, packed_targets: what stands where in them, where an example has several.

    Raises:
        BadInput: the splits don't agree with each other, with the kind or with the task; a value is not finite;
            a pixel lies outside [0, 1]; a label is no class; there is no such kind.
    """

    name: str
    summary: str
    kind: str
    task: str
    train: Split
    test: Split
    num_classes: int | None
    class_names: tuple[str, ...] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    columns: tuple[Column, ...] = ()
    tokens: TokenInfo | None = None
    words: tuple[str, ...] | None = None
    num_targets: int = 1
    packed_inputs: Packing | None = None
    packed_targets: Packing | None = None

    def __repr__(self) -> str:
        sizes = f"{len(self.train)} train and {len(self.test)} test examples of {self.input_shape}"
        several = f", {self.task_kind.said.format(self.num_targets)}" if self.num_targets > 1 else ""
        targets = f", {self.num_classes} classes" if self.num_classes else several
        return f"Dataset({reprlib.repr(self.name)}: {self.kind} {self.task}, {sizes}{targets})"

    def __post_init__(self) -> None:
        kind = example_kind(self.kind)
        for part, split in (("train", self.train), ("test", self.test)):
            _check_inputs(f"data set '{self.name}', {part} split", kind, split)
            _check_tokens(f"data set '{self.name}', {part} split", kind, split, self.tokens, self.words)
            _check_targets(f"data set '{self.name}', {part} split", self, split.targets)
        if self.train.inputs.shape[1:] != self.test.inputs.shape[1:]:
            shapes = f"{tuple(self.train.inputs.shape[1:])} and {tuple(self.test.inputs.shape[1:])}"
            raise BadInput(f"data set '{self.name}': train and test inputs have different shapes: {shapes}")
        if self.class_names is not None and len(self.class_names) != (self.num_classes or self.num_targets):
            given = f"{len(self.class_names)} class names for num_classes={self.num_classes or self.num_targets}"
            raise BadInput(f"data set '{self.name}': {given}; give one name per class or label, or none")
        check_names(self.class_names or (), f"data set '{self.name}'")
        check_columns(self.columns, self.input_shape, f"data set '{self.name}'")
        for split in (self.train, self.test):
            check_cells(split.inputs, self.columns, f"data set '{self.name}'")
        width = kind.channels(self.input_shape)
        if len(self.mean) != width or len(self.std) != width or not all(s > 0 for s in self.std):
            raise BadInput(f"data set '{self.name}': mean and std must have {width} values, every std above 0")

    @property
    def task_kind(self) -> Task:
        """What a model is asked for."""
        return NEXT_TOKEN if self.tokens is not None and self.tokens.causal else task_named(self.task)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example: (C, H, W), (C, D, H, W), (C, T), (d,), or of another kind."""
        return tuple(self.train.inputs.shape[1:])

    @classmethod
    def from_tensors(
        cls,
        inputs: Array | Several,
        targets: Array | Several,
        *,
        test: tuple[Array | Several, Array | Several] | None = None,
        kind: str | None = None,
        name: str = "custom",
        summary: str = "given by the caller",
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        source: str = "given by the caller",
        channels: Channels | None = None,
        classes: bool = False,
        raw_targets: bool = False,
        columns: Sequence[Column] = (),
        task: str | None = None,
    ) -> Dataset:
        """Make a data set of tensors or numpy arrays.

        Args:
            inputs: images (n, C, H, W), (n, H, W) or (n, H, W, C), uint8, whole numbers of 12 or 16 bits, or floats in
                [0, 1]; volumes (n, C, D, H, W), or (n, D, H, W) with ``kind="volume"``, likewise, floats of any range;
                signals (n, C, T) with ``kind="signal"``, of any range; or a table (n, d), which is standardised here,
                column by column, by the train split. Floats of any precision. The summary says what was scaled, and by
                what range. Of a model of several inputs a tuple or a mapping of tensors (n, ...) of floats, which go
                into the model as they are.
            targets: whole numbers (n,) for classification; floats (n,), (n, 1) or (n, k) for regression, standardised
                here by the train split; 0 and 1 (n, k) for several labels; whole numbers (n, *spatial), of the shape
                that the inputs have without their channels, for segmentation. The summary says what isn't plain. Of a
                model of several outputs with a loss of one's own a tuple or a mapping of arrays (n, ...), or one.
            test: the same for the test split. Without it one example in five of every class is held out.
            kind: of the examples, if it is another than what the array's shape suggests.
            num_classes: by default one more than the largest label, or class of a pixel.
            name, summary, class_names, source: words for the report.
            task: what the model is asked for, where the targets' type and shape don't tell.
            channels: of images with four axes, whether the channels stand ``first`` or ``last``, where their shape
                doesn't tell.
            classes: floating-point targets are the classes 0 and 1, as for a binary cross-entropy.
            raw_targets: floating-point targets go to the loss as they are, for one that gives them a meaning (counts,
                0 and 1).
            columns: of a table, in the order of their positions: names and types. One-hot ones aren't standardised;
                means, deviations and codes are filled in here.

        Raises:
            BadInput: the arrays cannot be such a data set; the message says why.
        """
        where = f"data set '{name}'"
        parts, asked_of = None, None
        count = _count_of(inputs, targets)
        if several(targets, count):
            if task is not None and not task_named(task).real:
                raise BadInput(f"{where}: the targets are several, and task='{task}' is of one; leave it out")
            asked_of = Packing.of(targets, f"{where}: target", whole=True)
            task, raw_targets = REGRESSION.name, True
        if several(inputs, count):
            if (kind is not None and not example_kind(kind).packed) or columns or channels:
                raise BadInput(f"{where}: several inputs have no kind, columns or channels; leave these out")
            parts, kind = Packing.of(inputs, f"{where}: input"), PACKED.name
            summary = f"{summary}; inputs {parts}"
        elif kind is not None and example_kind(kind).packed:
            raise BadInput(f"{where}: {WAY_IN}, as tensors (n, ...)")
        if parts or asked_of:
            inputs, targets = _packed((inputs, targets), parts, asked_of, where)
            test = None if test is None else _packed(test, parts, asked_of, f"{where}, test split")
        x_kind, x = as_inputs(inputs, where, kind, channels)
        given = tuple(_as_tensor(inputs, where).shape[1:])
        shape = tuple(x.shape[1:])
        asked, y = _targets(targets, where, shape, task, classes=classes, raw=raw_targets)
        if len(x) != len(y):
            raise BadInput(f"{where}: {len(x)} inputs but {len(y)} targets; give one target per input")
        if test is None:
            held_out = hold_out(y, where)
            x, y, x_test, y_test = x[~held_out], y[~held_out], x[held_out], y[held_out]
            test_kind = x_kind
        else:
            test_kind, x_test = as_inputs(test[0], f"{where}, test split", kind, channels)
            known = asked.name if y.is_floating_point() else task  # of few examples any number may be 0 or 1
            y_test = _targets(test[1], f"{where}, test split", shape, known, classes=classes, raw=raw_targets)[1]
        if x_kind is not test_kind or y.dtype != y_test.dtype or y.shape[1:] != y_test.shape[1:]:
            raise BadInput(f"{where}: train and test splits are of different kinds; give both in the same form")
        if y.is_floating_point() and num_classes is not None:
            raise BadInput(f"{where}: {y.shape[1]} {asked.targets} have no num_classes; leave it out")
        names = None if class_names is None else tuple(class_names)
        if x.ndim == 2 and y.ndim == 1 and num_classes is None and names is None:
            check_classes(torch.cat([y, y_test]), f"{where}: targets", "say num_classes, or give floats for numbers")
        said = len(names) if num_classes is None and names and not y.is_floating_point() else num_classes
        count = asked.count(y, y_test, where) if said is None else said
        num_targets = 1 if asked.one_class else asked.target_values(count)
        if kind is None and channels is None and (taken := x_kind.said(given, tuple(x.shape[1:]))):
            summary = f"{summary}; {taken}"
        raw = x, x_test
        x, x_test, by = x_kind.scaled(x, x_test, where)
        summary = f"{summary}; {by}" if by else summary
        x, x_test, mean, std = x_kind.prepare(x, x_test)
        if columns:
            x, x_test, columns = declared(columns, raw, (x, x_test), where)
        y, y_test, what = asked.prepare(y, y_test, num_targets, raw=raw_targets)
        summary += f"; {what}" * bool(what) + f": {asked_of}" * (asked_of is not None)
        return cls(
            name=name,
            summary=summary,
            kind=x_kind.name,
            task=asked.name,
            num_targets=num_targets,
            train=Split(x, y),
            test=Split(x_test, y_test),
            num_classes=count if asked.one_class else None,
            class_names=names,
            mean=mean,
            std=std,
            source=source,
            columns=tuple(columns),
            packed_inputs=parts,
            packed_targets=asked_of,
        )

    @classmethod
    def from_tokens(
        cls,
        inputs: Array,
        targets: Array | None = None,
        *,
        vocabulary: int,
        padding: int | None = None,
        end: int | None = None,
        test: Array | tuple[Array, Array] | None = None,
        persons: Array | tuple[Array, Array] | None = None,
        words: Sequence[str] | None = None,
        name: str = "custom",
        summary: str = "given by the caller",
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        source: str = "given by the caller",
    ) -> Dataset:
        """Make a data set of text, as a tokenizer's whole numbers.

        Args:
            inputs: tokens (n, length), from 0; short sequences are filled up with ``padding`` on the right.
            targets: classes (n,); None for a causal task, in which the model predicts every following token.
            vocabulary: how many different tokens there are.
            padding: the token that fills up; None where all sequences have the same length.
            end: the token that ends every sequence, if there is one.
            test: the test split: tokens, and classes if there are any. Without it one sequence in five is held out.
            persons: whole numbers (n,), of which person (author, user) each sequence is; with ``test`` those of both
                splits. Then a person's sequences stay together, and attacks on membership are counted by persons.
            words: what each token stands for, for the report.
            num_classes: by default one more than the largest target.
            name, summary, class_names, source: words for the report.

        Raises:
            BadInput: the arrays cannot be such a data set; the message says why.
        """
        info = TokenInfo(vocabulary, padding, end, causal=targets is None)
        where = f"data set '{name}'"
        x = as_inputs(inputs, where, "tokens")[1]
        y = torch.zeros(len(x), dtype=torch.int64) if targets is None else _targets(targets, where)[1]
        if len(x) != len(y) or y.is_floating_point():
            raise BadInput(f"{where}: {len(x)} sequences need as many targets, whole numbers; there are {len(y)}")
        whose: tuple[Tensor | None, Tensor | None] = (None, None)
        if test is None:
            of = None if persons is None else persons_of(persons, len(x), where)
            held_out = hold_out(y, where, of)
            x, y, x_test, y_test = x[~held_out], y[~held_out], x[held_out], y[held_out]
            whose = whose if of is None else (of[~held_out], of[held_out])
        else:
            given, classes = test if isinstance(test, tuple) else (test, None)
            x_test = as_inputs(given, f"{where}, test split", "tokens")[1]
            y_test = torch.zeros(len(x_test), dtype=torch.int64)
            y_test = y_test if classes is None else _targets(classes, f"{where}, test split")[1]
            if persons is not None and not (isinstance(persons, tuple) and len(persons) == 2):
                raise BadInput(f"{where}: with a test split give the persons of both splits: (of train, of test)")
            if isinstance(persons, tuple):
                whose = (
                    persons_of(persons[0], len(x), where),
                    persons_of(persons[1], len(x_test), f"{where}, test split"),
                )
        if info.causal:
            y, y_test, num_classes = info.following(x), info.following(x_test), vocabulary
        elif num_classes is None:
            num_classes = len(class_names) if class_names is not None else int(max(y.max(), y_test.max())) + 1
        return cls(
            name=name,
            summary=summary,
            kind="tokens",
            task=CLASSIFICATION.name,
            train=Split(x, y, persons=whose[0]),
            test=Split(x_test, y_test, persons=whose[1]),
            num_classes=num_classes,
            class_names=None if class_names is None else tuple(class_names),
            mean=(0.0,),
            std=(1.0,),
            source=source,
            tokens=info,
            words=None if words is None else tuple(words),
        )

    @classmethod
    def from_torch(
        cls, dataset: MapStyle, *, test: MapStyle | None = None, limit: int | None = None, **options: Any
    ) -> Dataset:
        """Make a data set of any map-style torch data set of (input, target) pairs.

        Args:
            dataset: has ``__len__`` and ``__getitem__``; inputs are tensors, arrays or PIL images of one shape, or a
                tuple or a mapping of several, and so may targets be.
            test: the same for the test split.
            limit: read only the first so many pairs of each.
            options: as for ``from_tensors``.

        Raises:
            BadInput: an item is not such a pair, or the inputs differ in shape.
        """
        x, y = stack_pairs(dataset, limit)
        return cls.from_tensors(x, y, test=None if test is None else stack_pairs(test, limit), **options)


def of_heads(data: Dataset) -> Dataset:
    """Return a data set of one target an example for a model of several outputs, whose loss takes it as it is."""
    if data.packed_targets is not None:
        return data
    if data.tokens is not None and data.tokens.causal:
        raise BadInput("a model that predicts the next token has one output; take the others out of what it returns")
    shape, whole = tuple(data.train.targets.shape[1:]), not data.train.targets.is_floating_point()
    packing = Packing((Part("", shape, whole),))
    train, test = (
        replace(split, targets=packing.pack(split.targets, "the targets")) for split in (data.train, data.test)
    )
    return replace(
        data,
        task=REGRESSION.name,
        train=train,
        test=test,
        num_classes=None,
        class_names=None,
        num_targets=packing.size,
        packed_targets=packing,
    )


def check_names(names: Sequence[str], where: str) -> None:
    """Refuse names of classes that can't be shown or written: control characters, or no UTF-8, as folders may have."""
    for name in names:
        if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
            raise BadInput(f"{where}: the class name {ascii(name)[:80]} isn't text that can be shown; rename it")


def property_of(data: Dataset, text: str) -> tuple[str, int]:
    """Return the attribute that ``text``, as ``sex=Female``, names, and the number of its value."""
    name, _, value = text.partition("=")
    if name not in data.attributes:
        raise BadInput(f"the data set '{data.name}' has no {unknown_name('attribute', name, data.attributes)}")
    values = data.attributes[name].values
    if value not in values:
        raise BadInput(f"'{name}' of '{data.name}': {unknown_name('value', value, values)}")
    return name, values.index(value)


class MapStyle(Protocol):
    """What ``torch.utils.data.Dataset`` promises when it is map-style."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def as_inputs(
    array: Any, where: str, kind: str | None = None, channels: Channels | None = None
) -> tuple[ExampleKind, Tensor]:
    """Return an array's kind of examples, by default the first with as many axes, and what that kind reads."""
    x = _as_tensor(array, where)
    known = kind_of(x, where) if kind is None else example_kind(kind)
    if x.ndim not in known.array_axes or not x.numel():
        wanted = f"{known.described} {known.arrays}, none of them empty"
        raise BadInput(f"{where}: inputs of shape {tuple(x.shape)} cannot be used; give {wanted}")
    return known, known.read(known.arrange(x, where, channels), where)


def _count_of(inputs: Any, targets: Any) -> int | None:
    """Return how many examples there are, which a list of examples and several tensors say each in its way."""
    both = _counts(inputs) & _counts(targets)
    return max(both) if both else None


def _counts(given: Any) -> set[int]:
    if not isinstance(given, Mapping | tuple | list):
        return {int(given.shape[0])} if getattr(given, "ndim", 0) else set()
    parts = list(given.values()) if isinstance(given, Mapping) else given
    first = {int(part.shape[0]) for part in parts if getattr(part, "ndim", 0)}
    return (first if len(first) == 1 else set()) | (set() if isinstance(given, Mapping) else {len(given)})


def _packed(pair: tuple[Any, Any], parts: Packing | None, targets: Packing | None, where: str) -> tuple[Any, Any]:
    """Return inputs and targets, those of several parts packed."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise BadInput(f"{where}: give (inputs, targets)")
    return (
        pair[0] if parts is None else parts.pack(pair[0], f"{where}: inputs"),
        pair[1] if targets is None else targets.pack(pair[1], f"{where}: targets"),
    )


def _as_tensor(array: Any, where: str) -> Tensor:
    if isinstance(array, Tensor):
        return plain(array).cpu()
    try:
        return torch.from_numpy(np.ascontiguousarray(array))
    except TypeError as error:
        raise BadInput(f"{where}: cannot be read as numbers ({error}); give tensors or numeric numpy arrays") from error


def _targets(
    array: Any, where: str, shape: tuple[int, ...] = (), task: str | None = None, **how: bool
) -> tuple[Task, Tensor]:
    return read_targets(_as_tensor(array, where), shape, where, task, **how)


def persons_of(given: Any, n: int, where: str) -> Tensor:
    """Return of which person each of ``n`` examples is, int64 (n,)."""
    try:
        persons = np.asarray(given.cpu() if isinstance(given, Tensor) else given)
    except (TypeError, ValueError, RuntimeError):  # of lists of different lengths, a type that numpy lacks, gradients
        persons = np.zeros(0)
    if persons.shape != (n,) or persons.dtype.kind not in "iu":
        raise BadInput(f"{where}: persons: give a whole number for each of {n} examples")
    return torch.from_numpy(persons.astype(np.int64))


def hold_out(targets: Tensor, where: str, persons: Tensor | None = None) -> Tensor:
    """Mark one in five of every class, one at least, for the test split; ``persons`` (n,) as a whole."""
    if persons is not None:
        units, of = persons.unique(return_inverse=True)
        return hold_out(usual_targets(targets, of, len(units)), f"{where}, by person")[of]
    if len(targets) < 2:
        raise BadInput(
            f"{where}: {len(targets)} example cannot fill a train and a test split; give test=(inputs, targets)"
        )
    groups = torch.zeros(len(targets), dtype=torch.int64) if targets.ndim > 1 else targets
    held_out = within_class_rank(groups) % 5 == 4
    if not bool(held_out.any()):
        held_out[-1] = True
    return held_out


def usual_targets(targets: Tensor, of: Tensor, count: int) -> Tensor:
    """Return for each of ``count`` persons its most frequent class, for other targets the first; ``of`` (n,): whose."""
    if targets.ndim > 1 or targets.is_floating_point():
        first = torch.full((count,), len(of)).scatter_reduce_(0, of, torch.arange(len(of)), "amin")
        return targets[first]
    counts = torch.zeros(count, int(targets.max()) + 1)
    counts.index_put_((of, targets), torch.ones(len(of)), accumulate=True)
    return counts.argmax(dim=1)


def within_class_rank(targets: Tensor) -> Tensor:
    """Return for each of n labels how many equal ones stand before it: int64 (n,)."""
    order = torch.argsort(targets, stable=True)
    grouped = targets[order]
    first = torch.searchsorted(grouped, grouped, right=False)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(targets)) - first
    return rank


def balanced(targets: Tensor, limit: int | None) -> Tensor:
    """Return at most ``limit`` row numbers, in ascending order, taken in turn from every class."""
    if limit is None or limit >= len(targets):
        return torch.arange(len(targets))
    rank = within_class_rank(targets)
    order = torch.argsort(rank * (int(targets.max()) + 1) + targets, stable=True)
    return order[:limit].sort().values


def _check_inputs(where: str, kind: ExampleKind, split: Split) -> None:
    x, y = split.inputs, split.targets
    if x.dtype != kind.dtype or x.ndim != 1 + len(kind.axes):
        wanted = f"{str(kind.dtype).removeprefix('torch.')} (n, {kind.letters})"
        raise BadInput(f"{where}: inputs must be {wanted}, not {x.dtype} {tuple(x.shape)}")
    if x.numel() == 0 or len(x) != len(y):
        raise BadInput(f"{where}: {len(x)} inputs and {len(y)} targets; give one target per input, at least one")
    kind.check_finite(x, where)
    kind.check_bounds(x, where)
    if fault := kind.fault(x):
        raise BadInput(f"{where}: {fault}")


def _check_tokens(
    where: str, kind: ExampleKind, split: Split, tokens: TokenInfo | None, words: tuple[str, ...] | None
) -> None:
    if kind.discrete != (tokens is not None):
        raise BadInput(
            f"{where}: {kind.described} {'need' if kind.discrete else 'have no'} vocabulary; see from_tokens"
        )
    if tokens is None:
        return
    if fault := tokens.fault(split.inputs):
        raise BadInput(f"{where}: {fault}; raise vocabulary, or check the tokenizer")
    if words is not None and len(words) != tokens.vocabulary:
        raise BadInput(f"{where}: {len(words)} words for {tokens.vocabulary} tokens; give one for each, or none")


def _check_targets(where: str, dataset: Dataset, y: Tensor) -> None:
    task, classes = dataset.task_kind, dataset.num_classes
    tokens = dataset.tokens
    if tokens and tokens.causal and (classes != tokens.vocabulary or not task_named(dataset.task).one_class):
        raise BadInput(f"data set '{dataset.name}': a causal task is classification, with a class for each token")
    if task.one_class and (classes is None or classes < 2):
        raise BadInput(f"{where}: {task.name} needs num_classes of at least 2, not {classes}")
    if not task.one_class and classes is not None:
        raise BadInput(f"{where}: {task.name} has no num_classes but num_targets; leave num_classes out")
    shape = task.target_shape(dataset.num_targets, dataset.input_shape)
    if fault := task.fault(y, classes or dataset.num_targets, shape):
        raise BadInput(f"{where}: {fault}")


def _colours(item: Any) -> Any:
    """Return an image of Pillow's whose numbers are no colours (a palette's, inks) with such; all else as it is."""
    mode = getattr(item, "mode", None)
    if mode in ("P", "PA", "CMYK", "YCbCr", "LAB", "HSV"):
        return item.convert("RGB")
    return item.convert("L") if mode == "1" else item


def stack_pairs(dataset: MapStyle, limit: int | None = None) -> tuple[Any, Any]:
    """Return the inputs (n, ...) and targets of a torch data set's first pairs; several in a tuple or dictionary."""
    count = len(dataset) if limit is None else min(limit, len(dataset))
    inputs: list[Any] = []
    targets: list[Any] = []
    for i in range(count):
        item = dataset[i]
        if isinstance(item, Mapping):
            keys = reprlib.repr(", ".join(map(str, item)))
            raise BadInput(
                f"item {i} of the torch data set is a {type(item).__name__} of {keys}, not an (input, target) "
                "pair; wrap it so that it is"
            )
        if isinstance(item, tuple | list) and len(item) > 2:
            raise BadInput(
                f"item {i} of the torch data set has {len(item)} values, and nobody says which is the target; "
                f"{WAY_IN}: wrap it so that its items are such pairs"
            )
        if not (isinstance(item, (tuple, list)) and len(item) == 2):
            raise BadInput(f"item {i} of the torch data set is not an (input, target) pair; wrap it so that it is")
        inputs.append(item[0])
        targets.append(item[1])
    if not inputs:
        raise BadInput("the torch data set is empty; give one with examples")
    x = _stacked(inputs, _stack_inputs) if isinstance(inputs[0], Mapping | tuple | list) else _stack_inputs(inputs)
    return x, _stacked(targets, _stack_targets) if _is_several(targets[0]) else _stack_targets(targets)


def _stack_inputs(inputs: list[Any]) -> Tensor:
    found: list[Tensor] = []
    for i, given in enumerate(inputs):
        if isinstance(given, int | float):
            given = torch.tensor(given)
        x = given if isinstance(given, Tensor) else torch.from_numpy(np.array(_colours(given)))
        if found and x.shape != found[0].shape:
            shapes = f"{tuple(x.shape)}, not {tuple(found[0].shape)}"
            raise BadInput(f"item {i} of the torch data set has shape {shapes}; add a resizing transform")
        found.append(x)
    return torch.stack(found)


def _stack_targets(targets: list[Any]) -> Tensor:
    return torch.as_tensor(np.array([np.asarray(t) for t in targets]))


def _is_several(target: Any) -> bool:
    """Whether one example's target is several: by name, or a tuple of what doesn't go into one array."""
    if isinstance(target, Mapping):
        return True
    if not isinstance(target, tuple):
        return False
    arrays = [np.asarray(part) for part in target]
    return len({(array.shape, array.dtype.kind) for array in arrays}) > 1


def _stacked(items: list[Any], stack: Callable[[list[Any]], Tensor]) -> Any:
    """Return the parts of items, each stacked over all items, in the form of the first."""
    first = items[0]
    keys = list(first) if isinstance(first, Mapping) else range(len(first))
    form: list[Tensor] = []
    for key in keys:
        own = []
        for i, item in enumerate(items):
            if (
                type(item) is not type(first)
                or len(item) != len(first)
                or (isinstance(item, Mapping) and key not in item)
            ):
                raise BadInput(f"item {i} of the torch data set has other parts than the first; give all the same")
            own.append(item[key])
        form.append(stack(own))
    return dict(zip(keys, form, strict=True)) if isinstance(first, Mapping) else tuple(form)
