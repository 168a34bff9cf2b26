"""Whether anybody like a record was trained on: membership for who knows records only roughly."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedaudit.attacks.base import ATTACK_CONFIG, Case, Progress, register
from fedaudit.attacks.records.membership import MembershipAttack, Score
from fedaudit.attacks.records.target import Target, held
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import Count, Fraction, Share


@register
@dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class RangeMembership(MembershipAttack):
    """Whether anybody like a record was trained on, by the mean loss around it (Tao and Shokri 2025, RaMIA).

    The adversary doesn't know the record, but something like it: one that differs from it, as a note of somebody or an
    older picture does. It asks the model about several such ones. Of minus their losses the mean of the largest is the
    score, for a range holds many who weren't trained on. Of a table each column may differ, a cell of which is another
    record's of the same class; of images, volumes and signals each number, by noise as wide as numbers differ among the
    records. Departures: the paper scores each sample by RMIA, or LiRA, with shadow models, and here it is the loss.

    Args:
        differs: by how much: of a table which share of columns, of others the noise, in standard deviations.
        samples: that are asked about, of each record.
        kept: share of them, the most like members, of which the mean is taken.
    """

    name = "range-membership"
    summary = "whether anybody like a record was trained on, who is known only roughly"
    paper = "Tao and Shokri 2025 (Range membership inference attacks)"
    needs = ("records (threat.target_records)",)

    differs: Annotated[Fraction, Field(gt=0)] = 0.2
    samples: Annotated[Count, Field(le=1000)] = 15
    kept: Annotated[Share, Field(gt=0)] = 0.5

    @classmethod
    def fits(cls, case: Case) -> bool:  # noqa: ARG003 (it is asked for by its name)
        return False

    def check(self, observation: Observation) -> None:
        """Raise unless records are numbers or cells, which can differ a little."""
        super().check(observation)
        if not held(observation).inputs.is_floating_point():
            raise NotApplicable(f"{self.name} asks about examples like a record, and of texts it knows none; use min-k")

    def score(self, observation: Observation, target: Target, generator: torch.Generator, _: Progress) -> Score:
        """Return the mean of the largest minus losses in each record's range, which the record itself needn't be in."""
        records, columns = held(observation), observation.task_info.columns
        places = [list(column.positions) for column in columns]
        others = torch.cat([records.inputs, records.public_inputs])
        classes = torch.cat([records.labels, records.public_labels])
        width = others.double().std(dim=0).to(others)

        def near(inputs: Tensor, labels: Tensor) -> Tensor:
            if not places:
                noise = torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)
                return inputs + self.differs * width * noise
            made = inputs.clone()
            donors = torch.stack([_alike(label, classes, generator) for label in labels])
            for place in places:
                changed = torch.rand(len(inputs), generator=generator) < self.differs
                made[changed.nonzero(), torch.tensor(place)] = others[donors[changed]][:, place]
            return made

        def score(inputs: Tensor, labels: Tensor) -> Tensor:
            known = near(inputs, labels)  # what the adversary has in the record's place
            fits = torch.stack([-target.losses(near(known, labels), labels) for _ in range(self.samples)])
            return fits.topk(math.ceil(self.kept * self.samples), dim=0).values.mean(dim=0)

        return score


def _alike(label: Tensor, classes: Tensor, generator: torch.Generator) -> Tensor:
    """Return which example, drawn at random, has the same label; of numbers, or of none alike, any of all."""
    same = torch.arange(len(classes))
    if not classes.is_floating_point() and classes.ndim == 1:
        same = (classes == label).nonzero()[:, 0]
    return same[torch.randint(len(same), (), generator=generator)]
