"""The columns of a table: which of them are numbers, which are categories, and where they stand in what models see."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict
from torch import Tensor

from fedaudit.utils.errors import BadInput

ColumnKind = Literal["numeric", "categorical"]

MOST_CATEGORIES = 1_000  # of one column: beyond, it is rather a name or a number than a category
MOST_COLUMNS = 100_000
UNKNOWN = -1  # the category of a cell that has none
_LONGEST = 200  # characters of a name


@dataclass(frozen=True)
class Column:
    """A column of a table, as everybody in the federation knows it.

    Attributes:
        name: of the column.
        kind: ``numeric`` or ``categorical``.
        positions: in an example (d,), as the model sees it: one of a number; of categories one for each, of which one
            is 1 and the others are 0, or a single one, which holds a code.
        categories: their names, where it is categorical.
        mean, std: of a number in the train split: x = (value − mean) / std is what the model sees.
        codes: of categories at a single position, what stands there for each.

    Raises:
        BadInput: these contradict each other.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # where it is read from a file

    name: str
    kind: ColumnKind
    positions: tuple[int, ...]
    categories: tuple[str, ...] = ()
    mean: float = 0.0
    std: float = 1.0
    codes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        where, many = f"column '{self.name[:_LONGEST]}'", len(self.positions)
        if not self.name.isprintable() or any(len(word) > _LONGEST for word in (self.name, *self.categories)):
            raise BadInput(f"{where}: names of columns and categories must be printable, of {_LONGEST} letters at most")
        if not all(math.isfinite(value) for value in (self.mean, self.std, *self.codes)) or self.std <= 0:
            raise BadInput(f"{where}: mean, std and codes must be finite, and std above 0")
        if self.kind == "numeric" and (many != 1 or self.categories or self.codes):
            raise BadInput(f"{where}: a numeric column has one position and no categories")
        if self.kind == "categorical" and not 1 <= len(self.categories) <= MOST_CATEGORIES:
            raise BadInput(f"{where}: {len(self.categories)} categories; there must be 1 to {MOST_CATEGORIES:,}")
        if self.kind == "categorical" and many > 1 and (many != len(self.categories) or self.codes):
            raise BadInput(f"{where}: {many} positions for {len(self.categories)} categories, which need one each")
        if self.codes and (many != 1 or not len(set(self.codes)) == len(self.codes) == len(self.categories)):
            raise BadInput(f"{where}: {len(self.codes)} codes for {len(self.categories)} categories")

    @property
    def one_hot(self) -> bool:
        """Whether each category has a position of its own."""
        return self.kind == "categorical" and not self.codes

    def values(self) -> Tensor:
        """Return (k, p) float32: what stands at the positions for each of the k categories."""
        return torch.tensor(self.codes)[:, None] if self.codes else torch.eye(len(self.categories))

    def text(self, cell: float) -> str:
        """Return a cell, as :func:`cells` gives it, in the table's own words."""
        if self.kind == "categorical":
            return self.categories[int(cell)] if cell >= 0 else "(none)"
        return f"{cell * self.std + self.mean:.4g}"


def numbers(d: int, names: Sequence[str] = ()) -> tuple[Column, ...]:
    """Return the columns of a table of which nothing is known but perhaps ``names``: d numbers."""
    names = names or [f"column {i + 1}" for i in range(d)]
    return tuple(Column(name, "numeric", (i,)) for i, name in enumerate(names))


def check_columns(columns: Sequence[Column], shape: tuple[int, ...], where: str) -> None:
    """Refuse columns if a position of ``shape`` has none or several, or a name is there twice; none at all are fine."""
    if not columns:
        return
    if len(shape) != 1 or len(columns) > MOST_COLUMNS:
        raise BadInput(f"{where}: only tables have columns, at most {MOST_COLUMNS:,}")
    taken = [place for column in columns for place in column.positions]
    if sorted(taken) != list(range(shape[0])):
        raise BadInput(f"{where}: the columns have {len(taken)} positions; each of 0 to {shape[0] - 1} must be one's")
    if len({column.name for column in columns}) != len(columns):
        raise BadInput(f"{where}: two columns have the same name")


def cells(rows: Tensor, columns: Sequence[Column]) -> Tensor:
    """Return (n, c) float64, a value for each cell of rows (n, d): a number itself, a category's place.

    A category is the one that stands out (above 1/2), or whose code is nearest; UNKNOWN where none does.
    """
    found = torch.empty(len(rows), len(columns), dtype=torch.float64)
    for i, column in enumerate(columns):
        own = rows[:, list(column.positions)].double()
        if column.kind == "numeric":
            found[:, i] = own[:, 0]
        elif column.one_hot:
            best, place = own.max(dim=1)
            found[:, i] = torch.where(best > 0.5, place, UNKNOWN).double()
        else:
            found[:, i] = (own - torch.tensor(column.codes, dtype=torch.float64)).abs().argmin(dim=1).double()
    return found


def declared(
    columns: Sequence[Column], raw: tuple[Tensor, Tensor], standardised: tuple[Tensor, Tensor], where: str
) -> tuple[Tensor, Tensor, tuple[Column, ...]]:
    """Return both splits with the columns that their owner declares: one-hot ones stay 0 and 1.

    Args:
        columns: means, deviations and codes are filled in here.
        raw: train and test split (n, d), as they were given; ``standardised``: by the train split.
    """
    check_columns(columns, tuple(raw[0].shape[1:]), where)
    parts = [part.clone() for part in standardised]
    made = []
    for column in columns:
        places = list(column.positions)
        if column.kind == "numeric":
            own = raw[0][:, places[0]].double()
            spread = float(own.std(correction=0))
            mean = float(own.mean())
            made.append(replace(column, mean=mean, std=spread if spread > 1e-12 * abs(mean) else 1.0))
        elif len(places) > 1 or len(column.categories) == 1:
            for part, given in zip(parts, raw, strict=True):
                part[:, places] = given[:, places].to(part.dtype)
            made.append(column)
        else:
            codes = parts[0][:, places[0]].unique()
            if len(codes) != len(column.categories):
                count = len(column.categories)
                raise BadInput(f"{where}: column '{column.name}' has {len(codes)} values for {count} categories")
            made.append(replace(column, codes=tuple(codes.tolist())))
    for part in parts:
        check_cells(part, made, where)
    return parts[0], parts[1], tuple(made)


def check_cells(rows: Tensor, columns: Sequence[Column], where: str) -> None:
    """Refuse rows (n, d) in which a one-hot column isn't zeros and a single 1, or a code isn't one of the column's."""
    for column in columns:
        own = rows[:, list(column.positions)]
        if column.one_hot and not bool(((own == 0) | (own == 1)).all() and (own.sum(dim=1) <= 1).all()):
            raise BadInput(f"{where}: column '{column.name}' is one-hot, and some row has not a single 1 and zeros")
        if column.codes and not bool(torch.isin(own[:, 0], torch.tensor(column.codes, dtype=own.dtype)).all()):
            raise BadInput(f"{where}: column '{column.name}' holds a value that is none of its categories")


def encode(
    train: Mapping[str, Sequence[str] | Tensor], test: Mapping[str, Sequence[str] | Tensor], where: str
) -> tuple[Tensor, Tensor, tuple[Column, ...]]:
    """Return both splits (n, d) as models see them, and their columns, in the order of ``train``.

    The train split standardises float64 numbers (n,); texts become one position for each of its categories, sorted: any
    other category is zeros everywhere.
    """
    blocks: tuple[list[Tensor], list[Tensor]] = ([], [])
    columns: list[Column] = []
    width = 0
    for name, values in train.items():
        others = test[name]
        if isinstance(values, Tensor) and isinstance(others, Tensor):
            mean, spread = float(values.mean()), float(values.std(correction=0))
            spread = spread if spread > 1e-12 * abs(mean) else 1.0
            columns.append(Column(name, "numeric", (width,), mean=mean, std=spread))
            for block, part in zip(blocks, (values, others), strict=True):
                block.append(((part - mean) / spread)[:, None].float())
            width += 1
            continue
        categories = sorted({str(value) for value in values})
        if len(categories) > MOST_CATEGORIES:
            raise BadInput(
                f"{where}: column '{name}' has {len(categories):,} different values, more than {MOST_CATEGORIES:,} "
                "categories; leave it out, or declare it numeric"
            )
        number = {category: i for i, category in enumerate(categories)}
        positions = tuple(range(width, width + len(categories)))
        columns.append(Column(name, "categorical", positions, tuple(categories)))
        for block, texts in zip(blocks, (values, others), strict=True):
            codes = torch.tensor([number.get(str(value), UNKNOWN) for value in texts])
            block.append((codes[:, None] == torch.arange(len(categories))).float())
        width += len(categories)
    return torch.cat(blocks[0], dim=1), torch.cat(blocks[1], dim=1), tuple(columns)
