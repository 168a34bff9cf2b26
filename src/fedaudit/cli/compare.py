"""``fedaudit compare``: what got worse from one audit to another. Heavy imports happen inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedaudit.cli.options import NOT_TESTED, Json, print_json

if TYPE_CHECKING:
    from fedaudit.report.compare import AuditComparison, Row

REGRESSION = 1
_SETTINGS = 8  # of those that differ, as many are named
_SETTING = {"diagnostic": "a diagnostic", "deployment": "of a deployment"}
_STYLES = {"worse": "bold red", "better": "green", "unchanged": "", "can't be compared": "yellow"}


def compare(
    old: Annotated[Path, typer.Argument(help="Folder of an audit, or its results.json.")],
    new: Annotated[Path, typer.Argument(help="Folder of a later audit, or its results.json.")],
    json_output: Json = False,
) -> None:
    """Compare two audits: what leaks more or less; exit 1 if anything leaks more, 3 if something can't be compared."""
    from fedaudit.report.compare import compare_audits, open_audit

    before, after = open_audit(old), open_audit(new)
    found = compare_audits(before[0], after[0], folders=(before[1], after[1]))
    if json_output:
        print_json(found.for_programs())
    else:
        _show(found)
    if found.regression:
        raise typer.Exit(REGRESSION)
    if not found.tested:
        raise typer.Exit(NOT_TESTED)


def _show(found: AuditComparison) -> None:
    from rich.markup import escape
    from rich.table import Table

    from fedaudit.utils.progress import wide_console

    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("federation", "attack", "outcome"):
        table.add_column(name, no_wrap=True)
    for name in ("old", "new", "difference [95 %]"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for row in found.rows:
        style = _STYLES[row.outcome]
        outcome = f"[{style}]{row.outcome}[/]" if style else row.outcome
        cells = [_number(row.old), _number(row.new), _difference(row)]
        table.add_row(escape(row.federation), escape(row.attack), outcome, *map(escape, cells), _verdict(row))
    console = wide_console()
    counts = {outcome: sum(row.outcome == outcome for row in found.rows) for outcome in _STYLES}
    told = ", ".join(f"{n} {outcome}" for outcome, n in counts.items() if n) or "nothing to compare"
    first = "regression: something leaks more than before" if found.regression else "no regression"
    if not found.regression and not found.tested:
        compared = len(found.rows) - len(found.open)
        first = "not tested: no regression in what could be compared" if compared else "not tested: nothing compares"
    console.print(f"[bold]{first}[/] ({told})", highlight=False)
    console.print()
    console.print(table, highlight=False)
    said: dict[str, dict[str, list[str]]] = {}  # of what, by federation, of which attacks: each thing once
    for row in found.rows:
        if row.reason:
            said.setdefault(f"{row.outcome}; {row.reason}", {}).setdefault(row.federation, []).append(row.attack)
    for row in found.rows:
        if row.moved:
            was, now = (_SETTING[setting] for setting in (row.old_setting, row.new_setting) if setting)
            words = f"{was} before, {now} now; what differs may be the conditions"
            said.setdefault(words, {}).setdefault(row.federation, []).append(row.attack)
    for words, where in said.items():
        who = [f"{', '.join(attacks)} on {name}" for name, attacks in where.items()]
        print(f"{'; '.join(who)}: {words}")
    if found.settings:
        more = len(found.settings) - _SETTINGS
        tail = f" and {more} more" if more > 0 else ""
        print(f"the scenarios differ in {', '.join(found.settings[:_SETTINGS])}{tail}")


def _verdict(row: Row) -> str:
    names = [row.old_verdict or "-", row.new_verdict or "-"]
    return names[0] if names[0] == names[1] else " → ".join(names)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _difference(row: Row) -> str:
    d = row.difference
    if d is None:
        return "-"
    text = f"{d.mean:+.3g}{f' {row.unit}' if row.unit else ''}"
    return text if d.low is None or d.high is None else f"{text} [{d.low:+.3g}, {d.high:+.3g}], n = {d.n} {d.of}"
