"""``fedaudit verify``: whether an audit's numbers follow from its findings. Heavy imports happen inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedaudit.cli.options import DataDir, Workers, check_data_dir, number_of_workers
from fedaudit.cli.own import (
    BatchNorm,
    InputShape,
    Mean,
    OwnCheckpoint,
    OwnLoss,
    OwnModel,
    Rounds,
    Std,
    Task,
    loss_of,
    rounds_of,
    task_of,
)
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
    data_dir: DataDir = None,
    model: OwnModel = None,
    checkpoint: OwnCheckpoint = None,
    loss: OwnLoss = None,
    mean: Mean = None,
    std: Std = None,
    input_shape: InputShape = None,
    batch_norm: BatchNorm = None,
    task_file: Task = None,
    rounds: Rounds = None,
    workers: Workers = None,
) -> None:
    """Recompute an audit's numbers from its saved findings, and show differences; exit 2 if there are any."""
    task, chosen = task_of(mean, std, input_shape, batch_norm, task_file), rounds_of(rounds)
    check_data_dir(data_dir)
    from fedaudit import api
    from fedaudit.pipeline.recordings import own_module

    own_loss, named = loss_of(loss)
    task |= {"loss": named} if named else {}
    found = api.verify(
        folder,
        transcript=transcript,
        truth=truth,
        data_dir=data_dir,
        model=own_module(model, checkpoint) if model else None,
        loss=own_loss,
        task=task,
        rounds=chosen,
        workers=number_of_workers(workers),
    )
    for note in found.notes:
        print(f"note: {note}")
    for line in found.differences[:_MOST]:
        print(f"differs: {line}")
    if len(found.differences) > _MOST:
        print(f"differs: and {len(found.differences) - _MOST} more")
    if found.differences:
        raise BadInput(f"'{folder}' doesn't match its findings: {len(found.differences)} differences")
    print(
        f"{found.values:,} values of results.json, its images and its page match {found.findings} saved findings, "
        "the scenario and the truth"
    )
