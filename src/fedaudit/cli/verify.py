"""``fedaudit verify``: whether an audit's numbers follow from its findings. Heavy imports happen inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedaudit.cli import options
from fedaudit.utils.errors import BadInput
from fedaudit.utils.version import __version__

_MOST = 20  # of the differences, as many are told


def verify(
    folder: Annotated[Path, typer.Argument(help="Folder of an audit, or of a statement.")],
    of: Annotated[
        list[Path] | None,
        typer.Option("--of", help="If 'fedaudit statement' made it: a folder that it was made of; repeatable."),
    ] = None,
    transcript: Annotated[
        Path | None, typer.Option(help="If 'fedaudit attack' made it: the folder of the transcript.")
    ] = None,
    truth: Annotated[
        Path | None, typer.Option(help="File with the ground truth; default: the transcript's own.")
    ] = None,
    data_dir: options.DataDir = None,
    model: options.OwnModel = None,
    checkpoint: options.OwnCheckpoint = None,
    loss: options.OwnLoss = None,
    mean: options.Mean = None,
    std: options.Std = None,
    input_shape: options.InputShape = None,
    batch_norm: options.BatchNorm = None,
    task_file: options.Task = None,
    rounds: options.Rounds = None,
    records: options.Records = None,
    workers: options.Workers = None,
) -> None:
    """Recompute an audit's numbers from its findings, or a statement, and show differences; exit 2 if there are any."""
    if of or ((folder / "statement.json").is_file() and not (folder / "results.json").is_file()):
        _statement(folder, of or [])
        return
    task = options.task_of(mean, std, input_shape, batch_norm, task_file)
    own = options.own_parts(model, checkpoint, loss, task, rounds)
    options.check_data_dir(data_dir)
    from fedaudit import api

    processes = options.number_of_workers(workers)
    found = api.verify(
        folder, transcript=transcript, truth=truth, records=records, data_dir=data_dir, workers=processes, **own
    )
    for note in dict.fromkeys(found.notes):
        print(f"note: {note}")
    _refuse(found.differences, f"'{folder}' doesn't match its findings")
    page = " and its page" if (folder / "report.html").is_file() else ""
    print(
        f"{found.values:,} values of results.json, its images{page} match {found.findings} saved findings, "
        "the scenario and the truth"
    )


def _statement(folder: Path, of: list[Path]) -> None:
    from fedaudit.cli.statement import verify_statement

    stored, found = verify_statement(folder, of)
    if stored.fedaudit_version != __version__:
        print(f"note: made with fedaudit {stored.fedaudit_version}, and here it is {__version__}")
    _refuse(found, f"'{folder}' doesn't match what it was made of" if of else f"the files in '{folder}' don't hold")
    print(f"statement.json and statement.html belong together; valid until {stored.valid_until or 'no date'}")
    if of:
        print("all of it follows from what it was made of; next: verify the audits' own folders")
    else:
        print("next: give --of and each folder that it was made of, and verify the audits' own folders")


def _refuse(differences: list[str], what: str) -> None:
    for line in differences[:_MOST]:
        print(f"differs: {line}")
    if len(differences) > _MOST:
        print(f"differs: and {len(differences) - _MOST} more")
    if differences:
        raise BadInput(f"{what}: {len(differences)} {'differences' if len(differences) > 1 else 'difference'}")
