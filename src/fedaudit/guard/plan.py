"""What a site's guard may play in a round: its checks' cost, planned from measured seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fedaudit.guard.rounds import SiteRound

_NORMS = 10  # of the last quiet rounds, from which a bound is taken
_SAVED = 2.0  # times what a check takes, which it may put by


@dataclass
class Plan:
    """Which checks a round pays for: all together take at most ``share`` of the time that the site has trained.

    A check's first play measures what it costs. From then on training earns seconds: debts are paid first, and each
    check puts by an equal part of what is left, up to twice what it takes. A check is played once it has what it takes,
    so that cheap ones are played often, dear ones seldom, and none never.

    Attributes:
        share: of the training's time; None: everything is played in every round.
        rounds: that were begun.
        trained, spent: seconds in all of them.
        costs: seconds that each check took when it was played last.
        saved: seconds that each has put by.
        norms: of the last quiet rounds' updates.
        beside: seconds that the guard took for everything else when a round was last ended.
        writing: of these, to write the round down, which the next one pays.
        drawing: seconds that this took with the page, when that was drawn last.
    """

    share: float | None
    rounds: int = 0
    trained: float = 0.0
    spent: float = 0.0
    costs: dict[str, float] = field(default_factory=dict)
    saved: dict[str, float] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    beside: float = 0.0
    writing: float = 0.0
    drawing: float = 0.0

    def begin(self, checks: Sequence[str], trained: float) -> dict[str, float]:
        """Begin a round with ``trained`` seconds of training; return the checks to play, and what each may take.

        A check whose cost nobody knows may take any time.
        """
        self.rounds += 1
        self.trained += trained
        if self.share is None:
            return dict.fromkeys(checks, math.inf)
        known = [name for name in checks if name in self.costs]
        left = self.share * self.trained - self.spent - self.beside
        free = left - sum(self.saved.get(name, 0.0) for name in known)
        room = {name: _SAVED * self.costs[name] - self.saved.get(name, 0.0) for name in known}
        for place, name in enumerate(sorted(known, key=lambda name: room[name])):
            part = min(max(room[name], 0.0), max(free, 0.0) / (len(known) - place))
            self.saved[name] = self.saved.get(name, 0.0) + part
            free -= part
        chosen = {name: math.inf for name in checks if name not in self.costs}
        for name in sorted(known, key=lambda name: self.costs[name] - self.saved[name]):
            if self.costs[name] <= min(self.saved[name], left):
                chosen[name] = min(self.saved[name], left)
                left -= chosen[name]
        return chosen

    def played(self, check: str, seconds: float, takes: float = 0.0) -> None:
        """Pay for a check; ``takes``: seconds it needs to say something, where these were too few, or it failed."""
        self.saved[check] = max(0.0, self.saved.get(check, 0.0) - seconds)
        self.costs[check] = max(seconds, takes)

    def end(self, one: SiteRound, beside: float = 0.0) -> None:
        """End a round: what the guard took is spent, ``beside`` of it in no check; a quiet one tells what is usual."""
        self.spent += one.spent
        self.beside = beside
        if one.quiet and one.norm is not None:
            self.norms = [*self.norms, one.norm][-_NORMS:]

    def draws(self, trained: float) -> bool:
        """Whether a round pays for a page, in which the site trained so many seconds; every 2ⁿ-th has one anyway."""
        paid = self.share is None or self.drawing <= self.share * trained
        return paid or self.rounds & (self.rounds - 1) == 0

    @property
    def usual_norm(self) -> float | None:
        """The median of the last quiet rounds' norms; None: there was none."""
        norms = sorted(self.norms)
        middle = len(norms) // 2
        return (norms[middle] + norms[-middle - 1]) / 2 if norms else None

    @classmethod
    def of(cls, rounds: Iterable[SiteRound], share: float | None) -> Plan:
        """Return the plan of a guard that has begun anew, from what it wrote down; nothing is put by."""
        plan = cls(share)
        for one in rounds:
            plan.rounds += 1
            plan.trained += one.trained
            plan.end(one)
            for name, check in one.checks.items():
                if check.outcome in ("quiet", "alarm") and name != "received":
                    plan.costs[name] = check.seconds
        return plan
