"""Commands that other packages add to ``fedaudit``: the laboratory's, and anybody's, by an entry point."""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

from fedaudit.utils.distributions import lacking, misfit
from fedaudit.utils.errors import BadInput

GROUP = "fedaudit.commands"
LISTED = "fedaudit.catalogue"  # and kinds of things to what is listed: a function that returns them
_SUMMARIES = {  # of commands whose package isn't installed
    "study": "Run grids of audits; get tables and figures.",
    "bench": "Measure how fast fedaudit is here.",
    "rank": "Predict whether a network's gradient reveals its input.",
    "train-generator": "Train a generator of images on public data.",
}
_PANEL = "Of other packages"


def add_commands(app: typer.Typer) -> None:
    """Add to ``app`` the commands of installed packages, and groups; a missing one of ours says how to get it."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    for name, point in sorted(found.items()):
        if wrong := point.dist and misfit(point.dist.name):
            _add_refusal(app, name, "Can't be loaded.", wrong)
            continue
        try:
            command = point.load()
        except Exception as error:  # one package's fault mustn't end every command, nor end it with a limit's code
            why = f"the commands 'fedaudit {name} …' can't be loaded: {type(error).__name__}: {error}"
            _add_refusal(app, name, "Can't be loaded.", why)
        else:
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, rich_help_panel=_PANEL)
            else:
                app.command(name, rich_help_panel=_PANEL)(command)
    for name in sorted(_SUMMARIES.keys() - found.keys()):
        _add_refusal(app, name, _SUMMARIES[name], f"the command 'fedaudit {name}' {lacking(GROUP, name)}")


def check_listed(kind: str) -> None:
    """Refuse, with BadInput, to list what a package has that isn't installed, and say how to get it."""
    elsewhere = lacking(LISTED, kind)
    if elsewhere and kind not in {point.name for point in entry_points(group=LISTED)}:
        raise BadInput(f"'{kind}' {elsewhere}")


def _add_refusal(app: typer.Typer, name: str, summary: str, why: str) -> None:
    @app.command(
        name,
        help=summary,
        rich_help_panel=_PANEL,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def refuse() -> None:
        raise BadInput(why)
