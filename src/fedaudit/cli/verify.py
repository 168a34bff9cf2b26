"""``fedaudit verify``: whether an audit's numbers follow from its findings. Heavy imports happen inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedaudit.cli import options
from fedaudit.utils.errors import BadInput

_MOST = 20  # of the differences, as many are told


def verify(
    folder: Annotated[Path, typer.Argument(help="Folder of an audit.")],
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
    """Recompute an audit's numbers from its saved findings, and show differences; exit 2 if there are any."""
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
    for line in found.differences[:_MOST]:
        print(f"differs: {line}")
    if len(found.differences) > _MOST:
        print(f"differs: and {len(found.differences) - _MOST} more")
    if found.differences:
        raise BadInput(f"'{folder}' doesn't match its findings: {len(found.differences)} differences")
    page = " and its page" if (folder / "report.html").is_file() else ""
    print(
        f"{found.values:,} values of results.json, its images{page} match {found.findings} saved findings, "
        "the scenario and the truth"
    )
