"""Attacks on a transcript that lies on disk: first the attack, which reads no truth, then perhaps the evaluation."""

from __future__ import annotations

import json
import math
import reprlib
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, singledispatch
from numbers import Integral, Real
from pathlib import Path
from typing import Any, overload

import torch
from pydantic import ValidationError
from torch import nn

from fedaudit.attacks import Attack, Finding, ImageFinding, make_attack
from fedaudit.attacks.base import Attacks, attacks_of
from fedaudit.attacks.inversion.own_updates import distinct
from fedaudit.data.words import MASKED, words_of
from fedaudit.evaluation import Limits
from fedaudit.evaluation.limits import CEILING
from fedaudit.modalities import ExampleKind
from fedaudit.models import has_batch_norm
from fedaudit.pipeline.calibrations import calibrated
from fedaudit.pipeline.choice import choose_for
from fedaudit.pipeline.in_turn import InTurn
from fedaudit.pipeline.ledger import in_a_line
from fedaudit.pipeline.output import WITHIN, clear, holds_another, save_request
from fedaudit.pipeline.prepare import ResolvedScenario
from fedaudit.pipeline.recorded_records import OF_RECORDS, with_records
from fedaudit.pipeline.recordings import about, check_replay, with_known_victims, with_labels, with_truth
from fedaudit.pipeline.run import Audit, Opened, check_public_examples, plan, with_ceilings_alone
from fedaudit.pipeline.trials import Means, Trial, run_trials
from fedaudit.results import DataRecord, ModelRecord
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.simulator import Recording
from fedaudit.task.training import LOSSES, Loss, loss_name
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.secure_sum import sums_only, union
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth, check_belongs, load_truth, truth_beside
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput, CorruptTranscript, NotApplicable
from fedaudit.utils.folders import check_folder, inside
from fedaudit.utils.progress import live_display

NO_TRUTH = "there is no ground truth beside the transcript to evaluate findings by; say where it is (truth)"
NO_LIMITS_WITHOUT_TRUTH = (
    "fail_above=…, fail_below=… and fail_on=… need the ground truth to evaluate by, and there is none beside the "
    "transcript"
)


def _whole(given: Any, least: int) -> bool:
    return type(given) is not bool and isinstance(given, Integral) and int(given) >= least


# Of a request's fields, what they may be and how that is said.
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "transcript": (
        lambda given: isinstance(given, str | Path | Transcript | Recording),
        "a Recording, a Transcript or its folder",
    ),
    "threat": (
        lambda given: isinstance(given, Mapping | ThreatModel),
        "fields such as {'adversary': 'server'}, or a ThreatModel",
    ),
    "task": (lambda given: isinstance(given, Mapping), "what wasn't recorded, such as {'loss': 'mse'}"),
    "rounds": (
        lambda given: isinstance(given, Collection) and not isinstance(given, str),
        "a list of their numbers, such as [0, 1]",
    ),
    "seed": (lambda given: _whole(given, 0), "a whole number from 0"),
    "clients": (lambda given: _whole(given, 1), "a whole number from 1"),
}


@dataclass(frozen=True, kw_only=True)
class AttackRequest:
    """What is asked of attacks on a transcript; the fields are :func:`fedaudit.attack`'s.

    BadInput: one is of another kind; nothing has been read or run then.
    """

    transcript: Recording | Transcript | Path | str
    attacks: Attacks | None = None
    threat: Mapping[str, Any] | ThreatModel | None = None
    seed: int | None = None
    device: str = "cpu"
    truth: Path | Truth | str | None = None
    model: nn.Module | None = None
    loss: Loss | None = None
    task: Mapping[str, Any] | None = None
    rounds: Collection[int] | None = None
    records: Any = None
    words: Any = None
    clients: int | None = None
    max_minutes: float | None = None
    out: Path | str | None = None
    workers: int = 1
    overwrite: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        for name, (allowed, example) in _ALLOWED.items():
            given = getattr(self, name)
            if given is not None and not allowed(given):
                raise BadInput(f"{name} is {reprlib.repr(given)}; give {example}")
        if self.words not in (None, MASKED):  # before hours of attacks
            words_of(self.words)

    @contextmanager
    def means(self) -> Iterator[Means]:
        """Enter with what does the work, its progress shown; BadInput: ``max_minutes`` is no time."""
        deadline = deadline_of(self.max_minutes)
        with live_display(self.progress) as display:
            yield Means(self.workers, display=display, deadline=deadline)

    def opened(self) -> tuple[Path | Transcript, Path | Truth | None]:
        """Return the transcript, which may yet lie in its folder, and the truth that was given with it."""
        source = Path(self.transcript) if isinstance(self.transcript, str) else self.transcript
        truth = Path(self.truth) if isinstance(self.truth, str) else self.truth
        if not isinstance(source, Recording):
            return source, truth
        return source.transcript, truth or source.truth.of(source.transcript)


def deadline_of(max_minutes: float | None) -> float | None:
    """Return when so many minutes are over, in seconds since 1970; None: never. BadInput: it is no time."""
    if max_minutes is None:
        return None
    given: Any = max_minutes
    if isinstance(given, bool) or not isinstance(given, Real) or not 0 < max_minutes < math.inf:
        raise BadInput(f"max_minutes is {max_minutes!r}; give minutes above 0")
    return time.time() + 60 * max_minutes


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Findings(Sequence[Finding | NotApplicable]):
    """What attacks made of a transcript: for each run a finding, or why there is none. ``evaluate`` takes them.

    Attributes:
        transcript: that was attacked.
        seen: the transcript as the adversary sees it: with sums in place of updates, where the server adds.
        observation: that, as attacks receive it.
        members: of which updates each of these sums is made.
        attacks: that ran, with all their settings.
        threat: who attacked, knowing what.
        seed: of the attacks.
        device: where they ran.
        trials: each attack on each observation, with its outcome.
        truth: the ground truth or its file, where one lies beside the transcript; with whose its records are, where
            they were drawn from it.
        folder: of the transcript.
        store: folder that keeps finished findings.
        started: seconds since 1970.
        asked: what was asked for.
    """

    transcript: Transcript
    seen: Transcript
    observation: Observation
    members: dict[tuple[int, int], list[Update]]
    attacks: list[Attack]
    threat: ThreatModel
    seed: int
    device: str
    trials: list[Trial]
    truth: Path | Truth | None
    folder: Path | None
    store: Path | None
    started: float
    asked: AttackRequest

    @cached_property
    def _outcomes(self) -> list[Finding | NotApplicable]:
        return [trial.outcome for trial in self.trials if trial.outcome is not None]

    @overload
    def __getitem__(self, index: int) -> Finding | NotApplicable: ...

    @overload
    def __getitem__(self, index: slice) -> list[Finding | NotApplicable]: ...

    def __getitem__(self, index: int | slice) -> Finding | NotApplicable | list[Finding | NotApplicable]:
        return self._outcomes[index]

    def __len__(self) -> int:
        return len(self._outcomes)

    def __repr__(self) -> str:
        names = ", ".join(attack.name for attack in self.attacks)
        return f"<{len(self)} findings of {names} in {self.transcript.name}>"

    def request(self) -> dict[str, Any]:
        """Return what was asked for, as the folder of an audit keeps it."""
        return {
            "transcript": self.transcript.fingerprint(),
            "attacks": [attack.written() for attack in self.attacks],
            "threat": self.threat.model_dump(mode="json"),
            "seed": self.seed,
            "device": self.device,
            **({} if self.asked.rounds is None else {"rounds": sorted(self.asked.rounds)}),
            **({} if self.asked.clients is None else {"clients": self.asked.clients}),
            **({} if self.asked.max_minutes is None else {WITHIN: True}),
        }

    def make_room(self, out: Path) -> None:
        """Delete from ``out`` what another audit left there, and note what was asked for."""
        request = self.request()
        if holds_another(out, request, overwrite=True):
            clear(out)
        save_request(out, request)

    def save(self, out: Path | str) -> None:
        """Write what was recovered to ``out``, and a list of what was and what couldn't be run: findings.json.

        Raises:
            BadInput: the folder can't be written.
        """
        self.make_room(Path(out))
        _save_findings(Path(out), self.trials)


def attacked(request: AttackRequest) -> Findings:
    """Run attacks on a transcript, and list what was recovered in the folder, if there is one."""
    with request.means() as means:
        found = attack_transcript(request, means)
    if request.out:
        found.save(request.out)
    return found


def audited(request: AttackRequest, limits: Limits, *, controls: bool = True) -> Audit:
    """Run attacks on a transcript, evaluate what they found, and write the report into the folder, if there is one."""
    without = NO_LIMITS_WITHOUT_TRUTH if limits else NO_TRUTH
    ceiling = limits.fail_above.get(CEILING)
    with request.means() as means:
        found = planned_attacks(request, means, without_truth=without)
        means = replace(means, store=found.store)
        if means.deadline is None:
            found = replace(found, trials=run_trials(calibrated(found.trials, means), means))
            finished = opened(found, means=means, controls=controls, ceiling=ceiling).audit(found.trials, means)
        else:
            finished = InTurn(
                found.trials,
                lambda: opened(found, means=means, controls=controls, ceiling=ceiling),
                means,
                named=bool(attacks_of(request.attacks)),
                controls=controls,
                ready=lambda so_far: written(so_far.held_to(limits), found, request.out),
            ).run()
    return written(finished.held_to(limits), found, request.out)


def written(finished: Audit, found: Findings, out: Path | str | None) -> Audit:
    """Return the audit, with its report in ``out``, if that is a folder."""
    if out:
        found.make_room(Path(out))
        finished.save(out)
    return finished


def attack_transcript(request: AttackRequest, means: Means, *, without_truth: str | None = None) -> Findings:
    """Run attacks on a transcript, as :func:`planned_attacks` plans them; of the ground truth they get nothing."""
    found = planned_attacks(request, means, without_truth=without_truth)
    means = replace(means, store=found.store)
    return replace(found, trials=run_trials(calibrated(found.trials, means), means))


def planned_attacks(
    request: AttackRequest, means: Means, *, without_truth: str | Callable[[Transcript], str] | None = None
) -> Findings:
    """Return what is to be run on a transcript: no trial has been, but what doesn't apply has its reason.

    A recording's records are drawn first (:mod:`fedaudit.pipeline.recorded_records`), where an attack may ask about
    some. Findings are kept in the request's folder where ``means`` have no other store. ``without_truth``: what to say
    where there is no ground truth; None attacks all the same.
    """
    started = time.time()
    out = Path(request.out) if request.out else None
    device, seed, records, rounds = request.device, request.seed, request.records, request.rounds
    if out:
        check_folder(out)
    adversary, attacks = threat_from(request.threat), attacks_of(request.attacks)
    if device not in ("cpu", "cuda"):
        raise BadInput(f"device '{device}' isn't known; it is cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("device is 'cuda', but torch finds no GPU here; give device='cpu'")
    source, truth = request.opened()
    folder = None if isinstance(source, Transcript) else source
    if isinstance(source, Transcript):
        transcript = source
    else:
        own = None if request.loss is not None and loss_name(request.loss) in LOSSES else request.loss  # it is named
        transcript = Transcript.load(source, request.model, own, task=request.task, rounds=rounds)
    if records is not None and not transcript.recording:
        raise BadInput("records=… is for a recording: records of a simulation are drawn by it (threat.target_records)")
    if rounds is not None and not transcript.recording:
        raise BadInput("rounds=… is for a recording: which rounds of a simulation are attacked the scenario says")
    if truth is None and folder is not None:
        truth = truth_beside(folder)
    if transcript.recording and isinstance(truth, Path) and truth.is_dir():
        transcript = with_truth(transcript, truth)
    if truth is None and without_truth is not None:
        raise BadInput(without_truth if isinstance(without_truth, str) else without_truth(transcript))
    if truth is not None:  # find out before hours of work; only the seed is kept until every attack has been run
        loaded, recorded, *_ = _open_truth(truth, transcript)
        transcript = with_known_victims(transcript, loaded)
        if adversary.knows_labels and transcript.recording:
            transcript = with_labels(transcript, loaded)
        seed = recorded.seed if seed is None else seed
        wanted = adversary.client_property is not None
        kinds = {a.finds.kind for a in attacks} & {*OF_RECORDS, *(["property"] if wanted else [])}
        asked = records is not None or adversary.target_records is not None or wanted
        if transcript.recording and not transcript.sent.no_membership and (asked or not attacks or kinds):
            place = truth if isinstance(truth, Path) and truth.is_dir() else None
            besides = not attacks or kinds != {"property"}
            try:
                transcript, truth = with_records(transcript, loaded, place, records, adversary, seed, members=besides)
            except BadInput as error:
                if asked:
                    raise
                means.display.say(f"note: {error}")
    elif records is not None or (transcript.recording and (adversary.target_records or adversary.client_property)):
        raise BadInput(
            "no records: half of them are what clients trained on, and there is no ground truth to take them of"
        )
    if not attacks:
        attacks = [make_attack(s.name, s.settings()) for s in choose_for(transcript, adversary)]
    adversary = _granted(adversary, transcript)
    seed = seed or 0
    seen = transcript
    members: dict[tuple[int, int], list[Update]] = {}
    if adversary.group_size > 1 and adversary.clients is None and not _sums(transcript):
        seen, members = _summed(transcript, adversary.group_size)
    observation = observe(seen, adversary)
    planned = plan([observation], attacks, seed=seed, device=device)
    if request.clients is not None:
        planned = _of_first(planned, request.clients)
    found = Findings(
        transcript=transcript,
        seen=seen,
        observation=observation,
        members=members,
        attacks=attacks,
        threat=adversary,
        seed=seed,
        device=device,
        trials=planned,
        truth=truth,
        folder=folder,
        store=means.store or (out / "findings" if out else None),
        started=started,
        asked=request,
    )
    if out:
        holds_another(out, found.request(), overwrite=request.overwrite)
    return found


def _of_first(trials: Sequence[Trial], count: int) -> list[Trial]:
    """Return the trials; those on one client alone that isn't among the first ``count`` are refused."""
    alone = [{m.client for m in trial.observation.messages} for trial in trials]
    first = sorted({next(iter(own)) for own in alone if len(own) == 1})[:count]
    refusal = NotApplicable(f"not run: it is beyond the first {count} clients")
    return [
        trial if trial.outcome or len(own) != 1 or own <= set(first) else replace(trial, outcome=refusal)
        for trial, own in zip(trials, alone, strict=True)
    ]


def evaluate_findings(
    found: Findings,
    truth: Path | Truth | None = None,
    *,
    means: Means,
    controls: bool = True,
) -> Audit:
    """Evaluate what attacks made of a transcript, against ``truth``, or by default the one beside the transcript.

    It must be that of the transcript. With ``controls`` attacks that found nothing get a positive control.
    """
    return opened(found, truth, means=means, controls=controls).audit(found.trials, replace(means, store=found.store))


def opened(
    found: Findings,
    truth: Path | Truth | None = None,
    *,
    means: Means,
    controls: bool = True,
    ceiling: float | None = None,
) -> Opened:
    """Return the transcript with the truth to evaluate by; see :func:`evaluate_findings`.

    ``ceiling``: as a scenario's ``evaluation.ceiling``.
    """
    transcript, attacks, adversary = found.transcript, found.attacks, found.threat
    drawn = transcript.recording is not None and transcript.records is not None  # from the truth that the attack had
    truth = found.truth if truth is None or drawn else truth
    if truth is None:
        raise BadInput(NO_TRUTH)
    if transcript.recording and isinstance(truth, Path) and with_truth(transcript, truth) is not transcript:
        raise BadInput(f"'{truth}' hasn't the truth of every update that was attacked; attack with truth=… as well")
    loaded, scenario, data, model_record = _open_truth(truth, transcript)
    if transcript.recording:
        transcript = check_replay(transcript, loaded, found.folder, means.display)
        if found.folder is not None and (line := in_a_line(found.folder, loaded.candidates)):
            transcript = replace(transcript, notes=(*transcript.notes, line))
    name, spec, defences = next(run for run in scenario.runs() if run[0] == transcript.name)
    attacked = scenario.model_copy(
        update={
            "attacks": attacks,
            "threat": adversary,
            "federations": [spec.model_copy(update={"name": name})],
            "defences": defences,
            "other_defences": [],
            "device": found.device,
            "evaluation": scenario.evaluation.model_copy(
                update={
                    "max_updates": None,
                    "max_clients": None,
                    "attacked_federations": None,
                    "controls": controls,
                    "ceiling": None if ceiling is None else float(ceiling),
                    "mask_texts": scenario.evaluation.mask_texts or found.asked.words == MASKED,
                    "compare_defences": False,
                }
            ),
        }
    )
    if found.members:
        found.seen.replays = transcript.replays
        transcript = found.seen
        loaded = replace(
            loaded,
            inputs=union(loaded.inputs, found.members),
            labels=union(loaded.labels, found.members),
            rows={},
            seen={},
            randomness={},
        )
    if found.asked.words not in (None, MASKED):
        tokens = transcript.task_info.tokens
        words = words_of(found.asked.words)[: tokens.vocabulary if tokens else 0]  # a file may have any number
        data = data.model_copy(update={"words": words})
    recording = Recording(transcript, loaded)
    check_public_examples([recording], attacks)
    return Opened(
        ResolvedScenario(attacked, data, model_record),
        recording,
        found.observation,
        started=found.started,
        repeat=" ".join(["fedaudit attack TRANSCRIPT", *_flags(found), *["--no-controls"] * (not controls)]),
    )


def _counted(transcript: Transcript) -> str:
    """Return that there is no truth, and what counting says of the first update without it."""
    seen = observe(transcript, ThreatModel())
    if seen.sent.by_client() is not None or seen.sent.no_updates:
        return NO_TRUTH
    first = seen.split()[0]
    sent = sum(value.numel() for value in first.single().update.tensors.values())
    examples = distinct(first)
    unknown = examples * math.prod(transcript.task_info.input_shape)
    lost = (
        f"so {100 * (1 - sent / unknown):.0f} % of their directions are lost at least"
        if unknown > sent
        else "which may suffice"
    )
    things = first.task_info.example_kind.plural
    told = f"the {things} of the first update ({examples}) are {unknown:,} numbers, and {sent:,} are sent, {lost}"
    return f"{NO_TRUTH}; without it only counting is left: {told}"


def ceilings_of(request: AttackRequest, *, changes: bool = True, limit: float | None = None) -> Audit:
    """Return how much the updates of a recording determine of their examples; no attack is run.

    ``changes``: it is computed, too, what changes of the federation bring. ``limit``: it is asked whether it is above.

    Raises:
        BadInput: there is no ground truth, or something can't be used.
    """
    with request.means() as means:
        found = planned_attacks(request, means, without_truth=_counted)
        made = opened(found, means=means, ceiling=limit)
        return with_ceilings_alone(
            made.resolved,
            [made.recording],
            [made.observation],
            means,
            started=found.started,
            repeat="fedaudit ceiling TRANSCRIPT",
            changes=changes,
        )


def _granted(adversary: ThreatModel, transcript: Transcript) -> ThreatModel:
    """Return the adversary with what the transcript grants of what it asks for; BadInput where labels aren't in it."""
    if transcript.records is not None:
        public = len(transcript.records.public_inputs) if adversary.knows_public_data else 0
        known = transcript.records.known_clients.unique(return_counts=True)[1].tolist()
        granted = {
            "target_records": len(transcript.records),
            "public_examples": public,
            "known_records": max(known, default=0),
        }
        adversary = threat_from({**dict(adversary), **{name: number or None for name, number in granted.items()}})
    if transcript.task_info.inserted is not None and adversary.adversary == "server":
        adversary = adversary.model_copy(update={"adversary": "malicious-server"})
    if adversary.adversary != "client" and adversary.group_size == 1 and (sizes := _sums(transcript)):
        adversary = adversary.model_copy(update={"sees": f"aggregate of {min(sizes)}"})
    if adversary.knows_labels and any(u.labels is None for r in transcript.rounds for u in r.updates):
        remedy = "simulate a scenario with threat.knows_labels=true"
        if transcript.recording:
            remedy = "a recording has them in its ground truth, of every update: capture each client's training"
        raise BadInput(f"the transcript '{transcript.name}' grants no labels; {remedy}")
    return adversary


def _flags(found: Findings) -> list[str]:
    """Return the flags that make the same of the transcript again."""
    names, adversary, asked = [attack.name for attack in found.attacks], found.threat, found.asked
    info = found.transcript.task_info
    flags = ["--model MODULE:NAME"] * (info.model == "custom") + ["--loss MODULE:NAME"] * (info.loss == "custom")
    flags += [f"--attack {name}" for name in names]
    flags += [
        f"--set {shlex.quote(f'attacks.{name}.{key}={json.dumps(value, default=str)}')}"
        for name, attack in zip(names, found.attacks, strict=True)
        for key, value in attack.changed().items()
    ]
    flags += [f"--adversary {adversary.adversary}", f"--seed {found.seed}", "--out DIR"]
    flags += [f"--set {shlex.quote(f'threat.sees={adversary.sees}')}"] * (adversary.group_size > 1)
    for name in ("clients", "rounds"):
        if (part := getattr(adversary, name)) is not None:
            flags.append(f"--set {shlex.quote(f'threat.{name}={part}')}")
    if found.transcript.recording is not None:  # its records are drawn again
        for name in ("target_records", "known_records", "public_examples", "hidden_attribute", "client_property"):
            if (value := getattr(adversary, name)) is not None:
                flags.append(f"--set {shlex.quote(f'threat.{name}={json.dumps(value)}')}")
        records, rounds = asked.records, asked.rounds
        flags += ["--task FILE"] * bool(asked.task)
        path = shlex.quote(str(records)) if isinstance(records, str | Path) else "FILE"
        flags += [f"--records {path}"] * (records is not None)
        flags += [] if rounds is None else [f"--rounds {','.join(map(str, sorted(rounds)))}"]
    if asked.words is not None:
        flags.append(f"--words {shlex.quote(asked.words) if isinstance(asked.words, str) else 'FILE'}")
    flags += [] if asked.clients is None else [f"--clients {asked.clients}"]
    flags += [f"--truth {shlex.quote(str(asked.truth))}"] * isinstance(asked.truth, str | Path)
    flags += ["--max-minutes none"]  # what is named is run, however long it takes
    flags += [f"--device {found.device}"] * (found.device != "cpu")
    flags += ["--knows-public-data"] * adversary.knows_public_data
    flags += ["--knows-labels"] * adversary.knows_labels + ["--no-knows-training"] * (not adversary.knows_training)
    return flags


def _sums(transcript: Transcript) -> list[int]:
    """Return over how many clients the sums are that a transcript holds in place of updates."""
    return [len(u.members) for r in transcript.rounds for u in r.updates if u.members]


def _summed(transcript: Transcript, group_size: int) -> tuple[Transcript, dict[tuple[int, int], list[Update]]]:
    """Return a transcript with sums in place of updates, weighed as FedAvg does, and each sum's updates."""
    alone = transcript.task_info.batch_norm == "train" and has_batch_norm(transcript.module)
    rounds, members = sums_only(transcript.rounds, group_size, weighted=True, batch_norm=alone)
    return replace(transcript, rounds=rounds), members


def threat_from(given: Mapping[str, Any] | ThreatModel | None) -> ThreatModel:
    """Return a threat model of its fields; BadInput is one line that names the field and says what is wrong with it."""
    return given if isinstance(given, ThreatModel) else ThreatModel(**{str(k): v for k, v in (given or {}).items()})


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
                name = [str(part) for part in parts if part is not None]
                row |= _write_finding(outcome, out, name, observation.task_info.example_kind)
            else:
                row["not_applicable"] = str(outcome)
            rows.append(row)
        inside(out, "findings.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"can't write to '{out}': {error.strerror or error}") from None


@singledispatch
def _write_finding(finding: Finding, out: Path, name: list[str], kind: ExampleKind) -> dict[str, Any]:  # noqa: ARG001
    """Write what was recovered below ``out`` and return what the list says of it."""
    file = "-".join(name) + ".safetensors"
    finding.save(inside(out, file))
    return {"kind": finding.kind, "objective": finding.objective, "notes": list(finding.notes), "file": file}


@_write_finding.register
def _write_images(finding: ImageFinding, out: Path, name: list[str], kind: ExampleKind) -> dict[str, Any]:
    *place, attack = name
    names = [f"images/{'-'.join([*place, str(i), attack])}.png" for i in range(len(finding.images))]
    for path, image in zip(names, finding.images, strict=True):
        kind.write(image, inside(out, path))
    return {
        "labels": finding.labels.tolist(),
        "label_source": finding.label_source,
        "objective": finding.objective,
        "images": names,
    }


def _open_truth(given: Path | Truth, transcript: Transcript) -> tuple[Truth, Scenario, DataRecord, ModelRecord]:
    """Return the truth, checked against the transcript, and the scenario and records it was recorded with."""
    path = given if isinstance(given, Path) else Path("the truth")
    if isinstance(given, Truth):
        truth = given
        check_belongs(truth, transcript, path)
    else:
        truth = load_truth(given, transcript)
    if transcript.recording:
        return truth, *about(transcript)
    try:
        data = DataRecord.model_validate(truth.about["data"])
        model = ModelRecord.model_validate(truth.about["model"])
        scenario = scenario_from(truth.about["scenario"], where=f"the scenario in {path}")
    except (KeyError, ValidationError) as error:
        raise CorruptTranscript(f"{path} doesn't say what was recorded: {error}") from None
    if transcript.name not in [name for name, _, _ in scenario.runs()]:
        raise CorruptTranscript(f"{path}: its scenario has no federation '{transcript.name}'")
    return truth, scenario, data, model
