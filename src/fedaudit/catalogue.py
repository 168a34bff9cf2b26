"""What there is, for people and for programs; and a finished audit as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
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
    """Print one line per entry, and under an attack whose it is, who can play it and what it needs."""
    console = wide_console()
    for kind, entries in shown.items():
        console.print(kind, style="bold")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, style="cyan")
        grid.add_column()
        for entry in entries:
            grid.add_row("  " + entry["name"], escape(entry["summary"]))
            if kind == "attacks":
                for key in ("paper", "threat_model", "needs"):
                    grid.add_row("", f"[dim]{key.replace('_', ' ')}: {escape(_text(entry[key]))}[/]")
        console.print(grid if entries else "  none yet")


def wide_console() -> Console:
    """Return a console as wide as the terminal, or wide enough for our tables where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)


def print_summary(result: AuditResult) -> None:
    """Print one row per attack and federation."""
    console = wide_console()
    title = escape(f"{result.name}: {result.adversary.adversary}")
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for column in ("federation", "attack", "verdict"):
        table.add_column(column, no_wrap=True)
    for column in ("PSNR dB [95 %]", "SSIM", "identified", "n"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result.summaries:
        table.add_row(
            row.federation,
            row.attack,
            row.verdict,
            _interval(row.psnr, 1),
            f"{row.ssim.mean:.2f}" if row.ssim else "-",
            "-" if row.identification_rate is None else f"{row.identification_rate:.0%}",
            str(row.images),
        )
    console.print(table)
    for row in result.summaries:
        if row.verdict == "not applicable":
            print(row.verdict_text)
    for c in result.comparisons:
        d = c.difference
        print(f"{c.federation}: {c.a} - {c.b}: {d.mean:+.2f} dB [{d.low:+.2f}, {d.high:+.2f}], n = {d.n}: {c.outcome}")


def _interval(value: Interval | None, digits: int) -> str:
    return "-" if value is None else f"{value.mean:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"
