"""``fedaudit share``: what a site may share of an audit without its data. Heavy imports happen inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedaudit.cli import options
from fedaudit.utils.progress import tell


def share(
    folder: Annotated[Path, typer.Argument(help="Folder of an audit.")],
    out: Annotated[
        Path, typer.Option(parser=options.folder, metavar="FOLDER", help="Folder to write to, named after the site.")
    ],
    truth: Annotated[
        Path | None,
        typer.Option(hidden=True),  # of earlier versions, which searched for the ground truth itself
    ] = None,
) -> None:
    """Write what may be shared of an audit: no examples, names, records or hashes; exit 2 if one would be in it."""
    from fedaudit.report.share import share as write

    if truth is not None:
        tell("--truth isn't needed any more: whatever it is of, no encoded bytes or hash are shared")
    about = write(folder, out)
    print(f"shared: {out / 'results.json'} and {out / 'report.html'}")
    for line in about.left_out:
        print(f"left out: {line}")
    for line in about.looked_for:
        print(f"searched for: {line}")
    print("next: read report.html, then send the folder; whoever gets several: fedaudit join FOLDER...")
