"""The face: audit, simulate, attack, list, doctor, bench. Heavy imports happen inside the commands."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedaudit import __version__
from fedaudit.errors import BadInput, FedAuditError

if TYPE_CHECKING:
    from fedaudit.auditing import Audit

app = typer.Typer(
    name="fedaudit",
    help="What does a federation leak, to whom, and what does each defence cost?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", envvar="FEDAUDIT_DATA", help="Folder of data sets that aren't embedded.")
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="key=value; dotted keys; may be repeated.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Processes for the attacks; default: all cores.")]
Limits = Annotated[
    list[str] | None, typer.Option("--fail-above", help="metric=limit, e.g. psnr=20: exit 1 if exceeded; repeatable.")
]


class Kind(StrEnum):
    """What can be listed."""

    attacks = "attacks"
    defences = "defences"
    models = "models"
    datasets = "datasets"
    studies = "studies"


@app.command()
def audit(
    scenario: Annotated[Path | None, typer.Argument(help="YAML file; the embedded default if left out.")] = None,
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the scenario's.", min=0)] = None,
    data_dir: DataDir = None,
    out: Annotated[Path, typer.Option(help="Folder for report.html, results.json and scenario.yaml.")] = Path("audit"),
    workers: Workers = None,
    fail_above: Limits = None,
) -> None:
    """Simulate a federation, attack what the adversary sees, and write a report."""
    from fedaudit.auditing import run_audit
    from fedaudit.progress import live_display
    from fedaudit.scenario import load_scenario

    loaded = load_scenario(scenario, settings, seed)
    limits = _limits(fail_above)
    _check_folder(out)
    with live_display() as display:
        finished = run_audit(
            loaded,
            data_dir=data_dir,
            workers=_workers(workers),
            store=out / "findings",
            limits=limits,
            display=display,
        )
    _conclude(finished, out)


@app.command()
def simulate(
    scenario: Annotated[Path | None, typer.Argument(help="YAML file; the embedded default if left out.")] = None,
    out: Annotated[Path, typer.Option(help="New folder for the transcript.")] = Path("transcript"),
    federation: Annotated[str | None, typer.Option(help="Which federation, if the scenario has several.")] = None,
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the scenario's.", min=0)] = None,
    data_dir: DataDir = None,
) -> None:
    """Simulate one federation and write what travelled; the ground truth goes to a file of its own."""
    from fedaudit.auditing import record
    from fedaudit.errors import unknown_name
    from fedaudit.federation.truth import FILE
    from fedaudit.preparation import resolve
    from fedaudit.progress import live_display
    from fedaudit.scenario import load_scenario

    loaded = resolve(load_scenario(scenario, settings, seed))
    names = [spec.name for spec in loaded.federations]
    if federation is None and len(names) > 1:
        raise BadInput(f"the scenario has {len(names)} federations; choose one with --federation: {', '.join(names)}")
    if federation is not None and federation not in names:
        raise BadInput(unknown_name("federation", federation, names))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"'{out}' exists and isn't an empty folder; choose a new one for the transcript")
    with live_display() as display:
        (recording,), _, _ = record(loaded, names=[federation or names[0]], data_dir=data_dir, display=display)
    recording.transcript.save(out)
    recording.truth.save(out / FILE)
    print(f"{recording.transcript.updates} updates in {len(recording.transcript.rounds)} round(s): {out}")
    print(f"ground truth, for the evaluation only: {out / FILE}")


@app.command()
def attack(
    transcript: Annotated[Path, typer.Argument(help="Folder written by 'fedaudit simulate'.")],
    attacks: Annotated[list[str], typer.Option("--attack", help="Attack to play; may be repeated.")],
    settings: Settings = None,
    adversary: Annotated[str, typer.Option(help="server, eavesdropper or client")] = "server",
    knows_labels: Annotated[bool, typer.Option(help="Use the labels, if the transcript grants them.")] = False,
    seed: Annotated[int | None, typer.Option(help="Instead of the scenario's.", min=0)] = None,
    out: Annotated[Path, typer.Option(help="Folder for what was recovered, and the report.")] = Path("audit"),
    workers: Workers = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    truth: Annotated[
        Path | None, typer.Option(help="Ground truth for the evaluation; default: the transcript's, if it is there.")
    ] = None,
    fail_above: Limits = None,
) -> None:
    """Attack a transcript on disk; evaluate afterwards, if the ground truth is there."""
    from fedaudit.offline import attack_transcript
    from fedaudit.progress import live_display
    from fedaudit.scenario import parse_setting

    limits = _limits(fail_above)
    _check_folder(out)
    with live_display() as display:
        finished = attack_transcript(
            transcript,
            attacks,
            dict(parse_setting(text) for text in settings or []),
            threat={"adversary": adversary, "knows_labels": knows_labels},
            seed=seed,
            device=device,
            out=out,
            workers=_workers(workers),
            truth=truth,
            limits=limits,
            display=display,
        )
    if finished is None:
        print(f"recovered images: {out / 'images'} (not evaluated: no ground truth)")
        return
    _conclude(finished, out)


@app.command("list")
def list_command(
    kind: Annotated[Kind | None, typer.Argument(help="One kind only.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="For programs: one array per kind.")] = False,
) -> None:
    """Show the attacks, defences, models, data sets and studies that there are."""
    from fedaudit.catalogue import catalogue, print_catalogue

    shown = catalogue([kind.value] if kind else [k.value for k in Kind])
    if json_output:
        import json

        print(json.dumps(shown, indent=2))
    else:
        print_catalogue(shown)


@app.command()
def doctor(data_dir: DataDir = None) -> None:
    """Show versions, threads, GPU, and which data sets and weights are found."""
    from fedaudit.doctor import examine

    examine(data_dir)


bench = typer.Typer(no_args_is_help=True, help="Measure how fast fedaudit is here.")
app.add_typer(bench, name="bench")


@bench.command("inversion")
def bench_inversion(
    quick: Annotated[bool, typer.Option(help="Few repetitions, small models.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Time one step of every gradient-inversion engine."""
    from fedaudit.bench import print_bench, time_inversion

    print_bench(time_inversion(quick=quick), json_output)


def _limits(texts: list[str] | None) -> dict[str, float]:
    from fedaudit.api import check_limits

    limits = {}
    for text in texts or []:
        metric, _, value = text.partition("=")
        try:
            limits[metric.strip()] = float(value)
        except ValueError:
            raise BadInput(f"--fail-above {text}: expected metric=number, for example psnr=20") from None
    check_limits(limits)
    return limits


def _check_folder(out: Path) -> None:
    """Find out before hours of work whether the results can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".write-test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInput(f"can't write to '{out}': {error.strerror or error}") from None


def _workers(workers: int | None) -> int:
    import os

    return workers or os.cpu_count() or 1


def _conclude(finished: Audit, out: Path) -> None:
    from fedaudit.catalogue import print_summary

    report = finished.save(out)
    print_summary(finished.result)
    print(f"report: {report}")
    if finished.exceeded:
        for limit in finished.result.thresholds:
            if limit.exceeded:
                print(f"above your limit: {limit.metric} {limit.worst:.3g} > {limit.limit:g} ({limit.where})")
        raise typer.Exit(1)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; every error of ours, or in the use of a flag, is one line and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except FedAuditError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted; the same command goes on where it stopped", code=130)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        _fail(" ".join(error.format_message().split()))  # a wrong flag or argument, from the command-line library
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int = 2) -> None:
    print(f"fedaudit: error: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
