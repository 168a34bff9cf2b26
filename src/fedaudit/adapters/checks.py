"""What a guard plays on an update that is about to leave: as much of it as the round pays for."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedaudit.adapters import in_words
from fedaudit.adapters.attacked import Known, Passing, attacked
from fedaudit.defences.client_defences import ClientContext, norm
from fedaudit.defences.drift import ReceivedHistory
from fedaudit.pipeline.plan import Plan
from fedaudit.pipeline.site import known_of
from fedaudit.results.site import CheckRecord
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import BadInput

if TYPE_CHECKING:
    from fedaudit.api import MemberWatch, Verdict
    from fedaudit.pipeline.ledger import Filter
    from fedaudit.task.training import Loss

Examples = tuple[Tensor, Tensor]

MEMBERS, RECEIVED = "members", "received"  # names of the checks that are no attacks
LONGEST = 500  # characters that are written down of what a check says

_NO_HELD_OUT = "no held-out examples: give held_out, or let the client's app evaluate a model"


@dataclass
class Kept:
    """What is kept of a job and site from round to round."""

    plan: Plan
    held_out: Examples | None
    watch: MemberWatch | None = None
    received: ReceivedHistory = field(default_factory=ReceivedHistory)


@dataclass
class CheckResults:
    """What the checks of a round say.

    Attributes:
        norm: of the change of all parameters; None: not known.
        problem: why something couldn't be played that should have been; None: all was.
    """

    checks: dict[str, CheckRecord]
    norm: float | None = None
    slope: float | None = None
    problem: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Checks:
    """The checks of a guard and their settings, which are :class:`~fedaudit.adapters.guard.SiteGuard`'s.

    Args:
        given: the filters that updates went through, as the site says; None: as the framework does.
        alarmed: what becomes of an update that raises an alarm, in words.
    """

    attacks: Mapping[str, dict[str, Any]]
    fail_on: Verdict | None
    fail_above: Mapping[str, float]
    unset: bool
    every: int
    largest: int
    mean: list[float] | None
    std: list[float] | None
    loss: str | Loss | None
    out: Path | None
    given: list[Filter] | None
    alarmed: str
    log: logging.Logger

    def watch(self, held_out: Examples) -> MemberWatch:
        """Return what tells the site's own examples from held-out ones, by the time that it is given."""
        from fedaudit.api import MemberWatch  # what attacks need takes seconds to import

        return MemberWatch(held_out, math.inf, self.loss)

    def judge(
        self, kept: Kept, who: str, index: int | None, passing: Passing | None, problem: str | None
    ) -> CheckResults:
        """Play what is due and return what each check says; where ``passing`` can't be read, ``problem`` says why."""
        names = list(self.attacks) if kept.plan.rounds % self.every == 0 else []
        names += [MEMBERS] * (kept.held_out is not None)
        due = kept.plan.begin(names, passing.seen.seconds if passing is not None else 0.0)
        judged = CheckResults({name: CheckRecord(outcome="not played") for name in (*self.attacks, MEMBERS)})
        if kept.held_out is None:
            judged.checks[MEMBERS] = CheckRecord(outcome="not played", text=_NO_HELD_OUT)
        if passing is None:
            judged.problem = problem if due else None
            judged.checks |= {name: _unable(problem) for name in due}
            return judged
        judged.norm = _length(passing)
        sanitised = self._known(passing) if due else None
        if MEMBERS in due:
            try:
                judged.checks[MEMBERS] = self._members(kept, due[MEMBERS], passing, who, sanitised, judged)
            except Exception as error:  # what attacks say must not be lost with it
                judged.problem = f"members aren't watched: {in_words(error)}"
                judged.checks[MEMBERS] = _unable(judged.problem)
        if attacks := [name for name in due if name != MEMBERS]:
            judged.checks |= self._attack(kept, attacks, passing, who, index, sanitised, judged)
        return judged

    def _members(
        self,
        kept: Kept,
        seconds: float,
        passing: Passing,
        who: str,
        sanitised: ClientDefenceInfo | None,
        judged: CheckResults,
    ) -> CheckRecord:
        """Watch what a round tells of the site's own training examples."""
        assert kept.held_out is not None
        kept.watch = kept.watch or self.watch(kept.held_out)
        found = kept.watch.look(passing.state, passing.seen, passing.form, seconds=seconds, sanitised=sanitised)
        kept.plan.played(MEMBERS, found.seconds, found.needs)
        judged.seconds += found.seconds
        judged.slope = next((told.auc for told in found.told if told.by == "loss-series"), None)
        text = "; ".join([*map(str, found.told), *found.notes])
        cost = f"{found.seconds:.2g} s, {100 * found.share:.2g} % of the training's time"
        self.log.info("fedaudit guard: %s: members: %s (%s)", who, text or "not tested", cost)
        if alarms := [str(told) for told in found.told if told.alarm]:
            told = "; ".join(alarms)
            said = "fedaudit guard: %s: which examples were trained on can be told: %s; %s"
            self.log.warning(said, who, told, self.alarmed)
            return CheckRecord(outcome="alarm", text=told[:LONGEST], seconds=found.seconds)
        unable = found.unable is not None and not found.needs
        if unable:
            judged.problem = f"members aren't watched: {found.unable}"
        return CheckRecord(
            outcome="unable" if unable else "quiet" if found.told else "not played",
            text=(found.unable or text)[:LONGEST],
            seconds=found.seconds,
        )

    def _attack(
        self,
        kept: Kept,
        names: Sequence[str],
        passing: Passing,
        who: str,
        index: int | None,
        sanitised: ClientDefenceInfo | None,
        judged: CheckResults,
    ) -> dict[str, CheckRecord]:
        """Play attacks on the update."""
        from fedaudit import api

        began = perf_counter()
        known = Known(
            mean=self.mean,
            std=self.std,
            loss=self.loss,
            limits=api.Limits(self.fail_above, self.fail_on),
            unset=self.unset,
            whole=len(names) == len(self.attacks),
            out=None if self.out is None else self.out / passing.folder,
            sanitised=sanitised,
        )
        try:
            examples = sum(map(len, passing.seen.inputs))
            if examples > self.largest:
                raise BadInput(f"the update is over {examples} examples, and largest is {self.largest}; raise largest")
            found = attacked(passing, {name: self.attacks[name] for name in names}, index, known)
        except Exception as error:
            judged.problem = in_words(error)
            found = {name: _unable(judged.problem) for name in names}
        took = perf_counter() - began
        judged.seconds += took
        for name, check in found.items():
            failed = check.outcome == "unable"
            own = took / len(found) if failed else check.seconds
            kept.plan.played(name, own, kept.plan.costs.get(name, 0.0) if failed else 0.0)
            if not failed:
                self.log.info("fedaudit guard: %s: %s: %s", who, name, check.text)
        if any(check.outcome == "alarm" for check in found.values()):
            said = "fedaudit guard: %s: the update gives away more than allowed; %s (%.1f s)"
            self.log.warning(said, who, self.alarmed, took)
        elif not all(check.outcome == "unable" for check in found.values()):
            self.log.info("fedaudit guard: %s: within the limits (%.1f s)", who, took)
        return found

    def _known(self, passing: Passing) -> ClientDefenceInfo | None:
        """Return what everybody knows of the defence that an update went through."""
        filters = passing.went_through if self.given is None else self.given
        if not filters:
            return None
        weights = dict(passing.sent)
        try:
            training = passing.seen.training()
            update = Update(
                client=0,
                kind="weights",
                tensors={name: value for name, value in _changed(passing).items() if name in weights},
                num_examples=1 if training is None else sum(training.batch_sizes),
                training=training,
            )
            return known_of(filters, update, ClientContext(weights, tuple((name,) for name in weights), 1))
        except Exception as error:
            text = "fedaudit guard: attacks aren't told which defence the updates go through: %s"
            self.log.warning(text, in_words(error))
            return None


def _changed(passing: Passing) -> dict[str, Tensor]:
    """Return the change of each tensor that is no whole number."""
    floating = {name: value for name, value in passing.state.items() if value.is_floating_point()}
    if passing.form != "weights":
        return floating
    return {name: value - passing.sent[name] for name, value in floating.items() if name in passing.sent}


def _length(passing: Passing) -> float | None:
    """Return the norm of the change of all parameters; None: it isn't finite, or there are none."""
    module = passing.seen.module
    if module is None:
        return None
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    found = norm(value for name, value in _changed(passing).items() if name in parameters)
    return found if 0 < found < math.inf else None


def _unable(why: str | None) -> CheckRecord:
    return CheckRecord(outcome="unable", text=(why or "")[:LONGEST])
