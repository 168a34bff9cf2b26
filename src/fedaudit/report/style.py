"""What all pages have in common: one base template, one style sheet, the same words for numbers."""

from __future__ import annotations

import html
import re
from functools import cache
from typing import Any

import jinja2

from fedaudit.report.wording import count, counted, duration, number, percent, rests_on, sentence, short, span, when
from fedaudit.utils.version import __version__

_FILTERS = {"num": number, "count": count, "percent": percent, "duration": duration, "when": when} | {
    "sentence": sentence,
    "short": short,
    "span": span,
    "counted": counted,
    "rests_on": rests_on,
}
_TABLE = re.compile(r"<table\b.*?</table>", re.DOTALL)
_ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
_CELL = re.compile(r"<t([hd])\b([^>]*)>(.*?)</t\1>", re.DOTALL)
_SPAN = re.compile(r'\b(col|row)span="(\d+)"')


def render(template: str, /, *packages: str, **values: Any) -> str:
    """Return a page: ``template`` filled with ``values``, all of them escaped.

    The template is one of ``packages`` or ``fedaudit.report``, in a folder ``templates``, and may use all of theirs. A
    page extends ``base.html.j2``, so it needs no other file and no network. A value that it lacks is an error. Every
    cell of its tables carries the heading of its column, for on a narrow screen a table becomes a list of labelled
    values.
    """
    page = _environment(packages).get_template(template).render({"made_by": __version__} | values)
    return _TABLE.sub(lambda table: _labelled(table[0]), page)


@cache
def _environment(packages: tuple[str, ...]) -> jinja2.Environment:
    """Return the templates of ``packages`` and our own; each is compiled once."""
    loaders = [jinja2.PackageLoader(name) for name in dict.fromkeys((*packages, "fedaudit.report"))]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= _FILTERS
    return environment


def _labelled(table: str) -> str:
    """Return the table with a data-label in each cell that spans one column: the heading of that column."""
    head, end, body = table.partition("</thead>")
    headings = [_words(cell[3]) for cell in _CELL.finditer(head)]
    taken: dict[int, int] = {}  # column -> further rows that a cell from above reaches into

    def row(found: re.Match[str]) -> str:
        column = 0

        def cell(one: re.Match[str]) -> str:
            nonlocal column
            while taken.get(column):
                taken[column] -= 1
                column += 1
            spans = {name: int(value) for name, value in _SPAN.findall(one[2])}
            taken[column] = spans.get("row", 1) - 1
            place, column = column, column + spans.get("col", 1)
            if "col" in spans or place >= len(headings):
                return one[0]
            return f'<t{one[1]}{one[2]} data-label="{headings[place]}">{one[3]}</t{one[1]}>'

        text = _CELL.sub(cell, found[0])
        for left in range(column, len(headings)):
            taken[left] = max(0, taken.get(left, 0) - 1)
        return text

    return head + end + _ROW.sub(row, body)


def _words(markup: str) -> str:
    """Return a heading's text for an attribute, what is small after a comma."""
    text = re.sub(r"<[^>]+>", "", markup.replace("<small>", ", "))
    return html.escape(html.unescape(" ".join(text.split()).replace(" ,", ",")))
