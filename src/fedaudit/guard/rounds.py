"""What a site's guard writes down: a round is a line of JSON, and a site's rounds are a file."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from fedaudit.utils.bounds import SITE, opened

FILE = "guard.jsonl"

CheckOutcome = Literal["quiet", "alarm", "not played", "unable"]
Done = Literal["left", "clipped", "refused", "not let in", "stopped"]

RESULT = "result"  # name of the check of a result that is no update
LEFT: frozenset[Done] = frozenset({"left", "clipped"})  # what was sent, and so counts in ε


class CheckRecord(BaseModel):
    """What one check of a guard said of a round.

    Attributes:
        outcome: ``quiet``, ``alarm``, ``not played`` (no time, or nothing to play yet), or ``unable``: it should have
            been played and couldn't be.
        text: what was found, or why not.
        seconds: that it took.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    outcome: CheckOutcome
    text: str = Field(default="", max_length=2000)
    seconds: float = Field(default=0.0, ge=0)


class SiteRound(BaseModel):
    """One round of a site, as its guard saw it.

    Attributes:
        time: when.
        job: the framework's name of the job or run.
        site: of the site or node.
        index: of the round, from 0, as the server says; None: it doesn't.
        done: what became of the update: it ``left``, was ``clipped`` and left, was ``refused``, its model was ``not let
            in``, or it was ``stopped`` by the budget.
        checks: by name.
        trained: seconds that the site trained.
        spent: seconds that the guard took.
        norm: Euclidean, of the change of all parameters; None: not known.
        slope: probability that the confidence in one of the site's examples rose faster than in a held-out one; None:
            not tested.
        epsilon: that this site's updates of the job have cost, this one included; None: nothing is accounted for.
        target: ε that they must not exceed.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    time: AwareDatetime
    job: str
    site: str
    index: int | None = None
    done: Done = "left"
    checks: dict[str, CheckRecord] = {}
    trained: float = Field(default=0.0, ge=0)
    spent: float = Field(default=0.0, ge=0)
    norm: float | None = None
    slope: float | None = None
    epsilon: float | None = None
    target: float | None = None

    @property
    def alarms(self) -> list[str]:
        """Names of the checks that raised one."""
        return [name for name, check in self.checks.items() if check.outcome == "alarm"]

    @property
    def quiet(self) -> bool:
        """Whether something was played on the update, and nothing raised an alarm or failed."""
        outcomes = [check.outcome for name, check in self.checks.items() if name != "received"]
        return "quiet" in outcomes and not {"alarm", "unable"} & {*outcomes, *(["alarm"] if self.alarms else [])}


def in_parts(rounds: Sequence[SiteRound]) -> list[list[SiteRound]]:
    """Return the rounds of each job and site, those that were written to last first."""
    last = {(one.job, one.site): place for place, one in enumerate(rounds)}
    ordered = sorted(rounds, key=lambda one: -last[one.job, one.site])
    return [list(part) for _, part in itertools.groupby(ordered, key=lambda one: (one.job, one.site))]


@dataclass(frozen=True)
class Written:
    """The rounds in a site's file that can be read, in their order, and the ``torn`` lines that can't."""

    rounds: list[SiteRound]
    torn: int

    def left(self, job: str, site: str | None) -> list[SiteRound]:
        """Return the rounds of a job in which the site, or any, sent an update."""
        return [one for one in self.rounds if one.done in LEFT and one.job == job and site in (None, one.site)]

    def sent(self, job: str, site: str | None) -> int:
        """Return how many updates a site has sent in a job; any line that can't be read may be one."""
        return self.torn + len(self.left(job, site))


def read_site(folder: Path) -> Written:
    """Read a site's file; where there is none, nothing was written. BadInput: it is too large, or no file."""
    try:
        with opened(folder / FILE, SITE) as file:
            return read_rounds(file.read(SITE.file))
    except FileNotFoundError:
        return Written([], 0)


def read_rounds(data: bytes) -> Written:
    """Return what a site's file holds, of its bytes."""
    rounds: list[SiteRound] = []
    torn = 0
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            rounds.append(SiteRound.model_validate_json(line))
        except ValidationError:  # a crash cut it short
            torn += 1
    return Written(rounds, torn)


def append_round(folder: Path, make: Callable[[Written], SiteRound]) -> tuple[SiteRound, Written]:
    """Append the line that ``make`` gives, knowing the file, to a site's file; return it, and the file with it.

    Nobody else writes between reading and appending, and when this returns the line is on the disk; half a line is
    taken away again, where that can be. The folder is made. BadInput: the file is too large, or none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    path.touch(0o600)  # before it is opened by what refuses pipes
    with opened(path, SITE):
        pass
    with path.open("rb+") as file, _alone(file):
        before = read_rounds(file.read(SITE.file))
        size = file.seek(0, os.SEEK_END)
        whole = not size or file.seek(size - 1) is None or file.read(1) == b"\n"
        line = make(before)
        file.seek(size)
        try:
            file.write((b"" if whole else b"\n") + line.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                os.ftruncate(file.fileno(), size)
            raise
    return line, Written([*before.rounds, line], before.torn)


@contextmanager
def _alone(file: IO[bytes]) -> Iterator[None]:
    """Let nobody else into the block, as far as this file is concerned."""
    if sys.platform == "win32":  # no such locks
        yield
        return
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX)
    yield  # closing lets go of it
