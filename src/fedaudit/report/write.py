"""The files of ``--write``: which there are, and all of them written. No heavy import: formats are checked early."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fedaudit.utils.errors import BadInput, unknown_name
from fedaudit.utils.folders import inside

if TYPE_CHECKING:
    from fedaudit.results import AuditResult

FILES = {"sarif": "results.sarif", "junit": "junit.xml", "markdown": "summary.md"}


def check_formats(formats: Iterable[str]) -> list[str]:
    """Return the formats, each once; BadInput where one isn't known."""
    if isinstance(formats, str):
        raise BadInput(f"write: give a list of formats, such as ['{formats}']")
    found = list(dict.fromkeys(formats))
    for name in found:
        if name not in FILES:
            raise BadInput(f"write: {unknown_name('format', name, FILES)}")
    return found


def write_outputs(
    result: AuditResult, folder: Path, formats: Iterable[str], *, scenario: str = "scenario.yaml"
) -> list[Path]:
    """Write ``result`` to ``folder`` as sarif, junit or markdown, under the names of :data:`FILES`; return the files.

    ``scenario`` is the file that SARIF names as the place of every result, as a path from the root of the sources.
    """
    from fedaudit.report import junit, markdown, sarif

    render = {"sarif": lambda: sarif.render(result, scenario), "junit": lambda: junit.render(result)}
    render["markdown"] = lambda: markdown.render(result)
    written = []
    for name in check_formats(formats):
        path = inside(folder, FILES[name])
        try:
            path.write_text(render[name](), encoding="utf-8")
        except OSError as error:
            raise BadInput(f"can't write '{path}': {error.strerror or error}") from None
        written.append(path)
    return written


def remove_outputs(folder: Path) -> None:
    """Delete what an earlier audit wrote here in these formats: it would contradict the new results."""
    for name in FILES.values():
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise BadInput(f"can't delete '{folder / name}': {error.strerror or error}") from None
