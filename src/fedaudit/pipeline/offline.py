"""Attacks on a transcript that lies on disk: first the attack, which reads no truth, then perhaps the evaluation."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import singledispatch
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from fedaudit.attacks import Finding, ImageFinding, make_attack
from fedaudit.federation.simulator import Recording
from fedaudit.federation.transcript import Transcript
from fedaudit.federation.truth import FILE, Truth, check_belongs
from fedaudit.pipeline.prepare import ResolvedScenario
from fedaudit.pipeline.run import Audit, assess, check_public_examples, plan, run_attacks, save_png
from fedaudit.pipeline.trials import Trial
from fedaudit.results import DataRecord, ModelRecord
from fedaudit.scenario import AttackSpec, Scenario, scenario_from
from fedaudit.threat import ThreatModel
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.folders import inside
from fedaudit.utils.progress import Display
from fedaudit.utils.validation import explain


def attack_transcript(
    folder: Path,
    names: Sequence[str],
    settings: dict[str, Any],
    *,
    threat: dict[str, Any],
    seed: int | None,
    device: str,
    out: Path,
    workers: int,
    truth: Path | None,
    limits: dict[str, float],
    display: Display,
) -> Audit | None:
    """Run the attacks ``names`` on the transcript in ``folder``; write what was recovered to ``out``.

    Args:
        folder: of the transcript.
        names: of the attacks; ``settings`` apply to all of them.
        settings: hyper-parameters.
        threat: fields of a ThreatModel.
        seed: of the attacks; None takes the recorded scenario's, or 0 where there is no ground truth.
        device: where to compute.
        out: folder for images and findings.
        workers: processes.
        truth: ground truth file; None looks for the transcript's own.
        limits: metric to limit.
        display: shows progress.

    Returns:
        The evaluated audit, or None if there is no ground truth.

    Raises:
        BadInput: a name, setting, flag or file can't be used.
    """
    started = time.time()
    adversary = _threat(threat)
    attacks = [make_attack(name, settings) for name in names]
    if not attacks:
        raise BadInput("no attack is named; give --attack once or more")
    if len(set(names)) < len(names):
        raise BadInput("the same attack is named twice; give every --attack once")
    if device not in ("cpu", "cuda"):
        raise BadInput(f"device '{device}' isn't known; it is cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("device is 'cuda', but torch finds no GPU here; use --device cpu")
    transcript = Transcript.load(folder)
    if transcript.records:  # what the transcript grants, as far as it was asked for
        public = len(transcript.records.public_inputs) if adversary.knows_public_data else 0
        adversary = _threat({**threat, "records": len(transcript.records), "public_examples": public or None})
    if adversary.knows_labels and any(u.labels is None for r in transcript.rounds for u in r.updates):
        raise BadInput(f"the transcript in '{folder}' grants no labels; simulate with --set threat.knows_labels=true")
    truth_path = truth or folder / FILE
    evaluated = truth is not None or truth_path.exists()
    if limits and not evaluated:
        raise BadInput(f"--fail-above needs the ground truth to judge by, and there is none at {truth_path}")
    if evaluated:  # find out before hours of work; only the seed is kept until every attack has been run
        seed = _open_truth(truth_path, transcript)[1].seed if seed is None else seed
    planned = plan([transcript], attacks, adversary, seed=seed or 0, device=device)
    trials = run_attacks(planned, workers=workers, store=out / "findings", display=display)
    if not evaluated:
        _save_findings(out, trials)
        return None
    loaded, scenario, data, model = _open_truth(truth_path, transcript)
    specs = [AttackSpec.model_validate({"name": a.name, **a.settings()}) for a in attacks]
    name, spec, defences = next(run for run in scenario.runs() if run[0] == transcript.name)
    attacked = scenario.model_copy(
        update={
            "attacks": specs,
            "threat": adversary,
            "federations": [spec.model_copy(update={"name": name})],
            "defences": defences,
            "other_defences": [],
            "device": device,
            "evaluation": scenario.evaluation.model_copy(
                update={"updates": None, "clients": None, "federations": None}
            ),
        }
    )
    flags = [f"--attack {name}" for name in names] + [f"--set {key}={value}" for key, value in settings.items()]
    flags += [f"--adversary {adversary.adversary}", f"--seed {seed or 0}", "--out DIR"]
    flags += ["--knows-public-data"] * adversary.knows_public_data
    flags += ["--knows-labels"] * adversary.knows_labels + ["--no-knows-training"] * (not adversary.knows_training)
    recording = Recording(transcript, loaded)
    check_public_examples([recording], attacks)
    return assess(
        ResolvedScenario(attacked, attacks, data, model),
        [recording],
        trials,
        limits=limits,
        workers=workers,
        started=started,
        repeat=f"fedaudit attack TRANSCRIPT {' '.join(flags)}",
    )


def _threat(values: dict[str, Any]) -> ThreatModel:
    try:
        return ThreatModel.model_validate(values)
    except ValidationError as error:
        raise BadInput(explain(error, ThreatModel)) from None


def _save_findings(out: Path, trials: Sequence[Trial]) -> None:
    """Write what was recovered, and a list of what was and what couldn't be run."""
    try:
        (out / "images").mkdir(parents=True, exist_ok=True)
        rows = []
        for trial in trials:
            observation, attack, outcome = trial.observation, trial.attack, trial.outcome
            place = {
                "round": {m.round for m in observation.messages},
                "client": {m.client for m in observation.messages},
            }
            row: dict[str, Any] = {"attack": attack.name}
            row |= {key: values.pop() if len(values) == 1 else None for key, values in place.items()}
            if isinstance(outcome, Finding):
                parts = [row["round"], row["client"], attack.name]
                row |= _write_finding(outcome, out, [str(part) for part in parts if part is not None])
            else:
                row["not_applicable"] = str(outcome)
            rows.append(row)
        inside(out, "findings.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"can't write to '{out}': {error.strerror or error}") from None


@singledispatch
def _write_finding(finding: Finding, out: Path, name: list[str]) -> dict[str, Any]:
    """Write what was recovered below ``out`` and return what the list says of it."""
    file = "-".join(name) + ".safetensors"
    finding.save(inside(out, file))
    return {"kind": finding.kind, "objective": finding.objective, "notes": list(finding.notes), "file": file}


@_write_finding.register
def _write_images(finding: ImageFinding, out: Path, name: list[str]) -> dict[str, Any]:
    *place, attack = name
    names = [f"images/{'-'.join([*place, str(i), attack])}.png" for i in range(len(finding.images))]
    for path, pixels in zip(names, finding.images, strict=True):
        save_png(pixels, inside(out, path))
    return {
        "labels": finding.labels.tolist(),
        "label_source": finding.label_source,
        "objective": finding.objective,
        "images": names,
    }


def _open_truth(path: Path, transcript: Transcript) -> tuple[Truth, Scenario, DataRecord, ModelRecord]:
    """Return the truth, checked against the transcript, and the scenario and records it was recorded with."""
    truth = Truth.load(path)
    check_belongs(truth, transcript, path)
    try:
        data = DataRecord.model_validate(truth.about["data"])
        model = ModelRecord.model_validate(truth.about["model"])
        scenario = scenario_from(truth.about["scenario"], where=f"the scenario in {path}")
    except (KeyError, ValidationError) as error:
        raise CorruptTranscript(f"{path} doesn't say what was recorded: {error}") from None
    if transcript.name not in [name for name, _, _ in scenario.runs()]:
        raise CorruptTranscript(f"{path}: its scenario has no federation '{transcript.name}'")
    return truth, scenario, data, model
