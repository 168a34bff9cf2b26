"""Options that several commands share, and what is checked before work begins."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import check_folder as check_folder


def folder(given: str | Path) -> Path:
    """Return the folder that was named; an empty name is refused."""
    if not str(given).strip():
        raise typer.BadParameter("the name is empty")
    return Path(given)


DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", envvar="FEDAUDIT_DATA", help="Folder with data sets that don't come with fedaudit."),
]
Workers = Annotated[
    int | None,
    typer.Option("--workers", min=1, max=1024, help="Number of processes; default: one per core."),
]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, max=2**63 - 1, help="Seed to use in place of the scenario's.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting of the scenario: attacks.invg.iterations=600; repeatable."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="If the folder holds another audit, delete its report and images.")
]


def check_data_dir(data_dir: Path | None) -> None:
    """Raise unless the data folder, if there is one, is a folder."""
    if data_dir is not None and not data_dir.is_dir():
        raise BadInput(f"the data folder '{data_dir}' (--data-dir or FEDAUDIT_DATA) isn't a folder")


def number_of_workers(workers: int | None) -> int:
    """Return how many processes to use: as asked, or all cores."""
    return workers or os.cpu_count() or 1
