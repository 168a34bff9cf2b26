"""``fedaudit join``: several sites' audits on one page. Heavy imports happen inside the command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedaudit.cli import options
from fedaudit.utils.errors import BadInput

if TYPE_CHECKING:
    from fedaudit.report.join import Guard, Joined


def join(
    audits: Annotated[
        list[Path],
        typer.Argument(help="Two or more: a folder that 'fedaudit share' or an audit wrote, named as the site."),
    ],
    out: Annotated[
        Path, typer.Option(parser=options.folder, metavar="FOLDER", help="Folder for joined.html and joined.json.")
    ],
    guards: Annotated[
        list[Path] | None,
        typer.Option(
            "--guard", metavar="FOLDER", help="Of a site's guard, or of a statement made of its log; repeatable."
        ),
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Join several sites' audits into one page; exit 1 if a site's limit was exceeded, 3 if one wasn't tested."""
    from fedaudit.report.join import join_audits, open_sites, write_joined

    joined = join_audits(open_sites(audits), _different([one for folder in guards or [] for one in _guards(folder)]))
    write_joined(joined, out)
    if json_output:
        options.print_json(joined.for_programs())
    else:
        _show(joined)
        print(f"page: {out / 'joined.html'}")
    for caution in joined.cautions:
        print(f"note: {caution}", file=sys.stderr)
    if joined.outcome == "fail":
        raise typer.Exit(options.EXCEEDED)
    if joined.outcome == "not tested":
        raise typer.Exit(options.NOT_TESTED)


def _guards(folder: Path) -> list[Guard]:
    """Return what a guard's log says, or a statement that was made of one. BadInput: there is none."""
    from fedaudit.guard.statement import guarded
    from fedaudit.report.join import Guard, Limit
    from fedaudit.report.statement import Guarded, read_statement

    stored = read_statement(folder) if (folder / "statement.json").is_file() else None
    if stored is not None:
        told, limits = stored.guards, stored.limits
    else:
        parts, _, given = guarded(folder)
        told, limits = [one for one in parts if isinstance(one, Guarded)], list(given)
    if not told:
        raise BadInput(f"the statement in '{folder}' is of no guard's log")
    found = {f"{one.site}, {one.job}": one for one in told}
    # what is of no one site's, such as torn lines of the log, stands with the first
    audits = {one.name for one in stored.audits} if stored else set[str]()
    whole = [limit for limit in limits if limit.source not in found and limit.source not in audits]
    return [
        Guard(
            "".join(c if c.isprintable() else " " for c in whose),  # a log names its job and site
            f"{one.sent} left, {one.held} didn't, {one.checked} of those that left were checked; {one.alarmed} left "
            f"after an alarm; {one.privacy.text if one.privacy else 'no ε is accounted for'}",
            tuple(
                Limit(limit.outcome, limit.text)
                for limit in [*(one for one in limits if one.source == whose), *(whole if not place else [])]
            ),
            one.sent,
        )
        for place, (whose, one) in enumerate(found.items())
    ]


def _different(guards: list[Guard]) -> list[Guard]:
    """Return the guards. BadInput: one is there twice."""
    names = [one.whose for one in guards]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"the guard of '{name}' is there twice: leave one out")
    return guards


def _show(joined: Joined) -> None:
    from rich.markup import escape
    from rich.table import Table

    from fedaudit.report.wording import sentence, short
    from fedaudit.utils.progress import wide_console

    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("site", "adversary", *(one.kind for one in joined.counts), "ε", "defences", "limits"):
        table.add_column(name)
    for site in joined.sites:
        verdicts = [told.verdict if (told := site.of_kind(one.kind)) else "not tried" for one in joined.counts]
        epsilon = f"{short(site.demonstrated)} of {short(site.claimed)}" if site.demonstrated is not None else "-"
        cells = [
            site.site,
            site.who,
            *verdicts,
            epsilon,
            ", ".join(site.defences) or "none",
            site.outcome or "none set",
        ]
        table.add_row(*map(escape, cells))
    console = wide_console()
    console.print(f"[bold]{escape(joined.headline)}[/]", highlight=False)
    if joined.detail:
        console.print(escape(sentence(joined.detail)), highlight=False)
    console.print()
    console.print(table, highlight=False)
    for line in joined.together:
        console.print(escape(sentence(line)), highlight=False)
    for one in joined.guards:
        console.print(escape(f"guard of {one.whose}: {one.text}"), highlight=False)
