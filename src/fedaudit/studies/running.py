"""Run a study: what the store doesn't have yet, on a backend, each result written as it arrives."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedaudit.attacks import make_attack
from fedaudit.pipeline.run import Audit, run_audit
from fedaudit.results import AuditResult
from fedaudit.scenario import Scenario, apply_override, scenario_from
from fedaudit.studies.backends import Backend
from fedaudit.studies.spec import IMAGE_METRICS, StudySpec, StudyTrial
from fedaudit.studies.store import Store
from fedaudit.utils import plain_yaml
from fedaudit.utils.errors import BadInput, FedAuditError
from fedaudit.utils.machine import one_thread, own_process, peak_memory, start_measuring_memory
from fedaudit.utils.progress import Display

_METRICS = (*IMAGE_METRICS, "rank")
_MOST_PROBED = 24
_LONG_ENOUGH = 60.0  # seconds of probing
_PROBES = (20, 60)  # iterations: enough for the engine that a long run would have


@dataclass(frozen=True)
class Task:
    """What a worker is given."""

    key: str
    scenario: str
    data_dir: str | None


@dataclass(frozen=True)
class Played:
    """What a worker gives back: numbers for the store, files for the folder beside it."""

    outcome: dict[str, Any]
    seconds: float
    versions: dict[str, str]
    files: dict[str, bytes]


def run_study(
    study: StudySpec,
    trials: Sequence[StudyTrial],
    store: Store,
    *,
    backend: Backend,
    data_dir: Path | None,
    display: Display,
) -> int:
    """Play every trial that isn't done, the failed ones again, and return how many failed.

    Raises:
        BadInput: another run is at work in the folder; the disk is full. What was finished is kept.
    """
    wanted = {trial.key: trial for trial in trials}
    done = {row.key for row in store.rows() if row.status == "done"}
    tasks = [
        Task(trial.key, trial.scenario.to_yaml(), str(data_dir.resolve()) if data_dir else None)
        for trial in trials
        if trial.key not in done
    ]
    report = display.stage(f"{study.name}: {len(trials)} trials", len(trials))
    finished, failed = len(wanted) - len(tasks), 0
    report(finished)
    for task, result in backend(play, tasks) if tasks else ():
        when = datetime.now(UTC).isoformat(timespec="seconds")
        if isinstance(result, Played):
            _keep(store.folder / "trials" / task.key, result.files)
            store.finish(task.key, result.outcome, result.seconds, result.versions, when)
        else:
            failed += 1
            store.fail(task.key, _one_line(result), when)
            _keep(store.folder / "trials" / task.key, {"error.txt": _trace(result).encode()})
        finished += 1
        report(finished)
    return failed


def play(task: Task) -> Played:
    """Play one trial; runs in a worker, which writes nothing."""
    own_process()  # Ray's workers, too
    began = time.perf_counter()
    scenario = scenario_from(plain_yaml.loads(task.scenario, "the trial's scenario"))
    before = start_measuring_memory()
    with one_thread():
        audit = run_audit(scenario, data_dir=Path(task.data_dir) if task.data_dir else None)
    result = audit.result
    return Played(_outcome(result, peak_memory(before)), time.perf_counter() - began, _versions(result), _files(audit))


def estimate(
    trials: Sequence[StudyTrial], store: Store, *, data_dir: Path | None, workers: int, display: Display
) -> float:
    """Return about how many seconds the trials that aren't done will take.

    Combinations of levels (all, two dozen of many, or what a minute is enough for) are played twice with a few
    iterations here; the others are taken to last as long on average. What was measured before is taken as it is.

    Raises:
        BadInput: the data aren't there, or a scenario can't be played.
    """
    rows = {row.key: row for row in store.rows()}
    todo = [t for t in trials if rows[t.key].status != "done"]
    known = {tuple(r.point.items()): r.seconds for r in rows.values() if r.seconds is not None}
    cells = {tuple(t.point.items()): t for t in todo}
    unknown = {point: trial for point, trial in cells.items() if point not in known}
    probed = list(unknown.items())[:: math.ceil(len(unknown) / _MOST_PROBED) or 1]
    report = display.stage("estimating the time", len(probed))
    began = time.perf_counter()
    for done, (point, trial) in enumerate(probed):
        known[point] = _probe(trial.scenario, data_dir)
        report(done + 1)
        if time.perf_counter() - began > _LONG_ENOUGH:
            report(len(probed))
            probed = probed[: done + 1]
            break
    typical = sum(known[point] or 0.0 for point, _ in probed) / max(1, len(probed))
    total = sum(known.get(tuple(t.point.items()), typical) or 0.0 for t in todo)
    return total / min(workers, max(1, len(todo)))


def _probe(scenario: Scenario, data_dir: Path | None) -> float:
    """Return about how long a trial of ``scenario`` takes: what surrounds the attack, and the attack at its pace."""
    attack = scenario.attacks[0]
    settings = make_attack(attack.name, attack.settings()).settings()
    counts = {name: value for name, value in settings.items() if name.endswith("iterations")}
    longest = max(counts.values(), default=1)
    parts = sorted({min(1.0, few / longest) for few in _PROBES}) if counts else [1.0]
    around, attacks = [], []
    for part in parts:
        values = scenario.model_dump(mode="json")
        for name, value in counts.items():
            values = apply_override(values, f"attacks.0.{name}={max(1, round(part * value))}")
        began = time.perf_counter()
        with one_thread():
            findings = run_audit(scenario_from(values), data_dir=data_dir).result.findings
        attacks.append(sum(f.timing.seconds for f in findings if f.timing))
        around.append(time.perf_counter() - began - attacks[-1])
    if len(parts) == 1:
        return around[0] + attacks[0] / parts[0]
    pace = max(0.0, attacks[1] - attacks[0]) / (parts[1] - parts[0])
    return min(around) + attacks[0] + pace * (1 - parts[0])


def _since(shares: Sequence[float | None], start: int) -> float | None:
    """Return the mean of what is known from round ``start`` on."""
    known = [share for share in shares[start:] if share is not None]
    return sum(known) / len(known) if known else None


def _given(**numbers: float | None) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if value is not None}


def _outcome(result: AuditResult, memory: float | None) -> dict[str, Any]:
    """Return the numbers of every update: images and metrics, or the reason why the attack couldn't be played."""
    updates = [
        {
            "federation": f.federation,
            "round": f.round,
            "client": f.client,
            "reason": f.reason,
            "label_accuracy": f.label_accuracy,
            "seconds": f.timing.seconds if f.timing else None,
            "images": [{metric: getattr(image, metric) for metric in _METRICS} for image in f.images],
            "metrics": {
                **{m.name: m.value for m in f.metrics},
                **_given(
                    matching=f.matching,
                    label_accuracy=f.label_accuracy,
                    seconds=f.timing.seconds if f.timing else None,
                    memory=memory,
                ),
            },
        }
        for f in result.findings
    ]
    starts = [(f.get("malicious") or {}).get("start", 0) for f in result.scenario["federations"]]
    start = max(starts)  # of the attack
    courses = [
        {
            "federation": f.name,
            "attacked": any(u["federation"] == f.name for u in updates),
            "accuracy": f.course.accuracy[-1] if f.course.accuracy else None,
            "parameters": f.course.parameters,
            "bytes": f.course.bytes,
            "training": f.course.timing.training,
            "sanitising": f.course.timing.sanitising,
            "epsilon": f.course.epsilon[-1] if f.course.epsilon else None,
            "stopped": f.course.stopped,
            "malicious_accepted": _since(f.course.malicious_accepted, start),
            "honest_accepted": _since(f.course.honest_accepted, start),
        }
        for f in result.federations
        if f.course
    ]
    return {"updates": updates, "courses": courses, "lpips_missing": result.lpips_missing}


def _versions(result: AuditResult) -> dict[str, str]:
    return {key: str(value) for key, value in result.environment.items()}


def _files(audit: Audit) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory(prefix="fedaudit-") as name:
        folder = Path(name)
        audit.save_data(folder)
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _keep(folder: Path, files: dict[str, bytes]) -> None:
    """Write a trial's files at once or not at all."""
    draft = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        for name, content in files.items():
            path = draft / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        shutil.rmtree(folder, ignore_errors=True)
        draft.replace(folder)
    except OSError as error:
        raise BadInput(
            f"can't write to '{folder.parent}': {error.strerror or error}; what was finished before is kept"
        ) from None


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, FedAuditError) else f"{type(error).__name__}: {text}".rstrip(": ")


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
