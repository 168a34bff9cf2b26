"""Several rounds as one observation: the mean of a client's updates, in which each round's own noise averages out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from fedaudit.attacks.base import Progress, register
from fedaudit.attacks.findings import ImageFinding
from fedaudit.attacks.inversion.template import Composed, GradientInversion
from fedaudit.attacks.local_training import Way
from fedaudit.attacks.mean_update import mean_of
from fedaudit.transcript.observation import Message, Observation


@register
class Averaged(Composed):
    """Any method that optimises images, on the mean of all updates of a client.

    Noise that a client adds anew in every round falls with the square root of their number, and the examples stay: what
    no single update shows, the mean may. Our own; that repetition wears noise out is why budgets are composed (Dwork
    et al. 2006). Where every update is over the same examples, the mean stands as one of them; where the client goes
    through its examples in batches of one step each, as the gradient over all of them, of whole epochs. The model is
    the mean of those that were sent: how far they lie apart is in the notes, and blurs what is found. A number of a
    sparse update that wasn't sent is left out of its mean.

    Args:
        attack: the method: its name and settings.
    """

    name = "averaged"
    summary = "any method on the mean of a client's updates over rounds, in which noise averages out"
    paper = "this project"
    threat_model = GradientInversion.threat_model
    needs = ("what the method needs (attack)", "several updates of a client that holds the same examples throughout")
    default_scope = "client"
    over = "the mean of several updates"
    averages = True

    def check(self, observation: Observation) -> None:
        """Refuse what makes no mean, or what the method refuses."""
        super().check(observation)
        observation.need_messages()
        self.method.check(mean_of(observation)[0])

    def single(self, observation: Observation) -> Observation:
        """Return the mean."""
        return mean_of(observation)[0]

    def ways(self, observation: Observation, message: Message) -> Sequence[Way]:
        """Return those of the method."""
        return self.method.ways(observation, message)

    def _run(
        self, observation: Observation, generator: torch.Generator, device: str, progress: Progress
    ) -> ImageFinding:
        single, notes = mean_of(observation)
        found = self.method._run(single, generator, device, progress)
        return dataclasses.replace(found, notes=(*notes, *found.notes))
