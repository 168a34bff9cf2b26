"""The formats of ``--write`` by name; no heavy import, for they are checked before an audit begins."""

from __future__ import annotations

from collections.abc import Iterable

from fedaudit.utils.errors import BadInput, unknown_name

FILES = {"sarif": "results.sarif", "junit": "junit.xml", "markdown": "summary.md"}


def check_formats(formats: Iterable[str]) -> list[str]:
    """Return the formats, each once.

    Raises:
        BadInput: one isn't known.
    """
    if isinstance(formats, str):
        raise BadInput(f"write: give a list of formats, such as ['{formats}']")
    found = list(dict.fromkeys(formats))
    for name in found:
        if name not in FILES:
            raise BadInput(f"write: {unknown_name('format', name, FILES)}")
    return found
