"""The files of ``--write``: which there are, and all of them written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from fedaudit.report import junit, markdown, sarif
from fedaudit.report.formats import FILES, check_formats
from fedaudit.results import AuditResult
from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import inside

_RENDER: dict[str, Callable[[AuditResult, str], str]] = {
    "sarif": sarif.render,
    "junit": lambda result, _: junit.render(result),
    "markdown": lambda result, _: markdown.render(result),
}


def write_outputs(
    result: AuditResult, folder: Path, formats: Iterable[str], *, scenario: str = "scenario.yaml"
) -> list[Path]:
    """Write ``result`` in ``formats`` to ``folder``, under the names of :data:`FILES`; return the files.

    Args:
        result: of the audit.
        folder: with results.json and the report.
        formats: sarif, junit, markdown.
        scenario: the file that SARIF names as the place of every result, as a path from the root of the sources.

    Raises:
        BadInput: a format isn't known, or a file can't be written.
    """
    written = []
    for name in check_formats(formats):
        path = inside(folder, FILES[name])
        try:
            path.write_text(_RENDER[name](result, scenario), encoding="utf-8")
        except OSError as error:
            raise BadInput(f"can't write '{path}': {error.strerror or error}") from None
        written.append(path)
    return written


def remove_outputs(folder: Path) -> None:
    """Delete what an earlier audit wrote here in these formats: it would contradict the new results.

    Raises:
        BadInput: a file can't be deleted.
    """
    for name in FILES.values():
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise BadInput(f"can't delete '{folder / name}': {error.strerror or error}") from None
