"""What becomes of an update, by what its checks say."""

from __future__ import annotations

from dataclasses import dataclass

from fedaudit.guard.checks import CheckResults
from fedaudit.guard.rounds import LEFT, Done

# What the server is told, and not why: that would tell what was found, or what is looked for.
NOT_LET_IN = "the site's guard didn't let this model in"
REFUSED = "the site's guard didn't let this update leave"
SPENT = "the site's privacy budget doesn't allow another update"

ALARMED = {"refuse": "it doesn't leave", "warn": "it leaves nevertheless", "clip": "it is clipped"}


@dataclass(frozen=True)
class Decision:
    """What becomes of an update; of one that is ``clipped`` only the ``scale`` of its change leaves."""

    done: Done
    scale: float = 1.0

    @property
    def reason(self) -> str:
        """What the server is told in the update's place; empty where it leaves."""
        return "" if self.done in LEFT else SPENT if self.done == "stopped" else REFUSED


@dataclass(frozen=True)
class Policy:
    """A site's settings of what doesn't leave, which are :class:`~fedaudit.guard.SiteGuard`'s."""

    on_fail: str
    unaudited: str
    clip_norm: float | None

    def decide(self, results: CheckResults, usual: float | None) -> tuple[Decision, str]:
        """Return what becomes of an update, and a line on that; empty: there is nothing to say.

        ``usual`` is the norm of quiet rounds; None: there was none.
        """
        if any(check.outcome == "alarm" for check in results.checks.values()):
            return self._alarmed(results.norm, self.clip_norm or usual)
        if results.problem is None:
            return Decision("left"), ""
        refused = self.unaudited == "refuse"
        done = "doesn't leave" if refused else "leaves"
        return Decision("refused" if refused else "left"), f"not audited, and {done}: {results.problem}"

    def _alarmed(self, norm: float | None, bound: float | None) -> tuple[Decision, str]:
        if self.on_fail != "clip":  # the line is the check's own
            return Decision("refused" if self.on_fail == "refuse" else "left"), ""
        if bound is None or norm is None:
            why = "no quiet round says to which norm it is clipped; give clip_norm"
            return Decision("refused"), f"it doesn't leave: {why}"
        if norm <= bound:
            return Decision("left"), f"its norm {norm:.3g} is within {bound:.3g}: it leaves"
        return Decision("clipped", bound / norm), f"clipped from norm {norm:.3g} to {bound:.3g}"
