"""What runs, how far it is, how long it will take: live on a terminal, a line now and then in a log."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

Report = Callable[[float], None]

SOON = 5.0  # seconds until a log's first line of progress: by then there is a pace to tell the time left by
EVERY = 15.0  # seconds between two of them
_WINDOW = 5  # lines that the pace is measured over
_LEAST_LATELY, _LEAST_ON_AVERAGE = 0.01, 0.1  # shares of a stage before which nothing is said of the time left


class Display(Protocol):
    """Shows stages of work one after the other."""

    def stage(self, title: str, total: float) -> Report:
        """Start a stage and return the function that says how much of ``total`` is done."""
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


class Lines:
    """Writes plain lines to standard error: what is said, and on :meth:`tick` how far the stage is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._title: str | None = None  # of the stage
        self._total = self._done = self._began = 0.0
        # When how much was done: at the first report, which brings what is kept from another run; at the first that
        # brought more, by which time workers have started; and at the last few lines.
        self._first: tuple[float, float] | None = None
        self._moved: tuple[float, float] | None = None
        self._seen: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def stage(self, title: str, total: float) -> Report:
        """Start a stage and return the function that says how much of ``total`` is done."""
        with self._lock:
            self._title, self._total, self._done, self._began = title, total, 0.0, time.monotonic()
            self._first = self._moved = None
            self._seen.clear()

        def report(done: float) -> None:
            with self._lock:
                if self._title != title:
                    return
                now = (time.monotonic(), done)
                if self._first is None:
                    self._first = now
                elif self._moved is None and done > self._first[1]:
                    self._moved = now
                self._done = done

        return report

    def say(self, text: str) -> None:
        """Write the line."""
        tell(text)

    def tick(self) -> None:
        """Write how far the stage is, and about how much time is left where that can be told."""
        with self._lock:
            if self._title is None:
                return
            now, share = time.monotonic(), self._done / self._total if self._total > 0 else 1.0
            pace = self._pace(now)
            if self._moved:
                self._seen.append((now, self._done))
            if share >= 1:
                text = f"{self._title}: done; the next step is running"
            else:
                told = f"about {about((self._total - self._done) / pace)} left" if pace else about(now - self._began)
                text = f"{self._title}: {math.floor(100 * share)} % done{', ' if pace else ' after '}{told}"
        self.say(text)

    def _pace(self, now: float) -> float | None:
        """Return what is done in a second: lately, or else on average; None where too little is done to tell."""
        if self._first is None or self._moved is None:
            return None
        for (since, before), least in (
            (self._seen[0] if self._seen else self._moved, _LEAST_LATELY),
            (self._first, _LEAST_ON_AVERAGE),
        ):
            if now > since and self._done > before and self._done - self._first[1] >= least * self._total:
                return (self._done - before) / (now - since)
        return None


def tell(text: str) -> None:
    """Write a line to standard error, at once."""
    print(text, file=sys.stderr, flush=True)


def about(seconds: float) -> str:
    """Return a time as exactly as an estimate deserves: '5 s', '40 s', '12 min', '3.5 h'."""
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{seconds / 3600:.1f} h"


def how_long(seconds: float, *, at_most: bool = False) -> str:
    """Return the line that says how long a command will take, after a moment of it was tried.

    Args:
        seconds: estimated.
        at_most: something of it may be kept from an earlier run.
    """
    return (
        f"this will take {'at most ' if at_most else ''}about {about(seconds)}, judging by a short try of each part …"
    )


@contextmanager
def live_display(enabled: bool = True) -> Iterator[Display]:
    """Yield a display on standard error: a live one on a terminal, elsewhere plain lines every 15 seconds."""
    if not enabled or sys.stderr is None:
        yield Quiet()
        return
    if not sys.stderr.isatty():
        with _ticking(Lines()) as lines:
            yield lines
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

            def say(self, text: str) -> None:
                progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield _Live()


@contextmanager
def _ticking(lines: Lines) -> Iterator[Lines]:
    """Let ``lines`` tick while the block runs, from a thread of its own: work may be silent for minutes."""
    over = threading.Event()

    def tick() -> None:
        wait = SOON
        with suppress(OSError):  # nobody reads standard error any more
            while not over.wait(wait):
                lines.tick()
                wait = EVERY

    thread = threading.Thread(target=tick, name="fedaudit-progress", daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        over.set()
        thread.join()


def wide_console() -> Console:
    """Return a console as wide as the terminal, or wide enough for our tables where there is none."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=140)
