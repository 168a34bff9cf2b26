"""The command line: every command of ``fedaudit --help``. Heavy imports happen inside the commands."""

from __future__ import annotations

import io
import math
import os
import sys
import warnings
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from fedaudit.cli.bench import bench
from fedaudit.cli.generator import train_generator
from fedaudit.cli.options import DataDir, Workers, check_data_dir, check_folder, folder, number_of_workers
from fedaudit.cli.study import study
from fedaudit.utils.errors import BadInput, FedAuditError
from fedaudit.utils.machine import own_process
from fedaudit.utils.version import __version__

if TYPE_CHECKING:
    from fedaudit.pipeline.run import Audit

INTERRUPTED = 130
HUNG_UP = 141  # what a shell reports of a program whose reader went away

app = typer.Typer(
    name="fedaudit",
    help="What does a federation leak, to whom, and what does each defence cost?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(study, name="study")
app.add_typer(bench, name="bench")
app.command("train-generator")(train_generator)


Seed = Annotated[int | None, typer.Option("--seed", min=0, max=2**63 - 1, help="Instead of the scenario's.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="key=value; dotted keys; may be repeated.")]
Limits = Annotated[
    list[str] | None, typer.Option("--fail-above", help="metric=limit, e.g. psnr=20: exit 1 if exceeded; repeatable.")
]


class Kind(StrEnum):
    """What can be listed."""

    attacks = "attacks"
    defences = "defences"
    behaviours = "behaviours"
    models = "models"
    datasets = "datasets"
    studies = "studies"


@app.command()
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


@app.command()
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


@app.command()
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


@app.command("list")
def list_command(
    kind: Annotated[Kind | None, typer.Argument(help="One kind only.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="For programs: one array per kind.")] = False,
) -> None:
    """Show the attacks, defences, malicious behaviours, models, data sets and studies that there are."""
    from fedaudit.cli.catalogue import catalogue, print_catalogue

    shown = catalogue([kind.value] if kind else [k.value for k in Kind])
    if json_output:
        import json

        print(json.dumps(shown, indent=2))
    else:
        print_catalogue(shown)


@app.command()
def rank(
    scenario: Annotated[
        str | None, typer.Argument(help="YAML file, or a model's name; the embedded default if left out.")
    ] = None,
    settings: Settings = None,
    seed: Seed = None,
    data_dir: DataDir = None,
    json_output: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Tell before any attack whether a network's gradient gives away its input: unknowns and equations by layer."""
    check_data_dir(data_dir)
    from fedaudit.pipeline.rank import for_programs, load, rank_of, show

    analysis = rank_of(load(scenario, settings or [], seed), data_dir=data_dir)
    if json_output:
        import json

        print(json.dumps(for_programs(analysis), indent=2))
    else:
        show(analysis)


@app.command()
def doctor(
    data_dir: DataDir = None,
    build: Annotated[bool, typer.Option("--build", help="Only build the native code for this processor.")] = False,
) -> None:
    """Show versions, threads, GPU, native code, and which data sets and weights are found."""
    from fedaudit.cli.doctor import build_native_code, examine

    if build:
        build_native_code()
    else:
        examine(data_dir)


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


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; every error of ours, or in the use of a flag, is one line and exit code 2."""
    own_process()
    if not sys.warnoptions:  # a library's warning isn't an answer to the user; -W shows them
        warnings.simplefilter("ignore")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a letter must not end an audit
    try:
        code = app(standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except FedAuditError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        _hang_up()
    except SystemExit as error:  # from the command-line library
        if isinstance(error.__context__, BrokenPipeError):
            _hang_up()
        raise
    except OSError as error:
        if error.filename is not None:
            raise
        _fail(f"can't write the output: {error.strerror or error}")
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.exit(2)  # the help has been printed
        if hasattr(error, "format_message"):  # a wrong flag or argument, from the command-line library
            _fail(" ".join(error.format_message().replace("Value error, ", "").split()))
        if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
            _fail("there isn't enough memory; use a smaller model, batch_size or image_size, or fewer --workers")
        raise
    if code == INTERRUPTED:
        exec("")  # else Python, interrupted within some library's exec("..."), ends itself by the signal
        _fail("interrupted; findings that were finished are kept, and the same command goes on from there", code)
    sys.exit(code if isinstance(code, int) else 0)


def _hang_up() -> NoReturn:
    """End quietly: the reader of our output has gone, as in ``fedaudit list | head -1``."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(HUNG_UP)


def _fail(message: str, code: int = 2) -> NoReturn:
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in message[:1000])
    print(f"fedaudit: error: {shown}", file=sys.stderr)
    sys.exit(code)
