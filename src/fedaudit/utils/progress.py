"""What runs, how far it is and how long it will still take, once it runs longer than two seconds."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Task

Report = Callable[[float], None]

SOON = 2.0  # seconds after which a stage is shown
EVERY = 15.0  # seconds between two lines of a log
_PACE = 600.0  # seconds that the pace is measured over


class Display(Protocol):
    """Shows stages of work one after the other."""

    def stage(self, title: str, total: float) -> Report:
        """Start a stage and return the function that says how much of ``total``, infinite if unknown, is done."""
        ...

    def say(self, text: str) -> None:
        """Show a line that stays."""
        ...


class Quiet:
    """Shows nothing."""

    def stage(self, title: str, total: float) -> Report:  # noqa: ARG002
        """Return a function that does nothing."""
        return lambda _done: None

    def say(self, text: str) -> None:
        """Do nothing."""


def tell(text: str) -> None:
    """Write a line to standard error, at once."""
    print(text, file=sys.stderr, flush=True)


def about(seconds: float) -> str:
    """Return a time as exactly as an estimate deserves: '5 s', '40 s', '12 min', '3.5 h'."""
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{seconds / 3600:.1f} h"


@contextmanager
def live_display(enabled: bool = True) -> Iterator[Display]:
    """Yield a display on standard error: a live one on a terminal, elsewhere plain lines every 15 seconds."""
    if not enabled or sys.stderr is None:
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
    live = sys.stderr.isatty()

    class Stages(Progress):
        """Stages that the user reads of."""

        def get_renderables(self) -> Iterable[RenderableType]:
            """Yield the table of the stages that run, or ran, long enough."""
            yield self.make_tasks_table([task for task in self.tasks if (task.elapsed or 0.0) >= SOON])

        def stage(self, title: str, total: float) -> Report:
            """Start a stage and return the function that says how much of ``total`` is done."""
            task = self.add_task(title, total=None if math.isinf(total) else max(total, 1e-9))
            return lambda done: self.update(task, completed=done)

        def say(self, text: str) -> None:
            """Show a line that stays."""
            if live:
                self.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                tell(text)

    stages = Stages(*columns, console=Console(stderr=True), speed_estimate_period=_PACE, disable=not live)
    # where nothing is drawn it isn't started: some versions of rich write an empty line when they stop
    with stages if live else _lines_of(lambda: stages.tasks):
        yield stages


@contextmanager
def _lines_of(tasks: Callable[[], list[Task]]) -> Iterator[None]:
    """Write now and then how far the latest task is, from a thread of its own: work may be silent for minutes."""
    over = threading.Event()

    def write() -> None:
        wait = SOON
        with suppress(OSError):  # nobody reads standard error any more
            while not over.wait(wait):
                wait = EVERY
                latest = tasks()[-1:]
                if latest and (latest[0].elapsed or 0.0) >= SOON:
                    tell(line(latest[0]))

    thread = threading.Thread(target=write, name="fedaudit-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def line(task: Task) -> str:
    """Return how far a task is, and about how much time is left once its pace is known."""
    if task.finished:
        return f"{task.description}: 100 % done; the next step is running"
    if task.total is None:
        return f"{task.description}: running for {about(task.elapsed or 0.0)}"
    left = task.time_remaining
    told = f" after {about(task.elapsed or 0.0)}" if left is None else f", about {about(left)} left"
    return f"{task.description}: {int(task.percentage)} % done{told}"


def wide_console() -> Console:
    """Return a console as wide as the terminal, or wide enough for our tables where there is none."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=140)
