"""Rows of tables on the report page: true and rebuilt, cell by cell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fedaudit.report.panels import PANELS, Panel
from fedaudit.results import AuditResult, FindingResult, RowResult

SHOWN = 8  # rows, of each attack on each federation


@dataclass(frozen=True)
class Cell:
    """One cell: its column, what is true, what was rebuilt (None: nothing), and how sure the attack was (0 to 1)."""

    column: str
    true: str
    rebuilt: str | None
    wrong: bool
    confidence: float | None


@dataclass(frozen=True)
class DrawnRow:
    """One training example: what it is called, its scores, and its cells."""

    number: int
    where: str
    scores: RowResult
    cells: list[Cell]


@dataclass(frozen=True)
class DrawnTable:
    """What one attack rebuilt of the rows of one federation.

    Attributes:
        federation, attack: whose.
        rows: the first ones, in the order of the audit.
        hidden: how many more there are.
        exact, total: rows of which every cell is right, and all.
        sure: whether the attack says how sure it is of each cell.
    """

    federation: str
    attack: str
    rows: list[DrawnRow]
    hidden: int
    exact: int
    total: int
    sure: bool


def drawn_tables(result: AuditResult) -> list[DrawnTable]:
    """Return the rows of each attack on each federation, those of them that the page shows."""
    groups: dict[tuple[str, str], list[FindingResult]] = {}
    for finding in result.findings:
        if finding.rows:
            groups.setdefault((finding.federation, finding.attack), []).append(finding)
    made = []
    for (federation, attack), findings in groups.items():
        rows = [drawn for finding in findings for drawn in _drawn(finding)][:SHOWN]
        rows = [DrawnRow(i, row.where, row.scores, row.cells) for i, row in enumerate(rows, start=1)]
        scores = [row for finding in findings for row in finding.rows]
        made.append(
            DrawnTable(
                federation=federation,
                attack=attack,
                rows=rows,
                hidden=len(scores) - len(rows),
                exact=sum(row.exact for row in scores),
                total=len(scores),
                sure=any(row.scores.confidence for row in rows),
            )
        )
    return made


def _drawn(finding: FindingResult) -> Iterator[DrawnRow]:
    client = "" if finding.client is None else f"client {finding.client}, "
    where = f"{client}round {finding.round}" if finding.round is not None else client.rstrip(", ")
    for scores in finding.rows:
        if not scores.true:
            continue
        wrong = set(scores.wrong)
        cells = [
            Cell(
                column=name,
                true=true,
                rebuilt=scores.recovered[i] if scores.recovered else None,
                wrong=i in wrong,
                confidence=scores.confidence[i] if scores.confidence else None,
            )
            for i, (name, true) in enumerate(zip(finding.columns, scores.true, strict=True))
        ]
        yield DrawnRow(0, where, scores, cells)


PANELS["rows"] = Panel("Rows", "parts/rows.html.j2", lambda result, images: drawn_tables(result))  # noqa: ARG005
