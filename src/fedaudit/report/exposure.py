"""Membership on the report page: which classes' and subgroups' members are exposed, and which records most."""

from __future__ import annotations

from dataclasses import dataclass

from fedaudit.report.panels import PANELS, Panel
from fedaudit.results import AuditResult, FindingResult, GroupExposure, RecordExposure

SHOWN = 4  # findings; results.json has all
CATEGORIES = 12  # of a table, those of the least p-values


@dataclass(frozen=True)
class Exposed:
    """What the page shows of one finding.

    Attributes:
        groups: its classes, then the categories that are shown.
        hidden: how many more categories there are.
        records: the most exposed, each with the other attacks that it is among the most exposed of.
    """

    finding: FindingResult
    groups: list[GroupExposure]
    hidden: int
    records: list[tuple[RecordExposure, list[str]]]


def exposed(result: AuditResult) -> list[Exposed]:
    """Return the first findings that tell how exposed at least two groups are, or which records."""
    found = [f for f in result.findings if len(f.exposure) > 1 or f.most_exposed][:SHOWN]
    return [_exposed(result, f) for f in found]


def _exposed(result: AuditResult, finding: FindingResult) -> Exposed:
    classes = [group for group in finding.exposure if not group.column]
    categories = sorted((group for group in finding.exposure if group.column), key=lambda group: group.p_value)
    records = [(one, _others(result, finding, one.record)) for one in finding.most_exposed]
    return Exposed(finding, classes + categories[:CATEGORIES], len(categories[CATEGORIES:]), records)


def _others(result: AuditResult, finding: FindingResult, record: int) -> list[str]:
    """Return the other attacks on the same federation that have this record among the most exposed."""
    alike = [f for f in result.findings if f.federation == finding.federation and f.attack != finding.attack]
    return list(dict.fromkeys(f.attack for f in alike if any(one.record == record for one in f.most_exposed)))


PANELS["membership"] = Panel(
    "Exposure",
    "parts/exposure.html.j2",
    lambda result, images: exposed(result),  # noqa: ARG005
    after_results=True,
)
