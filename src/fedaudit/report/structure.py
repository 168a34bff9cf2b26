"""What data say before any training, as a page, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from fedaudit.data.structure import Singled, Structure
from fedaudit.report.style import render
from fedaudit.report.wording import count, noun
from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import check_folder, inside
from fedaudit.utils.integrity import write_whole


def write_structure(found: Structure, folder: Path) -> None:
    """Write ``check-data.html``, ``check-data.json`` and ``records.csv``. BadInput: they can't be written."""
    check_folder(folder)
    text = io.StringIO()
    lines = csv.writer(text)
    lines.writerow(["site", "row", "score", "by", "group", "duplicates", "same as", "file"])
    for one in found.records:
        same = "{}, row {}".format(*one.same_as) if one.same_as else ""
        site, by, same, file = (
            f"'{cell}" if cell.startswith(("=", "+", "-", "@")) else cell
            for cell in (one.site, " and ".join(one.by), same, one.file or "")
        )
        lines.writerow([site, one.row, f"{one.score:.4f}", by, one.group, one.duplicates, same, file])
    try:
        page = render("structure.html.j2", found=found, lines=list(in_words(found)), told=told)
        write_whole(inside(folder, "check-data.html"), page.encode())
        values = json.dumps(asdict(found), indent=2, ensure_ascii=False) + "\n"
        write_whole(inside(folder, "check-data.json"), values.encode())
        write_whole(inside(folder, "records.csv"), text.getvalue().encode())
    except OSError as error:
        raise BadInput(f"can't write to '{folder}': {error.strerror or error}") from None


def told(one: Singled) -> str:
    """Return why a record deserves a test, in a line."""
    name = f"{one.site}, row {count(one.row)}" + (f" ({one.file})" if one.file else "")
    parts = [f"{name}: score {one.score:.2f}"]
    parts += [f"alone by {' and '.join(one.by)}"] if one.by else []
    parts += [f"in a group of {count(one.group)}"] if one.group else []
    if one.same_as:
        site, row = one.same_as
        parts.append(
            f"with {count(one.duplicates)} {noun(one.duplicates, 'duplicates')}, first {site}, row {count(row)}"
        )
    return ", ".join(parts)


def in_words(one: Structure) -> Iterator[str]:
    """Yield what data say, a line each."""
    sites = f" at {len(one.sites)} sites" if len(one.sites) > 1 else ""
    yield f"{_records(one.rows)}{sites}"
    if one.columns:
        used = [key for key, use in one.columns.items() if use in ("exact", "tenths")]
        yield f"attributes that somebody may know: {', '.join(used) or 'none'}"
        if own := [key for key, use in one.columns.items() if use == "identifier"]:
            yield f"identifiers, with a value of its own in nearly every row of a site: {', '.join(own)}"
        if one.smallest is not None:
            share = f"{100 * one.unique / one.rows:.3g} %"
            yield f"{_records(one.unique)} alone with all attributes at the same site ({share})"
            groups = f"{count(one.small_groups)} {noun(one.small_groups, 'groups')}"
            yield f"{_records(one.small)} in {groups} of fewer than {one.least} that are alike"
        if one.depth:
            yield f"{_records(one.singled)} singled out by {one.depth} {noun(one.depth, 'attributes')} or fewer"
        if one.same_target is not None:
            yield f"{_records(one.same_target)} with the target of all who are like them: knowing them tells it"
    yield f"{_records(one.duplicates_within)} with a duplicate at the same site"
    if len(one.sites) > 1:
        yield f"{_records(one.duplicates_across)} with a duplicate at another site"


def _records(n: int) -> str:
    return f"{count(n)} {noun(n, 'records')}"
