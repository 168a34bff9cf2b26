"""Rows of tables on the report page: true and rebuilt, cell by cell."""

from __future__ import annotations

from dataclasses import dataclass

from fedaudit.evaluation.scores import grouped
from fedaudit.report.panels import PANELS, Panel
from fedaudit.report.wording import place_of
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
    made = []
    for (federation, attack), findings in grouped([f for f in result.findings if f.rows]).items():
        scores = [row for finding in findings for row in finding.rows]
        drawn = [(finding, row) for finding in findings for row in finding.rows if row.true][:SHOWN]
        rows = [DrawnRow(i, place_of(f, result), row, _cells(f, row)) for i, (f, row) in enumerate(drawn, start=1)]
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


def _cells(finding: FindingResult, row: RowResult) -> list[Cell]:
    return [
        Cell(
            column=name,
            true=true,
            rebuilt=row.recovered[i] if row.recovered else None,
            wrong=i in row.wrong,
            confidence=row.confidence[i] if row.confidence else None,
        )
        for i, (name, true) in enumerate(zip(finding.columns, row.true, strict=True))
    ]


PANELS["rows"] = Panel("Rows", "parts/rows.html.j2", lambda result, images: drawn_tables(result))  # noqa: ARG005
