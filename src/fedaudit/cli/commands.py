"""Commands that other packages add to ``fedaudit``: the laboratory's, and anybody's, by an entry point."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

import typer

from fedaudit.utils.errors import BadInput

GROUP = "fedaudit.commands"
LISTED = "fedaudit.catalogue"  # and kinds of things to what is listed: a function that returns them

_LAB = "fedaudit-lab"  # a package that may not be installed, which has these commands and lists these kinds
_COMMANDS = {"study": "Run grids of audits; get tables and figures.", "bench": "Measure how fast fedaudit is here."}
_KINDS = ("studies",)
_MISSING = f"come with the package {_LAB}, which isn't installed: pip install {_LAB}"


def add_commands(app: typer.Typer) -> None:
    """Add to ``app`` the groups of commands of installed packages; a missing one's say how to get it."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    for name, point in sorted(found.items()):
        app.add_typer(point.load(), name=name)
    for name in sorted(_COMMANDS.keys() - found.keys()):
        app.command(
            name,
            help=f"{_COMMANDS[name]} Needs {_LAB}.",
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(_missing(name))


def check_listed(kind: str) -> None:
    """Refuse to list what a package has that isn't installed, and say how to get it.

    Raises:
        BadInput: it isn't.
    """
    if kind in _KINDS and kind not in {point.name for point in entry_points(group=LISTED)}:
        raise BadInput(f"{kind} {_MISSING}")


def _missing(name: str) -> Callable[[], None]:
    def refuse() -> None:
        raise BadInput(f"the commands 'fedaudit {name} …' {_MISSING}")

    return refuse
