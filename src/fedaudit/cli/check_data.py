"""``fedaudit check-data``: what singles records out, before any training. Heavy imports happen inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedaudit.cli import options


def check_data(
    data: Annotated[
        list[Path],
        typer.Argument(help="A table, or one a site; or files of arrays, or folders of pictures (duplicates alone)."),
    ],
    target: Annotated[str | None, typer.Option(metavar="COLUMN", help="What is predicted, and nobody knows.")] = None,
    site: Annotated[str | None, typer.Option(metavar="COLUMN", help="Whose a row is.")] = None,
    by: Annotated[
        list[str] | None,
        typer.Option("--by", metavar="COLUMN", help="What somebody may know of a person; repeatable; default: all."),
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option("--drop", metavar="COLUMN", help="Leave it out; repeatable.")
    ] = None,
    least: Annotated[int, typer.Option(min=2, max=10**6, help="Records of a group that isn't small.")] = 10,
    most: Annotated[int, typer.Option(min=0, max=10**6, help="Records that are named, and duplicates beside.")] = 20,
    fail_below: Annotated[
        int | None, typer.Option(min=2, help="Exit 1 if a group of records that are alike is smaller.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=options.folder, metavar="FOLDER", help="Folder for a page, JSON and CSV; it stays here."),
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Find what singles records out before any training: small groups, unique rows, duplicates; which to test."""
    from dataclasses import asdict

    from fedaudit.data.structure import structure_of
    from fedaudit.report.structure import in_words, told, write_structure
    from fedaudit.utils.errors import BadInput

    found = structure_of(data, target=target, site=site, by=by or [], drop=drop or [], least=least, most=most)
    if fail_below is not None and found.smallest is None:
        raise BadInput("--fail-below is for tables with attributes that somebody may know")
    if out is not None:
        write_structure(found, out)
    if json_output:
        options.print_json(asdict(found))
    else:
        for line in in_words(found):
            print(line)
        if found.records:
            print("test these first:", *map(told, found.records), sep="\n  ")
        if out is not None:
            print(f"page: {out / 'check-data.html'}")
    if fail_below is not None and found.smallest is not None and found.smallest < fail_below:
        raise typer.Exit(options.EXCEEDED)
