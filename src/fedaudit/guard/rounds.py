"""What a site's guard writes down of every round: one line of JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

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
