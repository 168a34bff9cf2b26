"""The commands ``fedaudit study …``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedaudit import FedAuditError
from fedaudit.cli import DataDir, Kind, Workers, check_data_dir, list_command, number_of_workers

study = typer.Typer(
    no_args_is_help=True, help="Run grids of audits; get tables and figures. An interrupted study resumes."
)


@study.command("list")
def study_list(json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the built-in studies."""
    list_command(Kind.studies, long=True, json_output=json_output)


@study.command("show")
def study_show(name: Annotated[str, typer.Argument(help="A built-in study, or a YAML file.")]) -> None:
    """Show a study: its axes, what each scale changes, its claims."""
    from fedaudit_lab.cli.study_commands import describe

    describe(name)


@study.command("run")
def study_run(
    name: Annotated[str, typer.Argument(help="A built-in study, or a YAML file.")],
    out: Annotated[Path, typer.Option(help="Folder for finished trials and results.")],
    scale: Annotated[str, typer.Option(help="Size of the study: smoke, cpu or paper.")] = "smoke",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change a setting in every scenario: attacks.0.iterations=9; repeatable.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="axis=level: run only this level of an axis; repeatable.", show_default=False),
    ] = None,
    workers: Workers = None,
    data_dir: DataDir = None,
    again: Annotated[
        bool, typer.Option("--again", help="Rerun trials made with other code, torch, data or device.")
    ] = False,
    keep_old: Annotated[
        bool, typer.Option("--keep-old", help="Keep such trials; the result says which they are.")
    ] = False,
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster to run on.", show_default=False)] = None,
    ray_cpus: Annotated[float, typer.Option(min=0, help="Cores per trial on Ray.")] = 1,
    ray_gpus: Annotated[float, typer.Option(min=0, help="GPUs per trial on Ray.")] = 0,
) -> None:
    """Run or resume a study; finished trials in the folder aren't rerun."""
    check_data_dir(data_dir)
    from fedaudit.utils import live_display
    from fedaudit_lab.cli.study_commands import conclude
    from fedaudit_lab.studies import backends
    from fedaudit_lab.studies.running import check_versions, run_study
    from fedaudit_lab.studies.spec import expand, load_study
    from fedaudit_lab.studies.store import Store

    study, overrides = load_study(name), settings or []
    trials = expand(study, scale, overrides=overrides, only=only)
    store = Store(out)
    try:
        with store.exclusively():
            about = {"name": study.name, "scale": scale, "study": study.model_dump(mode="json"), "overrides": overrides}
            store.plan(about, trials, replace=again)
            check_versions(trials, store, data_dir=data_dir, again=again, keep_old=keep_old)
            here = ray is None
            backend = (
                backends.processes(number_of_workers(workers))
                if ray is None
                else backends.ray(ray, cpus=ray_cpus, gpus=ray_gpus)
            )
            with live_display() as display:
                failed = run_study(study, trials, store, backend=backend, data_dir=data_dir, display=display, here=here)
        conclude(study, scale, store)
    finally:
        store.close()
    if failed:
        raise FedAuditError(
            f"{failed} trials failed; 'fedaudit study log {out}' says why, the same command tries again"
        )


@study.command("report")
def study_report(
    folder: Annotated[Path, typer.Argument(help="Folder of a study.")],
    metric: Annotated[
        str | None, typer.Option(help="Show this metric, not the study's own.", show_default=False)
    ] = None,
) -> None:
    """Draw a study's table, figure and page from the trials in its folder."""
    from fedaudit_lab.cli.study_commands import report

    report(folder, metric)


@study.command("log")
def study_log(
    folder: Annotated[Path, typer.Argument(help="Folder of a study.")],
    trial: Annotated[
        str | None, typer.Argument(help="The first letters of a trial's key; default: all trials.")
    ] = None,
) -> None:
    """Show every trial's state, or one trial's scenario, result and error."""
    from fedaudit_lab.cli.study_log import log

    log(folder, trial)
