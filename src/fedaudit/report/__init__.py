"""All that is written for readers and programs: page, notebook, terminal, SARIF, JUnit, Markdown; audits compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.lazy import lazy

if TYPE_CHECKING:
    from fedaudit.report.figures import LEAST_DB, limits
    from fedaudit.report.frontier import defence_tables
    from fedaudit.report.style import render
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "LEAST_DB",
    "defence_tables",
    "limits",
    "render",
]
