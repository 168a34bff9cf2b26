"""Commands that other packages add to ``fedaudit``: the laboratory's, and anybody's, by an entry point."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

import typer

from fedaudit.utils.errors import BadInput

GROUP = "fedaudit.commands"
LISTED = "fedaudit.catalogue"  # and kinds of things to what is listed: a function that returns them

# Commands, and kinds of things that are listed, of packages that may not be installed, and which package has them.
_ELSEWHERE = {"study": "fedaudit-lab", "bench": "fedaudit-lab"}
_LISTED = {"studies": "fedaudit-lab"}
_LINES = {"study": "Run grids of audits; get tables and figures.", "bench": "Measure how fast fedaudit is here."}


def add_commands(app: typer.Typer) -> None:
    """Add to ``app`` the groups of commands of installed packages; a missing one's say how to get it."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    for name, point in sorted(found.items()):
        app.add_typer(point.load(), name=name)
    for name in sorted(_ELSEWHERE.keys() - found.keys()):
        app.command(
            name,
            help=f"{_LINES[name]} Needs {_ELSEWHERE[name]}.",
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(_missing(name))


def check_listed(kind: str) -> None:
    """Refuse to list what a package has that isn't installed, and say how to get it.

    Raises:
        BadInput: it isn't.
    """
    if kind in _LISTED and kind not in {point.name for point in entry_points(group=LISTED)}:
        raise BadInput(f"{kind} {_where(_LISTED[kind])}")


def _where(package: str) -> str:
    return f"come with the package {package}, which isn't installed: pip install {package}"


def _missing(name: str) -> Callable[[], None]:
    def refuse() -> None:
        raise BadInput(f"the commands 'fedaudit {name} …' {_where(_ELSEWHERE[name])}")

    return refuse
