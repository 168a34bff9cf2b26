"""What closed forms recover, as findings of the kind of its examples."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedaudit.attacks.findings import ImageFinding, RowFinding
from fedaudit.transcript.observation import Observation


class Recovered(NamedTuple):
    """Different examples of an update.

    Attributes:
        inputs: (r, numbers) as the model sees them.
        labels: (r,) classes.
        certified: (r,) which are vouched for without the truth.
        notes: what the user should know.
    """

    inputs: Tensor
    labels: Tensor
    certified: Tensor
    notes: tuple[str, ...]


def as_images(observation: Observation, found: Recovered, attack: str) -> ImageFinding:
    """Return as many images as the update has examples: copies follow where there are fewer, not certified again."""
    task_info, count = observation.task_info, observation.single().update.num_examples
    rows = torch.arange(count) % len(found.inputs)
    certified = torch.zeros(count, dtype=torch.bool)
    certified[: len(found.inputs)] = found.certified[:count]
    inputs = found.inputs.view(-1, *task_info.input_shape).nan_to_num()
    return ImageFinding(
        images=task_info.denormalise(inputs).float().clamp(0, 1)[rows],
        labels=found.labels[rows],
        label_source=attack,
        certified=certified,
        notes=found.notes,
    )


def as_rows(observation: Observation, found: Recovered, attack: str) -> RowFinding:
    """Return the rows that are certified, or all as a guess where none is; cells are as sure as their rows."""
    task_info = observation.task_info
    some = bool(found.certified.any())
    kept = found.certified if some else torch.ones_like(found.certified)
    rows = found.inputs[kept].nan_to_num()
    return RowFinding(
        rows=task_info.denormalise(rows.float()),
        labels=found.labels[kept],
        label_source=attack,
        certified=found.certified[kept],
        notes=found.notes,
    )
