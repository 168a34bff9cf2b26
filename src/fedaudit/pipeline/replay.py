"""Whether what is recorded of local training gives the updates that travelled: train again, and compare."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from fedaudit.capture.replay import relative_error, replay
from fedaudit.models import set_training_mode
from fedaudit.simulation.local_training import draws_at_random, gradient, local_randomness
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput

CONTRADICTED = 0.05  # relative error from which the facts aren't those that the update was made with
_UPDATES = 4  # of a simulation that are replayed, the first ones


def replay_error(recording: Recording) -> float | None:
    """Return the largest relative error ‖replayed − sent‖ / ‖sent‖: of a recording over all updates, else the first.

    None where it can't be told: the local training isn't recorded, a defence changed the updates, or the model draws
    at random in training (dropout) and nobody recorded what.
    """
    transcript, truth = recording.transcript, recording.truth
    if transcript.recording:
        return max(transcript.replay_errors.values(), default=None)
    task_info = transcript.task_info
    if task_info.dropout and draws_at_random(transcript.module, task_info.normalise(truth.candidates[:2])):
        return None
    updates = [(r.index, r.sent_to(u.client), u) for r in transcript.rounds for u in r.updates]
    errors = [
        replay_update(transcript, truth, index, weights, update)
        for index, weights, update in updates[:_UPDATES]
        if update.training is not None
        and update.sanitised is None
        and not update.members
        and (index, update.client) in truth.inputs
    ]
    return max(errors, default=None)


def replay_update(transcript: Transcript, truth: Truth, index: int, start: dict[str, Tensor], update: Update) -> float:
    """Return the relative error with which training, repeated on the truth, gives one update.

    Args:
        transcript: that it is of.
        truth: on which it is repeated: what the model saw, where that was recorded.
        index: of the round.
        start: weights before the training.
        update: with the facts that are checked.

    Returns:
        0 where it gives the same bits, infinity where it can't be done under these facts or diverges.
    """
    training, key, info = update.training, (index, update.client), transcript.task_info
    if training is None:
        return float("inf")
    inputs, targets = truth.seen.get(key) or (info.normalise(truth.inputs[key]), truth.labels[key])
    sizes = [p.examples for step in training.passes for p in step] or list(training.batch_sizes)
    try:
        passes = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
        if update.kind == "gradient":
            weights = [p.weight for step in training.passes for p in step] or [1.0]
            each = [_gradient(transcript, start, one) for one in passes]
            moved = {n: torch.as_tensor(sum(w * g[n] for w, g in zip(weights, each, strict=True))) for n in each[0]}
        else:
            replayed = replay(
                transcript.module,
                transcript.loss,
                start,
                passes,
                training,
                batch_norm=info.batch_norm,
                dropout=info.dropout,
                randomness=[state.clone() for state in truth.randomness.get(key, ())],  # aligned, as torch wants
            )
            moved = {name: replayed[name] - start[name] for name in update.tensors}  # as the update was made
        return relative_error(
            update.tensors, moved, {name: torch.zeros_like(value) for name, value in update.tensors.items()}
        )
    except (BadInput, RuntimeError):  # of other sizes or shapes than these facts say, or it diverges
        return float("inf")


def _gradient(transcript: Transcript, start: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    module = copy.deepcopy(transcript.module)
    module.load_state_dict(start)
    set_training_mode(module, transcript.task_info.batch_norm, dropout=transcript.task_info.dropout)
    with local_randomness(0):
        return gradient(module, transcript.loss, batch)
