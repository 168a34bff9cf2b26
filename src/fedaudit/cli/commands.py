"""Commands that other packages add to ``fedaudit``: the laboratory's, and anybody's, by an entry point."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

from fedaudit.utils.errors import BadInput

GROUP = "fedaudit.commands"
LISTED = "fedaudit.catalogue"  # and kinds of things to what is listed: a function that returns them

_LAB = "fedaudit-lab"  # a package that may not be installed, which has these commands and lists these kinds
_COMMANDS = {"study": "Run grids of audits; get tables and figures.", "bench": "Measure how fast fedaudit is here."}
_KINDS = ("studies",)
_PANEL = "Of other packages"
_MISSING = f"come with the package {_LAB}, which isn't installed: pip install PATH_OF_THE_CLONE/lab"


def add_commands(app: typer.Typer) -> None:
    """Add to ``app`` the groups of commands of installed packages; a missing one's say how to get it."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    for name, point in sorted(found.items()):
        try:
            group = point.load()
        except Exception as error:  # one package's fault mustn't end every command, nor end it with a limit's code
            why = f"the commands 'fedaudit {name} …' can't be loaded: {type(error).__name__}: {error}"
            _add_refusal(app, name, "Can't be loaded.", why)
        else:
            app.add_typer(group, name=name, rich_help_panel=_PANEL)
    for name in sorted(_COMMANDS.keys() - found.keys()):
        _add_refusal(app, name, f"{_COMMANDS[name]} Needs {_LAB}.", f"the commands 'fedaudit {name} …' {_MISSING}")


def check_listed(kind: str) -> None:
    """Refuse, with BadInput, to list what a package has that isn't installed, and say how to get it."""
    if kind in _KINDS and kind not in {point.name for point in entry_points(group=LISTED)}:
        raise BadInput(f"{kind} {_MISSING}")


def _add_refusal(app: typer.Typer, name: str, summary: str, why: str) -> None:
    @app.command(
        name,
        help=summary,
        rich_help_panel=_PANEL,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def refuse() -> None:
        raise BadInput(why)
