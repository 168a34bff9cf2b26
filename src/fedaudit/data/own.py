"""A user's own data, in the forms that training code has them: arrays, torch data sets, frames of mixed columns."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fedaudit.data.cells import FEW, DecimalPoint, Empty, Read, cell, check_classes, read
from fedaudit.data.dataset import WAY_IN, Dataset, Split, hold_out, persons_of, stack_pairs
from fedaudit.data.files import read_arrays, read_csv
from fedaudit.modalities.columns import MOST_COLUMNS, ColumnKind, encode
from fedaudit.modalities.packed import packed_alone
from fedaudit.task.targets import CLASSIFICATION, REGRESSION
from fedaudit.utils.errors import BadInput

_ALONE = "\0"  # in front of the number of a row that is of nobody known
_DIGITS = re.compile(r"[0-9]{1,15}")
_FORMS = (
    "a fedaudit.Dataset, (inputs, targets), (frame, name of the target's column), a map-style torch Dataset of such "
    "pairs, or a DataLoader of one"
)


def dataset_of(data: Any, *, kind: str | None = None, classes: bool = False, raw_targets: bool = False) -> Dataset:
    """Return a user's own data, in one of ``_FORMS``, as a data set; the rest is as of :meth:`Dataset.from_tensors`."""
    options: dict[str, Any] = {"kind": kind, "classes": classes, "raw_targets": raw_targets}
    if isinstance(data, DataLoader):
        data = data.dataset
        options["summary"] = "given as a DataLoader: its data set was taken, without its batches, order and sampler"
    if isinstance(data, Dataset):
        if kind not in (None, data.kind):
            raise BadInput(f"kind='{kind}', and the data set '{data.name}' is of the kind '{data.kind}'; leave one out")
        return data
    if isinstance(data, Iterator | IterableDataset):
        raise BadInput(
            f"data is a {type(data).__name__}, which can only be read from front to back; read it into tensors first "
            "and give (inputs, targets)"
        )
    if isinstance(data, Mapping):
        raise BadInput(f"data is a {type(data).__name__} of parts by name; give (inputs, targets): {WAY_IN}")
    if isinstance(data, tuple) and len(data) > 2:
        raise BadInput(f"data is a tuple of {len(data)}; give (inputs, targets): {WAY_IN}")
    if isinstance(data, tuple | list) and len(data) == 2:
        if _is_frame(data[0]) and isinstance(data[1], str):
            return from_frame(*data, raw_targets=raw_targets)
        return Dataset.from_tensors(*data, **options)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Dataset.from_torch(data, **options)
    raise BadInput(f"data is a {type(data).__name__}; give {_FORMS}")


def pairs_of(data: Any) -> tuple[Tensor, Tensor]:
    """Return inputs (n, ...) and targets, several of an example packed, without standardising or normalising them.

    Args:
        data: (inputs, targets), a map-style torch Dataset, a DataLoader, whose data set is taken, or a file: .npz or
            .safetensors with ``inputs`` and ``labels``, or .csv of numbers under a line of names, the target last; a
            column ``person`` is none of the inputs.

    Raises:
        BadInput: it is none of these, or can't be read.
    """
    if isinstance(data, str | Path):
        return _pairs_in(Path(data))
    if isinstance(data, tuple | list) and len(data) == 2 and all(hasattr(part, "shape") for part in data):
        try:
            pair = tuple(torch.as_tensor(part).detach().cpu() for part in data)
        except (TypeError, ValueError) as error:
            raise BadInput(f"(inputs, targets) must be arrays of numbers ({error})") from None
    else:
        data = data.dataset if isinstance(data, DataLoader) else data
        if isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[0], Mapping | tuple | list):
            parts = tuple(packed_alone(part, "records", whole=i > 0) for i, part in enumerate(data))
            if all(hasattr(part, "shape") for part in parts):  # else they are two examples
                return pairs_of(parts)
        if isinstance(data, Mapping) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
            raise BadInput(f"a {type(data).__name__} isn't examples; give (inputs, targets), a torch Dataset or a file")
        pair = stack_pairs(data)
    inputs, targets = pair
    inputs, targets = packed_alone(inputs, "input"), packed_alone(targets, "target", whole=True)
    if not inputs.ndim or not targets.ndim or not len(inputs) or len(inputs) != len(targets):
        raise BadInput(f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}; give one target per input")
    return inputs, targets


def with_persons(data: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what :func:`pairs_of` returns, and int64 (n,) of which person each example is; None: that isn't told.

    Args:
        data: as of :func:`pairs_of`; an .npz or .safetensors file tells it by whole numbers, ``persons``, a .csv by a
            column ``person`` of any text, and of arrays there are three, in a tuple.

    Raises:
        BadInput: it can't be read, or persons are no whole numbers, one an example.
    """
    persons: Any = None
    if isinstance(data, tuple) and len(data) == 3 and not isinstance(data[1], tuple | list):  # else three examples
        data, persons = data[:2], data[2]
    elif isinstance(data, str | Path) and Path(data).suffix.lower() in (".npz", ".safetensors"):
        inputs, labels, persons = [*read_arrays(Path(data), "inputs", "labels", maybe="persons"), None][:3]
        data = inputs, labels
    elif isinstance(data, str | Path) and (rows := read_csv(Path(data))) and "person" in rows[0]:
        place = rows[0].index("person")
        persons = _numbered([row[place].strip() or None for row in rows[1:] if len(row) > place], alone=True)[0]
    inputs, targets = pairs_of(data)
    return inputs, targets, None if persons is None else persons_of(persons, len(inputs), "records")


def _pairs_in(path: Path) -> tuple[Tensor, Tensor]:
    if path.suffix.lower() in (".npz", ".safetensors"):
        return pairs_of(tuple(read_arrays(path, "inputs", "labels")))
    if path.suffix.lower() != ".csv":
        raise BadInput(
            f"'{path}' isn't read: give .npz or .safetensors with inputs and labels, or .csv with the target last"
        )
    head, *rows = read_csv(path) or [[]]
    persons = head.index("person") if "person" in head else None
    try:
        cells = [[float(cell) for i, cell in enumerate(row) if i != persons] for row in rows]
        table = torch.tensor(cells, dtype=torch.float64)
    except ValueError as error:
        raise BadInput(f"'{path}': rows of numbers of one length are read, the target last ({error})") from None
    if table.ndim != 2 or table.shape[1] < 2:
        raise BadInput(f"'{path}' holds no rows of at least two numbers below a line of names")
    if not bool(table.isfinite().all()):
        raise BadInput(f"'{path}' holds numbers that are infinite or none; leave these rows out")
    inputs, targets = table[:, :-1].float(), table[:, -1].clone(memory_format=torch.contiguous_format)
    return inputs, targets.long() if bool((targets == targets.round()).all()) else targets.float()


def from_frame(
    frame: Any,
    target: str,
    *,
    test: Any = None,
    types: Mapping[str, ColumnKind] | None = None,
    drop: Sequence[str] = (),
    decimal: DecimalPoint | None = None,
    raw_targets: bool = False,
    client: str | None = None,
    person: str | None = None,
    missing: Sequence[str | float] = (),
    empty: Empty = "ask",
    name: str = "custom",
    summary: str = "given by the caller",
    source: str = "given by the caller",
) -> Dataset:
    """Make a table of a frame of mixed columns: numbers are standardised, categories become one 0/1 column each.

    Numbers in texts are read as such, dates as days since the first one, all other texts, booleans and what is
    categorical by type as categories, where an empty cell is the category "?". Limits ('<0.5'), identifiers, free text
    and whatever else can be meant in several ways is asked about, and ``types`` or ``drop`` answers. Rows without a
    target are left out. The summary says what became of each column.

    Args:
        frame: of pandas or pyarrow, or a mapping of names to arrays.
        target: the column to be predicted: numbers that aren't whole for a regression, all else for classes.
        test: the same for the test split. Without it one example in five of every class is held out.
        types: by name, ``numeric`` or ``categorical``, where a column isn't what it seems; of the target, too.
        drop: columns to leave out.
        decimal: what stands before the decimals of numbers in texts, "." or ","; None: as they tell.
        raw_targets: the targets of a regression aren't standardised, for a loss that gives them a meaning (counts).
        client: the column that says whose a row is, for the partition ``natural``: clients are numbered in the order of
            its values, sorted. No input of the model; rows where it is empty are left out.
        person: the column that says of which person a row is: rows of one stay together. No input of the model.
        missing: what stands for a cell that is empty, beside an empty text, NA, null and the like: -999, for example.
        empty: what becomes of missing numbers: they are asked about, are the ``median`` of their column, or their rows
            are left out (``leave-out``, where any column but ``client`` and ``person`` is empty).
        name, summary, source: words for the report.

    Raises:
        BadInput: the frame cannot be such a data set, or has to be asked about; the message says why.
    """
    where = f"data set '{name}'"
    given, types = frame_cells(frame, types or {}, drop, where, missing)
    held = {} if test is None else frame_cells(test, types, drop, f"{where}, test split", missing)[0]
    roles = [column for column in (client, person) if column is not None]
    if target not in given or (test is not None and list(held) != list(given)) or len(given) < 2 + len(roles):
        raise BadInput(f"{where}: there is no column '{target}' beside others, or not the same columns for testing")
    if client is not None and client == person:
        raise BadInput(f"{where}: '{client}' is named for client and for person; leave person out")
    for column in roles:
        if column not in given or column == target:
            others = ", ".join(key for key in given if key != target)[:300]
            raise BadInput(f"{where}: there is no column '{column}' for client or person; known: {others}")
    needed = [target] if client is None else [target, client]
    if empty == "leave-out":
        needed = [key for key in given if key not in roles or key == client]
    rows = [
        [i for i in range(len(part[target])) if all(part[key][i] is not None for key in needed)]
        for part in (given, held)
        if part
    ]
    cells = {key: [part[key][i] for part, own in zip((given, held), rows, strict=False) for i in own] for key in given}
    if not cells[target]:
        empty_one = next((key for key in needed if not any(v is not None for v in given[key])), target)
        raise BadInput(f"{where}: column '{empty_one}' is empty in every row that has the others; name another column")
    whose = {column: _numbered(cells.pop(column), alone=column == person) for column in roles}
    columns = {
        key: read(values, types.get(key), f"{where}, column '{key}'", key, decimal, empty)
        for key, values in cells.items()
    }
    asked = columns.pop(target)
    wanted, names = _targets_of(asked, types.get(target), f"{where}, column '{target}'", target, raw_targets)
    if test is None:
        persons = None if person is None else whose[person][0]
        strata = wanted if names else torch.zeros(len(wanted), dtype=torch.int64)
        if client is not None:  # every client keeps rows in both splits, if it has five of a class
            strata = strata + (int(strata.max()) + 1) * whose[client][0]
        held_out = hold_out(strata if names or client is not None else wanted[:, None], where, persons)
    else:
        held_out = torch.arange(len(wanted)) >= len(rows[0])
    targets = [wanted[~held_out], wanted[held_out]]
    if test is not None and names and set(targets[1].tolist()) != set(targets[0].tolist()):
        raise BadInput(f"{where}: train and test split have different classes in '{target}'")
    parts = [{key: _chosen(column.values, part) for key, column in columns.items()} for part in (~held_out, held_out)]
    x, x_test, known = encode(parts[0], parts[1], where)
    said = _account(columns | ({} if asked.plain or names else {target: asked}), drop)
    if (left := sum(len(part[target]) for part in (given, held) if part) - len(wanted)) > 0:
        lacking = "with an empty cell" if empty == "leave-out" else f"without {' or '.join(map(repr, needed))}"
        said.append(f"rows {lacking}, left out: {left:,}")
    if client is not None:
        numbers, known_clients = whose[client]
        rows_each = torch.bincount(numbers).tolist()
        named = [f"{i}: {who} ({n:,})" for i, (who, n) in enumerate(zip(known_clients, rows_each, strict=True))]
        said.append(f"clients by '{client}': {', '.join(named[:20])}{f', … {len(named)} in all' * (len(named) > 20)}")
    if person is not None:
        said.append(f"persons by '{person}': {len(whose[person][1]):,}")
        if alone := sum(who.startswith(_ALONE) for who in whose[person][1]):
            said[-1] += f", {alone:,} of them rows without one"
    if names:
        counts = torch.bincount(wanted).tolist()
        said.append(f"classes of '{target}': " + ", ".join(f"{n} ({k:,})" for n, k in zip(names, counts, strict=True)))
    else:
        *targets, scaled = REGRESSION.prepare(targets[0][:, None], targets[1][:, None], 1, raw=raw_targets)
        said.append(scaled)
    summary = "; ".join([summary, *said])
    if left or not all(column.plain for column in columns.values()):
        logging.getLogger("fedaudit").warning("%s: %s", where, "; ".join(said))
    return Dataset(
        name=name,
        summary=summary,
        kind="table",
        task=(REGRESSION if names is None else CLASSIFICATION).name,
        train=Split(x, targets[0], _rows(whose, client, ~held_out), persons=_rows(whose, person, ~held_out)),
        test=Split(x_test, targets[1], _rows(whose, client, held_out), persons=_rows(whose, person, held_out)),
        num_classes=len(names) if names else None,
        class_names=tuple(names) if names else None,
        mean=(0.0,),
        std=(1.0,),
        source=source,
        columns=known,
    )


def _numbered(cells: list[Any], *, alone: bool) -> tuple[Tensor, list[str]]:
    """Return which of the different values, sorted, each cell is, and these; ``alone``: each empty cell is another."""
    texts = [f"{value:.15g}" if isinstance(value, float) else str(value) for value in cells]
    if alone:
        texts = [
            f"{_ALONE}{i}" if value is None else text for i, (value, text) in enumerate(zip(cells, texts, strict=True))
        ]
    # numbers in their own order: site 10 after site 9
    known = sorted(set(texts), key=lambda text: (0, float(text), text) if _DIGITS.fullmatch(text) else (1, 0.0, text))
    number = {text: i for i, text in enumerate(known)}
    return torch.tensor([number[text] for text in texts]), known


def _rows(whose: Mapping[str, tuple[Tensor, list[str]]], column: str | None, rows: Tensor) -> Tensor | None:
    return None if column is None else whose[column][0][rows]


def _account(columns: Mapping[str, Read], drop: Sequence[str]) -> list[str]:
    """Return what became of each column, those of which the same is said together."""
    alike: dict[str, list[str]] = {}
    for name, column in columns.items():
        alike.setdefault(column.said, []).append(name)
    if drop:
        alike["left out, as asked"] = list(drop)
    return [f"{', '.join(names)}: {said}" for said, names in alike.items()]


def _chosen(values: Tensor | list[str], rows: Tensor) -> Tensor | list[str]:
    return values[rows] if isinstance(values, Tensor) else [values[i] for i in rows.nonzero()[:, 0].tolist()]


def _is_frame(data: Any) -> bool:
    """Return whether this is a frame of pandas or pyarrow, told by what it offers."""
    pyarrow = hasattr(data, "column_names") and hasattr(data, "schema")
    return pyarrow or (hasattr(data, "columns") and hasattr(data, "dtypes") and hasattr(data, "iloc"))


def frame_cells(
    frame: Any, types: Mapping[str, ColumnKind], drop: Sequence[str], where: str, missing: Sequence[str | float] = ()
) -> tuple[dict[str, list[Any]], Mapping[str, ColumnKind]]:
    """Return a frame's cells by column, None where one is empty, and ``types`` with what is categorical by type."""
    names = _names(frame)
    for name, kind in types.items():
        if kind not in ("numeric", "categorical"):
            raise BadInput(f"{where}: column '{name}' is declared '{kind}'; a column is numeric or categorical")
    if unknown := [name for name in (*types, *drop) if name not in names]:
        raise BadInput(f"{where}: there is no column '{unknown[0]}'; known: {', '.join(names)[:300]}")
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise BadInput(f"{where}: {names.count(twice[0])} columns are called '{twice[0]}'; give each its own name")
    if len(names) > MOST_COLUMNS:
        raise BadInput(f"{where}: {len(names):,} columns are more than {MOST_COLUMNS:,}")
    cells: dict[str, list[Any]] = {}
    by_type: dict[str, ColumnKind] = {}
    for name in names:
        if name not in drop:
            found, values = _column(frame, name)
            if found.startswith(("category", "dictionary")):
                by_type[name] = "categorical"
                values = [value if isinstance(value, str | bytes) or value != value else str(value) for value in values]
            cells[name] = [cell(value, f"{where}, column '{name}'") for value in values]
            if missing:
                empty = {_plain(value) for value in missing}
                cells[name] = [
                    None if not isinstance(value, bool) and _plain(value) in empty else value for value in cells[name]
                ]
    if len({len(values) for values in cells.values()}) != 1 or not len(next(iter(cells.values()))):
        raise BadInput(f"{where}: the columns have different lengths, or there are none, or no rows")
    return cells, {**by_type, **types}


def _plain(value: Any) -> str:
    """Return a cell as a text that is the same for -999, -999.0, '-999' and '−999,0'."""
    try:
        return f"{float(str(value).replace('−', '-').replace(',', '.')):.15g}"
    except ValueError:
        return str(value)


def _targets_of(
    column: Read, kind: ColumnKind | None, where: str, name: str, raw: bool
) -> tuple[Tensor, list[str] | None]:
    """Return targets and classes' names, None for a regression; BadInput: all are the same, or it is unclear."""
    values = column.values
    if isinstance(values, list):
        names = sorted(set(values))
        number = {text: i for i, text in enumerate(names)}
        found = torch.tensor([number[text] for text in values])
    else:
        known = values.unique()
        found, names = torch.searchsorted(known, values), [f"{value:.15g}" for value in known.tolist()]
    if len(names) < 2:
        raise BadInput(f"{where} is '{names[0][:40]}' in every row: there is nothing to predict; name another target")
    if isinstance(values, list):
        return found, names
    if kind == "numeric":
        return values, None
    classes = column.whole or (names == ["0", "1"] and not raw)
    few = len(names) <= FEW and len(values) >= 5 * len(names)  # all of them whole by chance, they can hardly be
    choice = f"types={{'{name}': 'numeric'}} predicts a number, types={{'{name}': 'categorical'}} one of these classes"
    if classes:
        check_classes(values, where, choice)
    elif few and not raw and bool((values == values.round()).all()):
        raise BadInput(f"{where} has {len(names)} different whole numbers, as {names[0]} and {names[-1]}: {choice}")
    return (found, names) if classes else (values, None)


def _names(frame: Any) -> list[str]:
    if isinstance(frame, Mapping):
        return [str(name) for name in frame]
    if not _is_frame(frame):
        raise BadInput(f"the frame is a {type(frame).__name__}; give one of pandas or pyarrow, or columns by name")
    return [str(name) for name in (frame.column_names if hasattr(frame, "column_names") else frame.columns)]


def _column(frame: Any, name: str) -> tuple[str, list[Any]]:
    """Return a column's type, as its owner calls it, and its values."""
    if isinstance(frame, Mapping):
        try:
            values = np.asarray(frame[next(key for key in frame if str(key) == name)])
        except ValueError as error:  # of bytes and texts, or lists of different lengths
            raise BadInput(f"column '{name}' is no array ({str(error)[:100]}); give numbers or texts") from None
        return str(values.dtype), list(values) if values.dtype.kind in "mM" else values.tolist()
    if hasattr(frame, "column_names"):
        return str(frame.schema.field(name).type), frame.column(name).to_pylist()
    key = next(column for column in frame.columns if str(column) == name)
    return str(frame[key].dtype), list(frame[key].tolist())
