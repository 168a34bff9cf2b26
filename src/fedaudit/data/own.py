"""A user's own data, in the forms that training code has them: arrays, torch data sets, frames of mixed columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fedaudit.data.dataset import WAY_IN, Dataset, Split, hold_out, real_targets, stack_pairs
from fedaudit.data.files import read_arrays, read_csv
from fedaudit.modalities.columns import MOST_COLUMNS, ColumnKind, encode
from fedaudit.modalities.packed import packed_alone
from fedaudit.utils.errors import BadInput

MISSING = "?"  # the category of a cell that is empty
_NUMBERS = ("int", "uint", "float", "double", "halffloat", "decimal")
_CATEGORIES = ("bool", "object", "str", "string", "large_string", "string_view", "utf8", "category", "dictionary")

# By name of the column: float64 (n,) numbers, or n texts.
Cells = dict[str, Tensor | list[str]]


_FORMS = (
    "a fedaudit.Dataset, (inputs, targets), (frame, name of the target's column), a map-style torch Dataset of such "
    "pairs, or a DataLoader of one"
)


def dataset_of(data: Any, *, kind: str | None = None, classes: bool = False, raw_targets: bool = False) -> Dataset:
    """Return a user's own data as a data set.

    Args:
        data: a Dataset, (inputs, targets), (frame, name of the target's column), a map-style torch Dataset, or a
            DataLoader, whose data set is taken.
        kind: of the examples; None: what the arrays' shape suggests.
        classes: floating-point targets are the classes 0 and 1, not real values.
        raw_targets: those that are real values aren't standardised.

    Raises:
        BadInput: it is none of these, or can be read only once; the message says what to do.
    """
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
    """Return inputs (n, ...) and targets of a user's examples as they are: nothing is standardised or normalised.

    Several inputs or targets of an example are packed (:class:`fedaudit.modalities.Packing`).

    Args:
        data: (inputs, targets), a map-style torch Dataset, a DataLoader, whose data set is taken, or a file: .npz or
            .safetensors with ``inputs`` and ``labels``, or .csv of numbers under a line of names, the target last.

    Raises:
        BadInput: it is none of these.
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
            return pairs_of(tuple(packed_alone(part, "records", whole=i > 0) for i, part in enumerate(data)))
        if isinstance(data, Mapping) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
            raise BadInput(f"a {type(data).__name__} isn't examples; give (inputs, targets), a torch Dataset or a file")
        pair = stack_pairs(data)
    inputs, targets = pair
    inputs, targets = packed_alone(inputs, "input"), packed_alone(targets, "target", whole=True)
    if not inputs.ndim or not targets.ndim or not len(inputs) or len(inputs) != len(targets):
        raise BadInput(f"inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}; give one target per input")
    return inputs, targets


def _pairs_in(path: Path) -> tuple[Tensor, Tensor]:
    if path.suffix.lower() in (".npz", ".safetensors"):
        return pairs_of(tuple(read_arrays(path, "inputs", "labels")))
    if path.suffix.lower() != ".csv":
        raise BadInput(
            f"'{path}' isn't read: give .npz or .safetensors with inputs and labels, or .csv with the target last"
        )
    rows = read_csv(path)[1:]
    try:
        table = torch.tensor([[float(cell) for cell in row] for row in rows], dtype=torch.float64)
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
    raw_targets: bool = False,
    name: str = "custom",
    summary: str = "given by the caller",
    source: str = "given by the caller",
) -> Dataset:
    """Make a table of a frame of mixed columns: numbers are standardised, categories become one 0/1 column each.

    Args:
        frame: of pandas or pyarrow, or a mapping of names to arrays: texts, booleans, categories and objects are
            categorical, numbers numeric. An empty text is the category "?".
        target: the column to be predicted: floats for a regression, all else for classes.
        test: the same for the test split. Without it one example in five of every class is held out.
        types: by name, ``numeric`` or ``categorical``, where a column isn't what its type says.
        drop: columns to leave out.
        raw_targets: the targets of a regression aren't standardised, for a loss that gives them a meaning (counts).
        name, summary, source: words for the report.

    Raises:
        BadInput: the frame cannot be such a data set; the message says why.
    """
    where = f"data set '{name}'"
    cells, found = _read_frame(frame, types or {}, drop, where)
    held, _ = (cells, found) if test is None else _read_frame(test, types or {}, drop, f"{where}, test split")
    if target not in cells or list(held) != list(cells) or len(cells) < 2:
        raise BadInput(f"{where}: there is no column '{target}' beside others, or not the same columns for testing")
    wanted, names = _targets_of(cells[target], found[target])
    if test is None:
        rows = hold_out(wanted if names else wanted[:, None], where)
        parts = [_rows_of(cells, torch.nonzero(part)[:, 0]) for part in (~rows, rows)]
        targets = [wanted[~rows], wanted[rows]]
    else:
        if names != _targets_of(held[target], found[target])[1]:
            raise BadInput(f"{where}: train and test split have different classes in '{target}'")
        parts, targets = [cells, held], [wanted, _targets_of(held[target], found[target])[0]]
    for part in parts:
        del part[target]
    x, x_test, columns = encode(parts[0], parts[1], where)
    if names is None:
        *targets, said = real_targets(targets[0][:, None], targets[1][:, None], raw=raw_targets)
        summary = f"{summary}; {said}"
    return Dataset(
        name=name,
        summary=summary,
        kind="table",
        task="regression" if names is None else "classification",
        train=Split(x, targets[0]),
        test=Split(x_test, targets[1]),
        num_classes=len(names) if names else None,
        class_names=tuple(names) if names else None,
        mean=(0.0,),
        std=(1.0,),
        source=source,
        columns=columns,
    )


def _is_frame(data: Any) -> bool:
    """Return whether this is a frame of pandas or pyarrow, told by what it offers."""
    pyarrow = hasattr(data, "column_names") and hasattr(data, "schema")
    return pyarrow or (hasattr(data, "columns") and hasattr(data, "dtypes") and hasattr(data, "iloc"))


def _read_frame(
    frame: Any, types: Mapping[str, ColumnKind], drop: Sequence[str], where: str
) -> tuple[Cells, dict[str, str]]:
    """Return the cells of a frame by column, and each column's type; ``types`` and ``drop`` as of :func:`from_frame`.

    Raises:
        BadInput: a column is of another type, a number is missing or not finite, or there are no columns.
    """
    names = _names(frame)
    unknown = [name for name in (*types, *drop) if name not in names]
    if unknown:
        raise BadInput(f"{where}: there is no column '{unknown[0]}'; known: {', '.join(names)[:300]}")
    if len(set(names)) != len(names) or len(names) > MOST_COLUMNS:
        raise BadInput(
            f"{where}: {len(names)} columns, of which some have the same name, or more than {MOST_COLUMNS:,}"
        )
    cells: Cells = {}
    found: dict[str, str] = {}
    for name in names:
        if name in drop:
            continue
        found[name], values = _column(frame, name)
        kind = types.get(name) or _kind(found[name], f"{where}, column '{name}'")
        if kind not in ("numeric", "categorical"):
            raise BadInput(f"{where}: column '{name}' is declared '{kind}'; a column is numeric or categorical")
        cells[name] = _numbers(values, f"{where}, column '{name}'") if kind == "numeric" else _texts(values)
    if len({len(values) for values in cells.values()}) != 1 or not len(next(iter(cells.values()))):
        raise BadInput(f"{where}: the columns have different lengths, or there are none, or no rows")
    return cells, found


def _targets_of(values: Tensor | list[str], found: str) -> tuple[Tensor, list[str] | None]:
    """Return targets and the classes' names: floats stay real values, all else is a class for each different value."""
    if isinstance(values, Tensor) and found.lower().startswith(("float", "double", "halffloat", "decimal")):
        return values, None
    if isinstance(values, Tensor):
        known = values.unique()
        return torch.searchsorted(known, values), [f"{value:g}" for value in known.tolist()]
    names = sorted(set(values))
    number = {name: i for i, name in enumerate(names)}
    return torch.tensor([number[value] for value in values]), names


def _rows_of(cells: Cells, rows: Tensor) -> Cells:
    """Return the chosen rows of every column."""
    chosen = rows.tolist()
    return {
        name: values[rows] if isinstance(values, Tensor) else [values[i] for i in chosen]
        for name, values in cells.items()
    }


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
        return ("string" if values.dtype.kind in "US" else str(values.dtype)), values.tolist()
    if hasattr(frame, "column_names"):
        return str(frame.schema.field(name).type), frame.column(name).to_pylist()
    key = next(column for column in frame.columns if str(column) == name)
    return str(frame[key].dtype), list(frame[key].tolist())


def _kind(found: str, where: str) -> ColumnKind:
    if found.lower().startswith(_NUMBERS):
        return "numeric"
    if found.lower().startswith(_CATEGORIES):
        return "categorical"
    raise BadInput(f"{where} is of type {found[:60]}; make it a number or a text, or leave it out (drop=[…])")


def _numbers(values: Sequence[Any], where: str) -> Tensor:
    try:
        found = torch.tensor([math.nan if _missing(value) else float(value) for value in values], dtype=torch.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"{where} isn't numeric ({str(error)[:100]}); declare it categorical") from None
    if not bool(torch.isfinite(found).all()):
        raise BadInput(f"{where} has numbers that are missing or not finite; fill or remove them first")
    return found


def _texts(values: Sequence[Any]) -> list[str]:
    return [MISSING if _missing(value) else str(value).strip() or MISSING for value in values]


def _missing(value: Any) -> bool:
    try:
        return value is None or bool(value != value)  # NaN, NaT
    except TypeError:  # pandas' NA, of which nobody can say whether it is itself
        return True
    except ValueError:  # an array
        return False
