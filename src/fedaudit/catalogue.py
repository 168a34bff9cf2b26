"""What there is, for people and for programs; and a finished audit as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fedaudit.results import AuditResult, Interval

Catalogue = dict[str, list[dict[str, Any]]]


def catalogue(kinds: Sequence[str]) -> Catalogue:
    """Return name, summary and what else is declared of everything of the given kinds, one array per kind."""
    from fedaudit.attacks import ATTACKS
    from fedaudit.data import DATASETS
    from fedaudit.defences.aggregation import AGGREGATORS
    from fedaudit.defences.sanitising import SANITISERS
    from fedaudit.models import MODELS

    sources: dict[str, list[Any]] = {
        "attacks": [*ATTACKS],
        "defences": [*AGGREGATORS, *SANITISERS],
        "models": [*MODELS],
        "datasets": [*DATASETS],
        "studies": [],
    }
    return {kind: [{"name": e.name, "summary": e.summary, **e.info} for e in sources[kind]] for kind in kinds}


def print_catalogue(shown: Catalogue) -> None:
    """Print one table per kind."""
    console = Console()
    for kind, entries in shown.items():
        if not entries:
            console.print(f"{kind}: none yet", style="bold")
            continue
        columns = [key for key in entries[0] if any(entry.get(key) not in (None, [], "") for entry in entries)]
        table = Table(title=kind, title_justify="left", title_style="bold")
        for column in columns:
            table.add_column(column.replace("_", " "), no_wrap=column == "name")
        for entry in entries:
            table.add_row(*[_text(entry.get(column)) for column in columns])
        console.print(table)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def print_summary(result: AuditResult) -> None:
    """Print one row per attack and federation."""
    console = Console()
    table = Table(title=f"{result.name}: {result.adversary.adversary}", title_justify="left", title_style="bold")
    table.add_column("federation")
    table.add_column("attack")
    table.add_column("verdict")
    for column in ("PSNR dB [95 %]", "SSIM", "identified", "labels", "n", "seconds"):
        table.add_column(column, justify="right")
    for row in result.summaries:
        table.add_row(
            row.federation,
            row.attack,
            row.verdict,
            _interval(row.psnr, 1),
            f"{row.ssim.mean:.2f}" if row.ssim else "-",
            "-" if row.identification_rate is None else f"{row.identification_rate:.0%}",
            "-" if row.label_accuracy is None else f"{row.label_accuracy:.0%}",
            str(row.images),
            f"{row.timing.seconds:.0f}" if row.timing else "-",
        )
    console.print(table)
    for row in result.summaries:
        if row.verdict == "not applicable":
            console.print(row.verdict_text)
    for c in result.comparisons:
        d = c.difference
        console.print(
            f"{c.federation}: {c.a} - {c.b}: {d.mean:+.2f} dB [{d.low:+.2f}, {d.high:+.2f}], n = {d.n}: {c.outcome}",
            markup=False,
        )


def _interval(value: Interval | None, digits: int) -> str:
    return "-" if value is None else f"{value.mean:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"
