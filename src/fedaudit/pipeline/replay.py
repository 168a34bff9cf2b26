"""Whether what is recorded of local training reproduces the updates: train again on the truth, and compare."""

from __future__ import annotations

import copy

import torch

from fedaudit.federation.local_training import draws_at_random, gradient, local_randomness, train
from fedaudit.federation.simulator import Recording
from fedaudit.federation.transcript import Transcript
from fedaudit.models import set_training_mode
from fedaudit.update import Update
from fedaudit.utils.errors import BadInput

CONTRADICTED = 0.05  # relative error from which the facts aren't those that the update was made with
_UPDATES = 4  # that are replayed, the first ones


def replay_error(recording: Recording) -> float | None:
    """Return the largest relative error ‖replayed − sent‖ / ‖sent‖ over the first updates.

    None where it can't be told: the local training isn't recorded, a defence changed the updates, or the model draws
    at random in training (dropout), so that nobody can repeat it.
    """
    transcript, truth = recording.transcript, recording.truth
    if transcript.recording:
        return max(transcript.replay_errors.values(), default=None)
    task_info = transcript.task_info
    if task_info.dropout and draws_at_random(transcript.module, task_info.normalise(truth.candidates[:2])):
        return None
    errors = []
    updates = [(r.index, r.weights, u) for r in transcript.rounds for u in r.updates]
    for index, weights, update in updates[:_UPDATES]:
        if update.training is None or update.sanitised is not None or (index, update.client) not in truth.inputs:
            continue
        inputs = transcript.task_info.normalise(truth.inputs[index, update.client])
        try:
            replayed = _replayed(transcript, weights, update, inputs, truth.labels[index, update.client])
        except BadInput:  # the training diverges under these facts
            errors.append(float("inf"))
            continue
        names = [name for name in update.tensors if name in replayed]
        apart = torch.stack([(replayed[n] - update.tensors[n]).norm() for n in names]).norm()
        size = torch.stack([update.tensors[n].norm() for n in names]).norm()
        errors.append(float(apart / size.clamp(min=1e-30)))
    return max(errors, default=None)


def _replayed(
    transcript: Transcript, weights: dict[str, torch.Tensor], update: Update, inputs: torch.Tensor, labels: torch.Tensor
) -> dict[str, torch.Tensor]:
    training = update.training
    assert training is not None
    module = copy.deepcopy(transcript.module)
    module.load_state_dict(weights)
    set_training_mode(module, transcript.task_info.batch_norm, dropout=transcript.task_info.dropout)
    batches = list(zip(inputs.split(training.batch_sizes), labels.split(training.batch_sizes), strict=True))
    with local_randomness(0):
        if update.kind == "gradient":
            return gradient(module, transcript.loss, batches[0])
        train(
            module,
            transcript.loss,
            batches,
            learning_rate=training.learning_rate,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            proximal_mu=training.proximal_mu,
        )
    return {name: p.detach() - weights[name] for name, p in module.named_parameters() if p.requires_grad}
