"""The main job, top to bottom: scenario in, evaluated findings out."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import platform
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.attacks import Attack, Finding
from fedaudit.attacks.base import own_failures
from fedaudit.attacks.inversion.calibration import CalibrationFinding
from fedaudit.data import DATASETS, Dataset
from fedaudit.evaluation import FINDING_TYPES, check_limits, compare, entry, evaluate, summarise, verdict_rules
from fedaudit.evaluation import Limits as Limits
from fedaudit.evaluation.finding_types import Evaluation, known_type
from fedaudit.evaluation.image_metrics import lpips_missing
from fedaudit.evaluation.images import embedding
from fedaudit.evaluation.limits import NOT_YET
from fedaudit.modalities import example_kind, save_png
from fedaudit.pipeline.calibrations import calibrated
from fedaudit.pipeline.ceilings import UPDATES, ceiling_on, limit_of, run_ceilings, with_ceiling
from fedaudit.pipeline.ceilings import none as no_ceiling
from fedaudit.pipeline.controls import Controls, cautions, conditions_of, judged_by_control, run_controls
from fedaudit.pipeline.deployment import Settings, least_accuracy
from fedaudit.pipeline.describe import adversary_record, federation_record, with_device
from fedaudit.pipeline.margin import run_margins, with_margin
from fedaudit.pipeline.partial_view import truth_for
from fedaudit.pipeline.prepare import ResolvedScenario, resolve
from fedaudit.pipeline.pretraining import Trained, trained_before
from fedaudit.pipeline.received import noticed
from fedaudit.pipeline.recordings import why_contradicted, worst_replay
from fedaudit.pipeline.trials import Kept, Means, Trial, run_trials
from fedaudit.pipeline.untested import left_out, not_asked
from fedaudit.report.again import changes
from fedaudit.report.requirements import requirements
from fedaudit.results import (
    LEAKS,
    AttackRecord,
    AttackSummary,
    AuditResult,
    CalibrationResult,
    CalibrationStep,
    CeilingResult,
    Digests,
    FindingResult,
    MarginResult,
    Timing,
)
from fedaudit.results.rows import masked
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.simulator import Recording as Recording
from fedaudit.simulation.simulator import simulate
from fedaudit.task.training import Loss
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.fingerprint import code_digest, device_name, fingerprint
from fedaudit.utils.folders import inside
from fedaudit.utils.machine import one_thread, processor
from fedaudit.utils.native import native_code
from fedaudit.utils.processes import keep_workers
from fedaudit.utils.progress import Display, Quiet
from fedaudit.utils.version import __version__

_LONG = 10  # rounds, from which a federation is worth keeping


@dataclass(frozen=True)
class Audit:
    """A finished audit: the result and the images that it refers to.

    Attributes:
        result: JSON-serialisable.
        image_files: relative path to (C, H, W) pixels in [0, 1].
        scenario: resolved, as YAML.
    """

    result: AuditResult
    image_files: dict[str, Tensor]
    scenario: str

    def __repr__(self) -> str:
        return f"Audit({self.result!r}, {len(self.image_files)} image files)"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: headline, verdicts, images and limits; it needs no other file."""
        from fedaudit.report.notebook import as_html

        return as_html(self.result, self.image_files)

    @property
    def exceeded(self) -> bool:
        """Whether a limit of the user's was exceeded."""
        return any(threshold.exceeded for threshold in self.result.thresholds)

    def held_to(self, limits: Limits) -> Audit:
        """Return the same audit with what became of each of ``limits``."""
        used = set(self.result.in_use())
        findings = [f for f in self.result.findings if f.federation in used]
        summaries = [s for s in self.result.summaries if s.federation in used]
        margins = [m for m in self.result.margins if m.federation in used]
        ceilings = [c for c in self.result.ceilings if c.federation in used]
        thresholds = check_limits(limits, findings, summaries, self.result.data.kind or "image", margins, ceilings)
        return dataclasses.replace(self, result=self.result.model_copy(update={"thresholds": thresholds}))

    def save(self, folder: Path | str, *, write: Sequence[str] = (), scenario: str = "scenario.yaml") -> Path:
        """Write results.json, report.html, scenario.yaml and the images to ``folder``; return the report's path.

        Args:
            folder: where to; it is made.
            write: other formats too: ``sarif``, ``junit``, ``markdown``.
            scenario: the file that SARIF names as the place of every result, as a path from the root of the sources.

        Raises:
            BadInput: the folder can't be written, a name leads out of it, or a format isn't known.
        """
        from fedaudit.report.page import write_report
        from fedaudit.report.write import check_formats, remove_outputs, write_outputs

        folder, formats = Path(folder), check_formats(write)
        self.save_data(folder)
        remove_outputs(folder)
        write_outputs(self.result, folder, formats, scenario=scenario)
        try:
            write_report(self.result, folder, inside(folder, "report.html"))
        except OSError as error:
            raise BadInput(f"can't write to '{folder}': {error.strerror or error}") from None
        return folder / "report.html"

    def save_data(self, folder: Path) -> None:
        """Write the same without the report.

        Raises:
            BadInput: the folder can't be written, or a name leads out of it.
        """
        try:
            (folder / "images").mkdir(parents=True, exist_ok=True)
            for name, pixels in self.image_files.items():
                save_png(pixels, inside(folder, name))
            inside(folder, "scenario.yaml").write_text(self.scenario, encoding="utf-8")
            self.result.save(inside(folder, "results.json"))
        except OSError as error:
            raise BadInput(f"can't write to '{folder}': {error.strerror or error}") from None


@keep_workers()
def run_audit(
    scenario: Scenario,
    *,
    data_dir: Path | None = None,
    dataset: Dataset | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    workers: int = 1,
    store: Path | None = None,
    kept: Kept | None = None,
    checkpoints: bool = True,
    display: Display | None = None,
) -> Audit:
    """Simulate the federations of ``scenario``, attack what the adversary sees, and evaluate.

    Args:
        scenario, data_dir, dataset, model, loss: as of :func:`fedaudit.pipeline.prepare.resolve`.
        workers: processes for the simulation and the attacks.
        store: folder that keeps finished findings, so that an interrupted audit goes on where it stopped.
        kept: see :func:`.run_trials`.
        checkpoints: whether long simulations are kept there, too, until the audit is over.
        display: shows progress.

    Raises:
        BadInput: something in the scenario, the data or the model can't be used.
    """
    started = time.time()
    means = Means(workers, store, kept, display or Quiet())
    resolved = resolve(scenario, data_dir=data_dir, dataset=dataset, model=model, loss=loss, display=display)
    recordings = record(resolved, workers=workers, store=store if checkpoints else None, display=display)
    attacked = [r for r in recordings if resolved.scenario.attacked(r.transcript.name)]
    check_public_examples(attacked, resolved.scenario.attacks)
    observed = [observe(r, resolved.scenario.threat) for r in recordings]
    planned = plan(
        [seen for seen, recording in zip(observed, recordings, strict=True) if recording in attacked],
        resolved.scenario.attacks,
        updates=resolved.scenario.evaluation.max_updates,
        clients=resolved.scenario.evaluation.max_clients,
        seed=resolved.scenario.seed,
        device=resolved.scenario.device,
    )
    planned = calibrated(planned, means)
    audit = assess(resolved, recordings, observed, run_trials(planned, means), means, started=started)
    if store and checkpoints:
        for federation in resolved.federations:
            simulation_checkpoint(store, federation.name).unlink(missing_ok=True)
    return audit


def simulation_checkpoint(store: Path, run: str) -> Path:
    """Return the file from which the simulation of the run of that name goes on when it is killed."""
    return store / f"{run}.simulation"


@one_thread()
@keep_workers()
def record(
    resolved: ResolvedScenario,
    *,
    names: Sequence[str] | None = None,
    workers: int = 1,
    store: Path | None = None,
    display: Display | None = None,
) -> list[Recording]:
    """Simulate the federations (all, or those in ``names``); within ``training_once`` the last long one is kept.

    With ``store``, a folder, long ones that are killed go on from there.
    """
    display = display or Quiet()
    about: dict[str, Any] = {
        "scenario": resolved.scenario.model_dump(mode="json"),
        "data": resolved.data.model_dump(mode="json"),
        "model": resolved.model.model_dump(mode="json"),
    }
    recordings = []
    before = trained_before()
    last = (before or Trained()).recordings
    for federation in resolved.federations:
        name, spec = federation.name, federation.spec
        if names is not None and name not in names:
            continue
        report = display.stage(f"federation {name}", spec.rounds * (spec.clients_per_round or spec.clients))
        checkpoint = simulation_checkpoint(store, name) if store else None
        key = fingerprint(federation) if before and spec.rounds >= _LONG else None
        made = last.get(key) if key else None
        if made is None:
            last.clear()  # before another takes as much memory
            made = simulate(federation, report=report, checkpoint=checkpoint, workers=workers, say=display.say)
        if key:
            last[key] = made
        accuracy = made.history.accuracy[-1:] if made.history else []
        told = made.truth.about
        if resolved.scenario.model.training.epochs and resolved.scenario.data.split == "train":
            told = {name: value for name, value in told.items() if name != "promise"}  # it was trained on without noise
        known = told | about | ({"accuracy": accuracy[0]} if accuracy else {})
        known |= {} if federation.device == "cpu" else {"device": device_name(federation.device)}
        recordings.append(dataclasses.replace(made, truth=dataclasses.replace(made.truth, about=known)))
    return recordings


def check_public_examples(recordings: Sequence[Recording], attacks: Sequence[Attack]) -> None:
    """Raise BadInput if an attack's public examples have a victim among them: it would know what it is to find."""
    for attack in attacks:
        public = attack.public_examples()
        if public is None:
            continue
        for recording in recordings:
            kind = recording.transcript.task_info.example_kind
            for victims in recording.truth.inputs.values():
                shared = int(torch.isin(kind.fingerprints(victims), public).sum())
                if shared:
                    raise BadInput(
                        f"{attack.name}: {shared} of the victims' {kind.plural} are among the public examples that "
                        f"'{attack.files()[0]}' was trained on; let the clients hold the test split (data.split=test), "
                        "or train it on other data"
                    )


def plan(
    observed: Sequence[Observation],
    attacks: Sequence[Attack],
    *,
    updates: int | None = None,
    clients: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> list[Trial]:
    """Return every attack on all in its scope, checked beforehand; one that does not apply has its outcome already.

    The scope is every update that the adversary sees (or the first ``updates``), every client that it sees updates of
    (or the first ``clients``), or the federation. Where it sees no update, an attack on updates or clients stands with
    the reason.
    """
    trials: list[Trial] = []
    for whole, attack in itertools.product(observed, attacks):
        scope = attack.scope()
        most = {"update": updates, "client": clients}.get(scope)
        for observation in whole.split(scope)[:most] or [whole]:
            reason: NotApplicable | None = None
            try:
                if scope != "federation" and observation.sent.by_client() is None:
                    observation.need_messages()
                with own_failures(attack.name, observation):
                    attack.check(observation)
            except NotApplicable as found:
                reason = found
            trials.append(Trial(attack, observation, seed, device, reason))
    return trials


@dataclass
class SoFar:
    """What is known of an audit whose report is written more than once: none of it is worked out again.

    Attributes:
        evaluated: findings with their scores, by the trial's place.
        controls: that have been run.
        margins: that were measured, and their images; None: not yet.
        ceilings: likewise.
    """

    evaluated: dict[int, Evaluation] = field(default_factory=dict)
    controls: Controls = field(default_factory=Controls)
    margins: tuple[list[MarginResult], dict[str, Tensor]] | None = None
    ceilings: tuple[list[CeilingResult], dict[str, Tensor]] | None = None


@one_thread()  # transforms by several threads end in other bits
def assess(
    resolved: ResolvedScenario,
    recordings: Sequence[Recording],
    observed: Sequence[Observation],
    trials: Sequence[Trial],
    means: Means | None = None,
    *,
    started: float,
    repeat: str | None = None,
    so_far: SoFar | None = None,
    margins_too: bool = True,
    ceilings_too: bool = True,
) -> Audit:
    """Open the truth, now that these attacks have run, evaluate, run controls.

    Args:
        observed: what of each recording is seen.
        so_far: of the same trials, when some had no outcome yet; it is brought up to date.
        margins_too: whether margins are measured; they cost most. ``ceilings_too``: likewise.
    """
    scenario, attacks, means = resolved.scenario, resolved.scenario.attacks, means or Means()
    so_far = so_far or SoFar()
    replayed = {r.transcript.name: worst_replay(r) for r in recordings if r.history is None}
    recordings = [
        dataclasses.replace(r, truth=truth_for(r, seen)) for r, seen in zip(recordings, observed, strict=True)
    ]
    truths = {r.transcript.name: r.truth for r in recordings}
    findings: list[FindingResult] = []
    image_files: dict[str, Tensor] = {}
    for place, trial in enumerate(trials):
        seen = trial.observation
        if not isinstance(trial.outcome, Finding):
            reason = NOT_YET if trial.outcome is None else str(trial.outcome)
            findings.append(entry(trial.attack.name, seen, status="not applicable", reason=reason))
            continue
        if place not in so_far.evaluated:
            with embedding(scenario.evaluation.embedding):
                so_far.evaluated[place] = evaluate(trial.outcome, seen, truths[seen.federation], seed=scenario.seed)
        evaluated = so_far.evaluated[place]
        most = scenario.evaluation.most_exposed
        shown = {name: getattr(evaluated.result, name)[:most] for name in ("most_exposed", "recited")}
        if scenario.evaluation.mask_texts:
            texts = {"sequences": evaluated.result.sequences, "recited": shown["recited"]}
            shown |= {name: [masked(text) for text in own] for name, own in texts.items()}
        findings.append(_with_calibration(evaluated.result.model_copy(update=shown), trial))
        image_files |= evaluated.image_files
    known = {name: truth.about.get("accuracy") for name, truth in truths.items()}
    accuracy = {name: float(value) for name, value in known.items() if isinstance(value, int | float)}
    settings = Settings(recordings, scenario, resolved.model.trained, accuracy)
    findings = [settings.of(f, trial.observation) for f, trial in zip(findings, trials, strict=True)]
    least = {r.transcript.name: least_accuracy(r, scenario) for r in recordings}
    findings = [_not_by_chance(f, accuracy, least) for f in findings]
    if scenario.evaluation.mask_texts:  # a mark is a digest: whoever guesses a text can check it by that
        marks: dict[str, str] = {}
        findings = [
            f.model_copy(update={"victims": f.victims and marks.setdefault(f.victims, f"{len(marks) + 1:012x}")})
            for f in findings
        ]
    adversary = adversary_record(scenario, recordings)
    things = example_kind(resolved.data.kind or "image").plural
    summaries = summarise(
        findings, resamples=scenario.evaluation.bootstrap, seed=scenario.seed, who=adversary.who, things=things
    )
    summaries = [settings.of_all(_judged(s, accuracy, least)) for s in summaries]
    controls: Controls | None = None
    if scenario.evaluation.controls:
        controls = run_controls(summaries, findings, scenario, recordings, means, trials, so_far.controls)
        image_files |= controls.image_files
    wrong = {
        r.transcript.name: why_contradicted(r, replay)
        for r in recordings
        if (replay := replayed.get(r.transcript.name)) is not None
        and (replay.contradicts or (replay.explanation and not replay.reproduces))
    }
    by_name, conditions = {a.name: a for a in attacks}, {r.transcript.name: conditions_of(r) for r in recordings}
    before = summaries
    summaries = [
        judged_by_control(
            s,
            controls,
            who=adversary.who,
            things=things,
            wrong=wrong.get(s.federation),
            attack=by_name[s.attack],
            conditions=conditions[s.federation],
        )
        for s in summaries
    ]
    margins: list[MarginResult] = []
    if controls is not None and (margins_too or so_far.margins is not None):
        if so_far.margins is None:
            so_far.margins = run_margins(summaries, trials, recordings, scenario, controls, means, wrong)
        leaking = {s.federation for s in summaries if s.verdict in LEAKS and known_type(s.kind).margin}
        margins = [margin for margin in so_far.margins[0] if margin.federation not in leaking]
        image_files |= so_far.margins[1] if margins else {}
        summaries = [with_margin(summary, margins) for summary in summaries]
    if ceilings_too and so_far.ceilings is None:
        so_far.ceilings = run_ceilings(trials, summaries, recordings, scenario, means, wrong)
    ceilings, drawn = so_far.ceilings or ([], {})
    image_files |= drawn
    certified = {r.transcript.name: r.history.certificate for r in recordings if r.history is not None}
    summaries = [
        with_ceiling(s, was, ceilings, adversary.who, things, certified.get(s.federation))
        for s, was in zip(summaries, before, strict=True)
    ]
    unverified = {
        r.transcript.name
        for r in recordings
        if r.transcript.recording
        and not (r.transcript.replays and all(x.verifies or x.contradicts for x in r.transcript.replays.values()))
    }
    summaries = [_with_cautions(summary, attacks, findings, unverified) for summary in summaries]
    lpips_used = any(image.lpips is not None for finding in findings for image in finding.images)
    result = AuditResult(
        fedaudit_version=__version__,
        name=scenario.name,
        scenario=scenario.model_dump(mode="json"),
        data=resolved.data.model_copy(update={"words": None} if scenario.evaluation.mask_texts else {}),
        model=resolved.model,
        adversary=adversary,
        federations=[
            with_device(federation_record(r.transcript, r.history, scenario, seen), r.truth).model_copy(
                update={
                    "replay_error": replay.error if (replay := replayed.get(r.transcript.name)) else None,
                    "checks": noticed(r) if scenario.threat.adversary == "malicious-server" else [],
                }
            )
            for r, seen in zip(recordings, observed, strict=True)
        ],
        attacks=[
            AttackRecord(name=a.name, summary=a.summary, paper=a.paper, settings=a.settings(), mapping=a.by_standards())
            for a in attacks
        ],
        findings=findings,
        summaries=summaries,
        comparisons=compare(findings, summaries),
        controls=controls.results if controls else [],
        calibrations=_calibrations(trials),
        margins=margins,
        ceilings=ceilings,
        verdict_rules=verdict_rules(findings),
        not_asked=not_asked(resolved.data.kind or "image", scenario, recordings, findings),
        out_of_scope=_out_of_scope(scenario, attacks, resolved.data.kind or "image"),
        lpips_missing=None if lpips_used else lpips_missing(),
        as_deployed=settings.as_deployed(resolved.federations[0].dataset) if resolved.federations else [],
        repeat=repeat or _how_to_repeat(scenario),
        thresholds=[],
        environment=environment(scenario.device),
        digests=_digests(scenario, recordings),
        timing=Timing(
            seconds=time.time() - started,
            started=datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
            workers=means.workers,
        ),
    )
    result = result.model_copy(update={"requirements": requirements(result), "test_again": changes(result)})
    return Audit(result, image_files, scenario.to_yaml())


def ceilings_of(
    scenario: Scenario, *, data_dir: Path | None = None, display: Display | None = None, limit: float | None = None
) -> Audit:
    """Simulate the federations of ``scenario``, and return how much their updates determine; no attack is run.

    ``limit``: it is asked whether it is above.

    Raises:
        BadInput: as of :func:`run_audit`.
    """
    started, means = time.time(), Means(display=display or Quiet())
    if limit is not None:
        asked = scenario.evaluation.model_copy(update={"ceiling": float(limit)})
        scenario = scenario.model_copy(update={"evaluation": asked})
    resolved = resolve(scenario, data_dir=data_dir, display=display)
    recordings = record(resolved, display=display)
    observed = [observe(r, resolved.scenario.threat) for r in recordings]
    repeat = _how_to_repeat(resolved.scenario).replace("fedaudit audit ", "fedaudit ceiling ")
    return with_ceilings_alone(resolved, recordings, observed, means, started=started, repeat=repeat)


@one_thread()
def with_ceilings_alone(
    resolved: ResolvedScenario,
    recordings: Sequence[Recording],
    observed: Sequence[Observation],
    means: Means,
    *,
    changes: bool = True,
    **rest: Any,
) -> Audit:
    """Return an audit of ceilings, and where asked of what changes of the federation bring, without any attack."""
    found, files = list[CeilingResult](), dict[str, Tensor]()
    for recording, seen in zip(recordings, observed, strict=True):
        own = [] if seen.sent.by_client() is not None or seen.sent.no_updates else seen.split()
        if not own:
            found.append(no_ceiling(recording.transcript.name, "no updates travel that the adversary reads"))
            continue
        result, pictures = ceiling_on(
            truth_for(recording, seen),
            own[: min(UPDATES, resolved.scenario.evaluation.max_updates or UPDATES)],
            seed=resolved.scenario.seed,
            means=means,
            changes=changes,
            limit=limit_of(resolved.scenario),
        )
        found.append(result)
        files |= pictures
    bare = dataclasses.replace(resolved, scenario=resolved.scenario.model_copy(update={"attacks": []}))
    so_far = SoFar(ceilings=(found, files))
    return assess(bare, recordings, observed, [], means, so_far=so_far, margins_too=False, ceilings_too=False, **rest)


@dataclass(frozen=True)
class Opened:
    """A recording with its truth, to evaluate by what attacks find in it.

    Attributes:
        observation: what the adversary sees of it.
        started: seconds since 1970.
        repeat: the command that does the same again.
    """

    resolved: ResolvedScenario
    recording: Recording
    observation: Observation
    started: float
    repeat: str

    def audit(
        self,
        trials: Sequence[Trial],
        means: Means,
        so_far: SoFar | None = None,
        *,
        margins_too: bool = True,
        ceilings_too: bool = True,
    ) -> Audit:
        """Return the audit of what trials found; see :func:`assess`."""
        return assess(
            self.resolved,
            [self.recording],
            [self.observation],
            trials,
            means,
            started=self.started,
            repeat=self.repeat,
            so_far=so_far,
            margins_too=margins_too,
            ceilings_too=ceilings_too,
        )


# --- what attacks found out about themselves --------------------------------------------------------------------------


def _with_calibration(finding: FindingResult, trial: Trial) -> FindingResult:
    """Return the finding, with a note of how its attack came by its settings."""
    own = trial.calibration
    if own is None:
        return finding
    note = str(own) if isinstance(own, CalibrationFinding) else f"not calibrated, its own settings are kept: {own}"
    return finding.model_copy(update={"notes": [note, *finding.notes]})


def _calibrations(trials: Sequence[Trial]) -> list[CalibrationResult]:
    """Return every calibration once, with the rounds and clients that it served."""
    served: dict[int, tuple[CalibrationFinding, list[Trial]]] = {}
    for trial in trials:
        if isinstance(own := trial.calibration, CalibrationFinding):
            served.setdefault(id(own), (own, []))[1].append(trial)
    return [
        CalibrationResult(
            attack=of[0].attack.name,
            federation=of[0].observation.federation,
            updates=len(of),
            settings=own.settings,
            tried=[CalibrationStep(**dataclasses.asdict(rung)) for rung in own.rungs],
            images=own.images,
            source=own.source,
            iterations=own.iterations,
            text=str(own),
            timing=Timing(seconds=own.seconds),
        )
        for own, of in served.values()
    ]


# --- federations that have hardly learnt anything: no evidence, for a leak or against it ------------------------------


def _not_by_chance(finding: FindingResult, accuracy: Mapping[str, float], least: Mapping[str, float]) -> FindingResult:
    """Return the finding; one that needs a trained federation and had none is no leak, and says so."""
    if finding.status != "done" or not _hardly(finding.kind, finding.federation, accuracy, least):
        return finding
    notes = [*finding.notes, _said(accuracy[finding.federation])]
    return finding.model_copy(update={"is_leak": False, "notes": notes})


def _judged(summary: AttackSummary, accuracy: Mapping[str, float], least: Mapping[str, float]) -> AttackSummary:
    """Return the summary; where a federation had to be trained and hardly was, the verdict is inconclusive.

    A leak of what a model learns is one all the same; that there is none is no news.
    """
    kind = FINDING_TYPES[summary.kind] if summary.kind is not None else None
    silent = kind is not None and kind.learns and summary.verdict == "not demonstrated"
    silent &= accuracy.get(summary.federation, 1.0) < least[summary.federation]
    if kind is None or not (kind.trained or silent):
        return summary
    if summary.federation not in accuracy:
        caution = "how well the federation's model was trained isn't recorded"
        return summary.model_copy(update={"cautions": [*summary.cautions, caution]})
    if not (silent or _hardly(summary.kind, summary.federation, accuracy, least)):
        return summary
    reached, wanted = accuracy[summary.federation], least[summary.federation]
    advice = f"{_said(reached)}; train it to {wanted:g} or more: more rounds, more examples a client, another rate"
    text = f"{_said(reached)}, below {wanted:g} (evaluation.min_accuracy); {summary.verdict_text}"
    changes = {"verdict": "inconclusive", "verdict_text": text, "advice": [advice], "hardly_trained": reached}
    return summary.model_copy(update=changes)


def _hardly(kind: str | None, federation: str, accuracy: Mapping[str, float], least: Mapping[str, float]) -> bool:
    return kind is not None and FINDING_TYPES[kind].trained and accuracy.get(federation, 1.0) < least[federation]


def _said(accuracy: float) -> str:
    return f"the federation was hardly trained: accuracy {accuracy:.2f}"


# --- what a result says beside its findings ---------------------------------------------------------------------------


def _with_cautions(
    summary: AttackSummary, attacks: Sequence[Attack], findings: Sequence[FindingResult], unverified: Collection[str]
) -> AttackSummary:
    if summary.verdict not in ("identifiable", "inconclusive", "not demonstrated"):
        return summary
    attack = next(a for a in attacks if a.name == summary.attack)
    own = [f for f in findings if (f.federation, f.attack) == (summary.federation, summary.attack)]
    facts = ["facts unverified: how clients trained couldn't be checked by a replay"]
    return summary.model_copy(
        update={
            "cautions": [
                *summary.cautions,
                *cautions(attack, own),
                *(facts if summary.federation in unverified else []),
            ]
        }
    )


def _out_of_scope(scenario: Scenario, attacks: Sequence[Attack], kind: str) -> list[str]:
    threat: ThreatModel = scenario.threat
    lines = [f"other adversaries than this one: {threat.summary}", *left_out(scenario, attacks, kind)]
    altered, acts = (any(getattr(f, who) for f in scenario.federations) for who in ("server", "malicious"))
    recovered = " and ".join(dict.fromkeys(attack.recovers_of(kind) for attack in attacks))
    lines += [
        f"a server that sends altered models{' in another way than here' * altered}, and clients that poison the "
        f"training{' in another way than here' * acts}",
        f"anything else than the recovery of {recovered}",
    ]
    if all(attack.scope() == "update" for attack in attacks):
        lines.append("what several rounds reveal together: every update was attacked on its own")
    if scenario.evaluation.max_updates is not None:
        lines.append(f"updates after the first {scenario.evaluation.max_updates} of each federation")
    if scenario.evaluation.max_clients is not None and any(attack.scope() == "client" for attack in attacks):
        lines.append(f"clients after the first {scenario.evaluation.max_clients} of each federation")
    return lines


def _how_to_repeat(scenario: Scenario) -> str:
    if "custom" in (scenario.data.name, scenario.model.name, scenario.model.loss):
        return "fedaudit.audit('scenario.yaml', out='DIR', …) from Python, with the same model, data and loss"
    here = scenario.data.path is not None or DATASETS[scenario.data.name].info["embedded"]
    where = "" if here else " --data-dir DATA"
    return f"fedaudit audit scenario.yaml --out DIR{where}"


def _digests(scenario: Scenario, recordings: Sequence[Recording]) -> Digests:
    notes = [note for r in recordings for note in r.transcript.notes if "no digest" in note]
    return Digests(
        scenario=hashlib.sha256(scenario.to_yaml().encode()).hexdigest(),
        transcripts={r.transcript.name: r.transcript.digest() for r in recordings},
        code=code_digest(),
        notes=list(dict.fromkeys(notes)),
    )


def environment(device: str) -> dict[str, str]:
    """Return what the results were computed with."""
    return {
        "fedaudit": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processors": str(os.cpu_count()),
        "device": device_name(device),
        "threads per worker": "1",
        "processor": processor(),
        "native code": native_code(),
    }
