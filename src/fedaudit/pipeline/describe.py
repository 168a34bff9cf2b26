"""What a federation was like: its settings, its defences in words, what its rounds brought and cost."""

from __future__ import annotations

from collections.abc import Sequence

from fedaudit.defences.spec import DefencesSpec
from fedaudit.pipeline.describe_recording import recording_record
from fedaudit.pipeline.vertical import federation_record as vertical_record
from fedaudit.results import FederationRecord, HistoryRecord, HistoryTiming
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.history import History
from fedaudit.simulation.spec import FederationSpec
from fedaudit.transcript.observation import observe
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils.registry import Plugin


def federation_record(transcript: Transcript, history: History | None, scenario: Scenario) -> FederationRecord:
    """Return the settings of one of the scenario's federations; ``history``: None where it was read from disk."""
    name, spec, placed = next(run for run in scenario.runs() if run[0] == transcript.name)
    if transcript.vertical is not None:
        return vertical_record(transcript, history, spec)
    updates = [u for r in transcript.rounds for u in r.updates]
    summed = sorted({len(u.members) or 1 for u in updates})
    sums = ""
    if summed and summed[-1] > 1:
        over = _one_of(sorted({u.num_examples for u in updates}), "example")
        sums = f"; secure aggregation shows the server only the sum of {_one_of(summed, 'client')}, {over} together"
        sizes = f"up to {_one_of([spec.batch_size * (spec.local_steps or 1)], 'example')}"
    else:
        sizes = _one_of(sorted({u.num_examples for u in updates}), "example")
    if spec.algorithm == "fedsgd":
        what = f"each sends the gradient of one batch of {sizes}"
    else:
        local = _many(spec.local_steps, "local step") if spec.local_steps else _many(spec.local_epochs, "local epoch")
        what = f"each trains for {local} on batches of {spec.batch_size} ({sizes}) and sends its weights"
    rounds = _many(spec.rounds, "round")
    recording = recording_record(transcript) if transcript.recording else None
    if recording:
        sends = "its gradient" if transcript.update_kind == "gradient" else "its weights"
        trains = f"trains by {recording.training[0]}" if recording.training else "trains in a way that wasn't recorded"
        more = f" (or {len(recording.training) - 1} other ways)" if len(recording.training) > 1 else ""
        what = f"each {trains}{more} ({sizes}) and sends {sends}"
    stopped = _stopped(transcript, history, spec)
    if stopped is not None:
        rounds = (
            f"{stopped} of {rounds} (then {history.why if history and history.why else 'the privacy budget was spent'})"
        )
    per_round = spec.clients_per_round or spec.clients
    who = (
        f"{per_round} of {spec.clients} clients a round" if per_round != spec.clients else _many(spec.clients, "client")
    )
    defences = _defences(transcript, placed)
    inserted = transcript.task_info.inserted
    if inserted is not None:
        kernels = f", behind {_one_of([inserted.sets], 'set')} of kernels, one a client" if inserted.sets else ""
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
        updates_observed=len(observe(transcript, scenario.threat).messages),
        updates_rejected=sum(len(r.rejected) for r in transcript.rounds),
        fallbacks=sum(r.fallback is not None for r in transcript.rounds),
        description=f"{rounds}, {who}; {what}"
        + ("" if recording else f" (learning rate {spec.learning_rate:g})")
        + sums
        + (f"; {defences}" if defences else ""),
        aggregator=placed.aggregator.name,
        sanitiser=placed.sanitiser.name,
        defences=defences,
        recording=recording,
        summed=summed[-1] if summed else 1,
        course=None if history is None else _course_record(history, spec),
    )


def _one_of(numbers: Sequence[int], of: str) -> str:
    return " or ".join(map(str, numbers)) + f" {of}" + "s" * (list(numbers) != [1])


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
        epsilon_of_clients=history.epsilon_of_clients,
        epsilon_pld=history.epsilon_pld,
        stopped=history.stopped,
        why_stopped=history.why,
        honest_accepted=history.accepted(range(honest)),
        malicious_accepted=history.accepted(range(honest, spec.clients)),
        timing=HistoryTiming(
            training=history.training_seconds / updates, sanitising=history.sanitising_seconds / updates
        ),
    )


def _defences(transcript: Transcript, defences: DefencesSpec) -> str:
    """Return what the defences do, with which settings, in words; nothing where there is none."""
    parts = []
    if defences.sanitiser.protects:
        parts.append(f"each client changes its update before it leaves, by {_in_words(defences.sanitiser)}")
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


def _many(number: int | None, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _stopped(transcript: Transcript, history: History | None, spec: FederationSpec) -> int | None:
    """Return after how many rounds the privacy budget ended the federation, if it did and that is known."""
    if history is not None:
        return history.stopped
    recorded = len(transcript.rounds)
    if transcript.recording:
        return None
    return recorded if spec.record is None and recorded < spec.rounds else None
