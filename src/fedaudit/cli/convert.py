"""``fedaudit convert``: an earlier version's transcript, or messages as they travelled, in today's format."""

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
    from fedaudit.simulation.protocols import PROTOCOLS
    from fedaudit.transcript.files import travelled
    from fedaudit.transcript.older import convert_folder

    protocol = travelled(old)
    for note in PROTOCOLS[protocol].value.convert(old, new) if protocol else convert_folder(old, new):
        print(f"note: {note}")
    print(f"converted: {new}")
