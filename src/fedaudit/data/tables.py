"""Tables from local files: Adult (census incomes) and Location30 (check-ins)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaudit.data.catalogue import Layout, Reader, Request, add_dataset
from fedaudit.data.dataset import Dataset, Split, with_column, within_class_rank
from fedaudit.data.files import Numbers, read_csv, read_npz, read_parquet, reading, whole_numbers
from fedaudit.data.images import table_dataset
from fedaudit.modalities.columns import Column, encode
from fedaudit.utils.errors import BadInput

_ADULT_NUMBERS = ("age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week")
_ADULT_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship"),
    *("race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "income"),
)
# Education, also a number, and the country, of forty values, are no attributes to ask about.
_ADULT_ATTRIBUTES = ("workclass", "marital_status", "occupation", "relationship", "race", "sex")
_BACHELOR = 13  # years of education, as Adult counts them
_ADULT_CLASSES = ("<=50K", ">50K")

Columns = dict[str, list[Any]]


def _reader(read: Callable[[Path], Columns], make: Callable[..., Dataset]) -> Reader:
    return lambda paths, request: make(*map(read, paths), request, paths)


def _read_columns(path: Path) -> Columns:
    return read_parquet(path, *_ADULT_COLUMNS)


def _read_adult_csv(path: Path) -> Columns:
    """Read UCI's adult.data or adult.test: no header; the test file has a comment line and a dot after the income."""
    rows = [row for row in read_csv(path, skipinitialspace=True) if not row[0].startswith("|")]
    for number, row in enumerate(rows, start=1):
        if len(row) != len(_ADULT_COLUMNS):
            raise BadInput(f"{path}, row {number}: {len(row)} values, not {len(_ADULT_COLUMNS)}; get the file again")
    columns = {name: [row[i].strip() for row in rows] for i, name in enumerate(_ADULT_COLUMNS)}
    columns["income"] = [value.removesuffix(".") for value in columns["income"]]
    return columns


def _adult(train: Columns, test: Columns, request: Request, paths: list[Path]) -> Dataset:
    """Standardised numbers first, then one 0/1 column per category seen in the train split, in sorted order.

    A missing value is the category "?"; a category that only the test split has gets zeros everywhere. The first
    column is the age; the education is both a number and a block of categories.
    """
    cells, targets = [], []
    for columns, path in zip((train, test), paths, strict=True):
        numbers = dict(zip(_ADULT_NUMBERS, _adult_numbers(columns, path).unbind(1), strict=True))
        cells.append(numbers | {n: columns[n] for n in _ADULT_COLUMNS if n not in (*_ADULT_NUMBERS, "income")})
        unknown = set(columns["income"]) - set(_ADULT_CLASSES)
        if unknown:
            raise BadInput(f"{path}: income {sorted(unknown)[0]!r} is neither <=50K nor >50K; get the file again")
        targets.append(torch.tensor([_ADULT_CLASSES.index(value) for value in columns["income"]]))
    x, x_test, known = encode(cells[0], cells[1], f"data set '{request.name}'")
    source = "UCI Adult (Becker and Kohavi, 1996), CC BY 4.0; incomes from the 1994 US census"
    splits = Split(x, targets[0]), Split(x_test, targets[1])
    whole = table_dataset(request, *splits, source, num_classes=2, class_names=_ADULT_CLASSES)
    for column in known:
        values = column.categories
        if column.name in _ADULT_ATTRIBUTES and len(values) > 1 and set(map(str, test[column.name])) <= set(values):
            whole = with_column(whole, column.name, column.positions, values)
    return replace(whole, columns=known)


def _adult_phd(first: Columns, second: Columns, request: Request, paths: list[Path]) -> Dataset:
    """Both files together, people with a bachelor's degree or more, one in eight of every group held out.

    Groups (Xu & Neglia 2021, Section 4): doctorates of less than 38 years are client 0's, of 38 to 52 client 1's, older
    ones client 2's; the others are nobody's. The paper counts 126, 258 and 134 training examples in these three.
    """
    whole = {name: [*first[name], *second[name]] for name in _ADULT_COLUMNS}
    with reading(paths[0]):
        learned = [i for i, years in enumerate(whole["education_num"]) if int(years) >= _BACHELOR]
        ages = torch.tensor([int(whole["age"][i]) for i in learned])
    if not learned:
        raise BadInput(f"{paths[0]}: nobody has a bachelor's degree or more; get the file again")
    doctors = torch.tensor([str(whole["education"][i]).strip() == "Doctorate" for i in learned])
    groups = torch.where(doctors, (ages >= 38).long() + (ages > 52).long(), torch.tensor(-1))
    held_out = within_class_rank(groups) % 8 == 7
    rows = [torch.nonzero(~held_out)[:, 0], torch.nonzero(held_out)[:, 0]]
    columns = [{name: [values[learned[i]] for i in part] for name, values in whole.items()} for part in rows]
    made = _adult(columns[0], columns[1], request, paths)
    train, test = (
        replace(split, groups=groups[part]) for split, part in zip((made.train, made.test), rows, strict=True)
    )
    return replace(made, train=train, test=test)


def _adult_numbers(columns: Columns, path: Path) -> Tensor:
    with reading(path):
        numbers = np.array([columns[name] for name in _ADULT_NUMBERS], dtype=np.float64).T
    if numbers.size == 0 or not bool(np.isfinite(numbers).all()):
        raise BadInput(f"{path} has no rows, or a number that isn't finite; get the file again")
    return torch.from_numpy(np.ascontiguousarray(numbers))


def _location_npz(paths: list[Path], request: Request) -> Dataset:
    x, y = read_npz(paths[0], "x", "y")
    return _location(x, y, request, paths[0])


def _location_csv(paths: list[Path], request: Request) -> Dataset:
    table = read_csv(paths[0])
    with reading(paths[0]):
        rows = np.array([[int(value) for value in row] for row in table], dtype=np.int64)
        return _location(rows[:, 1:], rows[:, 0] - 1, request, paths[0])


def _location(x: Numbers, y: Numbers, request: Request, path: Path) -> Dataset:
    y = whole_numbers(y, path, "labels")
    if x.ndim != 2 or not x.size or y.shape != x.shape[:1] or len(y) < 10 or int(y.max()) > 29 or int(y.min()) < 0:
        raise BadInput(f"{path}: {x.shape} inputs and {y.shape} labels are not Location30; get the file again")
    order = np.random.default_rng(0).permutation(len(y))  # the set has no official split: one in five, always the same
    inputs = torch.from_numpy(x.astype(np.float32))[order]
    targets = torch.from_numpy(y)[order]
    cut = len(y) // 5
    source = "Location30 (Shokri et al., 2017) from Foursquare check-ins in Bangkok (Yang et al.); licence not stated"
    places = [Column(f"place {i + 1}", "categorical", (i,), ("0", "1"), codes=(0.0, 1.0)) for i in range(x.shape[1])]
    train, test = Split(inputs[cut:], targets[cut:]), Split(inputs[:cut], targets[:cut])
    clusters = [f"cluster {i + 1}" for i in range(30)]
    whole = table_dataset(request, train, test, source, num_classes=30, class_names=clusters)
    return replace(whole, columns=tuple(places)) if bool(((inputs == 0) | (inputs == 1)).all()) else whole


_NEEDS = "files; parquet files need pyarrow"
_PARQUET = (("train.parquet", "test.parquet"), ("adult",))
_CSV = (("adult.data", "adult.test"), ("adult", "."))

add_dataset(
    "adult",
    "48,842 people of the 1994 US census, who earns above 50,000 dollars: six numbers, eight categories as 0/1",
    "https://archive.ics.uci.edu/dataset/2/adult, unpack adult.data and adult.test into DATA_DIR/adult/",
    Layout(_reader(_read_columns, _adult), *_PARQUET),
    Layout(_reader(_read_adult_csv, _adult), *_CSV),
    kind="table",
    needs=_NEEDS,
)
add_dataset(
    "adult-phd",
    "those of Adult with a bachelor's degree or more; people with a doctorate are clients 0 to 2 by age (natural)",
    "as for adult: https://archive.ics.uci.edu/dataset/2/adult, adult.data and adult.test into DATA_DIR/adult/",
    Layout(_reader(_read_columns, _adult_phd), *_PARQUET),
    Layout(_reader(_read_adult_csv, _adult_phd), *_CSV),
    kind="table",
    needs=_NEEDS,
)
add_dataset(
    "location30",
    "5,010 users' check-ins at 446 places (0/1), thirty clusters; a membership-inference standard",
    "https://github.com/privacytrustlab/datasets, unpack dataset_location.tgz into DATA_DIR/location30/",
    Layout(_location_npz, ("location30.npz",), ("location30", ".")),
    Layout(_location_csv, ("bangkok",), ("location30", ".")),
    kind="table",
)
