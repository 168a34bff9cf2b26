"""A finished audit on the terminal: the report's sentences, a table, and what to do next."""

from __future__ import annotations

import shlex
import textwrap
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from fedaudit.report.advice import without_updates
from fedaudit.report.conclusion import (
    comparison_text,
    control_text,
    different_controls,
    headline,
    setting_text,
    threshold_text,
    uncontrolled,
)
from fedaudit.report.epsilon import certificates
from fedaudit.report.frontier import ORDERS, PSNR, DefenceTable, defence_tables, order, prices, scale, worth_comparing
from fedaudit.report.wording import counted, rests_on, shared
from fedaudit.results import AuditResult, Interval, with_images
from fedaudit.simulation.protocols import protocol_by
from fedaudit.utils.progress import wide_console

_WIDEST_HEAD = 14  # letters, of a column of numbers
_KNOWN = "fedaudit audit scenario.yaml --out DIR"  # a user's own parts, or a transcript, aren't repeated so
_ATTACK = "fedaudit attack "  # of a transcript
_NOTHING = ("present, not extracted", "not demonstrated", "inconclusive", "not applicable")


def print_summary(result: AuditResult) -> None:
    """Print the report's headline, a row per attack and federation, and another table for what isn't images."""
    console = wide_console()
    said = headline(result)
    console.print(f"[bold]{escape(said.title)}[/]", highlight=False)
    for line in (said.setting, said.tested, said.detail, *(f"Caution: {caution}." for caution in said.cautions)):
        if line:
            console.print(escape(line), highlight=False)
    console.print()
    title = escape(f"{result.name}: {result.adversary.adversary}")
    images, others = with_images(result.summaries)
    if images:
        likeness = "correlation" if any(row.correlation for row in images) else "SSIM"
        table = _table(title, ["federation", "attack", "verdict"], ["PSNR dB [95 %]", likeness, "identified", "n"])
        for row in images:
            table.add_row(
                row.federation,
                row.attack,
                row.verdict,
                _interval(row.psnr, 1),
                f"{alike.mean:.2f}" if (alike := row.correlation or row.ssim) else "-",
                "-" if row.identification_rate is None else f"{row.identification_rate:.0%}",
                counted(row),
            )
        console.print(table)
        for row in images:
            if row.named_text:
                print(f"{row.attack} on {row.federation} {row.named_text}")
        several = [
            f"{row.attack} on {row.federation} {row.psnr_of_tries:.1f} dB" for row in images if row.psnr_of_tries
        ]
        if several:
            print(f"of several tries on one victim the best counts, told by the truth; over all: {', '.join(several)}")
    if others:
        measured = ["measured", "value [95 %]", "without the attack", "n"] if any(r.metrics for r in others) else []
        table = _table(title if not images else "", ["federation", "attack", "verdict", *measured[:1]], measured[1:])
        for row in others:
            if not row.metrics:
                table.add_row(row.federation, row.attack, row.verdict, *["-"] * len(measured))
            for i, m in enumerate(row.metrics):
                first = [row.federation, row.attack, row.verdict] if i == 0 else [""] * 3
                name = f"{m.name} ({m.unit})" if m.unit else m.name
                value = f"{m.value.mean:.3g}{m.value.span('{:.3g}'.format)}"
                n, of = rests_on(m, row, result)
                baseline = f"{m.baseline.mean:.3g}" if m.baseline else "-"
                table.add_row(*first, name, value, baseline, f"{n} {of}".strip())
        console.print(table)
    tables = defence_tables(result)
    for one in tables:
        console.print(_defences(one))
        print(one.recommendation)
    if worth_comparing(result) and not tables:
        console.print(_price(result))
    if worth_comparing(result):
        for line in certificates(result):
            print(line)
    for f in result.federations:
        if f.history and f.history.stopped is not None:
            why = f.history.why_stopped or "the privacy budget was spent"
            print(f"{f.name}: {f.history.stopped} of {f.rounds} rounds ran, then {why}")
    for f in result.federations:
        if f.checks:
            seen = [f"{c.name} ({c.text})" for c in f.checks if c.noticed]
            print(f"{f.name}: would a client notice? {'; '.join(seen) if seen else 'no check raises an alarm'}")
    for line in dict.fromkeys(f"{s.federation}: {setting_text(result, s)}" for s in result.summaries if s.setting):
        if not line.endswith(f": {said.setting}"):
            print(line)
    rows = [row for row in result.summaries if row.verdict == "not applicable" or row.metrics]
    for whom, text, _ in shared((row.attack, row.federation, row.verdict_text) for row in rows):
        print(f"{whom}: {text}")
    for c in result.comparisons:
        print(f"{c.federation}: {comparison_text(c)}")
    for text in [*map(control_text, different_controls(result)), *uncontrolled(result)]:
        print(f"control: {text}")
    for margin in result.margins:
        if margin.steps:
            print(f"margin of {margin.federation}: {margin.text}")
    for ceiling in result.ceilings:
        print(f"ceiling of {ceiling.federation}: {ceiling.text}")
    advised = [(s.attack, s.federation, f"{s.verdict}; {advice}") for s in result.summaries for advice in s.advice]
    for whom, text, _ in shared(advised):
        print(f"{whom}: {text}")
    for threshold in result.thresholds:
        print(threshold_text(threshold))


def next_step(result: AuditResult, report: Path) -> str:
    """Return what to do next in a line: open ``report`` and, where something leaked, see which defences help."""
    text = f"next: open {report}"
    defended = any(not f.undefended for f in result.federations) or without_updates(result)
    if headline(result).verdict in _NOTHING or defended or not result.repeat.startswith(_KNOWN):
        return text
    return f"{text}; to compare defences: {_again(result, report, '--compare-defences', 'defences')}"


def deployed_step(result: AuditResult, report: Path) -> str:
    """Return the command that asks a diagnostic's question of a deployment, or why there is none; empty: no need."""
    diagnostic = any(summary.setting == "diagnostic" for summary in result.summaries)
    if diagnostic and (
        said := next(filter(None, (protocol_by(f.algorithm).deployment for f in result.federations)), "")
    ):
        return said
    if diagnostic and result.repeat.startswith(_ATTACK):
        return "this was a diagnostic; what travelled can't be changed: simulate a deployment, or record yours"
    if not result.as_deployed or not result.repeat.startswith(_KNOWN):
        return ""
    changes = " ".join(f"--set {shlex.quote(setting)}" for setting in result.as_deployed)
    return f"this was a diagnostic; of a deployment: {_again(result, report, changes, 'deployment')}"


def _again(result: AuditResult, report: Path, changes: str, name: str) -> str:
    """Return the command that repeats the audit with changes, in a folder beside this one's."""
    folder = report.parent if report.parent.name not in ("", "..") else report.parent.resolve()
    scenario, out = shlex.quote(str(folder / "scenario.yaml")), shlex.quote(f"{folder}-{name}")
    return f"fedaudit audit {scenario} {changes} --out {out}{result.repeat.removeprefix(_KNOWN)}"


def _defences(table: DefenceTable) -> Table:
    """Return what each defence of a federation still leaks, and what it costs."""
    shown = _table(
        f"{table.federation}: which defence, at what price",
        ["defence", "verdict", "still leaks [95 %]", "accuracy", "accuracy lost", "an update", "odds change at most"],
        [],
    )
    for row in table.rows:
        told = row.guarantee.rsplit(": ", 1)[-1].rsplit("at most ", 1)[-1]
        odds = {"none": "no bound", "it bounds nothing in practice": "no bound in practice"}.get(told, told)
        shown.add_row(row.federation, row.verdict, row.leak, row.accuracy, row.lost, row.bytes, odds)
    return shown


def _price(result: AuditResult) -> Table:
    """Return the comparison of leakage, accuracy and cost, sorted as the scenario says."""
    table = _table(
        f"what each federation leaks and costs, {ORDERS[order(result)][1]} first",
        ["federation", "strongest attack"],
        [
            f"leaks: {scale(result).label} [95 %]",
            "identified",
            "accuracy",
            "kB an update",
            "of training time",
            "epsilon",
        ],
    )
    images = scale(result) == PSNR
    for row in prices(result):
        table.add_row(
            row.federation,
            row.strongest,
            _interval(row.leak, 1 if images else 2),
            "-" if row.identified is None else f"{row.identified:.0%}",
            "-" if row.accuracy is None else f"{row.accuracy:.1%}",
            f"{row.bytes / 1000:,.1f}",
            f"{row.overhead:+.1%}",
            "-" if row.epsilon is None else f"{row.epsilon:.2f}",
        )
    return table


def _table(title: str, left: list[str], right: list[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for column in left:  # where a terminal is too narrow names go on in the next line, and no number is cut
        table.add_column(column, overflow="fold")
    for column in right:
        table.add_column(textwrap.fill(column, _WIDEST_HEAD), justify="right", no_wrap=True)
    return table


def _interval(value: Interval | None, digits: int) -> str:
    return "-" if value is None else f"{value.mean:.{digits}f}{value.span(f'{{:.{digits}f}}'.format)}"
