"""About how long an audit will take: measured beforehand, by a little of each simulation and of each attack."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedaudit.attacks import Attack
from fedaudit.defences.privacy import DifferentialPrivacy
from fedaudit.defences.spec import DefencesSpec
from fedaudit.pipeline.prepare import ResolvedScenario
from fedaudit.pipeline.trials import Trial, nothing_is_run
from fedaudit.simulation.client import Federation
from fedaudit.simulation.simulator import simulate
from fedaudit.simulation.spec import MaliciousSpec
from fedaudit.transcript.observation import observe
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils.errors import FedAuditError, NotApplicable
from fedaudit.utils.machine import one_thread
from fedaudit.utils.progress import Display, Quiet, how_long

_ATTACK = 0.3  # seconds for which an attack is tried, once it is under way
_SIMULATION = 0.3  # and a simulation
_MALICIOUS = 2.0  # with malicious clients, whose turn comes last
_LONGEST = 4.0  # seconds for which any of them is tried that has reported twice
_TOGETHER = 6.0  # seconds after which nothing more is tried: what is left takes as long as what is like it
_STEPS = 64  # of a client's local training that are tried at most
_AROUND = 1.5  # seconds for metrics, intervals and the page
_FINDING = 0.1  # of these for each finding
_WORKERS = 4.0  # seconds until worker processes have imported torch
_BUSIEST = 10.0  # times as long as alone it takes at most on a machine that others use
_WAITED = 1.25  # times its work that something takes where others are at work, too
_PAYS = 10.0  # seconds of simulation from which on clients train in processes of their own
_CONTROL = 0.5  # how often an attack needs a control, and about what share of an attack it takes


Clock = Callable[[], float]


class Enough(BaseException):
    """Ends what is tried; nothing that is tried catches it."""


class Pace:
    """Watches how far something is, and ends it when that tells its pace.

    Args:
        clock: that it goes by.
        limit: seconds after the first report until then.
        least: what is done by then at least, in the unit of the reports.
    """

    def __init__(self, clock: Clock, limit: float, least: float = 0.0) -> None:
        self.clock, self.began = clock, clock()
        self.seen: list[tuple[float, float]] = []
        self.limit, self.least = limit, least

    @property
    def elapsed(self) -> float:
        """Seconds since it began."""
        return self.clock() - self.began

    def __call__(self, done: float) -> None:
        now = self.elapsed
        if done > 0:
            self.seen.append((done, now))
        late, few = now - self.seen[0][1] if self.seen else 0.0, len(self.seen)  # the first report may come late
        if done > self.least and ((few > 2 and late > self.limit) or (few > 1 and now > _LONGEST)):
            raise Enough

    def seconds(self, total: float) -> float:
        """Return how long all of it takes; the first report's time is taken for what is done once only."""
        if not self.seen:
            return self.elapsed
        (first, since), (last, until) = self.seen[0], self.seen[-1]
        if last > first:
            return until + max(0.0, total - last) * (until - since) / (last - first)
        return until * total / last


def say_how_long(display: Display, estimate: Callable[[], float], store: Path | None = None) -> None:
    """Show about how long something will take; nothing is estimated where nothing is shown.

    Args:
        display: shows it.
        estimate: returns seconds.
        store: folder that may keep findings of an earlier run.
    """
    if not isinstance(display, Quiet):
        kept = store is not None and any(store.glob("*.safetensors"))
        display.say(how_long(estimate(), at_most=kept))


def audit_seconds(resolved: ResolvedScenario, *, workers: int = 1, alone: bool = False) -> float:
    """Return about how many seconds an audit will take, from now on.

    Every federation is simulated for a moment, and every attack is run for a moment on what one client sends.

    Args:
        resolved: what will be audited.
        workers: processes.
        alone: as if nothing else ran on this machine: by processors' seconds, not by the clock on the wall.
    """
    began, worked = time.perf_counter(), time.process_time()
    clock: Clock = time.perf_counter if resolved.scenario.device == "cuda" else time.process_time
    scenario = resolved.scenario
    simulated, trials = 0.0, list[float]()
    paces: dict[tuple[str, str], float] = {}
    attacks: dict[tuple[str, str], list[float]] = {}
    with one_thread():
        for federation in resolved.federations:
            spec = federation.spec
            like = (spec.name, federation.defences.sanitiser.name)
            if like not in paces or time.perf_counter() - began < _TOGETHER:
                paces[like] = _simulation(federation, clock)
            seconds = paces[like]
            processes = min(workers, spec.clients_per_round or spec.clients) if seconds > _PAYS else 1
            simulated += seconds / processes
            if nothing_is_run() or not scenario.attacked(federation.name):
                continue
            one = None
            for attack in scenario.attacks:
                key = (spec.name, attack.name)
                if key not in attacks:
                    one = one or _one_update(federation)
                    attacks[key] = _attacked(attack, one, federation, resolved, clock) if one else []
                trials += attacks[key]
    around = _AROUND + _FINDING * len(trials)
    total = simulated + _together(trials, workers) * _controls(resolved, trials) + around
    return total if alone else total * _busy(workers, began, worked)


def trials_seconds(trials: Sequence[Trial], *, workers: int = 1) -> float:
    """Return about how many seconds these attacks will take; of each attack one is run for a moment.

    Args:
        trials: to be run.
        workers: processes.
    """
    began, worked = time.perf_counter(), time.process_time()
    paces: dict[str, float] = {}
    seconds = []
    with one_thread():
        for trial in trials:
            if trial.outcome is None:
                if trial.attack.name not in paces:
                    clock: Clock = time.perf_counter if trial.device == "cuda" else time.process_time
                    paces[trial.attack.name] = _trial(trial, clock) / trial.work
                seconds.append(paces[trial.attack.name] * trial.work)
    total = _together(seconds, workers) + _AROUND + _FINDING * len(seconds)
    return total * _busy(workers, began, worked)


def simulation_seconds(resolved: ResolvedScenario, *, names: Sequence[str] | None = None, workers: int = 1) -> float:
    """Return about how many seconds the federations will take to simulate.

    Args:
        resolved: whose they are.
        names: of them; all if None.
        workers: processes.
    """
    began, worked = time.perf_counter(), time.process_time()
    total = 0.0
    with one_thread():
        for federation in resolved.federations:
            if names is None or federation.name in names:
                seconds = _simulation(federation, time.process_time)
                total += seconds / (workers if seconds > _PAYS else 1)
    return total * _busy(workers, began, worked)


def _together(seconds: Sequence[float], workers: int) -> float:
    """Return how long trials of so many seconds take in ``workers`` processes."""
    processes = min(workers, len(seconds))
    if processes <= 1:
        return sum(seconds)
    return max(max(seconds), sum(seconds) / processes) + _WORKERS


def _busy(processes: int, began: float, worked: float) -> float:
    """Return how many times as long ``processes`` take than on this machine alone.

    That is by its load in the last minute, where what was tried since ``began`` (``worked``, in processor time)
    had to wait for a processor; the load alone may be of what has just ended.
    """
    waited, work = time.perf_counter() - began, time.process_time() - worked
    if waited < _WAITED * work:
        return 1.0
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # not everywhere
        return 1.0
    return min(_BUSIEST, max(1.0, (load + processes) / (os.cpu_count() or 1)))


def _controls(resolved: ResolvedScenario, trials: Sequence[float]) -> float:
    """Return by what the time of the attacks grows with their positive controls, which some will need."""
    return 1 + _CONTROL / len(trials) if trials and resolved.scenario.evaluation.controls else 1


def _simulation(federation: Federation, clock: Clock) -> float:
    """Return about how many seconds the federation takes to simulate, in one process."""
    spec = federation.spec
    tried, share = _short(federation)
    total = spec.rounds * (spec.clients_per_round or spec.clients)
    pace = Pace(clock, _SIMULATION if federation.behaviour is None else _MALICIOUS, least=min(2, total - 1))
    try:
        simulate(tried, report=pace)
    except Enough:
        pass
    except FedAuditError:  # the simulation itself will say so
        return 0.0
    return pace.seconds(total) / share


def _short(federation: Federation, **changes: object) -> tuple[Federation, float]:
    """Return the federation with short local training, and the share of the steps that is left."""
    spec, share = federation.spec, 1.0
    if spec.algorithm not in ("fedsgd", "vertical"):
        held = max(len(data) for data in federation.client_data)
        steps = spec.local_steps or (spec.local_epochs or 1) * math.ceil(held / min(spec.batch_size, held))
        if steps > _STEPS:
            share = _STEPS / steps
            changes |= {"local_steps": _STEPS, "local_epochs": None}
    if spec.malicious and spec.malicious.behaviour.start:
        sooner = {**spec.malicious.model_dump(), "start": 0}
        changes |= {"malicious": MaliciousSpec.model_validate(sooner)}
    changed = spec.model_copy(update={"record": None, **changes})
    return dataclasses.replace(federation, spec=changed, accuracy_every=None), share


def _one_update(federation: Federation) -> Transcript | None:
    """Return a transcript of one client's update, as if it had been sent in every recorded round."""
    spec = federation.spec
    if spec.vertical is not None:  # its attacks need all rounds, which are quick
        return simulate(federation).transcript
    changes = {"rounds": 1, "clients_per_round": None if federation.behaviour else 1}
    quick = DefencesSpec()  # an account of a federation like this one takes seconds
    if not isinstance(federation.defences.sanitiser, DifferentialPrivacy):
        quick = DefencesSpec(sanitiser=federation.defences.sanitiser)
    like = dataclasses.replace(federation, defences=quick)
    tried, _ = _short(like, **changes)
    try:
        transcript = simulate(tried).transcript
    except FedAuditError:
        return None
    rounds = [
        dataclasses.replace(transcript.rounds[0], index=index)
        for index in range(len(spec.record or range(spec.rounds)))
        if transcript.rounds
    ]
    return dataclasses.replace(transcript, rounds=rounds)


def _attacked(
    attack: Attack, transcript: Transcript, federation: Federation, resolved: ResolvedScenario, clock: Clock
) -> list[float]:
    """Return about how many seconds each run of the attack on the federation takes."""
    spec, evaluation = federation.spec, resolved.scenario.evaluation
    each = spec.clients_per_round or spec.clients
    rounds = len(spec.record or range(spec.rounds))
    scope = attack.scope()
    runs = {
        "update": min(rounds * each, evaluation.updates or math.inf),
        "client": min(spec.clients, rounds * each, evaluation.clients or math.inf),
    }.get(scope, 1)
    try:
        whole = observe(transcript, resolved.scenario.threat)
        seen = (whole.split(scope) or [whole])[0]
        if scope != "federation":
            seen.need_messages()
        attack.check(seen)
        seconds = _trial(Trial(attack, seen, resolved.scenario.seed, resolved.scenario.device), clock)
    except FedAuditError:
        return []
    return [seconds] * int(runs)


def _trial(trial: Trial, clock: Clock) -> float:
    pace = Pace(clock, _ATTACK)
    try:
        found = dataclasses.replace(trial, attack=copy.deepcopy(trial.attack)).run(pace)
    except Enough:
        return pace.seconds(trial.work)
    except FedAuditError:
        return 0.0
    return 0.0 if isinstance(found, NotApplicable) else pace.elapsed
