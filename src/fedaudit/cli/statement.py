"""``fedaudit statement``: what is signed before updates leave. Heavy imports happen inside the command."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedaudit.cli import options
from fedaudit.utils.errors import BadInput

if TYPE_CHECKING:
    from fedaudit.report.statement import Part, Source, Statement

LONGEST = 300  # characters of what a person is called


def statement(
    sources: Annotated[
        list[Path], typer.Argument(help="Folders of audits, of their shared versions, and of a site's guard.")
    ],
    out: Annotated[
        Path, typer.Option(parser=options.folder, metavar="FOLDER", help="Folder for the page, JSON and metrics.")
    ],
    to: Annotated[str | None, typer.Option("--to", metavar="TEXT", help="To whom the updates go.")] = None,
    reviewer: Annotated[str | None, typer.Option(metavar="TEXT", help="Who reviewed it.")] = None,
    valid_until: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], metavar="YYYY-MM-DD", help="Last day, after which to test again."),
    ] = None,
    max_age: Annotated[
        int | None, typer.Option(min=1, max=36_500, metavar="DAYS", help="Exit 1 if an audit is older; it ends then.")
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Write a page to sign before updates leave; exit 1 if a limit was exceeded, 3 if one wasn't tested or none set."""
    from datetime import UTC

    from fedaudit.report.statement import statement as state
    from fedaudit.report.statement import write_statement

    last = None if valid_until is None else valid_until.date()
    if last is not None and last < datetime.now(UTC).date():
        raise BadInput(f"--valid-until {last} is over already")
    for flag, text in (("--to", to), ("--reviewer", reviewer)):
        if text is not None and not (0 < len(text.strip()) <= LONGEST and text.isprintable()):
            raise BadInput(f"{flag} is a line of 1 to {LONGEST} characters")
    for name in ("results.json", "guard.jsonl"):
        if (out / name).is_file():
            raise BadInput(f"--out '{out}' holds {name}; give the statement a folder of its own")
    made = write_statement(
        state(parts_of(sources), recipient=to, reviewer=reviewer, valid_until=last, max_age=max_age), out
    )
    if json_output:
        options.print_json(made.model_dump(mode="json"))
    else:
        for limit in made.limits:
            line = f"{limit.source}: {limit.text}" if limit.source else limit.text
            print("".join(c if c.isprintable() else " " for c in line))  # a log names its job and site
        for one in made.again[:1]:
            print(f"test again by {one.by}: {one.text}")
        print(f"page: {out / 'statement.html'}")
    if made.outcome != "pass":
        raise typer.Exit(options.EXCEEDED if made.outcome == "fail" else options.NOT_TESTED)


def parts_of(paths: Sequence[Path], known: Sequence[Source] = ()) -> list[Part]:
    """Return what each folder says for a statement; of logs as many bytes as the ``known`` sources have.

    BadInput: one holds neither an audit nor a guard's log, or two are the same.
    """
    from fedaudit.guard.statement import covered, guarded
    from fedaudit.report.statement import Audited, audited, same_in_both

    logs = [one for one in known if one.kind == "guard"]
    found: list[Part] = []
    for path in paths:
        folder = path if path.is_dir() else path.parent
        logged = (folder / "guard.jsonl").is_file() and path.name != "results.json"
        if logged and path.is_dir() and (folder / "results.json").is_file():
            raise BadInput(f"'{path}' holds an audit and a guard's log: name results.json or guard.jsonl in it")
        found.append(guarded(path, covered(path, logs)) if logged else audited(path))
    digests = [source.sha256 for _, source, _ in found]
    if len(set(digests)) < len(digests):
        raise BadInput("two of the sources are the same file; leave one out")
    audits = [same_in_both(one) for said, _, _ in found for one in said if isinstance(one, Audited)]
    if len(set(audits)) < len(audits):
        raise BadInput("two of the sources are one audit, as it is and as it is shared; leave one out")
    return found


def verify_statement(folder: Path, sources: Sequence[Path]) -> tuple[Statement, list[str]]:
    """Return the statement in a folder, and in a line each what doesn't fit; without sources, only its own files."""
    from fedaudit.report.statement import differences, read_statement
    from fedaudit.report.statement import statement as state

    stored = read_statement(folder)
    again = stored
    if sources:
        again = state(
            parts_of(sources, stored.sources),
            recipient=stored.recipient,
            reviewer=stored.reviewer,
            valid_until=next((one.by for one in stored.again if one.why == "given"), None),
            max_age=stored.max_age,
            made=stored.made,
        )
    return stored, differences(stored, again, folder)
