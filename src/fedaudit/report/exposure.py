"""Membership on the report page: which classes' members are exposed."""

from __future__ import annotations

from fedaudit.report.panels import PANELS, Panel
from fedaudit.results import AuditResult, FindingResult

SHOWN = 4  # findings; results.json has all


def exposed(result: AuditResult) -> list[FindingResult]:
    """Return the first findings that tell how exposed at least two classes are."""
    return [f for f in result.findings if len(f.exposure) > 1][:SHOWN]


PANELS["membership"] = Panel(
    "Exposure by class",
    "parts/exposure.html.j2",
    lambda result, images: exposed(result),  # noqa: ARG005
    after_results=True,
)
