"""What singles records out before anything is trained: small groups, unique rows, duplicates; of the data alone."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedaudit.data.own import frame_cells, pairs_of
from fedaudit.data.table_file import is_table, read_numbered
from fedaudit.utils.bounds import PICTURE, read_bytes
from fedaudit.utils.errors import BadInput

LEAST = 10  # rows of a group that isn't small: a convention, as where results are shared
MOST = 20  # records that are named, and as many more of those that have a duplicate
_DEEPEST = 3  # attributes of a combination, at most
_WORK = 3e7  # rows times combinations that are looked at: some seconds
_EXACT = 20  # different numbers of a column, up to which people know them exactly; of more they know the tenth
_TENTHS = 10
_OWN = 0.9  # share of a site's rows with a text of their own, from which a column is an identifier
_OWN_WHOLE = 0.98  # the same of whole numbers, which may also measure something
_PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".tif", ".tiff", ".webp", ".dcm", ".nii"}

Use = Literal["exact", "tenths", "identifier", "target"]
Codes = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Singled:
    """A record that deserves a test.

    Attributes:
        site: whose it is.
        row: its number at the site, from 1; empty rows of a site's own text count.
        score: of SUDA, relative to the highest possible one: many small combinations of attributes are its alone.
        by: the smallest of these combinations; empty: none.
        group: rows of its site with the same attributes, itself too.
        duplicates: rows that are the same, at its site and at others.
        same_as: site and row of the first of them.
        file: of a folder of pictures, its path in there.
    """

    site: str
    row: int
    score: float
    by: tuple[str, ...]
    group: int
    duplicates: int
    same_as: tuple[str, int] | None = None
    file: str | None = None


@dataclass(frozen=True)
class Structure:
    """What data say of the risk to single records.

    Attributes:
        sites: rows by site.
        columns: how each was used; empty: no table, so that only duplicates are known.
        least: rows of a group that isn't small.
        small_groups, small: groups of a site that are smaller, and their rows.
        unique: rows that are alone in their group.
        smallest: rows of the smallest group; None: no groups.
        same_target: rows whose group has two or more and one target, which whoever knows the attributes knows; None: no
            target was named.
        duplicates_within, duplicates_across: rows that have the same row at their site; at another one.
        depth: attributes of the largest combination that was looked at.
        singled: rows that so few attributes single out at their site.
        records: those that deserve a test, the riskiest first; then others that have a duplicate.
    """

    sites: dict[str, int]
    columns: dict[str, Use]
    least: int
    small_groups: int
    small: int
    unique: int
    smallest: int | None
    same_target: int | None
    duplicates_within: int
    duplicates_across: int
    depth: int
    singled: int
    records: tuple[Singled, ...]

    @property
    def rows(self) -> int:
        """How many there are in all."""
        return sum(self.sites.values())


def structure_of(
    paths: Sequence[Path],
    *,
    target: str | None = None,
    site: str | None = None,
    by: Sequence[str] = (),
    drop: Sequence[str] = (),
    least: int = LEAST,
    most: int = MOST,
) -> Structure:
    """Return what data say of the risk to single records.

    Args:
        paths: a table, or one for each site, which then has the file's name; or files of arrays, or folders of
            pictures, of which only duplicates are told.
        target: the column that is predicted, which nobody is taken to know.
        site: the column that says whose a row is.
        by: columns that somebody may know of a person; empty: all others but identifiers.
        drop: columns to leave out.
        least: rows of a group that isn't small.
        most: records that are named, and as many more that have a duplicate.

    Raises:
        BadInput: something can't be read, or a column isn't there.
    """
    tables = [is_table(path) for path in paths]
    if not paths or any(tables) is not all(tables):
        raise BadInput("give tables, or files of arrays and folders of pictures, and not both")
    names = _sites(paths)
    if not tables[0]:
        if target or site or by or drop:
            raise BadInput("columns are named, and these are no tables")
        keys = [_digests(path) for path in paths]
        owners = np.repeat(np.arange(len(paths)), [len(one) for one in keys])
        duplicates = _numbered([key for one in keys for key, _ in one])
        rows = _counted(owners)
        files = [file for one in keys for _, file in one]
        return _told(names, owners, duplicates, rows, files=files, least=least, most=most)
    found: dict[str, dict[str, list[Any]]] = {}
    numbers: list[int] | None = [] if site is None else None
    for name, path in zip(names, paths, strict=True):
        columns, rows_of = read_numbered(path)
        found[name] = frame_cells(columns, {}, drop, str(path))[0]
        if numbers is not None:
            numbers += rows_of or range(1, 1 + len(next(iter(found[name].values()))))
    return _of_tables(found, numbers, target, site, by, least, most)


def _sites(paths: Sequence[Path]) -> list[str]:
    names = [path.resolve().name.split(".")[0] for path in paths]
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise BadInput(f"two of the sites would be called '{twice[0]}'; rename a file")
    return names


def _digests(path: Path) -> list[tuple[str, str | None]]:
    """Return a digest of each example, of the bytes of a file or of an array's row, and the file's path below."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and _PICTURES & set(p.suffixes))
        if not files:
            raise BadInput(f"'{path}' holds no pictures")
        return [(hashlib.sha256(read_bytes(f, PICTURE)).hexdigest(), f.relative_to(path).as_posix()) for f in files]
    inputs, _ = pairs_of(path)
    return [(hashlib.sha256(one.contiguous().numpy().tobytes()).hexdigest(), None) for one in inputs]


def _of_tables(
    tables: Mapping[str, Mapping[str, list[Any]]],
    numbers: Sequence[int] | None,
    target: str | None,
    site: str | None,
    by: Sequence[str],
    least: int,
    most: int,
) -> Structure:
    first, *others = tables.values()
    for name, table in tables.items():
        if table.keys() != first.keys():
            raise BadInput(f"'{name}' has other columns than '{next(iter(tables))}'; sites have the same ones")
        for asked in filter(None, (target, site, *by)):
            if asked not in table:
                raise BadInput(f"there is no column '{asked}'; known: {', '.join(table)[:300]}")
    if (site or target) in by or (site is not None and site == target):
        raise BadInput("a column is the target, the site or an attribute, and not two of them")
    columns = {key: [cell for table in (first, *others) for cell in table[key]] for key in first}
    if site is None:
        owners = np.repeat(np.arange(len(tables)), [len(next(iter(t.values()))) for t in tables.values()])
        names = list(tables)
    else:
        said = ["(none)" if cell is None else str(cell) for cell in columns.pop(site)]
        names = sorted(set(said))
        owners = _numbered(said)
    uses: dict[str, Use] = {}
    codes: dict[str, Codes] = {}
    duplicates = np.zeros(len(owners), np.int64)
    for key, cells in columns.items():
        exact = _numbered(["" if cell is None else str(cell) for cell in cells])
        use, if_known, known = _used(cells, exact, owners)
        if use == "identifier" and key in by:
            use = if_known
        uses[key] = "target" if key == target else use
        if use != "identifier":
            duplicates = _joined(duplicates, exact)
        if key != target and use != "identifier" and (not by or key in by):
            codes[key] = known
    targets = None if target is None else _numbered([str(cell) for cell in columns[target]])
    if by:
        uses = {key: use for key, use in uses.items() if key in by or use == "target"}
    rows = _counted(owners) if numbers is None else np.array(numbers, np.int64)
    return _told(names, owners, duplicates, rows, uses, codes, targets, least=least, most=most)


def _used(cells: Sequence[Any], exact: Codes, owners: Codes) -> tuple[Use, Use, Codes]:
    """Return how a column singles rows out, how it does if somebody knows it, and its values as numbers from 0."""
    own = _own(exact, owners)
    numbers = _as_numbers(cells)
    if numbers is None:
        return ("identifier" if own > _OWN else "exact"), "exact", exact
    if int(exact.max(initial=-1)) < _EXACT:
        return "exact", "exact", exact
    known = numbers[~np.isnan(numbers)]
    edges = np.unique(np.quantile(known, np.linspace(0, 1, _TENTHS + 1)[1:-1]))
    codes = np.where(np.isnan(numbers), len(edges) + 1, np.searchsorted(edges, numbers, side="right"))
    whole = bool((known % 1 == 0).all())
    return ("identifier" if whole and own > _OWN_WHOLE else "tenths"), "tenths", codes


def _own(exact: Codes, owners: Codes) -> float:
    """Return the share of rows with a value of their own at a site, of the site where it is largest.

    Sites have the same numbers for other people, and not every site fills a column. Sites of few rows say nothing;
    where all are such, all rows are asked together.
    """
    counts = np.bincount(owners)
    if not (counts > _EXACT).any():
        different = int(exact.max(initial=-1)) + 1
        return different / len(exact) if different > _EXACT else 0.0
    sites = np.flatnonzero(counts > _EXACT)
    return max(len(np.unique(exact[owners == site])) / int(counts[site]) for site in sites)


def _as_numbers(cells: Sequence[Any]) -> NDArray[np.float64] | None:
    """Return a column of numbers, NaN where a cell is empty; None: it has others."""
    found = []
    for cell in cells:
        try:
            found.append(math.nan if cell is None else float(str(cell).replace(",", ".")))
        except ValueError:
            return None
    numbers = np.array(found)
    return None if np.isinf(numbers).any() or np.isnan(numbers).all() else numbers


def _counted(owners: Codes) -> Codes:
    """Return each row's number at its site, from 1."""
    rows = np.empty(len(owners), np.int64)
    for place in np.unique(owners):
        rows[owners == place] = 1 + np.arange(int((owners == place).sum()))
    return rows


def _numbered(values: Sequence[str]) -> Codes:
    return np.unique(np.array(values, dtype=object), return_inverse=True)[1].astype(np.int64)


def _joined(one: Codes, other: Codes) -> Codes:
    """Return numbers from 0 of the pairs that two columns have."""
    width = int(other.max(initial=0)) + 1
    keys = one * width + other
    joined: Codes
    if (int(one.max(initial=0)) + 1) * width > 4 * max(len(keys), 10**6):
        joined = np.unique(keys, return_inverse=True)[1].astype(np.int64)
    else:  # without sorting
        joined = (np.cumsum(np.bincount(keys) > 0) - 1)[keys]
    return joined


def _sizes(keys: Codes) -> Codes:
    """Return of each row how many have its key."""
    sizes: Codes = np.bincount(keys)[keys]
    return sizes


def _told(
    names: Sequence[str],
    owners: Codes,
    duplicates: Codes,
    rows: Codes,
    uses: Mapping[str, Use] | None = None,
    codes: Mapping[str, Codes] | None = None,
    targets: Codes | None = None,
    *,
    files: Sequence[str | None] | None = None,
    least: int,
    most: int,
) -> Structure:
    codes = codes or {}
    same = _sizes(duplicates)
    here = _sizes(_joined(duplicates, owners))
    groups = owners.astype(np.int64)
    for column in codes.values():
        groups = _joined(groups, column)
    size = _sizes(groups) if codes else np.zeros(len(owners), np.int64)
    alone = same_target = None
    if targets is not None and codes:
        alone = (size > 1) & (_sizes(_joined(groups, targets)) == size)
        same_target = int(alone.sum())
    depth, scores, smallest = _singled(owners, codes)
    # Many small combinations first, then rows that are alone in their group, then those that other sites have, too.
    order = np.lexsort((np.arange(len(owners)), -(same - here), size, -scores))
    worth = [i for i in order.tolist() if scores[i] > 0 or (codes and size[i] < least) or same[i] > here[i]][:most]
    seen = set(worth)
    worth += [i for i in order.tolist() if same[i] > 1 and i not in seen][:most]
    keys = duplicates.tolist()
    alike: dict[int, list[int]] = {}
    for i in np.flatnonzero(same > 1).tolist():
        alike.setdefault(keys[i], []).append(i)

    def same_as(i: int) -> tuple[str, int] | None:
        other = next((j for j in alike.get(keys[i], ()) if j != i), None)
        return None if other is None else (names[owners[other]], int(rows[other]))

    return Structure(
        sites={name: int((owners == place).sum()) for place, name in enumerate(names)},
        columns=dict(uses or {}),
        least=least,
        small_groups=len(np.unique(groups[size < least])) if codes else 0,
        small=int((size < least).sum()) if codes else 0,
        unique=int((size == 1).sum()),
        smallest=int(size.min()) if codes else None,
        same_target=same_target,
        duplicates_within=int((here > 1).sum()),
        duplicates_across=int((same > here).sum()),
        depth=depth,
        singled=int((scores > 0).sum()),
        records=tuple(
            Singled(
                names[owners[i]],
                int(rows[i]),
                float(scores[i]),
                smallest.get(i, ()),
                int(size[i]),
                int(same[i]) - 1,
                same_as(i),
                files[i] if files else None,
            )
            for i in worth
        ),
    )


def _singled(owners: Codes, codes: Mapping[str, Codes]) -> tuple[int, NDArray[np.float64], dict[int, tuple[str, ...]]]:
    """Return the depth of the search, each row's SUDA score from 0 to 1, and the smallest combination of those above 0.

    Elliot, Manning and Ford, A computational algorithm for handling the special uniques problem, 2002: a combination is
    minimal if no part of it singles the row out, and one of k of n attributes counts (n - k) (n - k - 1) … (n - m), up
    to m attributes. Departure: scores are divided by what a row has that each single attribute singles out.
    """
    names = list(codes)
    scores = np.zeros(len(owners))
    smallest: dict[int, tuple[str, ...]] = {}
    depth, work = 0, 0.0
    for size in range(1, min(_DEEPEST, len(names)) + 1):
        work += math.comb(len(names), size) * len(owners)
        if size > 1 and work > _WORK:
            break
        depth = size
    before: dict[tuple[str, ...], Flags] = {(): np.zeros(len(owners), bool)}
    keys: dict[tuple[str, ...], Codes] = {(): owners.astype(np.int64)}
    for size in range(1, depth + 1):
        level: dict[tuple[str, ...], Flags] = {}
        for combination in itertools.combinations(names, size):
            *rest, last = combination
            joined = _joined(keys[tuple(rest)], codes[last])
            if size < depth:  # the last ones are many
                keys[combination] = joined
            level[combination] = _sizes(joined) == 1
            new = level[combination].copy()
            for part in itertools.combinations(combination, size - 1):
                new &= ~before[part]
            scores[new] += _weight(len(names), size, depth)
            for row in np.flatnonzero(new).tolist():
                smallest.setdefault(row, combination)
        before = level
    return depth, scores / max(1.0, len(names) * _weight(len(names), 1, depth)), smallest


def _weight(attributes: int, size: int, depth: int) -> float:
    return float(math.prod(max(1, attributes - i) for i in range(size, depth + 1)))
