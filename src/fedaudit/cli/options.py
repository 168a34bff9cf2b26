"""Options that several commands share, and what is checked before work begins. Heavy imports happen inside."""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedaudit.utils.errors import BadInput
from fedaudit.utils.folders import check_folder as check_folder

if TYPE_CHECKING:
    from torch.nn import Module

    from fedaudit.results import AuditResult
    from fedaudit.scenario.scenario import Scenario as ReadScenario

EXCEEDED = 1
NOT_TESTED = 3
MINUTES = 10.0  # for an answer, where nobody says otherwise


# What errors below the command line tell a Python caller to give, and the flag that gives it.
_SAME = "data_dir fail_above fail_below fail_on max_minutes nodes out parameters rounds transcript truth"
_FLAGS = {f"{name}=…": f"--{name.replace('_', '-')}" for name in _SAME.split()} | {
    "again=True": "--again",
    "client=": "--client ",
    "device='cpu'": "--device cpu",
    "max_minutes is": "--max-minutes is",
    "loss=…": "--loss package.module:function",
    "model='FILE'": "--model FILE",
    "module=…": "--model package.module:factory",
    "overrides: ": "--set ",
    "overwrite=True": "--overwrite",
    "records=…": "--records FILE",
    "task={'input_shape': (3, 32, 32)}": "--input-shape 3,32,32",
    "threat={'sees': 'aggregate of 10'}": "--set threat.sees='aggregate of 10'",
    "compare_defences=True": "--compare-defences",
    "with overrides": "with --set",
}
_PYTHON = re.compile(r"\w\([^()]*\)|(?<![\w.])(?:" + "|".join(map(re.escape, _FLAGS)) + ")")


def in_flags(message: str) -> str:
    """Return an error's message with flags in place of Python's keywords; calls in it stay as they are."""
    return _PYTHON.sub(lambda found: _FLAGS.get(found[0], found[0]), message)


class Level(StrEnum):
    """Verdicts that an audit can fail on, from the worst down."""

    recovered = "recovered"
    identifiable = "identifiable"
    inferred = "inferred"


def folder(given: str | Path) -> Path:
    """Return the folder that was named; an empty name is refused."""
    if not str(given).strip():
        raise typer.BadParameter("the name is empty")
    return Path(given)


# Of scenarios and of work.
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", envvar="FEDAUDIT_DATA", help="Folder with data sets that don't come with fedaudit."),
]
Scenario = Annotated[Path | None, typer.Argument(help="YAML file; default: the built-in scenario.")]
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# Of limits, and of what is written.
FailAbove = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-above", help="Limit on a metric, e.g. psnr=20: exit 1 if exceeded, 3 if not tested; repeatable."
    ),
]
FailBelow = Annotated[
    list[str] | None,
    typer.Option("--fail-below", help="Least value, margin=FACTOR: exit 1 if below, 3 if it can't be told."),
]
FailOn = Annotated[
    Level | None, typer.Option("--fail-on", help="Exit 1 on this verdict or a worse one, 3 if not tested.")
]
Policy = Annotated[
    Path | None,
    typer.Option("--policy", help="YAML file with fail_above, fail_below, fail_on; default: ./fedaudit.yaml, if any."),
]
NoControls = Annotated[
    bool,
    typer.Option("--no-controls", help="Skip positive controls: an attack that finds nothing is then inconclusive."),
]
Write = Annotated[
    str | None,
    typer.Option("--write", metavar="FORMATS", help="Files for CI, separated by commas: sarif, junit, markdown."),
]

# Of a recording of a user's own federation: what it doesn't say.
OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODULE:NAME", help="For a recording: the model that clients train, or what makes it."
    ),
]
AppModel = Annotated[
    Path | None,
    typer.Option(
        "--model", metavar="FILE", help="Of a Flower app of NumPy, JAX, …: a Python file that says what its model is."
    ),
]
OwnCheckpoint = Annotated[
    Path | None, typer.Option("--checkpoint", help="Weights of --model, for the parts that clients don't send.")
]
OwnLoss = Annotated[
    str | None,
    typer.Option(
        "--loss", metavar="NAME", help="Of a recording or an app, where it isn't seen: cross-entropy, … or MODULE:NAME."
    ),
]
Mean = Annotated[
    str | None, typer.Option(metavar="0.5,0.5,0.5", help="For a recording: the mean by which inputs are normalised.")
]
Std = Annotated[str | None, typer.Option(metavar="0.5,0.5,0.5", help="The standard deviation; give it with --mean.")]
InputShape = Annotated[str | None, typer.Option(metavar="3,32,32", help="For a recording: the shape of one input.")]
BatchNorm = Annotated[
    str | None, typer.Option(metavar="train|eval", help="For a recording: BatchNorm's mode in local training.")
]
Task = Annotated[
    Path | None,
    typer.Option(
        "--task",
        help="For a recording: YAML file with what it doesn't say of the task, such as a table's columns, or tokens.",
    ),
]
Rounds = Annotated[
    str | None,
    typer.Option(
        metavar="0,5-9",
        help="Of a recording or an app: attack only these rounds; an app is stopped after the last of them.",
    ),
]
Clients = Annotated[
    int | None,
    typer.Option("--clients", min=1, help="Of a recording or an app: attack only the first so many clients' updates."),
]
KeepRounds = Annotated[
    str | None,
    typer.Option(
        "--keep-rounds",
        metavar="0,5-9|all",
        help="Of an app: record these rounds beside the attacked ones; default: all of up to 200 updates, else the "
        "first and the last.",
    ),
]
KeepClients = Annotated[
    int | None, typer.Option("--keep-clients", min=1, help="Of an app: record only the first so many clients' updates.")
]
Records = Annotated[
    Path | None,
    typer.Option(
        "--records",
        metavar="FILE",
        help="Of a recording or an app: examples that nobody trained on, as the model sees them (.npz with inputs and "
        "labels, or .csv), to ask about beside as many of the clients'; with persons, of whom each is, these count.",
    ),
]
Words = Annotated[
    str | None,
    typer.Option(
        "--words",
        metavar="FILE|masked",
        help="Of text: what each token stands for (tokenizer.json, vocab.json, or a word a line); masked: the report "
        "holds no text.",
    ),
]
MaxMinutes = Annotated[
    str | None,
    typer.Option(
        "--max-minutes",
        metavar="MINUTES|none",
        help="Time for an answer, 10 unless told otherwise: the cheapest questions first, each with its control; an "
        "app gets half. More narrows intervals and plays dear attacks; none: no limit.",
    ),
]

# Of a Flower app.
App = Annotated[
    Path | None,
    typer.Option("--flower", metavar="APP", help="Folder of a Flower app to run here, unchanged, and audit."),
]
NVFlareJob = Annotated[
    Path | None,
    typer.Option("--nvflare", metavar="JOB", help="Folder of an NVFlare job to run here by its simulator, and audit."),
]
Nodes = Annotated[
    int | None,
    typer.Option(
        "--nodes",
        min=1,
        max=10_000,
        help="Nodes of the Flower app; default: the app's own number, or 10. Sites of the NVFlare job.",
    ),
]
RunConfig = Annotated[
    list[str] | None,
    typer.Option(
        "--run-config", metavar="'k=v k=v'", help="Settings of the Flower app, as 'flwr run' takes them; repeatable."
    ),
]
AppAttacks = Annotated[
    list[str] | None, typer.Option("--attack", help="Attack on the app or job; repeatable; default: all that fit.")
]


def print_json(value: Any) -> None:
    """Print ``value`` for programs."""
    print(json.dumps(value, indent=2))


def check_data_dir(data_dir: Path | None) -> None:
    """Raise unless the data folder, if there is one, is a folder."""
    if data_dir is not None and not data_dir.is_dir():
        raise BadInput(f"the data folder '{data_dir}' (--data-dir or FEDAUDIT_DATA) isn't a folder")


def scenario_of(path: Path | None, settings: list[str] | None, seed: int | None) -> ReadScenario:
    """Return the scenario, read once; what can't be read is told before torch is loaded."""
    from fedaudit.scenario.yaml import describe_source, read_scenario

    values = read_scenario(path, settings, seed)
    from fedaudit.scenario.scenario import scenario_from

    return scenario_from(values, where=describe_source(path, settings))


def minutes_of(given: str | None) -> float | None:
    """Return the time for an answer, in minutes: ten, or as asked; None: no limit."""
    if given is None:
        return MINUTES
    if given == "none":
        return None
    try:
        return float(given)
    except ValueError:
        raise BadInput(f"--max-minutes is {given!r}; give minutes, such as {MINUTES:g}, or none") from None


def number_of_workers(workers: int | None) -> int:
    """Return how many processes to use: as asked, or all cores."""
    return workers or os.cpu_count() or 1


def check_alone(app: Path | None, others: dict[str, Any], own: dict[str, Any], flag: str = "--flower") -> None:
    """Refuse an app's options beside a scenario's, or without an app; None, False and an empty list aren't given."""
    for name, value in (own if app is None else others).items():
        if value not in (None, [], ()) and value is not False:
            without = " needs --flower or --nvflare" if app is None else f": not with {flag}"
            raise BadInput(f"{name}{without}; see fedaudit audit --help")


def formats_of(write: str | None) -> list[str]:
    """Return the formats of ``--write``."""
    from fedaudit.report.write import check_formats

    return check_formats([name.strip() for name in write.split(",")] if write is not None else [])


def limits_of(
    fail_above: list[str] | None, fail_on: Level | None, policy: Path | None, fail_below: list[str] | None = None
) -> dict[str, Any]:
    """Return ``fail_above``, ``fail_below`` and ``fail_on``, as given, over those of the policy."""
    from fedaudit.evaluation import Limits, read_policy
    from fedaudit.evaluation.limits import POLICY_FILE

    if policy is None and Path(POLICY_FILE).is_file():
        policy = Path(POLICY_FILE)
    team = read_policy(policy) if policy else Limits()
    above = _limits("--fail-above", fail_above, "psnr=20")
    below = _limits("--fail-below", fail_below, "margin=4")
    verdict = fail_on.value if fail_on else team.fail_on
    limits = Limits({**team.fail_above, **above}, verdict, {**team.fail_below, **below}).check()
    return {
        "fail_above": dict(limits.fail_above),
        "fail_on": limits.fail_on,
        "fail_below": dict(limits.fail_below),
    }


def _limits(option: str, given: list[str] | None, example: str) -> dict[str, float]:
    """Return the limits that were given as metric=number; BadInput where one isn't, or a metric has two."""
    found: dict[str, float] = {}
    for text in given or []:
        metric, _, value = text.partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if not math.isfinite(limit):
            raise BadInput(f"{option} {text}: expected metric=number, for example {example}")
        if metric.strip() in found:
            raise BadInput(f"{option} {text}: '{metric.strip()}' has a limit already; give one")
        found[metric.strip()] = limit
    return found


def exit_code(result: AuditResult) -> int:
    """Return 0 where every limit was kept, 1 where one was exceeded, 3 where one could not be tested."""
    outcomes = {threshold.outcome for threshold in result.thresholds}
    return EXCEEDED if "fail" in outcomes else NOT_TESTED if "not tested" in outcomes else 0


def task_of(
    mean: str | None,
    std: str | None,
    input_shape: str | None = None,
    batch_norm: str | None = None,
    file: Path | None = None,
) -> dict[str, Any]:
    """Return these options as :meth:`fedaudit.Transcript.load` takes them; they count more than what ``file`` says."""
    told = {}
    if file is not None:
        from fedaudit.utils import plain_yaml  # its library takes as long to import as the rest

        told = plain_yaml.read(file, f"the task '{file}'")
        if not isinstance(told, dict):
            raise BadInput(f"the task '{file}': expected a mapping of keys such as columns, tokens, input_shape")
    if batch_norm not in (None, "train", "eval"):
        raise BadInput(f"--batch-norm is '{batch_norm}'; give train or eval")
    if (mean is None) != (std is None):
        raise BadInput("give --mean and --std together")
    given = {
        "mean": _numbers("--mean", mean, float),
        "std": _numbers("--std", std, float),
        "input_shape": _numbers("--input-shape", input_shape, int),
        "batch_norm": batch_norm,
    }
    return {**told, **{key: value for key, value in given.items() if value is not None}}


def _numbers(flag: str, text: str | None, kind: type) -> tuple[Any, ...] | None:
    if text is None:
        return None
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f"{flag} is '{text}'; give numbers separated by commas, such as 0.5,0.5,0.5") from None


def own_parts(
    model: str | None, checkpoint: Path | None, loss: str | None, task: dict[str, Any], rounds: str | None
) -> dict[str, Any]:
    """Return the user's own parts of a recording as the Python interface takes them; ``task`` is of :func:`task_of`."""
    parts: dict[str, Any] = {"model": None, "loss": None, "task": task, "rounds": rounds_of(rounds)}
    if model:
        parts["model"] = _own_module(model, checkpoint)
    if loss is not None:
        found = loss_of(loss)
        (task if isinstance(found, str) else parts)["loss"] = found
    return parts


def _own_module(name: str, checkpoint: Path | None = None) -> Module:
    """Return the module that ``package.module:factory`` names or makes without arguments.

    What doesn't travel in the federation (a frozen part) has the weights of ``checkpoint``.
    """
    from torch import nn

    from fedaudit.models import load_checkpoint
    from fedaudit.utils.machine import import_torchvision
    from fedaudit.utils.objects import load_object

    with suppress(Exception):
        import_torchvision()  # transformers looks for it, and only here it is made to fit
    found = load_object(name, "--model")
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise BadInput(f"--model '{name}' is a {type(found).__name__}; give a torch module or what makes one")
        try:
            found = found()
        except Exception as error:
            raise BadInput(
                f"--model '{name}' can't be called without arguments ({type(error).__name__}: {error}); write a "
                "function that makes the module, and name that"
            ) from None
        if not isinstance(found, nn.Module):
            raise BadInput(f"--model '{name}' returns a {type(found).__name__}, not a torch module")
    if checkpoint is not None:
        load_checkpoint(found, checkpoint)
    return found


def loss_of(text: str) -> Any:
    """Return what ``--loss`` stands for: a registered name as it is, or a user's own function."""
    from fedaudit.api import LOSSES
    from fedaudit.utils.objects import load_object

    if text in LOSSES:
        return text
    if ":" not in text:
        raise BadInput(f"--loss is '{text}'; give {', '.join(LOSSES)}, or package.module:function")
    found = load_object(text, "--loss")
    if isinstance(found, type):
        found = found()
    if not callable(found):
        raise BadInput(f"--loss '{text}' is a {type(found).__name__}; give a function of (outputs, targets)")
    return found


def rounds_of(text: str | None, flag: str = "--rounds") -> list[int] | None:
    """Return the rounds in ``0,5-9``."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if not match:
            raise BadInput(f"{flag} is '{text}'; give rounds such as 0,5-9")
        first, last = int(match[1]), int(match[2] or match[1])
        found += range(first, last + 1)
    return found
