"""Tables from local files: Adult (census incomes) and Location30 (check-ins)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaudit.data.catalogue import DATASETS, Layout, Recipe, Request
from fedaudit.data.dataset import Dataset, Split, with_column, within_class_rank
from fedaudit.data.files import Numbers, read_csv, read_npz, read_parquet, reading, whole_numbers
from fedaudit.data.images import limit_table
from fedaudit.modalities.columns import Column
from fedaudit.modalities.table import standardise
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


def _adult_parquet(paths: list[Path], request: Request) -> Dataset:
    train, test = (read_parquet(path, *_ADULT_COLUMNS) for path in paths)
    return _adult(train, test, request, paths)


def _adult_csv(paths: list[Path], request: Request) -> Dataset:
    train, test = (_read_adult_csv(path) for path in paths)
    return _adult(train, test, request, paths)


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
    splits = []
    parts = [_adult_numbers(columns, path) for columns, path in zip((train, test), paths, strict=True)]
    numbers = standardise(parts[0], parts[1])
    for columns, path, part in zip((train, test), paths, numbers, strict=True):
        one_hot = [
            torch.from_numpy(np.array(columns[name], dtype=str)[:, None] == np.unique(np.array(train[name], dtype=str)))
            for name in _ADULT_COLUMNS
            if name not in _ADULT_NUMBERS and name != "income"
        ]
        unknown = set(columns["income"]) - set(_ADULT_CLASSES)
        if unknown:
            raise BadInput(f"{path}: income {sorted(unknown)[0]!r} is neither <=50K nor >50K; get the file again")
        targets = torch.tensor([_ADULT_CLASSES.index(value) for value in columns["income"]])
        splits.append(Split(torch.cat([part, *(block.float() for block in one_hot)], dim=1), targets))
    whole = _table_dataset(
        request,
        splits[0],
        splits[1],
        _ADULT_CLASSES,
        "UCI Adult (Becker and Kohavi, 1996), CC BY 4.0; incomes from the 1994 US census",
    )
    first = len(_ADULT_NUMBERS)
    means, spreads = parts[0].mean(dim=0).tolist(), parts[0].std(dim=0, correction=0).tolist()
    known = [
        Column(name, "numeric", (i,), mean=means[i], std=spreads[i] or 1.0) for i, name in enumerate(_ADULT_NUMBERS)
    ]
    for name in _ADULT_COLUMNS:
        if name not in _ADULT_NUMBERS and name != "income":
            values = [str(value) for value in np.unique(np.array(train[name], dtype=str))]
            known.append(Column(name, "categorical", tuple(range(first, first + len(values))), tuple(values)))
            if name in _ADULT_ATTRIBUTES and len(values) > 1 and set(map(str, test[name])) <= set(values):
                whole = with_column(whole, name, range(first, first + len(values)), values)
            first += len(values)
    return replace(whole, columns=tuple(known))


def _adult_phd_parquet(paths: list[Path], request: Request) -> Dataset:
    return _adult_phd([read_parquet(path, *_ADULT_COLUMNS) for path in paths], request, paths)


def _adult_phd_csv(paths: list[Path], request: Request) -> Dataset:
    return _adult_phd([_read_adult_csv(path) for path in paths], request, paths)


def _adult_phd(parts: list[Columns], request: Request, paths: list[Path]) -> Dataset:
    """Both files together, people with a bachelor's degree or more, one in eight of every group held out.

    Groups (Xu & Neglia 2021, Section 4): doctorates of less than 38 years are client 0's, of 38 to 52 client 1's, older
    ones client 2's; the others are nobody's. The paper counts 126, 258 and 134 training examples in these three.
    """
    whole = {name: [*parts[0][name], *parts[1][name]] for name in _ADULT_COLUMNS}
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
    made = _adult(columns[0], columns[1], replace(request, limit=None), paths)
    train, test = (
        replace(split, groups=groups[part]) for split, part in zip((made.train, made.test), rows, strict=True)
    )
    return limit_table(replace(made, train=train, test=test), request.limit)


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
    whole = _table_dataset(
        request,
        Split(inputs[cut:], targets[cut:]),
        Split(inputs[:cut], targets[:cut]),
        tuple(f"cluster {i + 1}" for i in range(30)),
        source,
    )
    return replace(whole, columns=tuple(places)) if bool(((inputs == 0) | (inputs == 1)).all()) else whole


def _table_dataset(request: Request, train: Split, test: Split, classes: tuple[str, ...], source: str) -> Dataset:
    whole = Dataset(
        name=request.name,
        summary=request.summary,
        kind="table",
        task="classification",
        train=train,
        test=test,
        num_classes=len(classes),
        class_names=classes,
        mean=(0.0,),
        std=(1.0,),
        source=source,
    )
    return limit_table(whole, request.limit)


DATASETS.register(
    "adult",
    "48,842 people of the 1994 US census, who earns above 50,000 dollars: six numbers, eight categories as 0/1",
    kind="table",
    task="classification",
    embedded=False,
    needs="files; parquet files need pyarrow",
)(
    Recipe(
        (
            Layout(_adult_parquet, ("train.parquet", "test.parquet"), ("adult",)),
            Layout(_adult_csv, ("adult.data", "adult.test"), ("adult", ".")),
        ),
        "https://archive.ics.uci.edu/dataset/2/adult, unpack adult.data and adult.test into DATA_DIR/adult/",
    )
)
DATASETS.register(
    "adult-phd",
    "those of Adult with a bachelor's degree or more; people with a doctorate are clients 0 to 2 by age (natural)",
    kind="table",
    task="classification",
    embedded=False,
    needs="files; parquet files need pyarrow",
)(
    Recipe(
        (
            Layout(_adult_phd_parquet, ("train.parquet", "test.parquet"), ("adult",)),
            Layout(_adult_phd_csv, ("adult.data", "adult.test"), ("adult", ".")),
        ),
        "as for adult: https://archive.ics.uci.edu/dataset/2/adult, adult.data and adult.test into DATA_DIR/adult/",
    )
)
DATASETS.register(
    "location30",
    "5,010 users' check-ins at 446 places (0/1), thirty clusters; a membership-inference standard",
    kind="table",
    task="classification",
    embedded=False,
    needs="files",
)(
    Recipe(
        (
            Layout(_location_npz, ("location30.npz",), ("location30", ".")),
            Layout(_location_csv, ("bangkok",), ("location30", ".")),
        ),
        "https://github.com/privacytrustlab/datasets, unpack dataset_location.tgz into DATA_DIR/location30/",
    )
)
