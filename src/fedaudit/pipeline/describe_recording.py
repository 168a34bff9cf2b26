"""A recorded federation in words: how its clients trained, and whether that gives the updates that travelled."""

from __future__ import annotations

import math
import statistics

from fedaudit.pipeline.replay import CONTRADICTED
from fedaudit.results import RecordingRecord, ReplayRecord
from fedaudit.task.training import UNMODELLED, TrainingConfig
from fedaudit.transcript.transcript import Transcript


def recording_record(transcript: Transcript) -> RecordingRecord:
    """Return what is known of a recorded federation."""
    updates = [u for r in transcript.rounds for u in r.updates]
    names = transcript.clients
    seconds = [u.seconds for u in updates if u.seconds is not None]
    errors = transcript.replay_errors
    facts = "unverified"
    if errors and all((r.index, u.client) in errors for r in transcript.rounds for u in r.updates):
        facts = "contradicted" if max(errors.values()) > CONTRADICTED else "verified"
    elif any(error > CONTRADICTED for error in errors.values()):
        facts = "contradicted"
    notes = list(transcript.notes)
    if any(u.training is None for u in updates):
        notes.append(
            "how clients train was not recorded: capture it (Recorder.capture), or give training=… with each update"
        )
    return RecordingRecord(
        clients=[names[number] for number in sorted(names)],
        totals=sum(any(u.members for u in r.updates) for r in transcript.rounds),
        training=list(dict.fromkeys(training_in_words(u.training) for u in updates if u.training)),
        seconds=statistics.median(seconds) if seconds else None,
        replays=[
            ReplayRecord(round=r, client=names.get(c, str(c)), error=error if math.isfinite(error) else None)
            for (r, c), error in sorted(errors.items())
        ],
        facts=facts,
        notes=notes,
    )


def training_in_words(training: TrainingConfig) -> str:
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
    if training.precision != "float32":
        settings.append(f"mixed precision ({training.precision})")
    sizes = sorted(set(training.batch_sizes))
    batches = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    steps = f"{training.local_steps} local step{'s' * (training.local_steps > 1)}"
    passes = max((len(step) for step in training.passes), default=1)
    accumulated = f", each accumulated over up to {passes} passes" if passes > 1 else ""
    words = f"{name} ({', '.join(settings)}), {steps} on batches of {batches}{accumulated}"
    if training.unmodelled:
        words += "; not modelled: " + "; ".join(UNMODELLED[key] for key in training.unmodelled)
    return words
