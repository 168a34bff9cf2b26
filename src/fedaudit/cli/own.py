"""Options that say what a recording of a user's own federation doesn't: model, loss, preprocessing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedaudit.utils.errors import BadInput

if TYPE_CHECKING:
    from fedaudit.api import Loss

OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODULE:NAME", help="For a recording: the model that clients train, or what makes it."
    ),
]
OwnCheckpoint = Annotated[
    Path | None, typer.Option("--checkpoint", help="Weights of --model, for the parts that clients don't send.")
]
OwnLoss = Annotated[
    str | None,
    typer.Option("--loss", metavar="NAME", help="For a recording: cross-entropy, bce-with-logits, mse or MODULE:NAME."),
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
Rounds = Annotated[str | None, typer.Option(metavar="0,5-9", help="For a recording: attack only these rounds.")]


def task_of(
    mean: str | None, std: str | None, input_shape: str | None, batch_norm: str | None, file: Path | None = None
) -> dict[str, Any]:
    """Return these options as :meth:`fedaudit.Transcript.load` takes them; they count more than what ``file`` says.

    Raises:
        BadInput: one is malformed, or the file can't be read.
    """
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


def rounds_of(text: str | None) -> list[int] | None:
    """Return the rounds in ``0,5-9``.

    Raises:
        BadInput: it is something else.
    """
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if not match:
            raise BadInput(f"--rounds is '{text}'; give rounds such as 0,5-9")
        first, last = int(match[1]), int(match[2] or match[1])
        found += range(first, last + 1)
    return found


def loss_of(text: str | None) -> tuple[Loss | None, str | None]:
    """Return the user's own loss, or the name of one of fedaudit's.

    Raises:
        BadInput: there is none of that name.
    """
    if text is None:
        return None, None
    from fedaudit.api import LOSSES
    from fedaudit.utils.objects import load_object

    if text in LOSSES:
        return None, text
    if ":" not in text:
        raise BadInput(f"--loss is '{text}'; give {', '.join(LOSSES)}, or package.module:function")
    found = load_object(text, "--loss")
    if isinstance(found, type):
        found = found()
    if not callable(found):
        raise BadInput(f"--loss '{text}' is a {type(found).__name__}; give a function of (outputs, targets)")
    return found, None
