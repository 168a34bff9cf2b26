"""The Python interface: an audit of a user's own model and data in one call, or its two halves: simulate and attack."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from fedaudit.attacks import make_attack as make_attack
from fedaudit.attacks.base import Attacks
from fedaudit.data import Dataset
from fedaudit.evaluation.limits import CEILING
from fedaudit.pipeline.compare_defences import with_compared_defences
from fedaudit.pipeline.offline import AttackRequest, Findings, attacked, audited, evaluate_findings, written
from fedaudit.pipeline.output import clear, holds_another
from fedaudit.pipeline.parts.data import of_one_tensor_each, own_dataset
from fedaudit.pipeline.prepare import AuditRequest, check_files, resolve, spell_out
from fedaudit.pipeline.run import Audit as Audit
from fedaudit.pipeline.run import Limits as Limits
from fedaudit.pipeline.run import Recording as Recording
from fedaudit.pipeline.run import record, run_audit
from fedaudit.pipeline.transcripts import new_folder
from fedaudit.pipeline.trials import Means
from fedaudit.pipeline.verify import verify as verify
from fedaudit.results import AuditResult as AuditResult
from fedaudit.results import Verdict as Verdict
from fedaudit.scenario.scenario import Scenario, load_scenario, scenario_from
from fedaudit.task.training import LOSSES as LOSSES
from fedaudit.task.training import Loss as Loss
from fedaudit.task.training import loss_name
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth, save_recording
from fedaudit.utils.errors import BadInput, unknown_name
from fedaudit.utils.folders import check_folder
from fedaudit.utils.progress import live_display
from fedaudit.utils.registry import listed
from fedaudit.utils.validation import Spec

Array = Tensor | np.ndarray[Any, Any]


def audit(
    scenario: Scenario | str | Path | dict[str, Any] | None = None,
    *,
    model: nn.Module | None = None,
    data: Dataset | tuple[Array, Array] | Any | None = None,
    kind: str | None = None,
    loss: Loss | None = None,
    batch_norm: Literal["eval", "train"] | None = None,
    dropout: bool | None = None,
    federations: Sequence[dict[str, Any]] | None = None,
    attacks: Attacks | None = None,
    threat: Mapping[str, Any] | ThreatModel | None = None,
    seed: int | None = None,
    data_dir: Path | str | None = None,
    out: Path | str | None = None,
    workers: int = 1,
    fail_above: dict[str, float] | None = None,
    fail_on: Verdict | None = None,
    fail_below: dict[str, float] | None = None,
    compare_defences: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> Audit:
    """Audit a federation: simulate it, attack what the adversary sees, and evaluate what was recovered.

    Args:
        scenario: a Scenario, a YAML file or a mapping; None starts from the default audit (embedded photographs).
        model: your own module, in the state and the mode (train or eval) in which round 0 begins; it isn't changed.
            (n, C, H, W) normalised images, (n, C, D, H, W) volumes, (n, C, T) signals or (n, d) rows to (n, classes)
            logits, or to (n, 1) logits of two classes.
        data: your own examples: a Dataset, (inputs, targets) with images uint8 or float in [0, 1] of shape
            (n, C, H, W) or (n, H, W, C) and integer targets, any map-style torch Dataset of such pairs, or a DataLoader
            of one. Without a scenario the clients hold its train split; of tensors one example in five is held out, as
            candidates. Several inputs are a tuple or a mapping of tensors, which the model gets as they are; several
            targets, of a model of several outputs and a loss of yours, likewise.
        kind: of your examples where the shape of the arrays doesn't tell: ``"signal"`` for (n, C, T) series,
            ``"volume"`` for (n, D, H, W) scans; five axes, (n, C, D, H, W), are a volume anyway.
        loss: your own, (outputs, targets) to the mean over the batch; default cross-entropy. nn.BCEWithLogitsLoss() is
            for a model of one logit and targets 0 and 1. Targets that are floats are standardised for the mean squared
            error, and stay as they are for any other loss of yours; the data's summary says which.
        batch_norm: BatchNorm's mode in the clients' training; default: the scenario's, else that of your module.
        dropout: whether clients train with dropout; default: the scenario's, else as your module is.
        federations: instead of the scenario's, as in YAML.
        attacks: instead of the scenario's: attacks, as ``InvG(iterations=300)`` of ``fedaudit.attacks``, or names, or
            mappings with settings. A scenario's defences may be objects, too. Where nobody names any attack, those that
            fit the data, the updates and the threat model; ``result.attacks`` lists them.
        threat: instead of the scenario's.
        seed: instead of the scenario's.
        data_dir: where data sets that aren't embedded lie (or FEDAUDIT_DATA).
        out: folder for report.html, results.json, scenario.yaml; an interrupted audit goes on from there.
        workers: processes for the attacks.
        fail_above: metric to limit; ``Audit.exceeded`` tells, and ``Audit.result.thresholds`` what could not be tested.
        fail_on: the verdict that must not be reached, nor a worse one: recovered, identifiable or inferred.
        fail_below: ``{"margin": factor}``: by so many times updates must be larger than the largest that an attack on
            images has power over.
        compare_defences: repeat the audit under three defences that fit what its first attack is after, and compare
        them.
        overwrite: where ``out`` holds the report of another scenario, delete that and its images; otherwise refuse.
        progress: show on standard error how far the audit is: live on a terminal, elsewhere in a line every 15 seconds.

    Returns:
        The finished audit; ``audit.result`` has every number, ``audit.save(folder)`` writes the report.

    Raises:
        BadInput: something can't be used; the message says what and what to do.
    """
    named = None if attacks is None else listed(attacks, "attacks")
    changes = {"federations": federations, "attacks": named, "threat": threat, "seed": seed}
    modes = {"batch_norm": batch_norm, "dropout": dropout}
    request = _requested(scenario, changes, modes, model=model, data=data, kind=kind, loss=loss, data_dir=data_dir)
    if compare_defences:
        request = dataclasses.replace(request, scenario=with_compared_defences(request.scenario))
    limits = limits_of(fail_above, fail_on, fail_below)
    if CEILING in limits.fail_above:
        asked = request.scenario.evaluation.model_copy(update={"ceiling": float(limits.fail_above[CEILING])})
        request = dataclasses.replace(request, scenario=request.scenario.model_copy(update={"evaluation": asked}))
    check_files(request.scenario)
    folder = Path(out) if out else None
    another = False
    if folder:
        check_folder(folder)
        request = spell_out(request)
        another = holds_another(folder, request.scenario, overwrite=overwrite)
    store = folder / "findings" if folder else None
    with live_display(progress) as display:
        finished = run_audit(**vars(request), workers=workers, store=store, display=display).held_to(limits)
    if folder:
        if another:
            clear(folder)
        finished.save(folder)
    return finished


def simulate(
    scenario: Scenario | str | Path | dict[str, Any] | None = None,
    *,
    federation: str | None = None,
    model: nn.Module | None = None,
    data: Dataset | tuple[Array, Array] | Any | None = None,
    kind: str | None = None,
    loss: Loss | None = None,
    batch_norm: Literal["eval", "train"] | None = None,
    dropout: bool | None = None,
    seed: int | None = None,
    data_dir: Path | str | None = None,
    out: Path | str | None = None,
    workers: int = 1,
    progress: bool = True,
) -> Recording:
    """Simulate one federation and return what travelled, with the ground truth beside it.

    Args:
        scenario, model, data, kind, loss, batch_norm, dropout, seed, data_dir, progress: as of :func:`audit`.
        federation: which one, if the scenario has several; of the default ones, where it names none, the first.
        out: a new folder for the transcript, with the truth in a file of its own; one that takes long and is killed
            goes on from where it was when it is called again.
        workers: processes that the clients are simulated in.

    Returns:
        ``recording.transcript`` and ``recording.truth``; :func:`attack` and :func:`audit_transcript` take the
        recording, its transcript alone, or the folder.

    Raises:
        BadInput: something can't be used; the message says what and what to do.
    """
    modes = {"batch_norm": batch_norm, "dropout": dropout}
    request = _requested(
        scenario, {"seed": seed}, modes, model=model, data=data, kind=kind, loss=loss, data_dir=data_dir
    )
    names = [name for name, _, _ in request.scenario.runs()]
    given = not (scenario is None or (isinstance(scenario, dict) and "federations" not in scenario))
    if federation is None and given and len(names) > 1:
        raise BadInput(f"the scenario has {len(names)} federations; choose one with federation=…: {', '.join(names)}")
    if federation is not None and federation not in names:
        raise BadInput(unknown_name("federation", federation, names))
    with new_folder(Path(out)) if out else nullcontext() as partial, live_display(progress) as display:
        resolved = resolve(**vars(request), display=display)
        chosen = [federation or names[0]]
        (made,) = record(resolved, names=chosen, workers=workers, store=partial, display=display)
        recording = dataclasses.replace(made, truth=made.truth.of(made.transcript))
        if partial:
            save_recording(recording.transcript, recording.truth, partial / "whole")
    return recording


def attack(
    transcript: Recording | Transcript | Path | str,
    attacks: Attacks | None = None,
    *,
    threat: Mapping[str, Any] | ThreatModel | None = None,
    seed: int | None = None,
    device: str = "cpu",
    truth: Path | str | None = None,
    module: nn.Module | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    task: dict[str, Any] | None = None,
    rounds: Sequence[int] | None = None,
    records: Any | None = None,
    words: Any | None = None,
    clients: int | None = None,
    max_minutes: float | None = None,
    out: Path | str | None = None,
    workers: int = 1,
    overwrite: bool = False,
    progress: bool = True,
) -> Findings:
    """Run attacks on a transcript; :func:`evaluate` says how good their findings are, where the truth is known.

    Args:
        transcript: what :func:`simulate` returned, a transcript alone, its folder, or that of a :class:`Recorder`.
        attacks: attacks, names, or mappings with settings; None: those that fit.
        threat: fields of a :class:`fedaudit.ThreatModel`; default: an honest-but-curious server.
        seed: of the attacks; default: the simulation's, or 0 where there is no ground truth.
        device: cpu or cuda.
        truth: file of the ground truth; default: the recording's own, or the one in the transcript's folder. Attacks
            get nothing of it.
        module, loss: your own, where the transcript is a folder and was made with them; ``model`` is the same.
        task: of a recording: what wasn't recorded, or counts in its place: ``mean``, ``std``, ``input_shape``,
            ``loss`` (its name), ``batch_norm``, ``dropout``, a table's ``columns``, ``tokens`` of text.
        rounds: of a recording: only these.
        records: of a recording: examples that nobody trained on, as the model sees them; with as many of the clients'
            they are the records that the adversary asks about. (inputs, targets), a torch Dataset, a DataLoader, or a
            file (.npz, .csv); with a third array, ``persons``, in which each is of the person of that number, attacks
            on membership count persons. Default: the recorder's candidates that no update used.
        words: of text: what each token stands for, as the report shows it: a tokenizer, its ``tokenizer.json`` or
            ``vocab.json``, a file with a word a line, or a list; "masked": no text is shown, but which words
            were found.
        clients: attack the updates of the first so many clients only; default: of all.
        max_minutes: begin no attack after so long, and stop those that run; what wasn't run says so.
        out: folder for what was recovered; an interrupted attack goes on from there.
        workers, overwrite, progress: as of :func:`audit`.

    Returns:
        A sequence: for each run of an attack its finding or why it wasn't applicable.

    Raises:
        BadInput: something can't be used; the message says what and what to do.
    """
    model = module if module is not None else model
    return attacked(AttackRequest(**_of_request(locals())))


def evaluate(
    findings: Findings,
    truth: Truth | Path | str | None = None,
    *,
    controls: bool = True,
    out: Path | str | None = None,
    workers: int = 1,
    fail_above: dict[str, float] | None = None,
    fail_on: Verdict | None = None,
    fail_below: dict[str, float] | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> Audit:
    """Evaluate what attacks made of a transcript, by the ground truth.

    Args:
        findings: of :func:`attack`.
        truth: the ground truth or its file; default: the one that lies beside the transcript.
        controls: run a positive control beside every attack that found nothing.
        out: folder for the report.
        workers, fail_above, fail_on, fail_below, overwrite, progress: as of :func:`audit`.

    Raises:
        BadInput: there is no ground truth, or it isn't that of the transcript.
    """
    limits = limits_of(fail_above, fail_on, fail_below)
    if out:
        check_folder(Path(out))
        holds_another(Path(out), findings.request(), overwrite=overwrite)
    with live_display(progress) as display:
        known, means = Path(truth) if isinstance(truth, str) else truth, Means(workers, display=display)
        finished = evaluate_findings(findings, known, means=means, controls=controls)
    return written(finished.held_to(limits), findings, out)


def audit_transcript(
    transcript: Recording | Transcript | Path | str,
    attacks: Attacks | None = None,
    *,
    threat: Mapping[str, Any] | ThreatModel | None = None,
    seed: int | None = None,
    device: str = "cpu",
    truth: Path | str | None = None,
    module: nn.Module | None = None,
    model: nn.Module | None = None,
    loss: Loss | None = None,
    task: dict[str, Any] | None = None,
    rounds: Sequence[int] | None = None,
    records: Any | None = None,
    words: Any | None = None,
    clients: int | None = None,
    max_minutes: float | None = None,
    out: Path | str | None = None,
    workers: int = 1,
    fail_above: dict[str, float] | None = None,
    fail_on: Verdict | None = None,
    fail_below: dict[str, float] | None = None,
    controls: bool = True,
    overwrite: bool = False,
    progress: bool = True,
) -> Audit:
    """Attack a transcript and evaluate what was found: :func:`attack`, then :func:`evaluate`.

    Args:
        transcript, attacks, threat, seed, device, truth, module, model, loss, task, rounds, records, words, clients: as
            of :func:`attack`.
        max_minutes: for an answer: one question after the other, the cheapest first, each with its control, and ``out``
            is renewed after each. Attacks on images without a chance on known examples are run last, or not. None: all
            is run, however long it takes.
        out: folder for the report; an interrupted audit goes on from there.
        controls: run a positive control beside every attack that found nothing.
        workers, fail_above, fail_on, fail_below, overwrite, progress: as of :func:`audit`.

    Raises:
        BadInput: there is no ground truth beside the transcript, or something can't be used.
    """
    model = module if module is not None else model
    request = AttackRequest(**_of_request(locals()))
    return audited(request, limits_of(fail_above, fail_on, fail_below), controls=controls)


def _of_request(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a function that are fields of a request."""
    return {field.name: given[field.name] for field in dataclasses.fields(AttackRequest)}


def limits_of(above: dict[str, float] | None, on: Verdict | None, below: dict[str, float] | None) -> Limits:
    """Return the limits of these keywords of :func:`audit`, checked."""
    return Limits({} if above is None else above, on, {} if below is None else below).check()


def _requested(
    scenario: Scenario | str | Path | dict[str, Any] | None,
    changes: dict[str, Any],
    modes: dict[str, Any],
    *,
    model: nn.Module | None,
    data: Any | None,
    kind: str | None,
    loss: Loss | None,
    data_dir: Path | str | None,
) -> AuditRequest:
    """Return what is asked for, with the loss only if it has no name.

    ``changes`` of the scenario and ``modes`` of its model count unless they are None.
    """
    where = Path(data_dir) if data_dir else None
    own = (model, data, kind, loss, *changes.values(), *modes.values())
    if isinstance(scenario, Scenario) and all(part is None for part in own):
        return AuditRequest(scenario=scenario, data_dir=where)  # what it holds has been made already
    values = _values(scenario)
    if scenario is None and (model is not None or data is not None or changes.get("threat") is not None):
        values["attacks"] = None  # the default audit's are for its own data and adversary
    for part in ("model", "data"):
        if not isinstance(values.get(part, {}), dict | Spec):
            raise BadInput(
                f"scenario: {part}: {values[part]!r} isn't allowed; it should be a mapping of keys to values"
            )
        values[part] = dict(values.get(part, {}))
    values |= {key: value for key, value in changes.items() if value is not None}
    if model is not None:
        own_model = {"name": "custom", "initialisation": "given", "width": None, "checkpoint": None}
        values["model"] = {**(values["model"] if scenario else {}), **own_model}
    if loss is not None:
        name = loss_name(loss)
        loss = None if name in LOSSES else loss
        values["model"]["loss"] = name
    values["model"] |= {key: value for key, value in modes.items() if value is not None}
    if kind is not None:
        values["data"]["kind"] = kind
    if data is None:
        return AuditRequest(scenario=scenario_from(values), data_dir=where, model=model, loss=loss)
    if scenario is None and changes.get("federations") is None:  # the default audit's are the first photographs
        values["federations"] = [spec.model_copy(update={"sampling": "stratified"}) for spec in values["federations"]]
    named = {"name": "custom", "image_size": None, "limit": None, "max_pixel_value": None}
    given = values["data"] if scenario else {"kind": kind}
    values["data"] = {"split": "train", **given, **named}
    dataset = own_dataset(data, values["data"].get("kind"), values["model"].get("loss"), loss)
    if isinstance(model, nn.Module):
        model, dataset = of_one_tensor_each(model, dataset)
        if dataset.packed_targets is not None and scenario is None and changes.get("threat") is None:
            values["threat"] = {**dict(values["threat"]), "knows_labels": True}  # nobody can seek them
    return AuditRequest(scenario=scenario_from(values), data_dir=where, dataset=dataset, model=model, loss=loss)


def _values(scenario: Scenario | str | Path | dict[str, Any] | None) -> dict[str, Any]:
    """Return the scenario's keys; what was made of them stays so."""
    if isinstance(scenario, dict):
        return {"federations": load_scenario(None).federations, **scenario}
    loaded = scenario if isinstance(scenario, Scenario) else load_scenario(Path(scenario) if scenario else None)
    return {**dict(loaded), "attacks": loaded.attacks or None}
