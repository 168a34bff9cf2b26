"""The columns of a user's frame: what their cells are, and what is asked where they don't say.

What can only be meant in one way is read so, and said: numbers in texts, with a unit, separators of thousands or
decimal commas, and dates. What can be meant in several is a question of one line, with the choice to make.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from numbers import Real
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedaudit.modalities.columns import ColumnKind
from fedaudit.utils.errors import BadInput

DecimalPoint = Literal[".", ","]
Empty = Literal["ask", "median", "leave-out"]  # what becomes of numbers that are missing

MISSING = "?"  # the category of a cell that is empty
_EMPTY = ("", MISSING, "na", "n/a", "#n/a", "<na>", "nan", "nat", "null")  # as pandas reads files
FEW = 10  # different whole numbers that may well be codes
MANY = 20  # rows, different values or numbers, from which chance explains no pattern
_NINES = (-9, *(sign * (10**digits - 1) for digits in range(2, 6) for sign in (1, -1)))
_EPOCH = datetime(1970, 1, 1)
_TYPEWRITTEN = str.maketrans({"−": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "’": "'", "≤": "<", "≥": ">"})
_PARTS = re.compile(
    r"(?P<bound>[<>]=?)?\s*(?P<number>[+-]?(?:\d[\d.,' ]*(?<! )|[.,]\d+)(?:[eE][+-]?\d+)?)"
    r"\s*(?P<unit>[^\W\d_][^\s\d]{0,11}|[%‰°€$£][^\s\d]{0,11})?"
)
_WHOLE = r"[+-]?(?:\d*|[1-9]\d{0,2}(?:%s\d{3})+|[1-9]\d{0,2}(?:[ ']\d{3})+)"
_WRITTEN: dict[DecimalPoint, re.Pattern[str]] = {
    ".": re.compile(_WHOLE % "," + r"(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE),
    ",": re.compile(_WHOLE % r"\." + r"(,\d*)?(e[+-]?\d+)?", re.IGNORECASE),
}
_ISO = re.compile(r"\d{4}([-/.])\d{2}\1\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?(Z|[+-]\d{2}:?\d{2})?)?")
_OTHER_DATE = re.compile(r"\d{1,2}([-/. ])(\d{1,2}|[^\W\d_]{3,9})\1\d{2,4}( .*)?")
_IDENTIFIER = re.compile(
    r"(.*[ _.-])?(id|mrn|pid|nr|uuid)|(patient|case|record|person)([ _.-]?(no|number))?", re.IGNORECASE
)


class Read(NamedTuple):
    """A column as it was read.

    Attributes:
        values: float64 (n,) numbers, or n texts, the categories.
        said: what it was taken for.
        plain: its type said so, and nothing about it is out of the ordinary.
        whole: its numbers are whole by type, or written so.
    """

    values: Tensor | list[str]
    said: str
    plain: bool
    whole: bool = False


def cell(value: Any, where: str) -> Any:
    """Return a cell as None where it is empty, or as a text, a boolean, a number or a date."""
    if isinstance(value, np.generic):
        in_us = {"M": "datetime64[us]", "m": "timedelta64[us]"}.get(value.dtype.kind)
        value = (value.astype(in_us) if in_us else value).item()
    if isinstance(value, str | bytes):
        given = value.decode(errors="replace") if isinstance(value, bytes) else value
        text = unicodedata.normalize("NFC", given).strip()
        return None if text.lower() in _EMPTY else text
    try:
        if value is None or value != value:  # NaN, NaT
            return None
    except TypeError:  # pandas' NA, of which nobody can say whether it is itself
        return None
    except ValueError:  # an array
        pass
    if isinstance(value, timedelta):
        return value / timedelta(days=1)
    if isinstance(value, bool | Real | Decimal | date):
        return value
    raise BadInput(f"{where} holds a {type(value).__name__}; make it a number or a text, or leave it out (drop=[…])")


def read(
    cells: Sequence[Any],
    kind: ColumnKind | None,
    where: str,
    name: str,
    decimal: DecimalPoint | None,
    empty: Empty = "ask",
) -> Read:
    """Return a column of :func:`cell`'s values as numbers or categories, by the owner's ``kind`` without questions.

    ``decimal``: the decimal separator in texts; None: as they tell. ``empty``: what becomes of missing numbers and
    dates, which are the median of the others or asked about.
    """
    known = [value for value in cells if value is not None]
    if kind == "categorical" or (known and all(isinstance(value, bool) for value in known)):
        return _categories(cells)
    if not known:
        raise BadInput(f"{where} is empty in every row; leave it out (drop=['{name}'])")
    if all(isinstance(v, date) or (isinstance(v, str) and _ISO.fullmatch(v)) for v in known):
        return _dates(cells, where, name, empty)
    parts = {v: number_in(v) for v in known if isinstance(v, str)}
    words = [str(v) for v in known if isinstance(v, date) or (isinstance(v, str) and parts[v] is None)]
    if kind == "numeric" and words:
        raise BadInput(f"{where} isn't numeric: {_seen(words, cells)}; declare it categorical")
    if kind is None and parts and _is_of_words(known, parts, words):
        return _of_words(cells, known, where, name)
    if words:
        raise BadInput(f"{where} is of numbers, but for {_seen(words, cells)}: empty these, or {_choice(name)}")
    return _numbers(cells, {text: m for text, m in parts.items() if m}, kind, where, name, decimal, empty)


def check_classes(values: Tensor, where: str, choice: str) -> None:
    """Refuse numbers that hardly are classes (too many, or one means missing); ``choice``: what to do if they are."""
    known = values.unique()
    if len(known) > MANY and len(values) < MANY * len(known):
        raise BadInput(
            f"{where}: are the {len(known):,} different whole numbers, as {known[0]:g} and {known[-1]:g}, classes or "
            f"numbers to predict? {choice}"
        )
    _check_nines(values, where, choice)


def _check_nines(values: Tensor, where: str, choice: str) -> None:
    """Refuse nines that stand for what is missing: alone negative, or three times as far as the others lie apart."""
    low, *others = values.unique().tolist()
    for end, rest in ((low, others), (others[-1], [low, *others[:-1]])) if others else ():
        gap = max(rest[0] - end, end - rest[-1])
        if end in _NINES and (end < 0 <= rest[0] or gap > 3 * (rest[-1] - rest[0])):
            raise BadInput(
                f"{where}: {end:g}, in {int((values == end).sum()):,} of {len(values):,} cells, is far from all "
                f"others: does it stand for what is missing? missing=[{end:g}] says so; else {choice}"
            )


def decimal_of(columns: Iterable[Iterable[str]]) -> DecimalPoint | None:
    """Return what stands before decimals in a whole file: the one mark that some column of numbers can only mean."""
    meant: set[DecimalPoint] = set()
    for cells in columns:
        parts = [number_in(text) for text in cells if text.strip().lower() not in _EMPTY]
        numbers = [match["number"] for match in parts if match]
        if not numbers or len(numbers) < len(parts):
            continue
        possible = [point for point, form in _WRITTEN.items() if all(form.fullmatch(n) for n in numbers)]
        if len(possible) == 1 and any(possible[0] in n for n in numbers):
            meant.add(possible[0])
    return meant.pop() if len(meant) == 1 else None


def number_in(text: str) -> re.Match[str] | None:
    """Return the parts of a text that is a number, however it is written, or a limit such as '<0.5'; else None."""
    return None if _OTHER_DATE.fullmatch(text) else _PARTS.fullmatch(text.translate(_TYPEWRITTEN))


def _seen(what: Iterable[str], cells: Sequence[Any]) -> str:
    """Return how many of a column's cells are meant, with the most frequent one as an example."""
    counts = Counter(what)
    return f"{counts.total():,} of {len(cells):,} cells, as '{counts.most_common(1)[0][0][:40]}'"


def _choice(name: str, numeric: str = "") -> str:
    known = f"types={{'{name}': 'numeric'}} {numeric}, " if numeric else ""
    return f"{known}types={{'{name}': 'categorical'}} makes categories of them, drop=['{name}'] leaves the column out"


def _is_of_words(known: Sequence[Any], parts: dict[str, re.Match[str] | None], words: Sequence[str]) -> bool:
    """Return whether texts are words, bands such as '<18' and '>65', or codes: few whole numbers beside words."""
    found = [match for v in known if isinstance(v, str) and (match := parts[v])]
    numbers = {match["number"] for match in found}
    codes = 0 < len(words) == len(known) - len(found) and len(numbers) <= FEW and all(n.isdigit() for n in numbers)
    bands = 2 * sum(match["bound"] is not None for match in found) > len(known)
    return codes or bands or 2 * len(words) > len(known) or len({match["unit"] for match in found} - {None}) > 1


def _categories(cells: Sequence[Any]) -> Read:
    texts = [MISSING if value is None else str(value) for value in cells]
    count, empty = len(set(texts)), sum(value is None for value in cells)
    said = f"{count} categories" if count > 1 else f"the same in every row ('{texts[0][:40]}')"
    said += f", {empty:,} cells empty ('{MISSING}')" * (empty > 0)
    return Read(texts, said, 1 < count <= MANY and not empty)


def _of_words(cells: Sequence[Any], known: Sequence[Any], where: str, name: str) -> Read:
    """Return a column of texts as categories; BadInput: dates, names or identifiers, or a word of several spellings."""
    counts = Counter(str(value) for value in known)
    dates = [v for v in map(str, known) if _OTHER_DATE.fullmatch(v) or _ISO.fullmatch(v)]
    if 2 * len(dates) > len(known):
        raise BadInput(f"{where} is of dates, {_seen(dates, cells)}: write them as 2020-12-31, or {_choice(name)}")
    begun = sum(text[0] in "0123456789+-(<>~=." for text in map(str, known))
    if len(counts) > (MANY if 2 * begun > len(known) else max(MANY, len(cells) // 2)):
        raise BadInput(
            f"{where} has {len(counts):,} different texts in {_seen(map(str, known), cells)}: numbers of patients, "
            f"names, free text, numbers with marks? {_choice(name)}"
        )
    spelt: dict[str, str] = {}
    for text in counts:
        if (other := spelt.setdefault(text.casefold(), text)) != text:
            raise BadInput(
                f"{where} has '{other[:40]}' in {counts[other]:,} cells and '{text[:40]}' in {counts[text]:,}: spell "
                f"them alike, or {_choice(name)}"
            )
    return _categories(cells)


def _dates(cells: Sequence[Any], where: str, name: str, empty: Empty) -> Read:
    """Return dates as days since the first one."""
    days = []
    for value in cells:
        try:
            moment = _EPOCH if value is None else _moment(value)
        except (ValueError, OverflowError):
            raise BadInput(f"{where}: '{str(value)[:40]}' is no date; mend it, or {_choice(name)}") from None
        days.append(math.nan if value is None else (moment - _EPOCH) / timedelta(days=1))
    since, filled = _complete(days, where, name, empty)
    first = int(since.min().floor())
    began = (_EPOCH + timedelta(days=first)).date().isoformat()
    return Read(since - first, ", ".join([f"dates, as days since {began}", *filled]), plain=False)


def _moment(value: date | str) -> datetime:
    if isinstance(value, str):
        value = datetime.fromisoformat(re.sub(r"[/.]", "-", value[:10]) + value[10:])
    if not isinstance(value, datetime):
        value = datetime.combine(value, time())
    return value.replace(tzinfo=None)


def _numbers(
    cells: Sequence[Any],
    parts: dict[str, re.Match[str]],
    kind: ColumnKind | None,
    where: str,
    name: str,
    decimal: DecimalPoint | None,
    empty: Empty,
) -> Read:
    """Return a column of numbers, some or all in texts; BadInput: one is missing, a limit, or unclear."""
    bounds = [v for v in cells if v in parts and parts[v]["bound"]]
    codes = [v for v in cells if v in parts and re.match(r"[+-]?0\d", parts[v]["number"])]
    units = sorted({match["unit"] for match in parts.values() if match["unit"]})
    if bounds and kind is None:
        taken = _choice(name, "takes the limit for the value")
        raise BadInput(f"{where}: {_seen(bounds, cells)}, are limits and not values: {taken}")
    if codes and kind is None:
        raise BadInput(
            f"{where}: {_seen(codes, cells)}, begin with 0, as codes do: {_choice(name, 'takes them for numbers')}"
        )
    if len(units) > 1:
        raise BadInput(f"{where} isn't numeric: it has the units {', '.join(units)[:80]}; use one")
    written = {text: match["number"] for text, match in parts.items()}
    point = _point(list(written.values()), where, decimal)
    try:
        values = [
            math.nan if v is None else _float(written[v], point) if isinstance(v, str) else float(v) for v in cells
        ]
    except OverflowError:
        raise BadInput(f"{where} has a number that isn't finite; mend it, or {_choice(name)}") from None
    numbers, filled = _complete(values, where, name, empty)
    given = [v for v in cells if v is not None]
    whole = all(written[v].isdigit() if isinstance(v, str) else isinstance(v, int) for v in given)
    if kind is None:
        _ask_of_numbers(numbers, whole, where, name)
    said = ["numbers", *(f"in {unit}" for unit in units)] + ["a limit taken for the value"] * bool(bounds)
    if any("," in number for number in written.values()):
        said.append("with decimal commas" if point == "," else "with commas between thousands")
    if parts and len(said) == 1:
        said.append("from texts")
    said += filled
    if bool((numbers == numbers[0]).all()):
        said.append(f"the same in every row ({float(numbers[0]):g})")
    return Read(numbers, ", ".join(said), len(said) == 1, whole)


def _complete(values: list[float], where: str, name: str, empty: Empty) -> tuple[Tensor, list[str]]:
    """Return numbers without a gap, and how gaps were filled; BadInput where that is to be asked."""
    numbers = torch.tensor(values, dtype=torch.float64)
    missing = (~torch.isfinite(numbers)).nonzero()[:, 0].tolist()
    if missing and empty == "median":
        middle = float(numbers[torch.isfinite(numbers)].median())
        return numbers.nan_to_num(middle, middle, middle), [f"{len(missing):,} that are missing are the median"]
    if missing:
        raise BadInput(
            f"{where} has {len(missing):,} of {len(values):,} numbers that are missing or not finite, the first in row "
            f"{missing[0] + 1}; empty='median' fills them, empty='leave-out' leaves the rows out, drop=['{name}'] "
            "the column"
        )
    return numbers, []


def _point(numbers: Sequence[str], where: str, decimal: DecimalPoint | None) -> DecimalPoint:
    """Return the decimal separator of numbers in texts; BadInput where that is open and matters, or varies."""
    odd = {point: [n for n in numbers if not written.fullmatch(n)] for point, written in _WRITTEN.items()}
    possible = [point for point in odd if not odd[point] and decimal in (None, point)]
    if not possible:
        shown = "' and '".join(sorted({odd[point][0] for point in odd if odd[point] and decimal in (None, point)}))
        raise BadInput(
            f"{where} has numbers such as '{shown}', which are not written as its others are; write all alike"
        )
    marked, bare = ([n for n in numbers if ("," in n or "." in n) is there] for there in (True, False))
    # All marks stand before three digits. Decimals would at times be fewer, or be there in whole numbers, too.
    grouped = len(marked) >= MANY and bare and all(len(n.lstrip("+-")) <= 3 for n in bare)
    if len(possible) > 1 and marked and bool(grouped) is ("." in marked[0]):
        raise BadInput(
            f"{where}: in {len(marked):,} numbers, as '{marked[0]}', the mark may stand between thousands or before "
            "decimals; say which: decimal='.' or decimal=','"
        )
    return possible[0]


def _float(number: str, point: DecimalPoint) -> float:
    return float(re.sub(r"[ ',]" if point == "." else r"[ '.]", "", number).replace(",", "."))


def _ask_of_numbers(numbers: Tensor, whole: bool, where: str, name: str) -> None:
    """Raise BadInput where numbers may stand for what is missing, be dates, or be the numbers of rows or patients."""
    count, choice = len(numbers), _choice(name, "takes them for numbers")
    _check_nines(numbers, where, choice)
    if not whole or count < MANY:
        return
    year, month, day = numbers // 10_000, numbers // 100 % 100, numbers % 100
    if bool(((year >= 1900) & (year < 2100) & (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31)).all()):
        raise BadInput(f"{where} is of dates, as {numbers[0]:.0f}: write them as 2020-12-31, or {choice}")
    steps = numbers.diff()
    counted = bool((steps > 0).all() or (steps < 0).all()) or float(numbers.max() - numbers.min()) == count - 1
    if len(numbers.unique()) == count and (counted or _IDENTIFIER.fullmatch(name)):
        raise BadInput(f"{where} has another number in each row, as {numbers[0]:.0f}: of rows or patients? {choice}")
