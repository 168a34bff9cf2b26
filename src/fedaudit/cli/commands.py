"""Commands that other packages add to ``fedaudit``: the laboratory's, and anybody's, by an entry point."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

import typer

from fedaudit.utils.errors import BadInput

GROUP = "fedaudit.commands"

# Commands of packages that may not be installed, and which package has them.
_ELSEWHERE = {"study": "fedaudit-lab", "bench": "fedaudit-lab"}
_LINES = {"study": "Run grids of audits; get tables and figures.", "bench": "Measure how fast fedaudit is here."}


def add_commands(app: typer.Typer) -> None:
    """Add to ``app`` the groups of commands of installed packages; a missing one's say how to get it."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    for name, point in sorted(found.items()):
        app.add_typer(point.load(), name=name)
    for name in _ELSEWHERE.keys() - found.keys():
        app.command(
            name,
            help=f"{_LINES[name]} Needs {_ELSEWHERE[name]}.",
            context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        )(_missing(name))


def _missing(name: str) -> Callable[[], None]:
    def refuse() -> None:
        package = _ELSEWHERE[name]
        raise BadInput(f"'fedaudit {name}' is in the package {package}, which isn't installed: pip install {package}")

    return refuse
