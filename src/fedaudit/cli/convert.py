"""``fedaudit convert``: a transcript that an earlier version wrote, in today's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedaudit.cli.options import folder


def convert(
    old: Annotated[Path, typer.Argument(help="Folder that an earlier fedaudit wrote.")],
    new: Annotated[Path, typer.Argument(parser=folder, metavar="NEW", help="New folder.")],
) -> None:
    """Convert a transcript of an earlier version, with its truth, to today's format; the old folder stays."""
    from fedaudit.transcript.older import convert_folder

    for note in convert_folder(old, new):
        print(f"note: {note}")
    print(f"converted: {new}")
