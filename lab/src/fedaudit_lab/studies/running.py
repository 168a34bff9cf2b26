"""Run a study: what the store doesn't have yet, on a backend, each result written as it arrives."""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from fedaudit import Audit, BadInput, FedAuditError, Scenario, load_dataset
from fedaudit.data import find_dataset, reading_once
from fedaudit.defences import AGGREGATORS, CLIENT_DEFENCES
from fedaudit.pipeline import Trained, run_audit, training_once
from fedaudit.results import AuditResult
from fedaudit.scenario import scenario_from
from fedaudit.simulation import BEHAVIOURS, SERVER_BEHAVIOURS
from fedaudit.utils import (
    Display,
    Quiet,
    Registry,
    Report,
    computation,
    device_name,
    file_digest,
    fingerprint_of,
    load_yaml,
    native_code,
    one_thread,
    own_process,
    peak_memory,
    start_measuring_memory,
    tell,
    temporary_folder,
    tensor_digest,
)
from fedaudit_lab.studies.backends import Backend
from fedaudit_lab.studies.spec import IMAGE_METRICS, NAMED, SUCCESS_DB, StudySpec, StudyTrial, trial_key
from fedaudit_lab.studies.store import Store

_METRICS = (*(name for name in IMAGE_METRICS if name != "success" and name not in NAMED), "rank")
_trained = Trained()  # by the trials that this process has run


@dataclass(frozen=True)
class Task:
    """What a worker is given; what it has of a trial that isn't over lies in ``unfinished``, if that is a folder."""

    key: str
    scenario: str
    data_dir: str | None
    unfinished: str | None = None


@dataclass(frozen=True)
class TrialOutput:
    """What a worker gives back: values for the store, files for the folder beside it."""

    outcome: dict[str, Any]
    seconds: float
    versions: dict[str, str]
    files: dict[str, bytes]


def check_versions(
    trials: Sequence[StudyTrial], store: Store, *, data_dir: Path | None, again: bool = False, keep_old: bool = False
) -> None:
    """Refuse a store with other versions of code, torch, data or device, so that nothing is mixed silently.

    Old trials are run ``again``, or with ``keep_old`` stay, and the result says which.
    """
    if again and keep_old:
        raise BadInput("--again runs old trials anew and --keep-old keeps them; give one of them")
    now: dict[str, str | None] = {trial.key: trial_computation(trial.scenario, data_dir) for trial in trials}
    others = {row.key for row in store.rows() if row.status == "done"} - now.keys()  # of another --only or --set
    for key, text in store.scenarios().items() if others else ():
        if key in others:
            now[key] = _computation_of(text, data_dir)
    store.expect(now)
    done = [row for row in store.rows() if row.status == "done"]
    old = [row for row in done if row.old]
    if again:
        store.forget({row.key for row in old} & {trial.key for trial in trials})
    elif old and not keep_old:
        raise BadInput(
            f"{len(old)} of the {len(done)} finished trials in '{store.folder}' are of another, or an unknown, version "
            "of fedaudit, torch, native code, data or device; --again runs them anew, --keep-old keeps them, and the "
            "result says so"
        )


def trial_computation(scenario: Scenario, data_dir: Path | None) -> str:
    """Return the fingerprint of all that a trial's outcome depends on: its scenario, code, data, files, device."""
    (attack,) = scenario.attacks
    defences = (scenario.defences, *scenario.other_defences)
    return computation(
        trial_key(scenario),
        [type(attack), *(file_digest(path) for path in attack.files())],
        [_entry(AGGREGATORS, one.aggregator.name) for one in defences],
        [_entry(CLIENT_DEFENCES, one.client_defence.name) for one in defences],
        [_entry(BEHAVIOURS, one.malicious.name) for one in scenario.federations if one.malicious],
        [_entry(SERVER_BEHAVIOURS, one.server.name) for one in scenario.federations if one.server],
        file_digest(scenario.model.checkpoint) if scenario.model.checkpoint else None,
        _data(scenario.data.name, scenario.data.image_size, scenario.data.limit, data_dir),
        device_name(scenario.device),
        native_code(),
    )


def _computation_of(text: str, data_dir: Path | None) -> str | None:
    """Return a stored trial's computation; None where this version can't read its scenario."""
    try:
        return trial_computation(scenario_from(load_yaml(text, "the trial's scenario")), data_dir)
    except BadInput:
        return None


def _entry(registry: Registry[Any], name: str) -> Any:
    """Return what is registered under ``name``; a name that isn't known is the trial's own failure."""
    return registry[name].value if name in registry.names() else name


@cache
def _data(name: str, image_size: int | None, limit: int | None, data_dir: Path | None) -> str | None:
    """Return the fingerprint of a data set: of its files, or of its tensors if there are none; None: it isn't there."""
    try:
        files = find_dataset(name, data_dir)
        if files:
            return fingerprint_of([file_digest(file) for file in files])
        if files is None:
            return None
        return fingerprint_of(load_dataset(name, image_size=image_size, data_dir=data_dir, limit=limit))
    except (BadInput, OSError):  # the trial itself will say so
        return None


def run_study(
    study: StudySpec,
    trials: Sequence[StudyTrial],
    store: Store,
    *,
    backend: Backend,
    data_dir: Path | None,
    display: Display,
    here: bool = True,
) -> int:
    """Run every trial that isn't done, the failed ones again, and return how many failed.

    Args:
        here: the backend's workers see the store's folder: then a trial that is killed goes on where it stood.
    """
    wanted = {trial.key: trial for trial in trials}
    done = {row.key for row in store.rows() if row.status == "done"}
    unfinished = (store.folder / "unfinished").resolve()
    tasks = [
        Task(
            trial.key,
            trial.text,
            str(data_dir.resolve()) if data_dir else None,
            str(unfinished / trial.key) if here else None,
        )
        for trial in trials
        if trial.key not in done
    ]
    report = display.stage(f"{study.name}: {len(trials)} trials", len(trials))
    finished, failed = len(wanted) - len(tasks), 0
    if finished:
        display.say(f"resuming: {finished} of {len(wanted)} trials kept in {store.folder}")
    report(finished)
    shares: dict[str, float] = {}  # of the trials at work, how much of each is done

    def beat(task: Task, share: float) -> None:
        shares[task.key] = share
        report(finished + sum(shares.values()))

    for task, result in backend(run_trial, tasks, beat) if tasks else ():
        when = datetime.now(UTC).isoformat(timespec="seconds")
        if isinstance(result, TrialOutput):
            _keep(store.folder / "trials" / task.key, result.files)
            store.finish(task.key, result.outcome, result.seconds, result.versions, when, result.files)
        else:
            failed += 1
            store.fail(task.key, _one_line(result), when)
            trace = "".join(traceback.format_exception(result)).encode("utf-8", "backslashreplace")
            _keep(store.folder / "trials" / task.key, {"error.txt": trace})
        shutil.rmtree(unfinished / task.key, ignore_errors=True)
        finished += 1
        shares.pop(task.key, None)
        report(finished + sum(shares.values()))
    shutil.rmtree(unfinished, ignore_errors=True)
    return failed


def run_trial(task: Task) -> TrialOutput:
    """Run one trial, in a worker, which writes nothing but what it goes on from when it is killed."""
    own_process()  # Ray's workers, too
    began, cpu_began = time.perf_counter(), time.process_time()
    scenario = scenario_from(load_yaml(task.scenario, "the trial's scenario"))
    before = start_measuring_memory()
    unfinished = Path(task.unfinished) if task.unfinished else None
    goes_on = unfinished is not None and unfinished.exists()
    with one_thread(), reading_once(), training_once(_trained):
        audit = run_audit(
            _without_controls(scenario),
            data_dir=Path(task.data_dir) if task.data_dir else None,
            store=unfinished,
            display=_Share(scenario),
        )
    cost = (None, None) if goes_on else (peak_memory(before), time.process_time() - cpu_began)  # a part of it isn't all
    outcome = _outcome(audit, *cost)
    versions = {key: str(value) for key, value in audit.result.environment.items()}
    return TrialOutput(outcome, time.perf_counter() - began, versions, _files(audit))


class _Share(Quiet):
    """Tells whoever waits for a trial how much of it is done.

    An audit shows its federations in rounds of a client, then the attack; an iteration is taken to be as long as a
    round.
    """

    def __init__(self, scenario: Scenario) -> None:
        attack = scenario.attacks[0]
        self._attack = float(getattr(attack, "iterations", 1) * getattr(attack, "restarts", 1))
        rounds = sum(f.rounds * (f.clients_per_round or f.clients) for f in scenario.federations)
        self._total = rounds * (1 + len(scenario.other_defences)) + self._attack
        self._before = 0.0

    def stage(self, title: str, total: float) -> Report:
        """Begin a stage, and return the function that tells how far it is."""
        if title.startswith("federation "):
            weight = total
        elif title.endswith(" attacks"):
            weight = self._attack
        else:
            return super().stage(title, total)
        start, self._before = self._before, self._before + weight
        return lambda done: tell(min(1.0, (start + weight * done / max(total, 1e-9)) / self._total))


def _without_controls(scenario: Scenario) -> Scenario:
    """Return the scenario without positive controls: a study compares numbers, and its grid has its own controls."""
    evaluation = scenario.evaluation.model_copy(update={"controls": False})
    return scenario.model_copy(update={"evaluation": evaluation})


def _since(accepted: Sequence[float | None], start: int) -> float | None:
    """Return the mean of what is known from round ``start`` on."""
    known = [share for share in accepted[start:] if share is not None]
    return sum(known) / len(known) if known else None


def _late(values: Sequence[float]) -> float | None:
    """Return the mean of the last fifth, and of the last one where there are fewer than ten."""
    last = values[-max(1, len(values) // 5) :]
    return sum(last) / len(last) if last else None


def _given(**values: float | None) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def _ceilings(result: AuditResult, federation: str) -> dict[str, float | None]:
    """Return what a federation's updates determine, in dB, where that was computed."""
    for one in result.ceilings:
        if one.federation == federation and one.unit == "dB":
            coarse = [point.low for point in one.curve if point.precision == 1e-3]
            return {"ceiling": one.low, "guess": one.guess, "ceiling_thousandth": coarse[0] if coarse else None}
    return {}


def _outcome(audit: Audit, memory: float | None, cpu_seconds: float | None) -> dict[str, Any]:
    """Return the values of every update: images and metrics, or the reason why the attack couldn't be run.

    ``victim`` is a hash of the true image: equal ones in several trials are one image.
    """
    result = audit.result
    victims = {path: tensor_digest(pixels).hex()[:16] for path, pixels in audit.image_files.items()}
    updates = [
        {
            "federation": f.federation,
            "round": f.round,
            "client": f.client,
            "reason": f.reason,
            "label_accuracy": f.label_accuracy,
            "seconds": f.timing.seconds if f.timing else None,
            "images": [
                {
                    **{metric: image.score(metric) for metric in _METRICS},
                    "success": float(image.psnr > SUCCESS_DB),
                    **{name: image.named and image.named.among(*asked) for name, asked in NAMED.items()},
                    "victim": victims.get(image.true_image),
                }
                for image in f.images
            ],
            "metrics": {
                **{m.name: m.value for m in f.metrics},
                **_given(
                    matching=f.matching,
                    label_accuracy=f.label_accuracy,
                    without_attack=f.metrics[0].baseline if f.metrics else None,
                    seconds=f.timing.seconds if f.timing else None,
                    memory=memory,
                    cpu_seconds=cpu_seconds,
                ),
            },
        }
        for f in result.findings
    ]
    hardly = {s.federation for s in result.summaries if s.hardly_trained is not None}
    starts = [(f.get("malicious") or {}).get("start", 0) for f in result.scenario["federations"]]
    start = max(starts)  # of the attack
    histories = [
        {
            "federation": f.name,
            "attacked": any(u["federation"] == f.name for u in updates),
            "hardly_trained": f.name in hardly,
            "accuracy": f.history.accuracy[-1] if f.history.accuracy else None,
            "late_accuracy": _late(f.history.accuracy),
            "parameters": f.history.parameters,
            "share": f.history.parameters / result.model.parameters,
            "bytes": f.history.bytes,
            "training": f.history.timing.training,
            "client_defence": f.history.timing.client_defence,
            "client_defence_share": f.history.timing.client_defence / max(f.history.timing.training, 1e-9),
            "epsilon": f.history.epsilon[-1] if f.history.epsilon else None,
            "stopped": f.history.stopped,
            "malicious_accepted": _since(f.history.malicious_accepted, start),
            "honest_accepted": _since(f.history.honest_accepted, start),
            "alarms": float(sum(check.noticed > 0 for check in f.checks)) if f.checks else None,
            **_ceilings(result, f.name),
        }
        for f in result.federations
        if f.history
    ]
    return {"updates": updates, "courses": histories, "lpips_missing": result.lpips_missing}


def _files(audit: Audit) -> dict[str, bytes]:
    with temporary_folder() as folder:
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
    line = text if isinstance(error, FedAuditError) else f"{type(error).__name__}: {text}".rstrip(": ")
    return line.encode("utf-8", "backslashreplace").decode()  # half characters, as of a file's name, can't be stored
