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
from fedaudit.simulation.simulator import Recording
from fedaudit.simulation.spec import FederationSpec
from fedaudit.task.training import UNMODELLED, TrainingConfig
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.trees import TreeRecord, TreeSpec
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import SanitiserInfo
from fedaudit.transcript.vertical import VerticalSpec
from fedaudit.transcript.view import view
from fedaudit.utils.registry import Plugin

_SPLITS = {"strips": "columns that stand side by side", "quadrants": "a quarter of an image each"}
_TOPS = {
    "sum": "adds the embeddings up",
    "linear": "has a linear layer on the embeddings",
    "mlp": "has two layers on the embeddings",
}
_PROTOCOLS = {
    "split": "embeddings go up, their gradients come down",
    "aggregated-gradients": "the server reads the model and every batch's gradient",
}
_WHO = {
    "server": "an honest-but-curious server of a vertical federation: holds the labels and follows the protocol",
    "client": "a party of a vertical federation: holds features, no labels, and follows the protocol",
    "eavesdropper": "an eavesdropper who reads the messages between the parties and the server",
}
_WHO_SPLIT = {
    "server": "an honest-but-curious server of split learning: has the other layers and the labels",
    "malicious-server": "a malicious server of split learning: sends gradients of its own in order to learn more",
    "client": "the client of split learning: holds examples, no labels but those it is given, and follows the protocol",
    "eavesdropper": "an eavesdropper who reads the messages between the client and the server",
}


def adversary_record(scenario: Scenario, recordings: Sequence[Recording]) -> AdversaryRecord:
    """Return who the adversary is and what it knows, in words."""
    threat = scenario.threat
    if (vertical := scenario.federations[0].vertical) is not None:
        return _split_adversary(threat, vertical) if vertical.cut is not None else _vertical_adversary(threat, vertical)
    if (trees := scenario.federations[0].trees) is not None:
        return _adversary_of_trees(threat, trees)
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
    if transcript.vertical is not None:
        return _vertical_federation(transcript, history, spec)
    if transcript.trees is not None:
        return _federation_of_trees(transcript.trees, transcript, history, spec)
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
    recording = _recording_record(transcript) if transcript.recording else None
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
        updates_observed=len(seen.messages),
        updates_rejected=sum(len(r.rejected) for r in transcript.rounds),
        fallbacks=sum(r.fallback is not None for r in transcript.rounds),
        description=f"{rounds}, {who}; {what}"
        + ("" if recording else f" (learning rate {spec.learning_rate:g}); examples: {spec.drawn}")
        + sums
        + _part(seen)
        + (f"; {defences}" if defences else ""),
        aggregator=placed.aggregator.name,
        sanitiser=placed.sanitiser.name,
        defences=defences,
        recording=recording,
        summed=summed[-1] if summed else 1,
        course=None if history is None else _course_record(history, spec),
    )


def _part(seen: Observation) -> str:
    """Return in words of which rounds an adversary that sees a part reads how many updates."""
    if not seen.threat.partial:
        return ""
    read = seen.messages
    sums = sum(len(m.update.members) > 1 for m in read)
    parts = [_many(len(read) - sums, "update")] * (len(read) > sums or not read)
    parts += [f"{_many(sums, 'sum')} of several"] * (sums > 0)
    return f"; the adversary reads {' and '.join(parts)}, of {_many(len({m.round for m in read}), 'round')}"


def with_device(record: FederationRecord, truth: Truth) -> FederationRecord:
    """Return the record; of a federation that was simulated on a GPU it says so, and on which."""
    device = truth.about.get("device")
    if not isinstance(device, str):
        return record
    return record.model_copy(update={"device": device, "description": f"{record.description}; simulated on {device}"})


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
        epsilon_adjacency=history.epsilon_adjacency,
        epsilon_delta=history.epsilon_delta,
        epsilon_unit=history.epsilon_unit,
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


# --- vertical federations ---------------------------------------------------------------------------------------------


def _vertical_adversary(threat: ThreatModel, spec: VerticalSpec) -> AdversaryRecord:
    server, whole = threat.adversary == "server", spec.protocol == "aggregated-gradients"
    known = {
        "the model's architecture, the loss, and how examples are normalised": True,
        "which examples are in every batch, by their numbers": True,
        "the labels of all examples": server,
        "every party's network, and the gradient of every batch for all of its parameters": server and whole,
        "the embeddings of all parties": not whole and threat.adversary != "client",
        f"the embeddings of party {spec.observer} and their gradients": not whole and threat.adversary == "client",
        "the features of the parties": False,
    }
    if spec.known_labels and threat.adversary == "client":
        known |= {f"its own features, and the labels of {spec.known_labels} examples of each class": True}
    return AdversaryRecord(
        adversary="party" if threat.adversary == "client" else threat.adversary,
        summary=_WHO[threat.adversary],
        knows=[text for text, yes in known.items() if yes],
        does_not_know=[text for text, yes in known.items() if not yes],
        acts=False,
    )


def _split_adversary(threat: ThreatModel, spec: VerticalSpec) -> AdversaryRecord:
    server, client = threat.adversary in ("server", "malicious-server"), threat.adversary == "client"
    public = f"{threat.public_examples or 'some'} public examples of the same kind"
    known = {
        "the model's architecture, the loss, and how examples are normalised": True,
        "which examples are in every batch, by their numbers": True,
        "what the client's layers put out, and the gradients that come back": True,
        "the client's examples and its layers": client,
        "the labels of all examples": server,
        f"the labels of {spec.known_labels} examples of each class": client and spec.known_labels > 0,
        public: threat.knows_public_data,
    }
    return AdversaryRecord(
        adversary="party" if client else threat.adversary,
        summary=_WHO_SPLIT[threat.adversary],
        knows=[text for text, yes in known.items() if yes],
        does_not_know=[text for text, yes in known.items() if not yes],
        acts=threat.adversary == "malicious-server",
    )


def _vertical_federation(transcript: Transcript, history: History | None, spec: FederationSpec) -> FederationRecord:
    record = transcript.vertical
    assert record is not None
    rounds, size = record.batches.shape
    vertical = record.spec
    who = (
        f"{record.parties} parties who hold {_SPLITS[vertical.features]} of the same {record.examples} examples; "
        f"{size} of them in a batch; {_PROTOCOLS[vertical.protocol]}; the server {_TOPS[vertical.top]} and holds the "
        "labels"
    )
    if vertical.cut is not None:
        answers = f"the gradients of '{spec.server.name}', a malicious server," if spec.server else "its gradients"
        who = (
            f"one client who holds {record.examples} examples and the layers up to {vertical.cut}; {size} examples in "
            f"a batch; what these layers put out goes up, {answers} come down; the server has the other layers and the "
            "labels"
        )
    description = f"{_many(rounds, 'round')}, {who} (learning rate {record.learning_rate:g}); examples: {spec.drawn}"
    return FederationRecord(
        name=transcript.name,
        algorithm="vertical" if vertical.cut is None else "split",
        update_kind="gradient",
        clients=record.parties,
        rounds=spec.rounds,
        batch_size=size,
        local_steps=None,
        local_epochs=None,
        learning_rate=record.learning_rate,
        updates_observed=rounds,
        description=description,
        course=None if history is None else _course_record(history, spec),
    )


# --- federations of trees ---------------------------------------------------------------------------------------------


_GROWN = {
    "bagging": "in a round each grows {n} on its own rows, and all join the model",
    "cyclic": "in turn, one a round, each grows {n} on its own rows, which join the model",
    "histogram": "one tree a round grows on the sum of the clients' histograms",
}


def _adversary_of_trees(threat: ThreatModel, spec: TreeSpec) -> AdversaryRecord:
    client, histogram = threat.adversary == "client", spec.protocol == "histogram"
    summed = histogram and (client or threat.group_size > 1)
    known = {
        "the step, λ and the other settings of training, and how columns are standardised": threat.knows_training,
        "every client's trees: splits and the leaves' values": not histogram,
        "the sums of gradients and hessians in their nodes (cover)": not histogram and spec.cover,
        "the trees of all, and each client's sums of gradients and hessians in their leaves": histogram and not summed,
        "the trees of all, and the sums over all clients in their leaves": summed,
        "the clients' rows, or any of them": False,
        "the distribution of the columns, but for mean and standard deviation": False,
    }
    return AdversaryRecord(
        adversary=threat.adversary,
        summary=f"client {spec.observer}, who reads the model of every round" if client else threat.summary,
        knows=[text for text, yes in known.items() if yes],
        does_not_know=[text for text, yes in known.items() if not yes],
        acts=False,
    )


def _federation_of_trees(
    record: TreeRecord, transcript: Transcript, history: History | None, spec: FederationSpec
) -> FederationRecord:
    own = record.spec
    sizes = _one_of(sorted({m.num_examples for m in record.messages}), "example")
    what = _GROWN[own.protocol].format(n=_one_of(sorted({len(m.booster.trees) for m in record.messages}), "tree"))
    kept = f", with noise of deviation {own.noise:g} on the sums in the leaves" if own.noise else ""
    kept += "" if own.cover else ", without cover"
    kept += "; secure aggregation shows the sum of all histograms only" if record.clients < spec.clients else ""
    description = (
        f"{_many(spec.rounds, 'round')}, {_many(spec.clients, 'client')} ({sizes} a message); {what}: depth "
        f"{own.max_depth} at most, least cover of a leaf {own.min_child_weight:g}, λ {own.reg_lambda:g}, "
        f"η {record.learning_rate:g}{kept}"
        + ("" if transcript.recording else f"; examples: {spec.drawn}, partition {spec.partition.scheme}")
    )
    return FederationRecord(
        name=transcript.name,
        algorithm="trees",
        update_kind="weights",
        clients=spec.clients,
        rounds=spec.rounds,
        batch_size=max(m.num_examples for m in record.messages),
        local_steps=None,
        local_epochs=None,
        learning_rate=record.learning_rate,
        updates_observed=len(record.messages),
        description=description,
        recording=_recording_record(transcript) if transcript.recording else None,
        course=None if history is None else _course_record(history, spec),
    )


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


def _training_in_words(training: TrainingConfig, known: SanitiserInfo | None) -> str:
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
    steps = _many(training.local_steps, "local step")
    passes = max((len(step) for step in training.passes), default=1)
    accumulated = f", each accumulated over up to {passes} passes" if passes > 1 else ""
    words = f"{name} ({', '.join(settings)}), {steps} on batches of {batches}{accumulated}"
    if training.unmodelled:
        words += "; not modelled: " + "; ".join(UNMODELLED[key] for key in training.unmodelled)
    return words
