"""``fedaudit convert``: a transcript that an earlier version wrote, or a folder of boosters, in today's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedaudit.cli.options import folder


def convert(
    old: Annotated[Path, typer.Argument(help="Folder that an earlier fedaudit wrote, or of xgboost's boosters.")],
    new: Annotated[Path, typer.Argument(parser=folder, metavar="NEW", help="New folder.")],
) -> None:
    """Convert a transcript of an earlier version, or recorded boosters, with the truth; the old folder stays."""
    from fedaudit.capture.boosters import convert_boosters
    from fedaudit.transcript.files import BOOSTERS
    from fedaudit.transcript.older import convert_folder

    for note in convert_boosters(old, new) if (old / BOOSTERS).is_file() else convert_folder(old, new):
        print(f"note: {note}")
    print(f"converted: {new}")
