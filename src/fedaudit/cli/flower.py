"""``fedaudit audit --flower APP``: its options, and the call; Flower is imported by the adapter, when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedaudit.utils.errors import BadInput

if TYPE_CHECKING:
    from fedaudit.evaluation import Limits
    from fedaudit.pipeline.run import Audit

App = Annotated[
    Path | None,
    typer.Option("--flower", metavar="APP", help="Folder of a Flower app to run here, unchanged, and audit."),
]
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", min=1, max=10_000, help="Nodes of the Flower app; default: the app's own number, or 10."),
]
RunConfig = Annotated[
    list[str] | None,
    typer.Option(
        "--run-config", metavar="'k=v k=v'", help="Settings of the Flower app, as 'flwr run' takes them; repeatable."
    ),
]
AppAttacks = Annotated[
    list[str] | None, typer.Option("--attack", help="Attack on the Flower app; repeatable; default: all that fit.")
]


def check_alone(app: Path | None, others: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise where an option of a scenario stands beside an app's, or one of an app where there is none.

    Args:
        app: the app, if one is given.
        others: options of a scenario and their values; falsy: not given.
        own: those of an app.
    """
    for name, value in (own if app is None else others).items():
        if value:
            without = " needs --flower" if app is None else ": not with --flower"
            raise BadInput(f"{name}{without}; see fedaudit audit --help")


def audit_app(
    app: Path,
    asked: dict[str, Any],
    *,
    nodes: int | None,
    run_config: Sequence[str] | None,
    task: dict[str, Any],
    seed: int | None,
    out: Path,
    overwrite: bool,
    workers: int,
    limits: Limits,
    controls: bool,
) -> Audit:
    """Audit the Flower app, with the attacks and the threat that are asked for.

    Raises:
        BadInput: Flower isn't installed, or something can't be used.
    """
    from fedaudit.adapters import flower

    return flower.audit_flower(
        app,
        nodes=nodes,
        config=flower.parse_config(run_config or []),
        attacks=asked["attacks"] or None,
        threat=asked["threat"],
        mean=task.get("mean"),
        std=task.get("std"),
        seed=seed or 0,
        out=out,
        workers=workers,
        fail_above=dict(limits.fail_above),
        fail_on=limits.fail_on,
        controls=controls,
        overwrite=overwrite,
    )
