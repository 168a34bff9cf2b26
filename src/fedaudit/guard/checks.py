"""What a guard plays on an update that is about to leave: as much of it as the round pays for."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from fedaudit.defences.client_defences import ClientContext
from fedaudit.defences.drift import ReceivedHistory
from fedaudit.evaluation.limits import CEILING
from fedaudit.guard.attacks import AttackSettings, attacked, ceiling_check
from fedaudit.guard.budget import known_of
from fedaudit.guard.given import Examples
from fedaudit.guard.outgoing import OutgoingUpdate
from fedaudit.guard.plan import Plan
from fedaudit.guard.rounds import CheckRecord
from fedaudit.simulation.local_training import local_randomness
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import in_words

if TYPE_CHECKING:
    from fedaudit.guard.members import MemberWatch
    from fedaudit.pipeline.ledger import Filter

MEMBERS, RECEIVED = "members", "received"  # names of the checks that are no attacks
LONGEST = 500  # characters that are written down of what a check says

_NO_HELD_OUT = "no held-out examples: give held_out, or let the client's app evaluate a model"


@dataclass
class SiteState:
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
    """The checks of a guard and their settings, which are :class:`~fedaudit.guard.SiteGuard`'s.

    Args:
        given: the filters that updates went through, as the site says; None: as the framework does.
        alarmed: what becomes of an update that raises an alarm, in words.
    """

    attacks: AttackSettings
    every: int
    given: list[Filter] | None
    alarmed: str
    log: logging.Logger

    def watch(self, held_out: Examples) -> MemberWatch:
        """Return what tells the site's own examples from held-out ones, by the time that it is given."""
        from fedaudit.guard.members import MemberWatch  # what attacks need takes seconds to import

        return MemberWatch(held_out, math.inf, self.attacks.loss)

    @local_randomness(0)  # the process may train on after the audit
    def play(
        self, state: SiteState, who: str, index: int | None, update: OutgoingUpdate | None, problem: str | None
    ) -> CheckResults:
        """Play what is due and return what each check says; where ``update`` can't be read, ``problem`` says why."""
        names = list(self.attacks.specs) if state.plan.rounds % self.every == 0 else []
        names += [CEILING] * (CEILING in self.attacks.fail_above)
        names += [MEMBERS] * (state.held_out is not None)
        due = state.plan.begin(names, update.seen.seconds if update is not None else 0.0)
        results = CheckResults({name: CheckRecord(outcome="not played") for name in (*self.attacks.specs, MEMBERS)})
        if state.held_out is None:
            results.checks[MEMBERS] = CheckRecord(outcome="not played", text=_NO_HELD_OUT)
        if update is None:
            results.problem = problem if due else None
            results.checks |= {name: unable(problem) for name in due}
            return results
        results.norm = update.norm()
        sanitised = self._sanitised(update) if due else None
        if MEMBERS in due:
            try:
                results.checks[MEMBERS] = self._members(state, due[MEMBERS], update, who, sanitised, results)
            except Exception as error:  # what attacks say must not be lost with it
                results.problem = f"members aren't watched: {in_words(error)}"
                results.checks[MEMBERS] = unable(results.problem)
        if CEILING in due:
            results.checks[CEILING] = self._ceiling(state.plan, update, who, index, sanitised, results)
        if attacks := [name for name in due if name not in (MEMBERS, CEILING)]:
            results.checks |= self._attack(state.plan, attacks, update, who, index, sanitised, results)
        return results

    def _members(
        self,
        state: SiteState,
        seconds: float,
        update: OutgoingUpdate,
        who: str,
        sanitised: ClientDefenceInfo | None,
        results: CheckResults,
    ) -> CheckRecord:
        """Watch what a round tells of the site's own training examples."""
        assert state.held_out is not None
        state.watch = state.watch or self.watch(state.held_out)
        found = state.watch.look(update.state, update.seen, update.form, seconds=seconds, sanitised=sanitised)
        state.plan.played(MEMBERS, found.seconds, found.needs)
        results.seconds += found.seconds
        results.slope = next((test.auc for test in found.tests if test.by == "loss-series"), None)
        text = "; ".join([*map(str, found.tests), *found.notes])
        cost = f"{found.seconds:.2g} s, {100 * found.share:.2g} % of the training's time"
        self.log.info("fedaudit guard: %s: members: %s (%s)", who, text or "not tested", cost)
        if alarms := "; ".join(str(test) for test in found.tests if test.alarm):
            said = "fedaudit guard: %s: which examples were trained on can be told: %s; %s"
            self.log.warning(said, who, alarms, self.alarmed)
            return CheckRecord(outcome="alarm", text=alarms[:LONGEST], seconds=found.seconds)
        failed = found.unable is not None and not found.needs
        if failed:
            results.problem = f"members aren't watched: {found.unable}"
        return CheckRecord(
            outcome="unable" if failed else "quiet" if found.tests else "not played",
            text=(found.unable or text)[:LONGEST],
            seconds=found.seconds,
        )

    def _ceiling(
        self,
        plan: Plan,
        update: OutgoingUpdate,
        who: str,
        index: int | None,
        sanitised: ClientDefenceInfo | None,
        results: CheckResults,
    ) -> CheckRecord:
        """Compute how much the update determines of its examples, whoever attacks."""
        began = perf_counter()
        try:
            found = ceiling_check(update, index, self.attacks, sanitised)
        except Exception as error:
            results.problem = f"the ceiling isn't computed: {in_words(error)}"
            found = unable(results.problem)
        took = perf_counter() - began
        results.seconds += took
        plan.played(CEILING, took)
        if found.outcome == "alarm":
            said = "fedaudit guard: %s: the update determines more of its examples than allowed: %s; %s"
            self.log.warning(said, who, found.text, self.alarmed)
        else:
            self.log.info("fedaudit guard: %s: ceiling: %s (%.1f s)", who, found.text, took)
        return found.model_copy(update={"text": found.text[:LONGEST], "seconds": took})

    def _attack(
        self,
        plan: Plan,
        names: Sequence[str],
        update: OutgoingUpdate,
        who: str,
        index: int | None,
        sanitised: ClientDefenceInfo | None,
        results: CheckResults,
    ) -> dict[str, CheckRecord]:
        """Play attacks on the update."""
        began = perf_counter()
        try:
            found = attacked(update, names, index, self.attacks, sanitised)
        except Exception as error:
            results.problem = in_words(error)
            found = {name: unable(results.problem) for name in names}
        took = perf_counter() - began
        results.seconds += took
        for name, check in found.items():
            if check.outcome == "unable":
                plan.played(name, took / len(found), plan.costs.get(name, 0.0))
            else:
                plan.played(name, check.seconds)
                self.log.info("fedaudit guard: %s: %s: %s", who, name, check.text)
        if any(check.outcome == "alarm" for check in found.values()):
            said = "fedaudit guard: %s: the update gives away more than allowed; %s (%.1f s)"
            self.log.warning(said, who, self.alarmed, took)
        elif not all(check.outcome == "unable" for check in found.values()):
            self.log.info("fedaudit guard: %s: within the limits (%.1f s)", who, took)
        return found

    def _sanitised(self, update: OutgoingUpdate) -> ClientDefenceInfo | None:
        """Return what everybody knows of the defence that an update went through."""
        filters = update.went_through if self.given is None else self.given
        if not filters:
            return None
        weights = dict(update.sent)
        try:
            training = update.seen.training()
            known = Update(
                client=0,
                kind="weights",
                tensors={name: value for name, value in update.changes().items() if name in weights},
                num_examples=1 if training is None else sum(training.batch_sizes),
                training=training,
            )
            return known_of(filters, known, ClientContext(weights, tuple((name,) for name in weights), 1))
        except Exception as error:
            said = "fedaudit guard: attacks aren't told which defence the updates go through: %s"
            self.log.warning(said, in_words(error))
            return None


def unable(why: str | None) -> CheckRecord:
    """Return the record of a check that should have been played and couldn't be."""
    return CheckRecord(outcome="unable", text=(why or "")[:LONGEST])
