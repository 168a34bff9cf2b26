"""A site's log: its file of rounds, the page that is drawn of it, and the budget that is counted in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedaudit.guard.budget import Budget
from fedaudit.guard.page import write_site
from fedaudit.guard.rounds import LEFT, Done, SiteRound, Written, append_round, read_site
from fedaudit.pipeline.ledger import Filter
from fedaudit.utils.bounds import shown
from fedaudit.utils.errors import BadInput, in_words


@dataclass(frozen=True)
class WrittenRound:
    """What becomes of a round's update, why it is stopped, if it is, and problems that stop nothing."""

    done: Done
    why: str = ""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundLog:
    """What a site's guard writes into a folder, if it has one, and the budget that is counted there.

    What a budget can't count isn't sent; without a budget nothing that goes wrong here stops anything.
    """

    folder: Path | None
    budget: Budget

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

        ``through`` and ``elements`` are as of :meth:`Budget.epsilon`.
        """
        if self.budget.target is None or self.folder is None:
            return None
        try:
            return self.budget.exceeded(self.budget.epsilon(read_site(self.folder), job, site, through, elements))
        except Exception as error:
            return _unwritten(self.folder, error)

    def end(
        self, line: SiteRound, through: Sequence[Filter] | None = (), elements: int | None = None, *, draw: bool = True
    ) -> WrittenRound:
        """Write a round down, before its update leaves, and draw the page, if that is wanted; as :meth:`stops`."""
        if (folder := self.folder) is None:
            return WrittenRound(line.done)
        why = problem = ""

        def made(written: Written) -> SiteRound:
            nonlocal why, problem
            counted, why, problem = self.budget.count(line, written, through, elements)
            return counted

        try:
            kept, written = append_round(folder, made)
        except Exception as error:
            problem = _unwritten(folder, error)
            if self.budget.target is not None and line.done in LEFT:  # what isn't counted isn't sent
                return WrittenRound("stopped", f"it can't be counted: {problem}")
            return WrittenRound(line.done, problems=(f"a round isn't written down: {problem}",))
        problems = [problem] if problem else []
        try:
            if draw:
                write_site(written.rounds, folder)
        except Exception as error:
            problems.append(f"the page isn't drawn: {_unwritten(folder, error)}")
        return WrittenRound(kept.done, why, tuple(problems))


def _unwritten(folder: Path, error: Exception) -> str:
    if not isinstance(error, OSError):
        return in_words(error)
    return f"can't write to '{shown(folder)}': {getattr(error, 'strerror', None) or error}"
