"""Many attacks on many observations, in worker processes, one thread each; what is finished is kept and reused."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedaudit.attacks import Attack, Finding
from fedaudit.attacks.inversion.calibration import CalibrationFinding
from fedaudit.evaluation.limits import TIME_IS_UP
from fedaudit.pipeline.pretraining import trained_before
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import BadInput, FedAuditError, NotApplicable, OutOfTime
from fedaudit.utils.fingerprint import computation, device_name, file_digest, fingerprint
from fedaudit.utils.machine import interrupted, one_thread
from fedaudit.utils.native import native_code
from fedaudit.utils.processes import WorkerDied, run_tasks, tell
from fedaudit.utils.progress import Display, Quiet, Report
from fedaudit.utils.seeds import generator

_GRACE = 5.0  # seconds after a deadline in which an attack that reports its progress ends by itself


@dataclass(frozen=True)
class Trial:
    """One attack on one observation.

    Attributes:
        observation: what the attack receives: one update, one client, or the federation.
        seed: of the scenario; the attack's generator derives from it and from *what* is attacked, so that all attacks
            start from the same dummy image.
        outcome: the finding, or why the attack doesn't apply; None as long as it may still be run.
        calibration: by which the attack has its settings, or why it couldn't be calibrated; None: it wasn't to be.
    """

    attack: Attack
    observation: Observation
    seed: int
    device: str
    outcome: Finding | NotApplicable | None = None
    calibration: CalibrationFinding | str | None = None

    @property
    def work(self) -> float:
        """Expected cost in arbitrary units, for the progress display."""
        return float(self.attack.effort() * max(1, sum(m.update.num_examples for m in self.observation.messages)))

    def key(self, native: str | None = None) -> str:
        """Return a hash of the attack's input, not the scenario around it: all that the finding depends on.

        ``native`` is the native code that it was made with; None: this machine's.
        """
        return computation(
            native_code() if native is None else native,
            type(self.attack),
            self.attack.settings(),
            [file_digest(path) for path in self.attack.files()],
            _without_weights(self.observation),
            self.seed,
            device_name(self.device),
        )[:32]

    def run(self, report: Report = lambda _: None) -> Finding | NotApplicable:
        """Run the attack and return the finding, or why there is none."""
        seen, scope = self.observation, self.attack.scope()
        where: tuple[str | int, ...] = ()
        if scope == "update":
            where = (seen.messages[0].round, seen.messages[0].client)
        elif scope == "client":
            where = ("client", seen.messages[0].client)
        start = generator(self.seed, "attack", seen.federation, *where)
        try:
            return self.attack(
                seen,
                generator=start,
                device=self.device,
                progress=lambda done, total: report(self.work * done / total),
            )
        except NotApplicable as reason:
            return reason

    def fits(self, finding: Finding) -> bool:
        """Return whether this trial's attack may have returned ``finding``: its name becomes part of file names."""
        return finding.attack == self.attack.name and isinstance(finding, self.attack.finds)

    def kept(self, path: Path) -> Finding:
        """Return this trial's finding, kept in ``path`` by its key; BadInput: it is damaged, changed or another's."""
        found = Finding.load(path, path.stem)
        if not self.fits(found):
            raise BadInput(
                f"{path} holds a finding of another attack than {self.attack.name}, put there by whoever may write "
                "there; delete it and run again"
            )
        return found


# Returns what a trial came to, from what is kept of it; then no attack is run.
Kept = Callable[[Trial], Finding | NotApplicable]


@dataclass(frozen=True)
class Means:
    """With what an audit is run: nothing of what it finds depends on it.

    Attributes:
        workers: processes for the simulation and the attacks; 1 means this one.
        store: folder where findings are kept as soon as they are made; those that are there are not made again.
        kept: returns what a trial came to; with it no attack is run, and ``store`` isn't looked into.
        deadline: seconds since 1970 after which no attack is begun, and those that run are stopped; None: none. The
            shortest are run first, and calibrations end after half of the time. What was stopped is refused with the
            reason, and isn't kept.
    """

    workers: int = 1
    store: Path | None = None
    kept: Kept | None = None
    display: Display = field(default_factory=Quiet)
    deadline: float | None = None

    def within(self, share: float) -> Means:
        """Return the same with a share of the time that is left."""
        now = time.time()
        return self if self.deadline is None else replace(self, deadline=now + share * (self.deadline - now))

    def check(self) -> None:
        """Raise OutOfTime once the time is over: before what takes long itself."""
        if self.deadline is not None and time.time() > self.deadline:
            raise OutOfTime(TIME_IS_UP)


def _in_time(report: Report, deadline: float | None) -> Report:
    """Return ``report``, which ends the attack that calls it after ``deadline``."""

    def timed(work: float) -> None:
        if deadline is not None and time.time() > deadline:
            raise OutOfTime(TIME_IS_UP)
        report(work)

    return timed


def run_trials(trials: Sequence[Trial], means: Means | None = None, title: str = "") -> list[Trial]:
    """Run all trials that have no outcome yet; return all with theirs, in order, whatever the number of workers.

    Args:
        title: of the work, for the display; default: how many attacks these are.

    Raises:
        FedAuditError: a trial's worker died twice; the other trials were finished and are kept in the store.
        BadInput: the store can't be written, or what is kept there was changed or damaged.
    """
    means = means or Means()
    outcomes = [trial.outcome for trial in trials]
    open_ones = [i for i, outcome in enumerate(outcomes) if outcome is None]
    if means.kept:
        for i in open_ones:
            outcomes[i] = means.kept(trials[i])
        return _with(outcomes, trials)
    store = means.store
    paths = {i: store / f"{trials[i].key()}.safetensors" for i in open_ones} if store else {}
    done = 0.0
    for i, path in paths.items():
        if path.is_file():
            outcomes[i] = trials[i].kept(path)
            done += trials[i].work
    todo = [i for i in open_ones if outcomes[i] is None]
    if means.deadline is not None:  # what takes long may have to be stopped
        todo.sort(key=lambda i: trials[i].work)
    if len(todo) < len(open_ones) and not title:
        kept_ones = f"{len(open_ones) - len(todo)} of {len(open_ones)}"
        means.display.say(f"resuming: {kept_ones} attacks kept in {store}")
    if store and todo:
        try:
            store.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"can't write to {store}: {error.strerror or error}") from None
    ready = dict(zip(todo, _prepared([trials[i] for i in todo], means), strict=True))
    report = means.display.stage(title or f"{len(open_ones)} attacks", sum(trials[i].work for i in open_ones))
    report(done)
    if means.workers <= 1 or len(todo) <= 1:
        with one_thread():
            for i in todo:

                def advance(work: float, before: float = done) -> None:
                    report(before + work)

                outcomes[i] = _run_and_keep(ready[i], paths.get(i), advance, means.deadline)
                done += trials[i].work
    else:
        began, parts, died = done, dict.fromkeys(todo, 0.0), None

        def beat(index: int, work: float) -> None:
            parts[todo[index]] = work
            report(began + sum(parts.values()))

        tasks = [(ready[i], paths.get(i), means.deadline) for i in todo]
        for index, result in run_tasks(_work, tasks, workers=means.workers, beat=beat):
            if isinstance(result, WorkerDied):
                died = result  # told once the others are finished and kept
            elif isinstance(result, BaseException) and not isinstance(result, NotApplicable):
                raise result
            else:
                outcomes[todo[index]] = result
                beat(index, trials[todo[index]].work)
        if died:
            there = f"; what was finished is kept in {store}" if store else ""
            raise FedAuditError(f"{died}, perhaps for want of memory: run again with fewer workers{there}")
        done += sum(parts.values())
    report(done)
    return _with(outcomes, trials)


def _prepared(trials: Sequence[Trial], means: Means) -> list[Trial]:
    """Return the trials with what their attacks ask for beforehand: run once for all that ask for the same, and kept.

    Where some of it fails, that is the trial's outcome. Within ``training_once`` the last results are taken again.
    """
    first: dict[str, Trial] = {}
    keys: list[list[str]] = []
    for trial in trials:
        asked = trial.attack.beforehand(trial.observation)
        prints = {id(seen): fingerprint(_without_weights(seen)) for _, seen in asked}  # large, and mostly one for all
        keys.append([])
        for attack, seen in asked:
            keys[-1].append(fingerprint(type(attack), attack.settings(), prints[id(seen)], trial.seed, trial.device))
            first.setdefault(keys[-1][-1], Trial(attack, seen, trial.seed, trial.device))
    if not first:
        return list(trials)
    title = f"{len(first)} {next(iter(first.values())).attack.name}s"
    before = trained_before()
    known = [before.findings.get(key) if before else None for key in first]
    wanted = [replace(trial, outcome=outcome) for trial, outcome in zip(first.values(), known, strict=True)]
    done = {key: t.outcome for key, t in zip(first, run_trials(wanted, means, title), strict=True)}
    if before is not None:
        before.findings = {key: outcome for key, outcome in done.items() if isinstance(outcome, Finding)}
    ready = []
    for trial, own in zip(trials, keys, strict=True):
        failed = next((outcome for key in own if isinstance(outcome := done[key], NotApplicable)), None)
        found = [outcome for key in own if isinstance(outcome := done[key], Finding)]
        prepared = trial.attack.prepared(found) if own and not failed else trial.attack
        ready.append(replace(trial, attack=prepared, outcome=failed))
    return ready


def _without_weights(observation: Observation) -> Observation:
    """Return the observation, of the module nothing but its shape: its own weights mean nothing."""
    return replace(observation, module=copy.deepcopy(observation.module).to("meta"))


def _with(outcomes: Sequence[Finding | NotApplicable | None], trials: Sequence[Trial]) -> list[Trial]:
    return [replace(trial, outcome=outcome) for trial, outcome in zip(trials, outcomes, strict=True)]


def _run_and_keep(trial: Trial, path: Path | None, report: Report, deadline: float | None) -> Finding | NotApplicable:
    if deadline is not None and time.time() > deadline:
        return OutOfTime(TIME_IS_UP)
    outcome = trial.outcome
    if outcome is None:
        try:
            with interrupted(None if deadline is None else deadline + _GRACE, OutOfTime):
                outcome = trial.run(_in_time(report, deadline))
        except OutOfTime as error:
            outcome = error
        if isinstance(outcome, OutOfTime):
            return OutOfTime(TIME_IS_UP)
    if path and isinstance(outcome, Finding):
        try:
            outcome.save(path, path.stem)
        except Exception as error:  # safetensors raises its own errors on a full disk
            raise BadInput(f"can't write {path}: {error}") from None
    return outcome


def _work(task: tuple[Trial, Path | None, float | None]) -> Finding | NotApplicable:
    """Run in a worker: one thread."""
    with one_thread():
        trial, path, deadline = task
        return _run_and_keep(trial, path, tell, deadline)
