"""What a federation was like: who attacked it, its settings, its defences, what its rounds brought and cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from fedaudit.defences.spec import DefencesSpec
from fedaudit.pipeline.recordings import facts_in_words, facts_of
from fedaudit.results import (
    AdversaryRecord,
    FederationRecord,
    HistoryRecord,
    HistoryTiming,
    RecordingRecord,
    ReplayRecord,
)
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.history import History
from fedaudit.simulation.protocols import protocol_of
from fedaudit.simulation.simulator import Recording
from fedaudit.simulation.spec import FederationSpec
from fedaudit.task.training import UNMODELLED, TrainingConfig
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import AT_HOME, ClientDefenceInfo
from fedaudit.transcript.view import view
from fedaudit.utils.registry import Plugin
from fedaudit.utils.words import many, one_of


def adversary_record(scenario: Scenario, recordings: Sequence[Recording]) -> AdversaryRecord:
    """Return who the adversary is and what it knows, in words."""
    threat = scenario.threat
    if (told := protocol_of(scenario.federations[0]).adversary(threat, scenario.federations[0])) is not None:
        return told
    rounds = (
        {tuple(r.index for r in view(one.transcript, threat)[1]) for one in recordings} if threat.partial else set()
    )
    read = [*rounds.pop()] if len(rounds) == 1 else None  # where federations differ, none of theirs is named
    knows, does_not_know = threat.knowledge(read)
    several = threat.adversary == "client" and len(threat.clients or ()) > 1
    return AdversaryRecord(
        adversary="colluding-clients" if several else threat.adversary,
        summary=threat.in_words(read, recordings[0].transcript.clients if len(recordings) == 1 else None),
        knows=knows,
        does_not_know=does_not_know,
        acts=threat.adversary == "malicious-server"
        or (threat.adversary == "client" and any(f.malicious for f in scenario.federations)),
    )


def federation_record(
    transcript: Transcript, history: History | None, scenario: Scenario, seen: Observation
) -> FederationRecord:
    """Return the settings of one of the scenario's federations; ``history``: None where it was read from disk."""
    name, spec, placed = next(run for run in scenario.runs() if run[0] == transcript.name)
    recording = _recording_record(transcript) if transcript.recording else None
    course = None if history is None else _course_record(history, spec)
    if (told := protocol_of(transcript).federation(transcript, spec)) is not None:
        return told.model_copy(update={"recording": recording, "history": course})
    updates = [u for r in transcript.rounds for u in r.updates]
    summed = sorted({len(u.members) or 1 for u in updates})
    sums = ""
    if summed and summed[-1] > 1:
        over = one_of(sorted({u.num_examples for u in updates}), "example")
        sums = f"; secure aggregation shows the server only the sum of {one_of(summed, 'client')}, {over} together"
        sizes = f"up to {one_of([spec.batch_size * (spec.local_steps or 1)], 'example')}"
    else:
        sizes = one_of(sorted({u.num_examples for u in updates}), "example")
    if spec.algorithm == "fedsgd":
        what = f"each sends the gradient of one batch of {sizes}"
    else:
        local = many(spec.local_steps, "local step") if spec.local_steps else many(spec.local_epochs, "local epoch")
        what = f"each trains for {local} on batches of {spec.batch_size} ({sizes}) and sends its weights"
    rounds = many(spec.rounds, "round")
    if recording:
        sends = "its gradient" if transcript.update_kind == "gradient" else "its weights"
        trains = f"trains by {recording.training[0]}" if recording.training else "trains in a way that wasn't recorded"
        more = f" (or {len(recording.training) - 1} other ways)" if len(recording.training) > 1 else ""
        what = f"each {trains}{more} ({sizes}) and sends {sends}{_part_of_model(transcript)}"
    stopped = _stopped(transcript, history, spec)
    if stopped is not None:
        rounds = (
            f"{stopped} of {rounds} (then {history.why if history and history.why else 'the privacy budget was spent'})"
        )
    per_round = spec.clients_per_round or spec.clients
    who = (
        f"{per_round} of {spec.clients} clients a round" if per_round != spec.clients else many(spec.clients, "client")
    )
    defences = _defences(transcript, placed)
    inserted = transcript.task_info.inserted
    if inserted is not None:
        kernels = f", behind {one_of([inserted.sets], 'set')} of kernels, one a client" if inserted.sets else ""
        sums += f"; the server put {inserted.units} units of its own before the network ({inserted.kind}){kernels}"
    return FederationRecord(
        name=name,
        algorithm=spec.algorithm,
        update_kind=transcript.update_kind,
        clients=spec.clients,
        rounds=spec.rounds,
        batch_size=spec.batch_size,
        local_steps=spec.local_steps,
        local_epochs=spec.local_epochs,
        learning_rate=spec.learning_rate,
        updates_observed=len(seen.messages),
        updates_rejected=sum(len(r.rejected) for r in transcript.rounds),
        fallbacks=sum(r.fallback is not None for r in transcript.rounds),
        description=f"{rounds}, {who}; {what}"
        + ("" if recording else f" (learning rate {spec.learning_rate:g}); examples: {spec.drawn}")
        + sums
        + _part(seen)
        + (f"; {defences}" if defences else ""),
        aggregator=placed.aggregator.name,
        client_defence=placed.client_defence.name,
        defences=defences,
        recording=recording,
        summed=summed[-1] if summed else 1,
        history=course,
    )


def _part_of_model(transcript: Transcript) -> str:
    """Return which part of the model travels, and who has the rest."""
    updates = [u for r in transcript.rounds for u in r.updates]
    trained = [name for name, p in transcript.module.named_parameters() if p.requires_grad]
    sent = max((len(u.tensors) for u in updates), default=len(trained))
    part = f", {sent} of {len(trained)} trained tensors" if sent < len(trained) else ""
    if frozen := len(list(transcript.module.parameters())) - len(trained):
        part += f"; {frozen} more are frozen, and everybody has them"
    home = next((one.home for one in transcript.replays.values() if AT_HOME in one.home), "")
    return part + (f"; {home.partition(AT_HOME)[0]}{AT_HOME}, and no other sees them" if home else "")


def _part(seen: Observation) -> str:
    """Return in words how many updates, and of which rounds, an adversary reads that sees a part."""
    if not seen.threat.partial:
        return ""
    read = seen.messages
    sums = sum(len(m.update.members) > 1 for m in read)
    parts = [many(len(read) - sums, "update")] * (len(read) > sums or not read)
    parts += [f"{many(sums, 'sum')} of several"] * (sums > 0)
    return f"; the adversary reads {' and '.join(parts)}, of {many(len({m.round for m in read}), 'round')}"


def with_device(record: FederationRecord, truth: Truth) -> FederationRecord:
    """Return the record, which for a federation that was simulated on a GPU says so, and on which."""
    device = truth.about.get("device")
    if not isinstance(device, str):
        return record
    return record.model_copy(update={"device": device, "description": f"{record.description}; simulated on {device}"})


def _course_record(history: History, spec: FederationSpec) -> HistoryRecord:
    updates = len(history.bytes)
    honest = spec.clients - (spec.malicious.clients if spec.malicious else 0)
    return HistoryRecord(
        rounds=history.rounds,
        accuracy=history.accuracy,
        per_client=history.per_client,
        examples=history.measured_on,
        bytes=sum(history.bytes) / updates,
        parameters=sum(history.parameters) / updates,
        epsilon=history.epsilon,
        epsilon_adjacency=history.epsilon_adjacency,
        epsilon_delta=history.epsilon_delta,
        epsilon_unit=history.epsilon_unit,
        epsilon_of_clients=history.epsilon_of_clients,
        epsilon_pld=history.epsilon_pld,
        certificate=history.certificate,
        stopped=history.stopped,
        why_stopped=history.why,
        honest_accepted=history.accepted(range(honest)),
        malicious_accepted=history.accepted(range(honest, spec.clients)),
        timing=HistoryTiming(
            training=history.training_seconds / updates, client_defence=history.client_defence_seconds / updates
        ),
    )


def _defences(transcript: Transcript, defences: DefencesSpec) -> str:
    """Return what the defences do, with which settings, in words; nothing where there is none."""
    parts = []
    if defences.client_defence.protects:
        parts.append(f"each client changes its update before it leaves, by {_in_words(defences.client_defence)}")
    if defences.aggregator.averages is None:
        rejected = sum(len(r.rejected) for r in transcript.rounds)
        merged = _in_words(defences.aggregator)
        parts.append(f"the server merges by {merged} and left out {rejected} of {transcript.updates} updates")
        reasons = [r.fallback for r in transcript.rounds if r.fallback]
        parts += [f"in {len(reasons)} of {len(transcript.rounds)} rounds: {reasons[0]}"] if reasons else []
    return "; ".join(parts)


def _in_words(defence: Plugin) -> str:
    """Return a defence's name, what it does, and its settings."""
    values = {name: "none" if value is None else str(value).lower() for name, value in defence.settings().items()}
    settings = [f"{name}={value}" for name, value in values.items()]
    about = [defence.summary] + [", ".join(settings)] * bool(settings)
    return f"{defence.name} ({'; '.join(about)})"


def _stopped(transcript: Transcript, history: History | None, spec: FederationSpec) -> int | None:
    """Return after how many rounds the privacy budget ended the federation, if it did and that is known."""
    if history is not None:
        return history.stopped
    recorded = len(transcript.rounds)
    if transcript.recording:
        return None
    return recorded if spec.keep_rounds is None and recorded < spec.rounds else None


# --- recorded federations ---------------------------------------------------------------------------------------------


def _recording_record(transcript: Transcript) -> RecordingRecord:
    """Return what is known of a recorded federation."""
    updates = [u for r in transcript.rounds for u in r.updates]
    names = transcript.clients
    seconds = [u.seconds for u in updates if u.seconds is not None]
    notes = list(transcript.notes)
    if any(u.training is None for u in updates):
        notes.append(
            "how clients train was not recorded: capture it (Recorder.capture), or give training=… with each update"
        )
    return RecordingRecord(
        clients=[names[number] for number in sorted(names)],
        totals=sum(any(u.members for u in r.updates) for r in transcript.rounds),
        training=list(dict.fromkeys(_training_in_words(u.training, u.sanitised) for u in updates if u.training)),
        seconds=statistics.median(seconds) if seconds else None,
        replays=[
            ReplayRecord(
                round=r,
                client=names.get(c, str(c)),
                **{name: None if value == math.inf else value for name, value in replay._asdict().items()},
            )
            for (r, c), replay in sorted(transcript.replays.items())
        ],
        facts=facts_of(transcript),
        facts_text=facts_in_words(transcript),
        notes=notes,
    )


def _training_in_words(training: TrainingConfig, known: ClientDefenceInfo | None) -> str:
    """Return how a client trained, as one line."""
    rates = training.rates
    rate = f"{rates[0]:g}" if min(rates) == max(rates) else f"{rates[0]:g} to {rates[-1]:g}"
    settings = [f"learning rate {rate}"]
    if training.optimiser == "sgd":
        name = "SGD"
        if training.momentum:
            settings.append(f"{'Nesterov ' * training.nesterov}momentum {training.momentum:g}")
        if training.dampening:
            settings.append(f"dampening {training.dampening:g}")
    else:
        name = {"adam": "Adam", "adamw": "AdamW"}.get(training.optimiser, "another optimiser")
        settings += ["AMSGrad"] * training.amsgrad
    if training.weight_decay:
        settings.append(f"weight decay {training.weight_decay:g}")
    if training.proximal_mu:
        settings.append(f"FedProx μ {training.proximal_mu:g}")
    if training.groups:
        settings.append(f"{sum(len(group.parameters) for group in training.groups)} tensors treated otherwise")
    if training.clip_norm:
        settings.append(f"gradients clipped to norm {training.clip_norm:g}")
    if training.clip_value:
        settings.append(f"gradients clipped to ±{training.clip_value:g}")
    if known is not None and known.private is not None:
        settings.append(str(known.private))
    if training.precision != "float32":
        settings.append(f"mixed precision ({training.precision})")
    if training.weights != "float32":
        settings.append(f"weights in {training.weights}")
    sizes = sorted(set(training.batch_sizes))
    batches = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    steps = many(training.local_steps, "local step")
    passes = max((len(step) for step in training.passes), default=1)
    accumulated = f", each accumulated over up to {passes} passes" if passes > 1 else ""
    words = f"{name} ({', '.join(settings)}), {steps} on batches of {batches}{accumulated}"
    if training.unmodelled:
        words += "; not modelled: " + "; ".join(UNMODELLED[key] for key in training.unmodelled)
    return words
