"""Many attacks on many observations, in worker processes, one thread each; what is finished is kept and reused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from fedaudit.attacks import Attack, Finding
from fedaudit.attacks.inversion.engines.native import native_code
from fedaudit.threat import Observation
from fedaudit.update import Tensors
from fedaudit.utils.errors import BadInput, FedAuditError, NotApplicable
from fedaudit.utils.machine import one_thread
from fedaudit.utils.processes import WorkerDied, run_tasks, tell
from fedaudit.utils.seeds import generator
from fedaudit.version import __version__

Report = Callable[[float], None]


@dataclass(frozen=True)
class Trial:
    """One attack on one observation.

    Attributes:
        attack: what to play.
        observation: what the attack looks at: one update, one client, or the federation.
        seed: of the scenario; the attack's generator derives from it and from *what* is attacked, so that all attacks
            start from the same dummy image.
        device: where to compute.
    """

    attack: Attack
    observation: Observation
    seed: int
    device: str

    @property
    def work(self) -> float:
        """Expected cost in arbitrary units, for the progress display."""
        steps = getattr(self.attack, "iterations", 1) * getattr(self.attack, "restarts", 1)
        return float(steps * max(1, sum(m.update.num_examples for m in self.observation.messages)))

    def key(self) -> str:
        """Return a hash of everything that the finding depends on: the attack's input, not the scenario around it."""
        seen = self.observation
        digest = hashlib.sha256()
        facts = [
            __version__,
            _code(),
            torch.__version__,
            native_code(),
            type(self.attack).__name__,
            self.attack.settings(),
            [hashlib.sha256(f.read_bytes()).hexdigest() if f.is_file() else None for f in self.attack.files()],
            str(seen.task_info),
            str(seen.threat),
            str(seen.module),
            getattr(seen.loss, "__qualname__", repr(type(seen.loss))),
            [seen.federation, seen.update_kind, len(seen.weights)],
            [
                [
                    [m.round, m.client, m.update.num_examples, str(m.update.training)],
                    None if m.update.labels is None else m.update.labels.tolist(),
                ]
                for m in seen.messages
            ],
            [self.seed, self.device],
        ]
        digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
        hashed: dict[int, bytes] = {}  # the messages of a round share their global weights
        for weights in (*seen.weights, *(m.weights for m in seen.messages)):
            if id(weights) not in hashed:
                hashed[id(weights)] = _digest(weights)
            digest.update(hashed[id(weights)])
        for message in seen.messages:
            digest.update(_digest(message.update.tensors) + _digest(message.update.buffers))
        digest.update(_digest(seen.adversary_log) + _digest(vars(seen.records) if seen.records else {}))
        return digest.hexdigest()[:32]

    def play(self, report: Report | None = None) -> Finding | NotApplicable:
        """Return the finding, or why there is none."""
        seen, scope = self.observation, self.attack.scope()
        where: tuple[str | int, ...] = ()
        if scope == "update":
            where = (seen.messages[0].round, seen.messages[0].client)
        elif scope == "client":
            where = ("client", seen.messages[0].client)
        start = generator(self.seed, "attack", seen.federation, *where)
        progress = None if report is None else lambda done, total: report(self.work * done / total)
        try:
            found = self.attack(seen, generator=start, device=self.device, progress=progress)
        except NotApplicable as reason:
            return reason
        return found

    def fits(self, finding: Finding) -> bool:
        """Return whether this trial's attack may have returned ``finding``: its name becomes part of file names."""
        return finding.attack == self.attack.name and isinstance(finding, self.attack.finds)

    def kept(self, path: Path) -> Finding:
        """Return this trial's finding that was kept in ``path``, a file named by the trial's key.

        Raises:
            BadInput: it is damaged or was changed, or another trial's.
        """
        found = Finding.load(path, path.stem)
        if not self.fits(found):
            raise BadInput(
                f"{path} holds a finding of another attack than {self.attack.name}, put there by whoever may write "
                "there; delete it and run again"
            )
        return found


def _digest(tensors: Tensors) -> bytes:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest()


@cache
def _code() -> str:
    """Return a hash of the source that findings come from, so that none outlives a change of it."""
    home = Path(__file__).parents[1]
    attacks = [path for kind in ("*.py", "*.cpp") for path in (home / "attacks").rglob(kind)]
    around = [path for part in ("examples", "models") for path in (home / part).rglob("*.py")]
    paths = sorted([*attacks, *around, home / "update.py"])
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def run_trials(
    trials: Sequence[Trial], *, workers: int = 1, store: Path | None = None, report: Report | None = None
) -> list[Finding | NotApplicable]:
    """Play all trials and return their outcomes in the same order, whatever the number of workers.

    Args:
        trials: to play.
        workers: processes; 1 means this one.
        store: folder where findings are kept as soon as they are made; those that are there already are not made again.
        report: called with the work done so far, of the sum of all trials' ``work``.

    Raises:
        FedAuditError: a trial's worker died twice; the other trials were finished and are kept in ``store``.
        BadInput: ``store`` can't be written, or what is kept there was changed or damaged.
    """
    outcomes: list[Finding | NotApplicable | None] = [None] * len(trials)
    paths = [store / f"{trial.key()}.safetensors" if store else None for trial in trials]
    done = 0.0
    for i, path in enumerate(paths):
        if path and path.is_file():
            outcomes[i] = trials[i].kept(path)
            done += trials[i].work
    if report:
        report(done)
    todo = [i for i, outcome in enumerate(outcomes) if outcome is None]
    if store and todo:
        _make_folder(store)
    if workers <= 1 or len(todo) <= 1:
        with one_thread():
            for i in todo:
                outcomes[i] = _play(trials[i], paths[i], _shifted(report, done))
                done += trials[i].work
    else:
        began, parts, died = done, dict.fromkeys(todo, 0.0), None

        def beat(index: int, work: float) -> None:
            parts[todo[index]] = work
            if report:
                report(began + sum(parts.values()))

        for index, result in run_tasks(_work, [(trials[i], paths[i]) for i in todo], workers=workers, beat=beat):
            if isinstance(result, WorkerDied):
                died = result  # told once the others are finished and kept
            elif isinstance(result, BaseException) and not isinstance(result, NotApplicable):
                raise result
            else:
                outcomes[todo[index]] = result
                beat(index, trials[todo[index]].work)
        if died:
            kept = f"; what was finished is kept in {store}" if store else ""
            raise FedAuditError(f"{died}, perhaps for want of memory: run again with fewer --workers{kept}")
        done += sum(parts.values())
    if report:
        report(done)
    return [outcome for outcome in outcomes if outcome is not None]


def _play(trial: Trial, path: Path | None, report: Report | None) -> Finding | NotApplicable:
    outcome = trial.play(report)
    if path and isinstance(outcome, Finding):
        try:
            outcome.save(path, path.stem)
        except Exception as error:  # safetensors raises its own errors on a full disk
            raise BadInput(f"can't write {path}: {error}") from None
    return outcome


def _shifted(report: Report | None, before: float) -> Report | None:
    return None if report is None else lambda done: report(before + done)


def _work(task: tuple[Trial, Path | None]) -> Finding | NotApplicable:
    """Run in a worker: one thread."""
    with one_thread():
        return _play(*task, tell)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"can't write to {path}: {error.strerror or error}") from None
