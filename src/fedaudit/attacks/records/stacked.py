"""Scores of several membership attacks, combined by a classifier that learns on shadow models only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from fedaudit.attacks.base import Case, Progress, register
from fedaudit.attacks.findings import Finding
from fedaudit.attacks.records.likelihood import RMIA, LiRA
from fedaudit.attacks.records.membership import LossThreshold, Score
from fedaudit.attacks.records.shadows import ShadowAttack, ShadowFinding, examples_in
from fedaudit.attacks.records.target import Target, classified, held, public
from fedaudit.transcript.observation import Observation
from fedaudit.utils.validation import Count

_MOST = 1e3  # of a score


@dataclass(frozen=True)
class _Played(Target):
    """A shadow model in the place of the model that is asked: what it says of each example is known."""

    said: Mapping[tuple[bytes, bytes], Tensor] = field(default_factory=dict)

    def answers(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return torch.stack([self.said[one] for one in examples_in(inputs, labels)]).double()

    def losses(self, inputs: Tensor, labels: Tensor) -> Tensor:
        answers = self.answers(inputs, labels)
        return self.losses_of(answers, labels) if classified(self.task_info) else answers[:, 0]


@register
class Stacked(ShadowAttack):
    """What `loss-threshold`, `lira` and `rmia` say together, weighed by a classifier (stacking, Wolpert 1992).

    Each shadow model plays the model that is asked, once: the three attacks score the public examples by it, with all
    other shadow models but its counterpart, which was trained on the other half. A logistic regression learns to tell
    by these scores which examples it was trained on, and is then applied to the records' scores. So nothing of the
    records or of the federation's model is learnt from. Red teams combine signals so (NIST's genomics exercise of 2025,
    arXiv 2604.12737); the choice of scores and of the classifier is ours, not theirs.

    Args:
        shadows: models, six at least; attacks with the same ones share them.
        epochs: of each one's training, by SGD.
        learning_rate: of that.
        batch_size: of that.
    """

    name = "stacked"
    summary = "loss-threshold, lira and rmia, weighed by a classifier that learns on shadow models"
    paper = "Wolpert 1992 (Stacked generalization), of membership scores"

    halved: ClassVar[int] = 8  # a half of fewer pairs is too few to play with

    shadows: Annotated[Count, Field(ge=6, le=1000)] = 16

    @classmethod
    def fits(cls, case: Case) -> bool:  # noqa: ARG003
        return False

    def decide(self, scores: Tensor) -> Tensor:
        """Return what the classifier takes for members."""
        return scores > 0

    def score(self, observation: Observation, target: Target, generator: torch.Generator, progress: Progress) -> Score:
        """Return the classifier's log-odds of a member.

        Raises:
            NotApplicable: as :meth:`ShadowAttack.models`.
        """
        known = self.shadow_findings(observation, generator, progress)
        inputs, labels = public(observation)
        records = held(observation)
        marks = examples_in(torch.cat([records.inputs, inputs]), torch.cat([records.labels, labels]))
        features, inside = [], []
        for i, found in enumerate(known):
            others = [other for j, other in enumerate(known) if j // 2 != i // 2]
            said = dict(zip(marks, found.answers, strict=True))
            played = _Played(target.module, target.task_info, target.loss, said=said)
            features.append(_scores(others, observation, played, inputs, labels))
            inside.append(found.inside[len(records) :])
        classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        classifier.fit(torch.cat(features).numpy(), torch.cat(inside).numpy())

        def score(inputs: Tensor, labels: Tensor) -> Tensor:
            own = _scores(known, observation, target, inputs, labels)
            return torch.as_tensor(classifier.decision_function(own.numpy()))

        return score


def _scores(
    known: Sequence[ShadowFinding], observation: Observation, target: Target, inputs: Tensor, labels: Tensor
) -> Tensor:
    """Return (n, 3) float64: what each attack says of the examples by ``target``, with these shadow models."""
    unused = torch.Generator()  # the shadow models are there
    found: Sequence[Finding] = known
    scores = [
        attack.score(observation, target, unused, lambda *_: None)(inputs, labels)
        for attack in (LossThreshold(), LiRA().prepared(found), RMIA().prepared(found))
    ]
    return torch.stack(scores, dim=1).nan_to_num(nan=-_MOST).clamp(-_MOST, _MOST)
