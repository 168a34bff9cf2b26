"""What there is, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from rich.columns import Columns
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedaudit.cli.commands import LISTED
from fedaudit.utils.distributions import OURS, misfit
from fedaudit.utils.errors import BadInput
from fedaudit.utils.progress import wide_console

Catalogue = dict[str, list[dict[str, Any]]]


def catalogue(kinds: Sequence[str]) -> Catalogue:
    """Return name, summary and what else is declared of everything of the given kinds, one array per kind."""
    from fedaudit.pipeline.catalogue import entries

    added = {point.name: point for point in entry_points(group=LISTED)}
    shown = {}
    for kind in kinds:
        known = entries(kind)
        if known is None:  # a kind that a package adds is empty where that isn't installed
            known = _of_package(added[kind]) if kind in added else []
        shown[kind] = known
    return shown


def _of_package(point: EntryPoint) -> list[dict[str, Any]]:
    package = point.dist.name if point.dist else point.value
    if why := misfit(package):
        raise BadInput(why)
    return [{**entry, "package": package} for entry in point.load()()]


def print_names(shown: Catalogue) -> None:
    """Print the names of each kind in columns, those of each package together, and how many there are."""
    console = wide_console()
    for kind, entries in shown.items():
        console.print(f"[bold]{escape(kind)}[/] ({len(entries)})", highlight=False)
        for package in dict.fromkeys(entry["package"] for entry in entries):
            if package != OURS:
                console.print(f"  [dim]of {escape(package)}:[/]", highlight=False)
            names = [Text(entry["name"], style="cyan") for entry in entries if entry["package"] == package]
            console.print(Padding(Columns(names, padding=(0, 2)), (0, 0, 0, 2), expand=False))


def print_lines(entries: Sequence[dict[str, Any]]) -> None:
    """Print each entry on one line: its name, its package if that isn't ours, and as much of its summary as fits."""
    console = wide_console()
    widest = max((len(entry["name"]) for entry in entries), default=0)
    for entry in entries:
        package = "" if entry["package"] == OURS else f"[{entry['package']}] "
        line = Text.assemble("  ", (f"{entry['name']:<{widest}}", "cyan"), "  ", (package, "dim"), entry["summary"])
        if console.is_terminal:
            line.truncate(console.width, overflow="ellipsis")
        console.print(line, soft_wrap=True)


def print_catalogue(shown: Catalogue) -> None:
    """Print one line per entry, and under an attack whose it is, who can run it and what it needs."""
    console = wide_console()
    for kind, entries in shown.items():
        console.print(kind, style="bold")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, style="cyan")
        grid.add_column()
        for entry in entries:
            grid.add_row("  " + entry["name"], escape(entry["summary"]))
            if entry["package"] != OURS:
                grid.add_row("", f"[dim]package: {escape(entry['package'])}[/]")
            if kind == "attacks":
                for key in ("paper", "threat_model", "needs", "on_sums"):
                    grid.add_row("", f"[dim]{key.replace('_', ' ')}: {escape(_text(entry[key]))}[/]")
                grid.add_row("", f"[dim]standards: {escape(_text(_standards(entry['mapping'])))}[/]")
        console.print(grid if entries else "  none yet")


def _standards(mapping: Sequence[dict[str, Any]]) -> list[str]:
    return [f"{'nearest ' if m['nearest'] else ''}{m['standard'].split()[0]} {m['id']}" for m in mapping]


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)
