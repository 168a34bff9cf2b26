"""Recordings of real federations, ready to be attacked: the user's module, the truth where it was captured, replay."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedaudit.data.dataset import Split
from fedaudit.modalities.tokens import as_given
from fedaudit.models import load_checkpoint, set_training_mode
from fedaudit.results import DataRecord, ModelRecord
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.local_training import draws_at_random, gradient, local_randomness
from fedaudit.simulation.replay import relative_error, replay
from fedaudit.simulation.simulator import Recording
from fedaudit.simulation.trees import replay_error
from fedaudit.task.training import UNMODELLED
from fedaudit.transcript.files import write_replay
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.trees import TreeRecord
from fedaudit.transcript.truth import Truth, truth_file
from fedaudit.transcript.update import CONTRADICTED, PrivateSteps, Replay, Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.objects import load_object
from fedaudit.utils.progress import Display
from fedaudit.utils.seeds import generator

_CLOSE = 1e-3  # relative error above which it is asked what rounding explains of it
_ROUNDINGS = 3  # how often
_UPDATES = 4  # of a simulation that are replayed, the first ones


def own_module(name: str, checkpoint: Path | None = None) -> nn.Module:
    """Return the module that ``package.module:factory`` stands for: a module, or a class or function that makes one.

    Args:
        name: of it.
        checkpoint: file with its weights; what doesn't travel in the federation (a frozen part) has these.

    Raises:
        BadInput: there is none, or it can't be made without arguments.
    """
    found = load_object(name, "--model")
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise BadInput(f"--model '{name}' is a {type(found).__name__}; give a torch module or what makes one")
        try:
            found = found()
        except Exception as error:
            raise BadInput(
                f"--model '{name}' can't be called without arguments ({type(error).__name__}: {error}); write a "
                "function that makes the module, and name that"
            ) from None
        if not isinstance(found, nn.Module):
            raise BadInput(f"--model '{name}' returns a {type(found).__name__}, not a torch module")
    module: nn.Module = found
    if checkpoint is not None:
        load_checkpoint(module, checkpoint)
    return module


def with_truth(transcript: Transcript, folder: Path) -> Transcript:
    """Return the transcript with those updates only whose truth lies in ``folder``, and a note on the others."""
    rounds = [
        dataclasses.replace(r, updates=[u for u in r.updates if (folder / truth_file(r.index, u.client)).is_file()])
        for r in transcript.rounds
    ]
    if transcript.canaries and not any(r.updates for r in rounds):  # which alone are asked for
        return transcript
    kept = dataclasses.replace(transcript, rounds=rounds)
    lost = transcript.updates - kept.updates
    if not lost:
        return transcript
    note = f"{lost} of {transcript.updates} updates weren't attacked: what they were trained on wasn't captured"
    return dataclasses.replace(kept, notes=(*kept.notes, note))


def about(transcript: Transcript) -> tuple[Scenario, DataRecord, ModelRecord]:
    """Return a recording as a scenario, as far as one can say it, and its data and model as results describe them."""
    info = transcript.task_info
    if transcript.trees is not None:
        return _about_trees(transcript, transcript.trees)
    updates = [u for r in transcript.rounds for u in r.updates]
    trained = next((u.training for u in updates if u.training), None)
    clients = {u.client for u in updates} | set(transcript.clients)
    federation: dict[str, Any] = {
        "name": transcript.name,
        "clients": max(len(clients), 1),
        "rounds": transcript.rounds[-1].index + 1,
    }
    if transcript.update_kind == "weights":
        federation |= {"algorithm": "fedavg", "local_steps": trained.local_steps if trained else 1}
    if trained:
        federation |= {"batch_size": max(trained.batch_sizes), "learning_rate": trained.learning_rate}
    scenario = scenario_from(
        {
            "name": transcript.name,
            "data": {"name": "custom"},
            "model": {
                "name": "custom",
                "initialisation": "given",
                "batch_norm": info.batch_norm,
                "dropout": info.dropout,
                "loss": info.loss,
            },
            "federations": [federation],
            "attacks": ["agic"],
        }
    )
    parts = info.packed_inputs
    data = DataRecord(
        name="the clients' own data",
        summary=f"recorded while the federation ran{f'; inputs {parts}' if parts else ''}",
        classes=info.num_classes,
        class_names=None,
        kind=info.kind,
        input_shape=list(info.input_shape),
    )
    norms = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in transcript.module.modules())
    drops = any(isinstance(part, nn.modules.dropout._DropoutNd) for part in transcript.module.modules())
    model = ModelRecord(
        name=type(transcript.module).__name__,
        parameters=sum(p.numel() for p in transcript.module.parameters()),
        initialisation="given",
        batch_norm=info.batch_norm if norms else "none",
        trained="as it travelled in the federation",
        dropout=("on" if info.dropout else "off") if drops else "none",
    )
    return scenario, data, model


def _about_trees(transcript: Transcript, trees: TreeRecord) -> tuple[Scenario, DataRecord, ModelRecord]:
    info, leaves = transcript.task_info, sum(len(t.leaves) for m in trees.messages for t in m.booster.trees)
    federation = {
        "name": transcript.name,
        "algorithm": "trees",
        "clients": trees.clients,
        "rounds": trees.messages[-1].round + 1,
        "learning_rate": trees.learning_rate,
        "trees": trees.spec.model_dump(mode="json"),
    }
    scenario = scenario_from(
        {
            "name": transcript.name,
            "data": {"name": "custom"},
            "federations": [federation],
            "attacks": ["timberstrike"],
        }
    )
    data = DataRecord(
        name="the clients' own data",
        summary="recorded while the federation ran",
        classes=info.num_classes,
        class_names=None,
        kind=info.kind,
        input_shape=list(info.input_shape),
    )
    model = ModelRecord(
        name=info.model,
        parameters=leaves,
        initialisation="given",
        batch_norm="none",
        trained="as it travelled in the federation",
        dropout="none",
    )
    return scenario, data, model


def with_known_victims(transcript: Transcript, truth: Truth) -> Transcript:
    """Return recorded trees with those victims only whose rows the truth has, and a note on the others."""
    trees = transcript.trees
    if trees is None or transcript.recording is None:
        return transcript
    victims = tuple(client for client in trees.victims if (0, client) in truth.inputs)
    notes, lost = transcript.notes, len(trees.victims) - len(victims)
    if lost:
        notes += (f"{lost} of {len(trees.victims)} clients weren't attacked: their rows weren't captured",)
    return dataclasses.replace(transcript, trees=dataclasses.replace(trees, victims=victims), notes=notes)


def check_replay(transcript: Transcript, truth: Truth, folder: Path | None, display: Display) -> Transcript:
    """Train every update again from what was recorded, on the truth, and return the transcript with the errors.

    What an earlier check found is taken from ``folder`` and the rest is kept there.

    Args:
        transcript: of a recording.
        truth: with what the model saw.
        folder: of the recording; None keeps nothing.
        display: shows progress.
    """
    replays = dict(transcript.replays)
    if (trees := transcript.trees) is not None:
        for message in trees.messages:
            if (key := (0, message.client)) in truth.inputs:
                held = Split(transcript.task_info.normalise(truth.inputs[key]), truth.labels[key])
                replays[message.round, message.client] = Replay(replay_error(trees, message, held))
        return dataclasses.replace(transcript, replays=replays)
    todo = [
        (r.index, r.sent_to(u.client), u)
        for r in transcript.rounds
        for u in r.updates
        if (r.index, u.client) in truth.seen and (r.index, u.client) not in replays and _repeatable(u)
    ]
    report = display.stage(f"replay of {len(todo)} updates", len(todo)) if todo else None
    for index, start, update in todo:
        replays[index, update.client] = replay_update(transcript, truth, index, start, update)
        if report is not None:
            report(1)
    if folder is not None and todo and transcript.recording:
        write_replay(folder, transcript.recording, replays)
    return dataclasses.replace(transcript, replays=replays)


def facts_of(transcript: Transcript) -> Literal["verified", "contradicted", "unverified"]:
    """Return whether what is recorded of local training gives the updates that travelled, as far as it was replayed."""
    replays = transcript.replays
    if any(replay.contradicts for replay in replays.values()):
        return "contradicted"
    sent = [(r.index, u.client) for r in transcript.rounds for u in r.updates]
    if transcript.trees is not None:
        sent = [(m.round, m.client) for m in transcript.trees.messages if m.client in transcript.trees.victims]
    verified = sent and all(key in replays and replays[key].verifies for key in sent)
    return "verified" if verified else "unverified"


def _repeatable(update: Update) -> bool:
    return update.training is not None and update.training.optimiser != "other"


# --- replay -----------------------------------------------------------------------------------------------------------


def worst_replay(recording: Recording) -> Replay | None:
    """Return the replay that came least close: of a recording's updates, else of the first ones.

    One that rounding doesn't explain comes before those that it does. None where it can't be told: the local training
    isn't recorded, a defence changed the updates, or the model draws at random in training (dropout) and nobody
    recorded what.
    """
    transcript, truth = recording.transcript, recording.truth
    if transcript.recording:
        return max(transcript.replays.values(), default=None, key=_how_far)
    task_info = transcript.task_info
    if task_info.dropout and draws_at_random(transcript.module, task_info.normalise(truth.candidates[:2])):
        return None
    updates = [(r.index, r.sent_to(u.client), u) for r in transcript.rounds for u in r.updates]
    replays = [
        replay_update(transcript, truth, index, weights, update)
        for index, weights, update in updates[:_UPDATES]
        if update.training is not None
        and update.sanitised is None
        and not update.members
        and (index, update.client) in truth.inputs
    ]
    return max(replays, default=None, key=_how_far)


def _how_far(replay: Replay) -> tuple[bool, float]:
    return replay.contradicts, replay.error


def replay_update(transcript: Transcript, truth: Truth, index: int, start: dict[str, Tensor], update: Update) -> Replay:
    """Return how close training, repeated on the truth, comes to one update.

    Where it isn't close, it is repeated from weights that are moved by a rounding: many steps at a high rate make much
    of the order in which a processor adds, and the facts aren't to blame for that.

    Args:
        transcript: that it is of.
        truth: on which it is repeated: what the model saw, where that was recorded.
        index: of the round.
        start: weights before the training.
        update: with the facts that are checked.

    Returns:
        an error of 0 where it gives the same bits, infinity where it can't be done under these facts or diverges.
    """
    moved = _repeated(transcript, truth, index, start, update)
    if moved is None:
        return Replay(math.inf)
    nothing = {name: torch.zeros_like(value) for name, value in update.tensors.items()}
    error = relative_error(update.tensors, moved, nothing)
    if not _CLOSE < error < math.inf:
        return Replay(error)
    if update.sanitised is not None and (private := update.sanitised.private) is not None and private.noise:
        return _beside_noise(transcript, truth, index, start, update, private)
    rounding = 0.0
    for seed in range(_ROUNDINGS):
        moved_start = _rounded(start, generator(seed, "rounding"), update)
        again = _repeated(transcript, truth, index, moved_start, update, start)
        if again is None:
            return Replay(error, math.inf)
        rounding = max(rounding, relative_error(moved, again, nothing))
    return Replay(error, rounding)


def _beside_noise(
    transcript: Transcript, truth: Truth, index: int, start: dict[str, Tensor], update: Update, private: PrivateSteps
) -> Replay:
    """Return how far an update is from its training without noise, and how far the declared noise takes that at most.

    For noise that isn't known: drawn on a GPU, or by a generator of its own. The update and trainings with other noise
    of that size are draws of one distribution, about as far from the training without any; the fewer numbers, the more
    these distances differ.
    """
    sent, most = update.tensors, 0.0
    nothing = {name: torch.zeros_like(value) for name, value in sent.items()}
    repeated = functools.partial(_repeated, transcript, truth, index, start, update)
    plain = repeated(private=dataclasses.replace(private, noise=0.0))
    for seed in range(1, _ROUNDINGS + 1):
        if plain is None or (drawn := repeated(private=private, seed=seed)) is None:
            return Replay(math.inf)
        most = max(most, relative_error(sent, {n: sent[n] + drawn[n] - plain[n] for n in sent}, nothing))
    assert plain is not None
    alike = 1.25 + 4 / math.sqrt(sum(value.numel() for value in sent.values()))
    return Replay(relative_error(sent, plain, nothing), noise=most * alike)


def _rounded(start: Mapping[str, Tensor], dice: torch.Generator, update: Update) -> dict[str, Tensor]:
    """Return weights of which each is moved by one unit in its last place, up or down or not at all."""
    own = torch.finfo(getattr(torch, update.training.weights) if update.training else torch.float32).eps

    def moved(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        ways = torch.randint(-1, 2, value.shape, generator=dice)
        return value * (1 + max(own, torch.finfo(value.dtype).eps) * ways.to(value.dtype))

    return {name: moved(value) for name, value in start.items()}


def why_contradicted(recording: Recording, replay: Replay) -> str:
    """Return in words why training, repeated, may give other updates than those that travelled, and what to do.

    What was seen of the training and can't be repeated says why. Else the update that is farthest off does: one
    factor, as clipping or another learning rate gives it, or a rest that is spread evenly, as noise is.
    """
    transcript, truth = recording.transcript, recording.truth
    begin = (
        "repeated on the true examples, the recorded training gives other updates than those that travelled "
        f"(relative error {replay.error:.2g})"
    )
    if transcript.trees is not None:
        return (
            f"{begin}: learning_rate or reg_lambda are others, rows are missing, weighted or drawn anew for each tree "
            "(subsample), the model had other trees than were recorded, or clients add noise to what they send"
        )
    updates = [(r.index, r.sent_to(u.client), u) for r in transcript.rounds for u in r.updates]
    none = Replay(0.0)
    replays = {(index, u.client): transcript.replays.get((index, u.client), none) for index, _, u in updates}
    off = [u.training for index, _, u in updates if replays[index, u.client].contradicts and u.training]
    seen = [name for name in UNMODELLED if any(name in training.unmodelled for training in off)]
    if seen:
        return f"{begin}: {'; '.join(UNMODELLED[name] for name in seen)}. {' '.join(_REMEDIES[name] for name in seen)}"
    for index, start, update in sorted(updates, key=lambda one: _how_far(replays[one[0], one[2].client]))[-1:]:
        moved = _repeated(transcript, truth, index, start, update)
        if moved is not None and (looks := _looks_like(update.tensors, moved, start)):
            return f"{begin}; {looks}. Record once without that: where it is reproduced, nothing else is wrong"
    return (
        f"{begin}: either clients clip updates or add noise (LocalDpMod, Opacus), or what is recorded of their "
        "training (learning rate, momentum, steps, BatchNorm) is wrong. Record once without noise: where that is "
        "reproduced, it was the noise"
    )


_REMEDIES = {  # of each of UNMODELLED
    "optimiser": "Train by one optimiser, SGD, Adam or AdamW (SAM and L-BFGS take more than one gradient a step).",
    "optimiser-state": "Make the optimiser anew each round.",
    "optimiser-settings": "Within an update let nothing of the optimiser change but the learning rate, and freeze "
    "layers before its first step.",
    "gradients-changed": "Take each step right after the backward pass, and change gradients by "
    "torch.nn.utils.clip_grad_norm_ or clip_grad_value_ only.",
    "several-inputs": "Call the model with tensors (n, …) of real values, or one tuple or dictionary of such.",
    "several-losses": "Train one model by one loss a step, without penalties, in one process.",
    "loss": "Give the loss: --loss package.module:function, or loss=….",
    "nothing-seen": "Train in the process and thread that record.",
}
_EVEN = 0.25  # by how much the standard deviations of a noise's tensors may differ
_SURE = 4  # standard errors
_ENOUGH = 200  # elements, to tell how a rest is spread


def _looks_like(sent: Mapping[str, Tensor], moved: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> str:
    """Return what takes a trained update to the one that was sent, if it is one factor or even noise; else nothing.

    Noise knows nothing of the weights that training starts from: a rest that correlates with them is a wrong fact,
    such as weight decay.
    """
    names = [name for name, value in sent.items() if value.is_floating_point()]
    if not names:
        return ""
    own, made, begun = (torch.cat([of[name].double().flatten() for name in names]) for of in (sent, moved, start))
    finite = bool(torch.isfinite(torch.cat([own, made, begun])).all())
    if not finite or not float(made.norm()) or not float(own.norm()):
        return ""
    factor = float(own @ made / (made @ made))
    rest = own - factor * made
    rounding = max(torch.finfo(sent[name].dtype).eps for name in names) * float(own.norm() + begun.norm())
    if float(rest.norm() / own.norm()) < CONTRADICTED:
        if factor <= 0 or abs(factor - 1) < CONTRADICTED:
            return ""
        clipped = f"clipping to a norm of {float(own.norm()):.3g}, or " if factor < 1 else ""
        return f"they are {factor:.3g} times as large: that looks like {clipped}another learning rate than is recorded"
    parts = rest.split([sent[name].numel() for name in names])
    deviation = float(rest.std())
    if deviation * math.sqrt(len(rest)) <= _SURE * rounding:
        return ""
    spreads = [abs(float(part.std()) / deviation - 1) for part in parts if len(part) >= _ENOUGH]
    if not spreads or max(spreads) > _EVEN:
        return ""
    kurtosis = float(((rest - rest.mean()) / deviation).pow(4).mean())
    besides = begun - float(begun @ made / (made @ made)) * made  # what training's direction doesn't explain of them
    length = float(rest.norm() * besides.norm())
    correlation = abs(float(rest @ besides)) / length if length else 0.0
    if abs(kurtosis - 3) > _SURE * math.sqrt(24 / len(rest)) or correlation > _SURE / math.sqrt(len(rest)):
        return ""
    unsure = _SURE * deviation / float(made.norm())
    scaled = f", after clipping by a factor of {factor:.2g}" if unsure < factor < 1 - unsure else ""
    return (
        f"the rest is spread evenly over all elements: it may be noise of standard deviation {deviation:.3g}"
        f"{scaled} (LocalDpMod, Opacus); audit what it promises by canaries"
    )


def _repeated(
    transcript: Transcript,
    truth: Truth,
    index: int,
    start: dict[str, Tensor],
    update: Update,
    sent: Mapping[str, Tensor] | None = None,
    *,
    private: PrivateSteps | None = None,
    seed: int | None = None,
) -> dict[str, Tensor] | None:
    """Return the update that training from ``start``, repeated on the truth, gives.

    None where it can't be done or diverges. What it is a difference to is ``sent``, if that isn't ``start``. With a
    ``seed`` the noise of ``private`` is another than was recorded; None: it is as the update's own.
    """
    training, key, info = update.training, (index, update.client), transcript.task_info
    if training is None or not (key in truth.seen or key in truth.inputs):  # or of no update that the adversary reads
        return None
    inputs, targets = truth.seen.get(key) or (info.normalise(truth.inputs[key]), truth.labels[key])
    sizes = [p.examples for step in training.passes for p in step] or list(training.batch_sizes)
    try:
        passes = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
        if info.tokens is not None:
            passes = [_as_given(*one, causal=info.causal) for one in passes]
        if update.kind == "gradient":
            weights = [p.weight for step in training.passes for p in step] or [1.0]
            each = [_gradient(transcript, start, one, training.weights) for one in passes]
            return {n: torch.as_tensor(sum(w * g[n] for w, g in zip(weights, each, strict=True))) for n in each[0]}
        replayed = replay(
            transcript.module,
            transcript.loss,
            start,
            passes,
            training,
            batch_norm=info.batch_norm,
            dropout=info.dropout,
            # aligned, as torch wants
            randomness=[] if seed else [state.clone() for state in truth.randomness.get(key, ())],
            private=private or (update.sanitised.private if update.sanitised else None),
            seed=seed or 0,
        )
        return {name: replayed[name] - (sent or start)[name] for name in update.tensors}  # as the update was made
    except (BadInput, RuntimeError):  # of other sizes or shapes than these facts say, or it diverges
        return None


def _as_given(texts: Tensor, targets: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    own = as_given(texts).contiguous()
    return own, targets[:, : own.shape[1]].contiguous() if causal else targets


def _gradient(
    transcript: Transcript, start: dict[str, Tensor], batch: tuple[Tensor, Tensor], weights: str
) -> dict[str, Tensor]:
    kind = getattr(torch, weights)
    module = copy.deepcopy(transcript.module).to(kind)
    batch = batch[0].to(kind) if batch[0].is_floating_point() else batch[0], batch[1]
    module.load_state_dict(start)
    set_training_mode(module, transcript.task_info.batch_norm, dropout=transcript.task_info.dropout)
    with local_randomness(0):
        return gradient(module, transcript.loss, batch)
