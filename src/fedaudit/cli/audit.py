"""The commands that audit: ``fedaudit audit``, ``simulate`` and ``attack``. Heavy imports happen inside them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedaudit.cli.options import (
    DataDir,
    Seed,
    Settings,
    Workers,
    check_data_dir,
    check_folder,
    folder,
    number_of_workers,
)
from fedaudit.utils.errors import BadInput

if TYPE_CHECKING:
    from fedaudit.pipeline.run import Audit

Limits = Annotated[
    list[str] | None, typer.Option("--fail-above", help="metric=limit, e.g. psnr=20: exit 1 if exceeded; repeatable.")
]


def audit(
    scenario: Annotated[Path | None, typer.Argument(help="YAML file; the embedded default if left out.")] = None,
    settings: Settings = None,
    seed: Seed = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path, typer.Option(parser=folder, metavar="FOLDER", help="For report.html, results.json and scenario.yaml.")
    ] = Path("audit"),
    workers: Workers = None,
    fail_above: Limits = None,
) -> None:
    """Simulate a federation, attack what the adversary sees, and write a report."""
    from fedaudit.scenario import load_scenario

    loaded = load_scenario(scenario, settings, seed)
    limits = _limits(fail_above)
    check_data_dir(data_dir)
    check_folder(out)
    from fedaudit.pipeline.run import run_audit  # after the checks: it takes seconds to import
    from fedaudit.utils.progress import live_display

    with live_display() as display:
        finished = run_audit(
            loaded,
            data_dir=data_dir,
            workers=number_of_workers(workers),
            store=out / "findings",
            limits=limits,
            display=display,
        )
    _conclude(finished, finished.save(out))


def simulate(
    scenario: Annotated[Path | None, typer.Argument(help="YAML file; the embedded default if left out.")] = None,
    out: Annotated[Path, typer.Option(parser=folder, metavar="FOLDER", help="A new one, for the transcript.")] = Path(
        "transcript"
    ),
    federation: Annotated[str | None, typer.Option(help="Which federation, if the scenario has several.")] = None,
    settings: Settings = None,
    seed: Seed = None,
    data_dir: DataDir = None,
    workers: Workers = None,
) -> None:
    """Simulate one federation and write what travelled; the ground truth goes to a file of its own."""
    from fedaudit import api
    from fedaudit.federation.truth import FILE
    from fedaudit.scenario import load_scenario

    loaded = load_scenario(scenario, settings, seed)
    check_data_dir(data_dir)
    recording = api.simulate(
        loaded, federation=federation, data_dir=data_dir, out=out, workers=number_of_workers(workers)
    )
    print(f"{recording.transcript.updates} updates in {len(recording.transcript.rounds)} round(s): {out}")
    print(f"ground truth, for the evaluation only: {out / FILE}")


def attack(
    transcript: Annotated[Path, typer.Argument(help="Folder written by 'fedaudit simulate'.")],
    attacks: Annotated[list[str], typer.Option("--attack", help="Attack to run; may be repeated.")],
    settings: Settings = None,
    adversary: Annotated[str, typer.Option(help="server, eavesdropper or client")] = "server",
    knows_labels: Annotated[bool, typer.Option(help="Use the labels, if the transcript grants them.")] = False,
    knows_training: Annotated[bool, typer.Option(help="Know how clients train.")] = True,
    knows_public_data: Annotated[bool, typer.Option(help="Have public data of the clients' kind.")] = False,
    seed: Annotated[
        int | None, typer.Option(help="Of the attacks; default: the simulation's.", min=0, max=2**63 - 1)
    ] = None,
    out: Annotated[
        Path, typer.Option(parser=folder, metavar="FOLDER", help="For what was recovered, and the report.")
    ] = Path("audit"),
    workers: Workers = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    truth: Annotated[
        Path | None, typer.Option(help="Ground truth for the evaluation; default: the transcript's, if it is there.")
    ] = None,
    fail_above: Limits = None,
) -> None:
    """Attack a transcript on disk; evaluate afterwards, if the ground truth is there."""
    from fedaudit import api
    from fedaudit.scenario import parse_setting

    limits = _limits(fail_above)
    given = dict(parse_setting(text) for text in settings or [])
    finished = api.attack(
        transcript,
        [{"name": name, **given} for name in attacks],
        threat={
            "adversary": adversary,
            "knows_labels": knows_labels,
            "knows_training": knows_training,
            "knows_public_data": knows_public_data,
        },
        seed=seed,
        device=device,
        truth=truth,
        out=out,
        workers=number_of_workers(workers),
        fail_above=limits,
    )
    if isinstance(finished, list):
        print(f"not evaluated: no ground truth; what was recovered is listed in {out / 'findings.json'}")
        return
    _conclude(finished, out / "report.html")


def _limits(texts: list[str] | None) -> dict[str, float]:
    from fedaudit.evaluation import check_limits

    limits = {}
    for text in texts or []:
        metric, _, value = text.partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if not math.isfinite(limit):
            raise BadInput(f"--fail-above {text}: expected metric=number, for example psnr=20")
        if metric.strip() in limits:
            raise BadInput(f"--fail-above {text}: '{metric.strip()}' has a limit already; give one")
        limits[metric.strip()] = limit
    check_limits(limits)
    return limits


def _conclude(finished: Audit, report: Path) -> None:
    from fedaudit.report.terminal import print_summary

    print_summary(finished.result)
    print(f"report: {report}")
    ran = any(finding.status == "done" for finding in finished.result.findings)
    why = "nothing that was run here measures it" if ran else "no attack could be run"
    for limit in finished.result.thresholds:
        if limit.worst is None:
            print(f"your limit for {limit.metric} was not tested: {why}")
        elif limit.exceeded:
            print(f"above your limit: {limit.metric} {limit.worst:.3g} > {limit.limit:g} ({limit.where})")
    if finished.exceeded:
        raise typer.Exit(1)
