"""A user's own table in a file: text with separators, or whatever else pandas reads."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedaudit.data.catalogue import Layout, Request, add_dataset
from fedaudit.data.cells import DecimalPoint, Empty, decimal_of
from fedaudit.data.dataset import Dataset
from fedaudit.data.files import reading, within
from fedaudit.data.own import from_frame
from fedaudit.modalities.columns import MOST_COLUMNS, ColumnKind
from fedaudit.utils.bounds import CSV, PARQUET, check_file, read_bytes
from fedaudit.utils.errors import BadInput, MissingData

TABLE_FILE = "table-file"
TEXT = (".csv", ".tsv", ".tab", ".txt", ".dat")
# By pandas: the function that reads such a file, and what it needs beside pandas.
OTHERS = {
    ".xlsx": ("read_excel", "openpyxl"),
    ".xls": ("read_excel", "xlrd"),
    ".ods": ("read_excel", "odfpy"),
    ".dta": ("read_stata", ""),
    ".sas7bdat": ("read_sas", ""),
    ".xpt": ("read_sas", ""),
    ".sav": ("read_spss", "pyreadstat"),
    ".feather": ("read_feather", "pyarrow"),
    ".orc": ("read_orc", "pyarrow"),
}
_SEPARATORS = {",": "','", ";": "';'", "\t": "a tab ('\\t')", "|": "'|'"}
_LOOKED_AT = 200  # rows by which the separator is told
_NEARLY_ALL = 0.9  # of them
_BOMS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))


def table_file(
    path: Path,
    target: str,
    *,
    client: str | None = None,
    person: str | None = None,
    drop: Sequence[str] = (),
    types: Mapping[str, ColumnKind] | None = None,
    missing: Sequence[str | float] = (),
    empty: Empty = "ask",
    separator: str | None = None,
    decimal: DecimalPoint | None = None,
    encoding: str | None = None,
    name: str | None = None,
) -> Dataset:
    """Read a table of mixed columns: ``.csv``, ``.tsv``, ``.txt`` (also gzipped), Parquet, or what pandas reads.

    Args:
        path: of the file; the first row of a text has the columns' names.
        target, client, person, drop, types, missing, empty, decimal: as of :meth:`fedaudit.Dataset.from_frame`.
        separator: of a text's columns; None: as the rows tell.
        encoding: of a text; None: UTF-8, or what its byte order mark says.
        name: for the report; None: the file's.

    Raises:
        BadInput: it can't be read, or has to be asked about; the message says what to do.
        MissingData: what reads such a file isn't installed.
    """
    columns = read_columns(path, separator, encoding)
    if decimal is None and _suffix(path) in TEXT:
        decimal = decimal_of(columns.values())
    try:
        return from_frame(
            columns,
            target,
            client=client,
            person=person,
            drop=drop,
            types=types,
            missing=missing,
            empty=empty,
            decimal=decimal,
            name=path.name if name is None else name,
            summary=f"the table {path.name}",
            source=f"the file {path.name}",
        )
    except BadInput as error:
        raise BadInput(str(error).replace(f"data set '{path.name}'", str(path))) from None


def read_columns(path: Path, separator: str | None = None, encoding: str | None = None) -> Any:
    """Return a file's columns: a mapping of names to cells, or a frame of pandas.

    Raises:
        BadInput: it can't be read, or has to be asked about.
        MissingData: what reads such a file isn't installed.
    """
    return read_numbered(path, separator, encoding)[0]


def read_numbered(
    path: Path, separator: str | None = None, encoding: str | None = None
) -> tuple[Any, Sequence[int] | None]:
    """Return what :func:`read_columns` does, and each row's number below the names, from 1; None: counted through.

    Empty rows of a text are no rows, and have numbers all the same: a spreadsheet shows them.
    """
    suffix = _suffix(path)
    if not path.is_file():
        raise BadInput(f"can't read '{path}': there is no such file")
    if suffix in TEXT:
        with reading(path):
            return _numbered_text(_text(path, encoding), separator, str(path))
    if separator is not None or encoding is not None:
        raise BadInput(f"{path} is no text: separator and encoding are for {', '.join(TEXT)}; leave them out")
    if suffix in (".parquet", ".pq"):
        return _parquet(path), None
    if suffix in OTHERS:
        return _by_pandas(path, *OTHERS[suffix]), None
    known = ", ".join((*TEXT, ".parquet", *OTHERS))
    raise BadInput(f"{path}: '{suffix or path.name}' is no kind of table that is known: {known}")


def is_table(path: Path) -> bool:
    """Return whether a file's name is that of a table."""
    return _suffix(path) in (*TEXT, ".parquet", ".pq", *OTHERS)


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise MissingData(f"reading {path} needs pyarrow; pip install 'PATH_OF_THE_CLONE[parquet]'") from error
    with reading(path):
        check_file(path, PARQUET)
        with pyarrow.parquet.ParquetFile(path) as file:
            within(file.metadata.num_rows, PARQUET.items, "rows")
            within(len(file.schema_arrow), MOST_COLUMNS, "columns")
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            within(sum(group.total_byte_size for group in groups), PARQUET.unpacked, "bytes")
            return file.read()


def _by_pandas(path: Path, function: str, needs: str) -> Any:
    try:
        import pandas
    except ImportError as error:
        raise MissingData(f"reading {path} needs pandas; pip install 'PATH_OF_THE_CLONE[tables]'") from error
    try:
        return getattr(pandas, function)(path)
    except ImportError as error:
        raise MissingData(f"reading {path} needs {needs}; pip install {needs}") from error
    except Exception as error:  # each format's reader raises its own
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"{path} can't be read as {_suffix(path)}: {type(error).__name__}: {reason}") from None


def _text(path: Path, encoding: str | None) -> str:
    data = read_bytes(path, CSV)
    if path.name.lower().endswith(".gz"):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                data = file.read(CSV.file + 1)
        except (OSError, EOFError) as error:
            raise BadInput(f"{path} isn't gzipped, or is damaged ({error})") from None
        within(len(data), CSV.file, "bytes")
    told = next((name for bom, name in _BOMS if data.startswith(bom)), None)
    chosen = encoding or told or "utf-8"
    try:
        text = data.decode(chosen)
    except LookupError:
        raise BadInput(
            f"{path}: there is no encoding '{encoding}'; cp1252, latin-1, utf-8 and utf-16 are usual"
        ) from None
    except UnicodeError as error:
        at = getattr(error, "start", 0)
        line = data[:at].count(b"\n") + 1
        other = "" if encoding else ": Windows in western Europe writes encoding=cp1252, in eastern cp1250; say which"
        raise BadInput(f"{path}, line {line}: byte 0x{data[at]:02x} isn't {chosen}{other}") from None
    if "\0" in text:
        raise BadInput(f"{path} holds zero bytes: it is no text, or of another encoding (encoding=utf-16)")
    return text.removeprefix("\ufeff")


def _numbered_text(text: str, separator: str | None, where: str) -> tuple[dict[str, list[str]], list[int]]:
    """Return the cells of a text by column, its first row's names, and the number of each row below it."""
    if separator is not None and len(separator) != 1:
        raise BadInput(f"{where}: separator is {separator!r}, and is one character")
    rows = _rows(text, _told(text, where) if separator is None else separator, where)
    if len(rows) < 2:
        raise BadInput(f"{where} has {len(rows)} rows; the first has the columns' names, the others are examples")
    (first, _, head), *below = rows
    body = [(line, row) for _, line, row in below]
    names = [" ".join(unicodedata.normalize("NFC", name).split()) for name in head]
    if len(names) > 1 and all(re.fullmatch(r"[-+]?[\d.,eE+-]+", name) for name in names if name):
        raise BadInput(
            f"{where}: the first row, {', '.join(names)[:80]}, is of numbers; put the columns' names above it"
        )
    while names and not names[-1] and all(not row[len(names) - 1 :][:1] or not row[len(names) - 1] for _, row in body):
        names.pop()  # each line ends with a separator
    for number, row in body:
        if len(row) != len(names) and not (len(row) > len(names) and not any(row[len(names) :])):
            raise BadInput(
                f"{where}, line {number}: {len(row)} cells, and the first row has {len(names)} names; mend the line, "
                "or say which separator it is"
            )
    names = [name or f"column {i + 1}" for i, name in enumerate(names)]
    seen: Counter[str] = Counter()
    for i, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[i] = f"{name} ({seen[name]})"
    if len(set(names)) < len(names):
        raise BadInput(f"{where}: two columns have one name; give each its own")
    numbers = [place - first for place, _, _ in below]
    return {name: [row[i] for _, row in body] for i, name in enumerate(names)}, numbers


def _rows(text: str, separator: str, where: str) -> list[tuple[int, int, list[str]]]:
    """Return the rows that aren't empty, each with its number among all and its line's."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    found = []
    try:
        for place, row in enumerate(reader):
            if any(cell.strip() for cell in row):
                found.append((place, reader.line_num, row))
                within(len(found), CSV.items, "rows")
    except csv.Error as error:
        raise BadInput(f"{where}, line {reader.line_num}: {error}; mend the quotes") from None
    return found


def _told(text: str, where: str) -> str:
    """Return the separator by which nearly all of the first rows have as many cells each, more than one."""
    counts: dict[str, int] = {}
    for separator in _SEPARATORS:
        rows = itertools.islice(csv.reader(io.StringIO(text, newline=""), delimiter=separator), _LOOKED_AT)
        try:
            widths = Counter(len(row) for row in rows if any(row))
        except csv.Error:
            continue
        for width, times in widths.most_common(1):
            if width > 1 and times >= _NEARLY_ALL * widths.total():  # a row that differs is named later, by its line
                counts[separator] = width
    if not counts:
        shown = ", ".join(_SEPARATORS.values())
        raise BadInput(f"{where}: by none of {shown} do nearly all rows have as many cells; say which separator it is")
    best = max(counts, key=lambda separator: counts[separator])
    others = [s for s in counts if s != best and counts[s] == counts[best]]
    if others or (best == "," and len(counts) > 1):  # decimal commas
        possible = " or ".join(f"{_SEPARATORS[s]} ({counts[s]} columns)" for s in counts)
        raise BadInput(f"{where}: columns may be separated by {possible}; say which separator it is")
    return best


def _nowhere(paths: list[Path], request: Request) -> Dataset:  # noqa: ARG001 (as of all readers)
    raise BadInput(f"data set '{TABLE_FILE}': say data.path, the file, and data.target, the column that models predict")


add_dataset(
    TABLE_FILE,
    "your own table in a file: CSV, TSV, Parquet, or what pandas reads (Excel, Stata, SAS, SPSS)",
    "data: {name: table-file, path: patients.csv, target: outcome, client: hospital}; fedaudit init patients.csv asks",
    Layout(_nowhere, ("table.csv",)),
    kind="table",
    needs="a file, and the column that models predict; pandas for other than text and Parquet",
)
