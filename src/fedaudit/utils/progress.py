"""What runs, how far it is, how long it will take: on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

Report = Callable[[float], None]


class Display(Protocol):
    """Shows stages of work one after the other."""

    def stage(self, title: str, total: float) -> Report:
        """Start a stage and return the function that says how much of ``total`` is done."""
        ...


class Quiet:
    """Shows nothing."""

    def stage(self, title: str, total: float) -> Report:  # noqa: ARG002
        """Return a function that does nothing."""
        return lambda _done: None


@contextmanager
def live_display(enabled: bool = True) -> Iterator[Display]:
    """Yield a live progress display on standard error, or a quiet one where that isn't a terminal."""
    if not enabled or not sys.stderr.isatty():
        yield Quiet()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:

        class _Live:
            def stage(self, title: str, total: float) -> Report:
                task = progress.add_task(title, total=max(total, 1e-9))
                return lambda done: progress.update(task, completed=done)

        yield _Live()


def wide_console() -> Console:
    """Return a console as wide as the terminal, or wide enough for our tables where there is none."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=140)
