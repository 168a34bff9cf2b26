"""Passive membership inference: the loss, the norm of its gradient, and shadow models."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
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
from fedaudit.models import initialise, set_training_mode
from fedaudit.simulation.local_training import local_randomness, train
from fedaudit.task.training import class_logits
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.validation import Count, Fraction, Positive

# (n, ...) examples as in a data set, and their labels, to (n,) float64: the higher, the more like members.
Score = Callable[[Tensor, Tensor], Tensor]

_TOP = 3  # sorted probabilities that the shadow attack uses


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
        """Return what scores examples, and what the user should know of how it was got.

        Raises:
            NotApplicable: it can't be made.
        """

    def decide(self, scores: Tensor) -> Tensor:
        """Return a mask (n,) of the records taken for members, where no public examples set the threshold."""
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
        """Return what scores examples.

        Raises:
            NotApplicable: it can't be made.
        """

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
    needs = ("records (threat.records)",)

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
    needs = ("records (threat.records)",)

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.asks_for_members

    def score(self, _observation: Observation, target: Target, *_: object) -> Score:
        """Return minus the norm of the loss's gradient."""
        return lambda inputs, labels: -_norms(target, inputs, labels)


@register
class ShadowModels(MembershipAttack):
    """A classifier of the model's outputs, learnt on shadow models whose training data are known (Shokri et al. 2017).

    Each shadow model has the federation's architecture and is trained on a random half of the public examples; an
    attack model learns to tell what it says of that half from what it says of the other. Departures: one attack model
    for all classes instead of one for each, because public examples are few: a logistic regression on the loss, the
    log-odds of the record's own class, the largest log-probabilities and the entropy. How long the federation trained
    on an example isn't known, so that the shadow models' own training is a setting.

    Args:
        shadows: models.
        epochs: of each one's training, by SGD.
        learning_rate: of that.
        batch_size: of that.
    """

    name = "shadow-models"
    summary = "an attack model learns on shadow models what members look like"
    paper = "Shokri et al. 2017 (Membership inference attacks against machine learning models)"
    needs = (
        "a classifier",
        "records (threat.records)",
        "public data (threat.knows_public_data, threat.public_examples)",
    )

    shadows: Annotated[Count, Field(le=1000)] = 8
    epochs: Count = 50
    learning_rate: Positive = 0.1
    batch_size: Count = 16

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.asks_for_members and case.threat.public_examples is not None and case.num_classes is not None

    def check(self, observation: Observation) -> None:
        """Raise unless there are public examples, and a classifier."""
        super().check(observation)
        inputs, _ = public(observation)
        if observation.task_info.num_classes is None:
            raise NotApplicable(f"{self.name} is for classifiers, and this model is a regression; use loss-threshold")
        if len(inputs) < 4:
            raise NotApplicable(f"{self.name} halves {len(inputs)} public examples; raise threat.public_examples to 4")

    def decide(self, scores: Tensor) -> Tensor:
        """Return what the attack model takes for members."""
        return scores > 0

    def score(self, observation: Observation, target: Target, generator: torch.Generator, progress: Progress) -> Score:
        """Train the shadow models and the attack model; return the attack model's log-odds of a member.

        Raises:
            NotApplicable: the architecture can't be trained anew, or the training diverged.
        """
        inputs, labels = public(observation)
        features, inside = [], []
        for done in range(self.shadows):
            chosen = torch.randperm(len(inputs), generator=generator)[: len(inputs) // 2]
            shadow = self._shadow(observation, inputs[chosen], labels[chosen], generator)
            features.append(_features(shadow, inputs, labels))
            inside.append(torch.zeros(len(inputs), dtype=torch.bool).index_fill(0, chosen, True))
            progress(done + 1, self.shadows)
        classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        classifier.fit(torch.cat(features).numpy(), torch.cat(inside).numpy())

        def score(inputs: Tensor, labels: Tensor) -> Tensor:
            return torch.as_tensor(classifier.decision_function(_features(target, inputs, labels).numpy()))

        return score

    def _shadow(self, observation: Observation, inputs: Tensor, labels: Tensor, generator: torch.Generator) -> Target:
        module = copy.deepcopy(observation.module)
        task_info = observation.task_info
        try:
            initialise(module, "default", generator)
            set_training_mode(module, task_info.batch_norm, dropout=task_info.dropout)
            batches = (
                (task_info.normalise(inputs[rows]), labels[rows])
                for _ in range(self.epochs)
                for rows in torch.randperm(len(inputs), generator=generator).split(self.batch_size)
            )
            with local_randomness(int(torch.randint(2**31, (1,), generator=generator))):
                train(module, observation.loss, batches, learning_rate=self.learning_rate)
        except BadInput as error:
            raise NotApplicable(f"{self.name} can't train a shadow model: {error}") from None
        return Target(module.eval(), task_info, observation.loss)


def _features(target: Target, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return (n, d) float64: what a classifier says of each example."""
    logs = class_logits(target.outputs(inputs)).log_softmax(dim=1)
    own = logs.gather(1, labels[:, None])
    others = logs.scatter(1, labels[:, None], -torch.inf).logsumexp(dim=1, keepdim=True)
    entropy = -(logs.exp() * logs).sum(dim=1, keepdim=True)
    top = logs.sort(dim=1, descending=True).values[:, :_TOP]
    return torch.cat([-own, own - others, top, entropy], dim=1).clamp(-1e3, 1e3)


def _norms(target: Target, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return (n,) float64, the norm of the gradient of each example's loss over all parameters."""
    norms = [torch.stack([g.norm() for g in gradient.values()]).norm() for gradient in target.gradients(inputs, labels)]
    return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)
