"""``fedaudit ceiling``: what any attack could get. Heavy imports happen inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedaudit.cli import options
from fedaudit.utils.errors import BadInput


def ceiling(
    source: Annotated[
        Path | None,
        typer.Argument(help="A scenario's YAML file, or a recording's folder; default: the built-in scenario."),
    ] = None,
    settings: options.Settings = None,
    seed: options.Seed = None,
    data_dir: options.DataDir = None,
    out: Annotated[
        Path, typer.Option(parser=options.folder, metavar="FOLDER", help="Folder for report.html and results.json.")
    ] = Path("ceiling"),
    overwrite: options.Overwrite = False,
    model: options.OwnModel = None,
    checkpoint: options.OwnCheckpoint = None,
    loss: options.OwnLoss = None,
    mean: options.Mean = None,
    std: options.Std = None,
    input_shape: options.InputShape = None,
    batch_norm: options.BatchNorm = None,
    task_file: options.Task = None,
    rounds: options.Rounds = None,
    truth: Annotated[
        Path | None, typer.Option(help="Of a recording: file with the ground truth; default: its own.")
    ] = None,
    fail_above: options.FailAbove = None,
) -> None:
    """Compute how much updates determine of their examples, whoever attacks, and what lowers it; no attack is run.

    With --fail-above ceiling=20: exit 1 if it is higher, 3 if that can't be told.
    """
    task = options.task_of(mean, std, input_shape, batch_norm, task_file)
    own = options.own_parts(model, checkpoint, loss, task, rounds)
    limits = options.limits_of(fail_above, None, None, None)
    limit = limits["fail_above"].get("ceiling")
    options.check_data_dir(data_dir)
    recording = source is not None and source.is_dir()
    of_recording = {"--model": model, "--checkpoint": checkpoint, "--loss": loss, "--rounds": rounds, "--mean": mean}
    of_recording |= {"--std": std, "--input-shape": input_shape, "--batch-norm": batch_norm, "--task": task_file}
    wrong = {"--set": settings, "--data-dir": data_dir} if recording else {**of_recording, "--truth": truth}
    if given := [flag for flag, value in wrong.items() if value is not None and value != []]:
        raise BadInput(f"{given[0]} is for {'a scenario' if recording else 'a recording: give its folder'}")
    from fedaudit.evaluation import Limits
    from fedaudit.pipeline import offline, run
    from fedaudit.pipeline.ceilings import between
    from fedaudit.pipeline.output import clear
    from fedaudit.utils.progress import live_display

    options.check_folder(out)
    if (out / "results.json").exists() and not overwrite:
        raise BadInput(f"'{out}' holds another report: take another folder with --out, or --overwrite")
    if source is not None and recording:
        request = offline.AttackRequest(transcript=source, **own, seed=seed, truth=truth)
        finished = offline.ceilings_of(request, limit=limit)
    else:
        loaded = options.scenario_of(source, settings, seed)
        with live_display() as display:
            finished = run.ceilings_of(loaded, data_dir=data_dir, display=display, limit=limit)
    if (out / "results.json").exists():
        clear(out)
    finished = finished.held_to(Limits(**limits))
    finished.save(out)
    for one in finished.result.ceilings:
        print(f"{one.federation}: {one.text}")
        if one.changes:
            print("For whoever matches an update to 1 in 10,000:")
        for change in one.changes:
            told = change.reason or between(change.low or 0.0, change.high or 0.0, one.unit)
            print(f"  {change.text}: {told}")
    print(f"report: {out / 'report.html'}")
    if code := options.exit_code(finished.result):
        raise typer.Exit(code)
