"""Passive membership inference: the loss, and the norm of its gradient."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedaudit.attacks.base import ATTACK_CONFIG, Attack, Case, Progress, register
from fedaudit.attacks.records.target import (
    MembershipFinding,
    RecordsAttack,
    Target,
    above,
    held,
    public,
    upper_half,
    whole,
)
from fedaudit.transcript.observation import Observation
from fedaudit.utils.validation import Fraction

# (n, ...) examples as in a data set, and their labels, to (n,) float64, or (n, k) of k clients: the higher, the more
# like members.
Score = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class ScoringAttack(Attack):
    """What the passive attacks share: a score for each record, and a threshold.

    Args:
        false_positives: share of the public examples that may pass the threshold; None: the threshold is the median of
            the records' scores, because the adversary knows that half of them are members.
    """

    recovers = "membership"
    finds = MembershipFinding

    false_positives: Annotated[Fraction, Field(gt=0)] | None = None

    def check(self, observation: Observation) -> None:
        """Raise unless there are records, and what the threshold needs."""
        super().check(observation)
        whole(observation)
        if self.false_positives is not None:
            public(observation)

    @abstractmethod
    def scorer(
        self, observation: Observation, generator: torch.Generator, progress: Progress, /
    ) -> tuple[Score, tuple[str, ...]]:
        """Return what scores examples, and what the user should know of how it was got."""

    def decide(self, scores: Tensor) -> Tensor:
        """Return a mask of the scores that are taken for members', where no public examples set the threshold."""
        return upper_half(scores)

    def _run(
        self, observation: Observation, generator: torch.Generator, _device: str, progress: Progress
    ) -> MembershipFinding:
        score, notes = self.scorer(observation, generator, progress)
        records = held(observation)
        scores = score(records.inputs, records.labels)
        if self.false_positives is None:
            members = self.decide(scores)
        else:
            members = above(scores, score(*public(observation)), self.false_positives)
        return MembershipFinding(scores=scores, members=members, notes=notes)


@dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class MembershipAttack(ScoringAttack, RecordsAttack):
    """What those share that query one model."""

    @abstractmethod
    def score(
        self, observation: Observation, target: Target, generator: torch.Generator, progress: Progress, /
    ) -> Score:
        """Return what scores examples."""

    def scorer(
        self, observation: Observation, generator: torch.Generator, progress: Progress
    ) -> tuple[Score, tuple[str, ...]]:
        """Return what scores examples by the model that is queried, and the notes on that."""
        target = self.target(observation, generator)
        return self.score(observation, target, generator, progress), target.notes


@register
class LossThreshold(MembershipAttack):
    """A record that the model fits well is taken for a member (Yeom et al. 2018, Adversary 2).

    Departure: the paper's threshold is the mean loss on the training data, which an adversary of a federation isn't
    told; see ``false_positives``.
    """

    name = "loss-threshold"
    summary = "a record whose loss is small was trained on"
    paper = "Yeom et al. 2018 (Privacy risk in machine learning)"
    needs = ("records (threat.target_records)",)

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.asks_for_members

    def score(self, _observation: Observation, target: Target, *_: object) -> Score:
        """Return minus the loss."""
        return lambda inputs, labels: -target.losses(inputs, labels)


@register
class GradientNorm(MembershipAttack):
    """A record that would hardly move the model is taken for a member (Nasr et al. 2019, Section IV).

    Departure: the paper trains a network on the gradients, activations and outputs of known members and others; this is
    the one feature of the gradient that it finds to differ most, its norm, over all parameters, without training.
    """

    name = "gradient-norm"
    summary = "a record whose gradient is small was trained on"
    paper = "Nasr et al. 2019 (Comprehensive privacy analysis of deep learning)"
    needs = ("records (threat.target_records)",)

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.asks_for_members

    def score(self, _observation: Observation, target: Target, *_: object) -> Score:
        """Return minus the norm of the loss's gradient."""
        return lambda inputs, labels: -_norms(target, inputs, labels)


def _norms(target: Target, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return (n,) float64, the norm of the gradient of each example's loss over all parameters."""
    norms = [torch.stack([g.norm() for g in gradient.values()]).norm() for gradient in target.gradients(inputs, labels)]
    return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)
