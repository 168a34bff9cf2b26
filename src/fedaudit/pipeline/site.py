"""What a site's guard writes down of every round, and the budget of ε that is counted there."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

from pydantic import ValidationError

from fedaudit.defences.client_defences import ClientContext
from fedaudit.epsilon.accounting import PrivacyAccount
from fedaudit.pipeline.ledger import Filter, chain_account, known_client_defence
from fedaudit.report.site import write_site
from fedaudit.results.site import LEFT, Done, SiteRound
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.bounds import SITE, opened, shown
from fedaudit.utils.errors import BadInput

FILE = "guard.jsonl"
_SAME = 1e-6  # by which an ε may differ that is computed again


# --- the file -------------------------------------------------------------------------------------------------------


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
            return _read(file)
    except FileNotFoundError:
        return Written([], 0)


def _read(file: IO[bytes]) -> Written:
    rounds: list[SiteRound] = []
    torn = 0
    for line in file.read(SITE.file).split(b"\n"):
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
        before = _read(file)
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


# --- what updates cost ----------------------------------------------------------------------------------------------


def filters_of(sanitised: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None) -> list[Filter] | None:
    """Return what a site says of its updates' defence, ``{"name": "local-dp", …}`` or several, as filters."""
    if sanitised is None:
        return None
    several = [sanitised] if isinstance(sanitised, Mapping) else list(sanitised)
    if not all(isinstance(one, Mapping) and isinstance(one.get("name"), str) for one in several):
        raise BadInput("sanitised is the defence that updates go through: {'name': 'local-dp', …}, or a list of such")
    filters: list[Filter] = [
        (str(one["name"]), {key: value for key, value in one.items() if key != "name"}) for one in several
    ]
    for name, settings in filters:
        if known_client_defence(name, settings) is None:
            raise BadInput(f"sanitised has '{name}', which isn't known; fedaudit list shows the client-side defences")
    return filters


def site_account(filters: Sequence[Filter], elements: int | None, delta: float | None) -> PrivacyAccount | None:
    """Return what a site's updates cost that go through these filters, as ``fedaudit ledger`` counts; None: no bound.

    Arguments are as of :func:`fedaudit.pipeline.ledger.chain_account`; ``delta`` counts in place of the settings'.
    BadInput: it can't be accounted for.
    """
    account = chain_account("the site", filters, elements).account
    if account is None:
        return None
    asked: PrivacyAccount = replace(cast("Any", account), adjacency="replace", delta=delta or account.delta)
    return asked


def known_of(filters: Sequence[Filter], update: Update, context: ClientContext) -> ClientDefenceInfo | None:
    """Return what everybody knows of an update that went through these filters; None: nothing."""
    import torch

    info = None
    for kind, settings in filters:
        client_defence = known_client_defence(kind, settings)
        if client_defence is not None:
            done = client_defence(update, context, torch.Generator().manual_seed(0))
            info = done.sanitised or info
    return info


@dataclass(frozen=True)
class WrittenRound:
    """A round that was written down, or wasn't.

    Attributes:
        done: what becomes of its update.
        why: it is stopped; empty where it isn't.
        problems: that stop nothing.
    """

    done: Done
    why: str = ""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Book:
    """A site's file and page, and the budget that is counted in it.

    What a budget can't count isn't sent; without a budget nothing that goes wrong here stops anything.

    Args:
        folder: of the file and the page; None: nothing is written.
        target: ε that the updates of a site in a job must not exceed; None: there is no budget.
        delta: δ; None: the mechanism's.
        given: the filters that updates go through, as the site says; None: as the framework does.
        lasting: a site has the same name after a restart; else all updates of a job that stand in the file count.
    """

    folder: Path | None
    target: float | None = None
    delta: float | None = None
    given: list[Filter] | None = None
    lasting: bool = True

    def rounds(self, job: str, site: str) -> list[SiteRound]:
        """Return what was written down of a site in a job."""
        if self.folder is None:
            return []
        try:
            return [one for one in read_site(self.folder).rounds if (one.job, one.site) == (job, site)]
        except OSError as error:
            raise BadInput(_unwritten(self.folder, error)) from None

    def stops(self, job: str, site: str, through: Sequence[Filter], elements: int) -> str | None:
        """Return why the budget doesn't allow another update; None: it does.

        ``through`` are all filters of the site's updates, as far as the framework tells; ``elements`` are the whole
        state's.
        """
        if self.target is None or self.folder is None:
            return None
        try:
            return self._above(self._epsilon(read_site(self.folder), job, site, through, elements))
        except Exception as error:
            return _unwritten(self.folder, error)

    def end(
        self, line: SiteRound, through: Sequence[Filter] | None = (), elements: int | None = None, *, draw: bool = True
    ) -> WrittenRound:
        """Write a round down, before its update leaves, and draw the page, if that is wanted.

        ``through`` is as of :meth:`stops`; None: whatever the site says, nothing works on what leaves. ``elements`` are
        the model's whole state's; None: not known.
        """
        if (folder := self.folder) is None:
            return WrittenRound(line.done)
        why: str | None = None
        problems: list[str] = []

        def made(written: Written) -> SiteRound:
            nonlocal why
            if line.done not in LEFT or not (self.target or self.given):
                return line
            try:
                epsilon = self._epsilon(written, line.job, line.site, through, elements)
                why = self._above(epsilon)
            except Exception as error:
                epsilon, problem = math.inf, f"ε isn't counted: {_unwritten(folder, error)}"
                if self.target is not None:
                    why = problem
                else:
                    problems.append(problem)
            done: Done = line.done if why is None else "stopped"
            told = epsilon if why is None and epsilon < math.inf else None
            return line.model_copy(update={"done": done, "epsilon": told, "target": self.target})

        try:
            line, written = append_round(folder, made)
        except Exception as error:
            problem = _unwritten(folder, error)
            if self.target is not None and line.done in LEFT:  # what isn't counted isn't sent
                return WrittenRound("stopped", f"it can't be counted: {problem}")
            return WrittenRound(line.done, problems=(f"a round isn't written down: {problem}",))
        try:
            if draw:
                write_site(written.rounds, folder)
        except Exception as error:
            problems.append(f"the page isn't drawn: {_unwritten(folder, error)}")
        return WrittenRound(line.done, why or "", tuple(problems))

    def _epsilon(
        self, written: Written, job: str, site: str, through: Sequence[Filter] | None, elements: int | None
    ) -> float:
        """Return the ε of a site's updates in a job with another one; infinite where nothing bounds it.

        BadInput: it can't be accounted for, or updates left that cost more than what is known now would have.
        """
        if through is None:
            raise BadInput("no defence of updates works on it, so that nothing bounds what it tells")
        account = site_account(through if self.given is None else self.given, elements, self.delta)
        if account is None:
            return math.inf
        who = site if self.lasting else None
        spent, before = written.sent(job, who), [one.epsilon for one in written.left(job, who)]
        if None in before:
            raise BadInput(
                "updates of this job left before ε was counted, and nothing says through which noise; a budget is for "
                "a job from its first update on"
            )
        if max((one for one in before if one is not None), default=0.0) > (1 + _SAME) * account.spent(spent):
            raise BadInput(
                "updates of this job left with less noise than now, or another δ: what they cost together isn't known; "
                "set sanitised and delta as they were"
            )
        return account.spent(spent + 1)

    def _above(self, epsilon: float) -> str | None:
        if self.target is None or epsilon <= self.target:
            return None
        if epsilon == math.inf:
            return "nothing that is known of the updates' defence bounds ε: give sanitised"
        return f"with it ε would be {epsilon:.4g}, and target_epsilon is {self.target:g}"


def _unwritten(folder: Path, error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error) if isinstance(error, BadInput) else f"{type(error).__name__}: {error}"
    return f"can't write to '{shown(folder)}': {getattr(error, 'strerror', None) or error}"
