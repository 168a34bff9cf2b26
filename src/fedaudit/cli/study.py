"""The commands ``fedaudit study …``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedaudit.cli.announce import announce
from fedaudit.cli.options import DataDir, Workers, check_data_dir, number_of_workers
from fedaudit.utils.errors import FedAuditError

study = typer.Typer(no_args_is_help=True, help="Grids of audits: tables and figures that resume.")


@study.command("list")
def study_list(json_output: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """List the built-in studies."""
    from fedaudit.cli.catalogue import catalogue, print_catalogue

    found = catalogue(["studies"])
    if json_output:
        import json

        print(json.dumps(found, indent=2))
    else:
        print_catalogue(found)


@study.command("show")
def study_show(name: Annotated[str, typer.Argument(help="A built-in study, or a YAML file.")]) -> None:
    """Show a study: its axes, what each scale changes, its claims."""
    from fedaudit.cli.study_commands import describe

    describe(name)


@study.command("run")
def study_run(
    name: Annotated[str, typer.Argument(help="A built-in study, or a YAML file.")],
    out: Annotated[Path, typer.Option(help="Folder for the store and the results.")],
    scale: Annotated[str, typer.Option(help="smoke, cpu or paper.")] = "smoke",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="key=value, as in a scenario, on each of them: attacks.0.iterations=9. Repeatable.",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="axis=level: leave out that axis's others. Repeatable.", show_default=False)
    ] = None,
    workers: Workers = None,
    data_dir: DataDir = None,
    again: Annotated[
        bool, typer.Option("--again", help="Run anew what another version of code, torch, data or device did.")
    ] = False,
    keep_old: Annotated[
        bool, typer.Option("--keep-old", help="Keep that; the result says which trials it is.")
    ] = False,
    estimated: Annotated[
        bool, typer.Option("--estimate/--no-estimate", help="Say beforehand how long it takes: runs a little of each.")
    ] = True,
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster to run on.", show_default=False)] = None,
    ray_cpus: Annotated[float, typer.Option(min=0, help="Cores a trial, on Ray.")] = 1,
    ray_gpus: Annotated[float, typer.Option(min=0, help="GPUs a trial, on Ray.")] = 0,
) -> None:
    """Run a study, or go on with it: what the folder holds already isn't run again."""
    check_data_dir(data_dir)
    announce(f"study {name} at scale {scale}", number_of_workers(workers) if ray is None else None)
    from fedaudit.cli.study_commands import run

    failed = run(
        name,
        out,
        scale=scale,
        overrides=settings or [],
        only=only or [],
        workers=number_of_workers(workers),
        data_dir=data_dir,
        again=again,
        keep_old=keep_old,
        estimated=estimated,
        ray_address=ray,
        ray_resources=(ray_cpus, ray_gpus),
    )
    if failed:
        raise FedAuditError(
            f"{failed} trials failed; 'fedaudit study log {out}' says why, the same command tries again"
        )


@study.command("report")
def study_report(
    folder: Annotated[Path, typer.Argument(help="Of a study.")],
    metric: Annotated[str | None, typer.Option(help="Another one than the study's.", show_default=False)] = None,
) -> None:
    """Draw a study's table, figure and page from what the folder holds."""
    from fedaudit.cli.study_commands import report

    report(folder, metric)


@study.command("log")
def study_log(
    folder: Annotated[Path, typer.Argument(help="Of a study.")],
    trial: Annotated[str | None, typer.Argument(help="The start of a trial's key; all trials if absent.")] = None,
) -> None:
    """Show every trial's state, or one trial's scenario, result and error."""
    from fedaudit.cli.study_log import log

    log(folder, trial)
