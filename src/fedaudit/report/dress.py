"""What all pages have in common: one base template, one style sheet, the same words for numbers."""

from __future__ import annotations

from typing import Any

import jinja2

from fedaudit.report.wording import count, duration, number, percent, sentence, short, span, when
from fedaudit.utils.version import __version__

_FILTERS = {"num": number, "count": count, "percent": percent, "duration": duration, "when": when} | {
    "sentence": sentence,
    "short": short,
    "span": span,
}


def render(template: str, /, **values: Any) -> str:
    """Return a page: ``template`` of ``report/templates`` filled with ``values``, all of them escaped.

    It extends ``base.html.j2``, so it needs no other file and no network. A value that it lacks is an error.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fedaudit.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= _FILTERS
    return environment.get_template(template).render({"made_by": __version__} | values)
