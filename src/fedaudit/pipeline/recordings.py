"""Recordings of real federations, ready to be attacked: the user's module, the truth where it was captured, replay."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedaudit.modalities.tokens import as_given
from fedaudit.models import set_training_mode
from fedaudit.pipeline.explanations import Difference, Explanation, named
from fedaudit.results import DataRecord, ModelRecord
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.local_training import draws_at_random, gradient, local_randomness
from fedaudit.simulation.protocols import protocol_of
from fedaudit.simulation.protocols.base import AsScenario
from fedaudit.simulation.replay import relative_error, replay
from fedaudit.simulation.simulator import Recording
from fedaudit.task.training import TOLD, UNMODELLED, UNREPEATABLE
from fedaudit.transcript.files import write_replay
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth, truth_file
from fedaudit.transcript.update import AT_HOME, BEYOND_ROUNDING, CONTRADICTED, PrivateSteps, Replay, Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.progress import Display
from fedaudit.utils.seeds import generator

_CLOSE = 1e-3  # relative error above which it is asked what rounding explains of it
_ROUNDINGS = 3  # how often
_POINTS = 20_000_000  # numbers of weights along a training that are kept to look for averages of them
_STEPS = 200  # of such a training, at most
_LESS_NOISE = 4  # times as little as noise makes at most: then less was added than was declared
_DRAWS = 3  # times as far from itself as two replays are where the model draws at random
_UPDATES = 4  # of a simulation that are replayed, the first ones


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
    own = protocol_of(transcript).recorded(transcript) or _of_updates(transcript)
    scenario = scenario_from(
        {
            "name": transcript.name,
            "data": {"name": "custom"},
            **own.scenario,
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
    return scenario, data, own.model


def _of_updates(transcript: Transcript) -> AsScenario:
    """Return a recording of rounds of updates as a scenario says it."""
    info = transcript.task_info
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
    network = {
        "name": "custom",
        "initialisation": "given",
        "batch_norm": info.batch_norm,
        "dropout": info.dropout,
        "loss": info.loss,
    }
    norms = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in transcript.module.modules())
    drops = any(isinstance(part, nn.modules.dropout._DropoutNd) for part in transcript.module.modules())
    model = ModelRecord(
        name=transcript.module._get_name(),
        parameters=sum(p.numel() for p in transcript.module.parameters()),
        initialisation="given",
        batch_norm=info.batch_norm if norms else "none",
        trained="as it travelled in the federation",
        dropout=("on" if info.dropout else "off") if drops else "none",
    )
    return AsScenario({"model": network, "federations": [federation], "attacks": ["agic"]}, model)


def with_known_victims(transcript: Transcript, truth: Truth) -> Transcript:
    """Return recorded trees with those victims only whose rows the truth has, and a note on the others."""
    clients = transcript.sent.by_client()
    if clients is None or transcript.recording is None:
        return transcript
    victims = [client for client in clients if (0, client) in truth.inputs]
    notes, lost = transcript.notes, len(clients) - len(victims)
    if lost:
        notes += (f"{lost} of {len(clients)} clients weren't attacked: their rows weren't captured",)
    return dataclasses.replace(transcript, sent=transcript.sent.of(*victims), notes=notes)


def with_labels(transcript: Transcript, truth: Truth) -> Transcript:
    """Return a recording with the labels that a threat model grants, as far as the truth has them."""

    def granted(update: Update, index: int) -> Update:
        return dataclasses.replace(update, labels=truth.labels.get((index, update.client)))

    rounds = [dataclasses.replace(r, updates=[granted(u, r.index) for u in r.updates]) for r in transcript.rounds]
    return dataclasses.replace(transcript, rounds=rounds)


def check_replay(transcript: Transcript, truth: Truth, folder: Path | None, display: Display) -> Transcript:
    """Train every update again from what was recorded, on the truth, and return the transcript with the errors.

    ``folder``, the recording's, has what an earlier check found, and keeps the rest; None keeps nothing.
    """
    replays = dict(transcript.replays)
    if (errors := protocol_of(transcript).replay_errors(transcript, truth)) is not None:
        replays |= {key: Replay(error) for key, error in errors.items()}
        return dataclasses.replace(transcript, replays=replays)
    todo = [
        (r.index, r.sent_to(u.client), u)
        for r in transcript.rounds
        for u in r.updates
        if (r.index, u.client) in truth.seen and (r.index, u.client) not in replays and _repeatable(u)
    ]
    report = display.stage(f"replay of {len(todo)} updates", len(todo)) if todo else None
    long = {(r.index, u.client): _length(u) for r in transcript.rounds for u in r.updates}
    for done, (index, start, update) in enumerate(todo, start=1):
        others = [length for key, length in long.items() if key != (index, update.client)]
        replays[index, update.client] = replay_update(transcript, truth, index, start, update, others)
        if report is not None:
            report(done)
    if folder is not None and todo and transcript.recording:
        write_replay(folder, transcript.recording, replays)
    return dataclasses.replace(transcript, replays=replays)


def facts_of(transcript: Transcript) -> Literal["verified", "contradicted", "unverified"]:
    """Return whether what is recorded of local training gives the updates that travelled, as far as it was replayed."""
    replays = transcript.replays
    if any(replay.contradicts for replay in replays.values()):
        return "contradicted"
    sent = transcript.sent.sent_by_victims(transcript.rounds)
    verified = sent and all(key in replays and replays[key].verifies for key in sent)
    return "verified" if verified else "unverified"


def _length(update: Update) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in update.tensors.values()))


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


def _how_far(replay: Replay) -> tuple[bool, bool, float]:
    return replay.contradicts, not replay.verifies, replay.error


def replay_update(
    transcript: Transcript,
    truth: Truth,
    index: int,
    start: dict[str, Tensor],
    update: Update,
    lengths: Sequence[float] = (),
) -> Replay:
    """Return how close training, repeated on the truth, comes to one update, and what explains that it comes no closer.

    Where it isn't close, it is repeated from weights that are moved by a rounding: many steps at a high rate make much
    of the order in which a processor adds, and the facts aren't to blame for that. Where that isn't why, what clients
    of a recording ordinarily do to their updates is tried.

    Args:
        truth: on which it is repeated: what the model saw, where that was recorded.
        lengths: norms of the other updates.

    Returns:
        an error of 0 where it gives the same bits, infinity where it can't be done under these facts or diverges.
    """
    own = _at_home(truth, (index, update.client), start)
    home, begin = _home_in_words(own, start), start | own
    again = functools.partial(_repeated, transcript, truth, index, update=update, sent=start)
    seen = _unrepeatable(transcript, update)
    moved = again(begin)
    if moved is None:
        return Replay(math.inf, 0.0, home, seen, math.inf)
    nothing = {name: torch.zeros_like(value) for name, value in update.tensors.items()}
    error = relative_error(update.tensors, moved, nothing)
    if error <= _CLOSE:
        return Replay(error, 0.0, home)
    if error < math.inf and update.sanitised is not None and (private := update.sanitised.private) and private.noise:
        return _beside_noise(functools.partial(again, begin), update.tensors, home, private)
    if error < math.inf and transcript.recording and (declared := _as_declared(update, moved, home)) is not None:
        return declared
    other = Difference(update.tensors, moved, start, weights=update.kind == "weights")
    if transcript.recording and (found := other.by_precision(error)):
        return Replay(error, 0.0, home, *found)
    rounding = 0.0
    for seed in range(_ROUNDINGS) if error < math.inf and any(value.any() for value in moved.values()) else ():
        rough = again(_rounded(begin, generator(seed, "rounding"), update))
        rounding = math.inf if rough is None else max(rounding, relative_error(moved, rough, nothing))
    plain = Replay(error, rounding, home)
    if not plain.contradicts or not transcript.recording:
        return plain
    points: list[dict[str, Tensor]] = []
    steps = update.training.local_steps if update.training else 1
    few = update.kind == "weights" and steps <= _STEPS and steps * len(other.sent) <= _POINTS
    once_more = again(begin, points=points if few else None)
    as_seen = not any(TOLD in note for note in transcript.notes) and not transcript.task_info.summed
    as_seen &= transcript.task_info.loss != "custom"
    clip = [update.sanitised.clip] if update.sanitised and update.sanitised.clip else []
    found = other.by_change(points, [*lengths, *clip], seen=as_seen) or other.by_noise(seen=as_seen)
    if found is None and seen:
        found = Explanation(seen, math.inf)
    drawn = 0.0 if once_more is None else relative_error(moved, once_more, nothing)
    if found is None and error <= _DRAWS * drawn:
        found = Explanation("the model draws at random by another generator than torch's, each time anew", math.inf)
    return plain if found is None else Replay(error, rounding, home, *found)


def _at_home(truth: Truth, key: tuple[int, int], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the client trained from and wasn't sent."""
    own = truth.starts.get(key, {})
    fit = {name: own[name] for name, value in start.items() if name in own and own[name].shape == value.shape}
    return {name: value for name, value in fit.items() if not start[name].equal(value.to(start[name].dtype))}


def _home_in_words(own: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> str:
    if not own:
        return ""
    for kind in (torch.float16, torch.bfloat16):
        if all(value.equal(start[name].to(kind).to(value.dtype)) for name, value in own.items()):
            return f"clients round what they receive to {str(kind).removeprefix('torch.')}"
    return f"{named([*own])} {'stays' if len(own) == 1 else 'stay'} {AT_HOME}, and the replay has its own"


def _unrepeatable(transcript: Transcript, update: Update) -> str:
    """Return what was seen of a training that can't be repeated, where nobody says that the facts cover it."""
    training = update.training
    if training is None or training.proximal_mu or any(TOLD in note for note in transcript.notes):
        return ""
    seen = [text for name, text in UNMODELLED.items() if name in training.unmodelled and name != "loss"]
    return "; ".join([*seen, *(note for note in transcript.notes if UNREPEATABLE in note)])


def _beside_noise(
    again: Callable[..., dict[str, Tensor] | None], sent: Mapping[str, Tensor], home: str, private: PrivateSteps
) -> Replay:
    """Return how far an update is from its training without noise, and whether the declared noise takes it there.

    For noise that isn't known: drawn on a GPU, or by a generator of its own. The update and trainings with other noise
    of that size are draws of one distribution, about as far from the training without any; the fewer numbers, the more
    these distances differ.
    """
    nothing, most = {name: torch.zeros_like(value) for name, value in sent.items()}, 0.0
    plain = again(private=dataclasses.replace(private, noise=0.0))
    for seed in range(1, _ROUNDINGS + 1):
        if plain is None or (drawn := again(private=private, seed=seed)) is None:
            return Replay(math.inf)
        most = max(most, relative_error(sent, {n: sent[n] + drawn[n] - plain[n] for n in sent}, nothing))
    assert plain is not None
    error = relative_error(sent, plain, nothing)
    return _of_noise(error, most, sent, home, "its DP-SGD declares") or Replay(error, 0.0, home)


def _of_noise(error: float, size: float, sent: Mapping[str, Tensor], home: str, who: str) -> Replay | None:
    """Return the replay of an update that declared noise takes about ``size`` away; None: it isn't as far."""
    most = size * (1.25 + 4 / math.sqrt(sum(value.numel() for value in sent.values())))
    if not most / _LESS_NOISE <= error <= most:
        return None
    return Replay(error, most / BEYOND_ROUNDING, home, f"noise of the size that {who}", most)


def _as_declared(update: Update, moved: Mapping[str, Tensor], home: str) -> Replay | None:
    """Return how far an update is from its training clipped as declared, where the declared noise takes it there."""
    done, length = update.sanitised, _length(update)
    if done is None or done.private or not done.noise or not length:
        return None
    own = math.sqrt(sum(float(value.double().square().sum()) for value in moved.values()))
    shrink = min(1.0, (done.clip or own) / own) if own else 1.0
    apart = sum(float((v.double() - shrink * moved[n].double()).square().sum()) for n, v in update.tensors.items())
    noises = dict(done.noises)
    size = math.sqrt(sum(noises.get(name, done.noise) ** 2 * v.numel() for name, v in update.tensors.items()))
    return _of_noise(math.sqrt(apart) / length, size / length, update.tensors, home, f"{done.name} declares")


def _rounded(start: Mapping[str, Tensor], dice: torch.Generator, update: Update) -> dict[str, Tensor]:
    """Return weights that are each moved by one unit in the last place, up or down or not at all."""
    own = torch.finfo(getattr(torch, update.training.weights) if update.training else torch.float32).eps

    def moved(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        ways = torch.randint(-1, 2, value.shape, generator=dice)
        return value * (1 + max(own, torch.finfo(value.dtype).eps) * ways.to(value.dtype))

    return {name: moved(value) for name, value in start.items()}


def facts_in_words(transcript: Transcript) -> str:
    """Return in a sentence what the replay says of a recording's facts, and what explains a difference."""
    replay, facts = max(transcript.replays.values(), default=None, key=_how_far), facts_of(transcript)
    if replay is None:
        return "The facts are unverified: no truth was captured to repeat the training on."
    error = "" if replay.error == math.inf else f" (relative error {replay.error:.2g})"
    other = f"repeated, the training gives other updates than those that travelled{error}"
    home = next((one.home for one in transcript.replays.values() if one.home), "")
    if facts == "contradicted":
        tried = ", and nothing ordinary that was tried explains it" * protocol_of(transcript).updates
        return f"The facts don’t explain the updates: {other}{tried}."
    if replay.explanation and facts == "verified":
        alone = f"{replay.explanation}, which alone explains a difference of {replay.error:.2g}"
        return f"The facts hold: {'; '.join([home] * bool(home) + [alone])}."
    if replay.explanation:
        return f"The facts are unverified: {'; '.join([home] * bool(home) + [other, replay.explanation])}."
    if facts == "unverified":
        much = "this training makes so much of rounding that a replay tells nothing"
        why = much if replay.error > CONTRADICTED else "the training of the other updates can’t be repeated"
        return f"The facts are unverified: {why}."
    rounding = ", and rounding explains it: this training makes much of it" * (replay.error > CONTRADICTED)
    holds = f"The facts hold: {home}; the" if home else "The facts are verified: the"
    return f"{holds} largest relative error is {replay.error:.2g}{rounding}."


def why_contradicted(recording: Recording, replay: Replay) -> str:
    """Return in words why repeated training gives other updates than those that travelled, and what to do.

    What explains them, or was seen of the training and can't be repeated, says why; else the update that is farthest
    off does, where it looks like another rate.
    """
    transcript, truth = recording.transcript, recording.truth
    begin = (
        "repeated on the true examples, the recorded training gives other updates than those that travelled "
        f"(relative error {replay.error:.2g})"
    )
    if contradicts := protocol_of(transcript).contradicts:
        return f"{begin}: {contradicts}"
    if replay.explanation and replay.left < math.inf:
        canaries = "; audit what the noise promises by canaries" * ("noise" in replay.explanation)
        return (
            f"{begin}: {replay.explanation}. Known examples aren't sent so, and what is found in theirs tells nothing "
            f"of these: record once without it{canaries}"
        )
    updates = [(r.index, r.sent_to(u.client), u) for r in transcript.rounds for u in r.updates]
    none = Replay(0.0)
    replays = {(index, u.client): transcript.replays.get((index, u.client), none) for index, _, u in updates}
    off = [u.training for index, _, u in updates if not replays[index, u.client].reproduces and u.training]
    seen = [name for name in UNMODELLED if any(name in training.unmodelled for training in off)]
    if seen:
        return f"{begin}: {'; '.join(UNMODELLED[name] for name in seen)}. {' '.join(_REMEDIES[name] for name in seen)}"
    if replay.explanation:
        return f"{begin}: {replay.explanation}"
    for index, start, update in sorted(updates, key=lambda one: _how_far(replays[one[0], one[2].client]))[-1:]:
        moved = _repeated(
            transcript, truth, index, start | _at_home(truth, (index, update.client), start), update, start
        )
        if moved is None:
            continue
        if looks := Difference(update.tensors, moved, start, weights=update.kind == "weights").looks_like():
            return f"{begin}; {looks}. Record once without that: where it is reproduced, nothing else is wrong"
    return (
        f"{begin}, and neither the precision of messages, clipping, noise, averages of weights nor layers that stay "
        "with clients explain it: what is recorded (learning rate, momentum, steps, BatchNorm) is wrong"
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
    "loss": "Give the loss: --loss package.module:function, or loss=… in Python.",
    "no-gradient": "Describe the model by a torch.nn.Module.",
    "nothing-seen": "Train in the process and thread that record.",
}


def _repeated(
    transcript: Transcript,
    truth: Truth,
    index: int,
    start: dict[str, Tensor],
    update: Update,
    sent: Mapping[str, Tensor],
    points: list[dict[str, Tensor]] | None = None,
    private: PrivateSteps | None = None,
    seed: int | None = None,
) -> dict[str, Tensor] | None:
    """Return the update that training from ``start``, repeated on the truth, gives, as a difference to ``sent``.

    None where it can't be done or diverges. ``points`` takes the parameters after each step. With a ``seed`` the noise
    of ``private`` is another than was recorded; None: it is as the update's own.
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
            points=points,
        )
        return {name: replayed[name] - sent[name] for name in update.tensors}  # as the update was made
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
