"""What data say before any training, as a page, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path

from fedaudit.data.structure import Structure, in_words
from fedaudit.report.style import render
from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import check_folder, inside
from fedaudit.utils.integrity import write_whole


def write_structure(found: Structure, folder: Path) -> None:
    """Write ``check-data.html``, ``check-data.json`` and ``records.csv``. BadInput: they can't be written."""
    check_folder(folder)
    text = io.StringIO()
    lines = csv.writer(text)
    lines.writerow(["site", "row", "score", "by", "group", "duplicates"])
    for one in found.records:
        site, by = (
            f"'{cell}" if cell.startswith(("=", "+", "-", "@")) else cell for cell in (one.site, " and ".join(one.by))
        )
        lines.writerow([site, one.row, f"{one.score:.4f}", by, one.group, one.twins])
    try:
        page = render("structure.html.j2", found=found, lines=list(in_words(found)))
        write_whole(inside(folder, "check-data.html"), page.encode())
        values = json.dumps(asdict(found), indent=2, ensure_ascii=False) + "\n"
        write_whole(inside(folder, "check-data.json"), values.encode())
        write_whole(inside(folder, "records.csv"), text.getvalue().encode())
    except OSError as error:
        raise BadInput(f"can't write to '{folder}': {error.strerror or error}") from None
