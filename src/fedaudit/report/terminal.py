"""A finished audit as a table on the terminal."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from fedaudit.progress import wide_console
from fedaudit.results import AuditResult, Interval


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
