"""Within a time: one question after the other, the cheapest first, each with its control, the report renewed each time.

An attack on images that takes long is first tried on known examples, with a small part of its iterations. Without any
chance there it isn't run on the clients' updates, unless time is left when everything else has been answered.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from fedaudit.attacks import Attack
from fedaudit.evaluation.finding_types import known_type
from fedaudit.evaluation.limits import POWERLESS, TIME_IS_UP
from fedaudit.pipeline.calibrations import calibrated
from fedaudit.pipeline.controls import Known, by_known, of_power
from fedaudit.pipeline.partial_view import truth_for
from fedaudit.pipeline.power import KnownClients, at_small_effort, power_of
from fedaudit.pipeline.run import Audit, Opened, SoFar
from fedaudit.pipeline.trials import Means, Trial, run_trials
from fedaudit.results import overall
from fedaudit.utils.errors import NotApplicable, OutOfTime
from fedaudit.utils.progress import about

_HALF = 0.5  # of the time left, that attacks get, where controls follow
_LOOK = 0.15  # of the time left, that it may take to see whether an attack has a chance
_MARGIN = 0.7  # of the time left, that the margin gets, where attacks still wait
_CALIBRATION = 6  # runs that one costs, about


class InTurn:
    """An audit under way.

    Args:
        trials: that are planned; what doesn't apply has its outcome.
        opened: the truth to evaluate by.
        named: whether the user named the attacks: then all are run on the clients.
        controls: whether attacks leave time for controls.
        ready: is given each renewed audit.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        opened: Callable[[], Opened],
        means: Means,
        *,
        named: bool,
        controls: bool,
        ready: Callable[[Audit], object],
    ) -> None:
        self.trials, self.means, self.named = list(trials), means, named
        self._share = _HALF if controls else 1.0
        self._open, self._ready = opened, ready
        self._so_far = SoFar()
        self._waiting: dict[int, Trial] = {}  # run, but what is found has no control yet
        self._told: dict[str, str] = {}  # by question, what the terminal said last
        self._controls, self._reported = controls, False

    @cached_property
    def opened(self) -> Opened:
        """The truth; it isn't opened before the first attacks have been run."""
        return self._open()

    def run(self) -> Audit:
        """Return the finished audit; KeyboardInterrupt: what was answered by then has been handed on."""
        try:
            return self._run()
        except KeyboardInterrupt:
            if self._reported:
                self.means.display.say("stopped: the report says what was answered so far")
            raise

    def _run(self) -> Audit:
        dear = self._dear() if self._controls and not self.named else {}
        places = {i for own in dear.values() for i in own}
        for question, own in self._questions(places):
            names = ", ".join(dict.fromkeys(self.trials[i].attack.name for i in own))
            self.means.display.say(f"next: {question}, by {names}")
            self._play(own, self.means.within(self._share))
            self._tell(self.means.within(_HALF))
        if dear:
            self.means.display.say("next: how much the updates determine, whoever attacks")
            self._tell(self.means.within(_LOOK), ceilings=True)
        costs: dict[str, float] = {}
        for name in sorted(dear, key=lambda name: self.trials[dear[name][0]].work):
            self.means.display.say(f"next: whether {name} has a chance")
            seconds = self._chance(dear[name])
            if seconds is None:
                self._play_with_power(dear[name], self.means.within(_HALF))
            else:
                costs[name] = seconds
        if dear:
            self._tell(self.means.within(_MARGIN), margins=True)
        for name in sorted(costs, key=costs.__getitem__):
            unknown = math.isinf(costs[name])  # even the look took too long
            if self._left() > (0 if unknown else costs[name]):
                long = "" if unknown else f", about {about(costs[name])}"
                self.means.display.say(f"next: {name} after all{long}")
                self._play_with_power(dear[name], self.means, anyway=True)
                self._tell(self.means)
        hopeless = {i for name, cost in costs.items() if cost >= self._left() for i in dear[name]}
        late = [
            i
            for i, trial in enumerate(self.trials)
            if i not in hopeless and (trial.outcome is None or isinstance(trial.outcome, OutOfTime))
        ]
        for i in late:
            self.trials[i] = self._waiting.pop(i, replace(self.trials[i], outcome=None))
        self._play(late, self.means)
        return self._tell(self.means, margins=True)

    def _left(self) -> float:
        return (self.means.deadline or time.time()) - time.time()

    def _dear(self) -> dict[str, list[int]]:
        """Return the attacks whose examples come out one by one and that take long, with the places of their trials."""
        found: dict[str, list[int]] = {}
        for i, trial in enumerate(self.trials):
            each = known_type(trial.attack.finds.kind).known.each
            if trial.outcome is None and each and at_small_effort(trial.attack, trial.observation) is not None:
                found.setdefault(trial.attack.name, []).append(i)
        return found

    def _questions(self, apart: set[int]) -> list[tuple[str, list[int]]]:
        """Return what is asked, but for trials apart, and the places of those that answer it; the cheapest first."""
        found: dict[str, list[int]] = {}
        for i, trial in enumerate(self.trials):
            if i not in apart and trial.outcome is None:
                found.setdefault(trial.attack.finds.kind, []).append(i)
        return sorted(found.items(), key=lambda item: sum(self.trials[i].work for i in item[1]))

    def _play(self, places: Sequence[int], means: Means) -> None:
        asked = calibrated([self.trials[i] for i in places], means)
        self._keep(places, run_trials(asked, means))

    def _keep(self, places: Sequence[int], trials: Sequence[Trial]) -> None:
        """Take over what trials came to; a control of their attacks was for those that had been run before."""
        new = [trial for trial in trials if not isinstance(trial.outcome, NotApplicable)]
        self._so_far.controls.drop({(t.observation.federation, t.attack.name) for t in new})
        for i, trial in zip(places, trials, strict=True):
            self.trials[i] = trial

    def _chance(self, places: Sequence[int]) -> float | None:
        """Return how long an attack would take in all, where it has no chance on known examples; None: play it."""
        first = min((self.trials[i] for i in places), key=lambda trial: trial.work)  # the easiest
        small = at_small_effort(first.attack, first.observation)
        assert small is not None
        name = f"{first.observation.federation}-chance-{first.attack.name}"
        began = time.perf_counter()
        try:
            self.means.check()
            known = self._known(small, first, name)
            power = power_of(known, self.means.within(_LOOK), most=1)
        except OutOfTime as late:
            for i in places:
                self.trials[i] = replace(self.trials[i], outcome=late)
            return math.inf
        except NotApplicable:  # nobody can tell beforehand
            return None
        if power.recovered:
            return None
        seconds = time.perf_counter() - began
        effort = f"{small.effort():,} of {first.attack.effort():,} iterations"
        shown = Known(of_power(first.attack.name, power, effort), power.files)
        self._so_far.controls.keep(first.observation.federation, shown)
        for i in places:
            self.trials[i] = replace(self.trials[i], outcome=NotApplicable(POWERLESS))
        runs = 2 + _CALIBRATION * (first.attack.calibration(first.observation) is not None)
        return seconds * runs * first.attack.effort() / small.effort()

    def _known(self, attack: Attack, trial: Trial, name: str) -> KnownClients:
        runs = [(attack, trial.observation)]
        return KnownClients(
            runs, truth_for(self.opened.recording, trial.observation), seed=trial.seed, device=trial.device, name=name
        )

    def _play_with_power(self, places: Sequence[int], means: Means, *, anyway: bool = False) -> None:
        """Find out what an attack recovers of known examples; run it on the clients where it has power, or anyway."""
        open_ones = [replace(self.trials[i], outcome=None) for i in places]
        asked = calibrated(open_ones, means.within(_HALF))
        runs = [(trial.attack, trial.observation) for trial in asked]
        opened, federation = self.opened, asked[0].observation.federation
        kind = known_type(asked[0].attack.finds.kind)
        known = by_known(kind, runs, len(runs), opened.recording, opened.resolved.scenario, means.within(_MARGIN))
        if known is not None:
            self._so_far.controls.keep(federation, known)
            if not (known.result.won or anyway):
                return
        for i, trial in zip(places, run_trials(asked, means), strict=True):
            self.trials[i] = trial

    def _tell(self, means: Means, *, margins: bool = False, ceilings: bool = False) -> Audit:
        """Evaluate what there is, with controls, say what is new, and hand the renewed audit on."""
        asked = {"margins_too": margins, "ceilings_too": margins or ceilings}
        audit = self.opened.audit(self.trials, means, self._so_far, **asked)
        if self._without_control():
            audit = self.opened.audit(self.trials, means, self._so_far, margins_too=False, ceilings_too=False)
        groups = {s.kind: [o for o in audit.result.summaries if o.kind == s.kind] for s in audit.result.summaries}
        for kind, own in groups.items():
            ran = [s for s in own if s.verdict != "not applicable"]
            if kind is None or not ran:
                continue
            verdict = overall(ran)
            chief = next(s for s in ran if s.verdict == verdict)
            line = f"{kind}: {verdict}. {chief.headline or chief.verdict_text}"
            if self._told.get(kind) != line:
                self._told[kind] = line
                self.means.display.say(line)
        for told in audit.result.ceilings:
            if self._told.get(f"ceiling of {told.federation}") != told.text:
                self._told[f"ceiling of {told.federation}"] = told.text
                self.means.display.say(f"ceiling of {told.federation}: {told.text}")
        self._ready(audit)
        self._reported = True
        return audit

    def _without_control(self) -> bool:
        """Take back what no control could be run for, and return whether there is such: it is no answer yet."""
        controls = self._so_far.controls
        late = {place for place, i in controls.of.items() if controls.results[i].text == TIME_IS_UP}
        controls.drop(late)
        found = False
        for i, trial in enumerate(self.trials):
            own = trial.observation.federation, trial.attack.name
            if own in late and not isinstance(trial.outcome, NotApplicable):
                self._waiting[i] = trial
                self._so_far.evaluated.pop(i, None)
                self.trials[i] = replace(trial, outcome=OutOfTime(TIME_IS_UP))
                found = True
        return found
