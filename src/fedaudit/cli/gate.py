"""Limits on the command line: what an audit must keep, one line for each, and the exit code."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedaudit.utils.errors import BadInput

if TYPE_CHECKING:
    from fedaudit.evaluation import Limits
    from fedaudit.results import AuditResult

EXCEEDED = 1
NOT_TESTED = 3


class Level(StrEnum):
    """Verdicts that an audit can fail on, from the worst down."""

    recovered = "recovered"
    identifiable = "identifiable"
    inferred = "inferred"


FailAbove = Annotated[
    list[str] | None,
    typer.Option(
        "--fail-above", help="Limit on a metric, e.g. psnr=20: exit 1 if exceeded, 3 if not tested; repeatable."
    ),
]
FailOn = Annotated[
    Level | None, typer.Option("--fail-on", help="Exit 1 on this verdict or a worse one, 3 if not tested.")
]
Policy = Annotated[
    Path | None,
    typer.Option("--policy", help="YAML file with fail_above and fail_on; default: ./fedaudit.yaml, if there is one."),
]
NoControls = Annotated[
    bool,
    typer.Option("--no-controls", help="Skip positive controls: an attack that finds nothing is then inconclusive."),
]

Write = Annotated[
    str | None,
    typer.Option("--write", metavar="FORMATS", help="Files for CI, separated by commas: sarif, junit, markdown."),
]


def formats_of(write: str | None) -> list[str]:
    """Return the formats of ``--write``.

    Raises:
        BadInput: one isn't known.
    """
    from fedaudit.report.formats import check_formats

    return check_formats([name.strip() for name in write.split(",")] if write is not None else [])


def limits_of(fail_above: list[str] | None, fail_on: Level | None, policy: Path | None) -> Limits:
    """Return the limits that were given, over those of the policy.

    Raises:
        BadInput: one can't be used.
    """
    from fedaudit.evaluation import Limits, read_policy
    from fedaudit.evaluation.limits import POLICY_FILE

    if policy is None and Path(POLICY_FILE).is_file():
        policy = Path(POLICY_FILE)
    team = read_policy(policy) if policy else Limits()
    above: dict[str, float] = {}
    for text in fail_above or []:
        metric, _, value = text.partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if not math.isfinite(limit):
            raise BadInput(f"--fail-above {text}: expected metric=number, for example psnr=20")
        if metric.strip() in above:
            raise BadInput(f"--fail-above {text}: '{metric.strip()}' has a limit already; give one")
        above[metric.strip()] = limit
    return Limits({**team.fail_above, **above}, fail_on.value if fail_on else team.fail_on).check()


def exit_code(result: AuditResult) -> int:
    """Return 0 where every limit was kept, 1 where one was exceeded, 3 where one could not be tested."""
    outcomes = {threshold.outcome for threshold in result.thresholds}
    return EXCEEDED if "fail" in outcomes else NOT_TESTED if "not tested" in outcomes else 0
