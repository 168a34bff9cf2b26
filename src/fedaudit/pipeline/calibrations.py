"""Attacks that fit their victims: each is calibrated on own images first, once for all updates of the same facts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from fedaudit.attacks import Attack
from fedaudit.attacks.inversion.calibration import LEARNED, Calibration, CalibrationFinding, inverted
from fedaudit.attacks.inversion.own_updates import distinct, likely_labels
from fedaudit.data import load_dataset
from fedaudit.modalities import ExampleKind
from fedaudit.pipeline.trials import Means, Trial, run_trials
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.fingerprint import fingerprint
from fedaudit.utils.seeds import generator

_MADE_UP = 96  # examples, as many as there are photographs, about
_VALUES = 2**25  # of these together, at most
_SIZES = (8, 224)  # of an image's side, at which they can be cut well


@dataclass(frozen=True)
class OwnImages:
    """Images that the adversary has, none of them a victim's.

    Attributes:
        inputs: (m, C, H, W) in [0, 1], or examples of another kind.
        labels: (m,); empty where they have none that mean anything to the model.
        source: whose they are, in the plural.
    """

    inputs: Tensor
    labels: Tensor
    source: str

    def labels_for(self, observation: Observation) -> Tensor:
        """Return (m,) their labels; images without labels get such as the model of one update takes them for."""
        if len(self.labels):
            return self.labels
        return likely_labels(observation, self.inputs, generator(0, "labels of own images"))


def own_images(observation: Observation, *, held_out: bool = False) -> OwnImages:
    """Return the images that an adversary tries its attacks on: its public ones if enough, else fedaudit's photographs.

    The photographs are mirrored, so that none is a victim's even where clients hold the same ones. Volumes and signals
    are made up: drawn shapes and curves. ``held_out`` gives every second one, which no attack is calibrated on.
    NotApplicable: the examples are no images.
    """
    chosen = slice(int(held_out), None, 2)
    records, info = observation.records, observation.task_info
    if records is not None and len(records.public_inputs[chosen]) >= distinct(observation.split()[0]):
        labels = records.public_labels if info.num_classes is None else records.public_labels.flatten()
        return OwnImages(records.public_inputs[chosen], labels[chosen], "public examples")
    empty = torch.zeros(0, dtype=torch.int64)
    made_up = _made_up(info.example_kind, info.input_shape, info.mean, info.std)
    if made_up is not None:
        return OwnImages(made_up[chosen], empty, f"made-up {info.example_kind.plural}")
    if len(info.input_shape) != 3:
        raise NotApplicable("there are no images of one's own for examples of this kind")
    return OwnImages(_photographs(tuple(observation.task_info.input_shape))[chosen], empty, "fedaudit's photographs")


@cache
def _made_up(
    kind: ExampleKind, shape: tuple[int, ...], mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor | None:
    """Return made-up examples of a kind, where it has such; fewer where they are large."""
    count = min(_MADE_UP, max(16, _VALUES // math.prod(shape)))
    return kind.drawn_up(shape, count, torch.tensor(mean), torch.tensor(std))


@cache
def _photographs(shape: tuple[int, ...]) -> Tensor:
    """Return (m, C, H, W) photographs of that shape."""
    channels, height, width = shape
    side = min(max(height, width, _SIZES[0]), _SIZES[1])
    found = load_dataset("photos", image_size=side).train.inputs.flip(-1)
    if (height, width) != (side, side):
        found = nn.functional.interpolate(found, (height, width), mode="bilinear", antialias=True).clamp(0, 1)
    if channels == 1:
        return found.mean(dim=1, keepdim=True)
    return found[:, [i % found.shape[1] for i in range(channels)]].contiguous()


def calibrated(trials: Sequence[Trial], means: Means) -> list[Trial]:
    """Return the trials; those of attacks that are to be calibrated have the settings that fit.

    One calibration, on the first of them, serves all updates of the same facts, and is kept like any trial. Where
    nobody can repeat the clients' training with other examples, the attack stays as it is, and the reason is noted.
    """
    groups: dict[str, list[int]] = {}
    targets: dict[str, tuple[Attack, Observation]] = {}
    for i, trial in enumerate(trials):
        if trial.outcome is None and (target := trial.attack.calibration(trial.observation)) is not None:
            key = fingerprint(trial.attack.written(), trial.attack.inverts, facts(target[1]))
            groups.setdefault(key, []).append(i)
            targets.setdefault(key, target)
    planned = []
    for key, rows in groups.items():
        (attack, observation), first = targets[key], trials[rows[0]]
        own = own_images(observation)
        made = Calibration(
            attack=attack,
            inputs=own.inputs,
            labels=own.labels,
            updates=len(rows),
            source=own.source,
            learn=first.attack.inverts,
        )
        reason: NotApplicable | None = None
        try:
            made.check(observation)
        except NotApplicable as error:
            reason = error
        planned.append(Trial(made, observation, first.seed, first.device, reason))
    found = list(trials)
    if not planned:
        return found
    half = None if means.deadline is None else (time.time() + means.deadline) / 2  # attacks need the other half
    made_first = run_trials(planned, replace(means, deadline=half), f"{len(planned)} calibrations")
    for rows, done in zip(groups.values(), made_first, strict=True):
        for i in rows:
            attack = trials[i].attack
            if isinstance(done.outcome, CalibrationFinding):
                settings, failed = done.outcome.settings, done.outcome.failed
                if failed and attack.settings().get("start") == LEARNED:  # without an inverter it is nothing
                    found[i] = replace(trials[i], outcome=NotApplicable(failed))
                    continue
                fitted = attack.with_settings(settings, **inverted(done.outcome.inverter))
                found[i] = replace(trials[i], attack=fitted, calibration=done.outcome)
            else:
                found[i] = replace(trials[i], attack=attack.with_settings({}), calibration=str(done.outcome))
    return found


def facts(observation: Observation) -> tuple[object, ...]:
    """Return all that decides how hard an update is to invert, but for its examples: whose it is has no part in it."""
    message = observation.single()
    update = message.update
    return (
        observation.federation,
        message.weights,
        update.kind,
        update.num_examples,
        update.training,
        update.sanitised,
        update.labels is None,
        len(update.members),
        sorted(update.tensors),
    )
