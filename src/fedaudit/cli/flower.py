"""``fedaudit audit --flower APP``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedaudit.utils.errors import BadInput

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
