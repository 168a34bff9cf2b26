"""Membership by likelihood ratios: what the model says of a record against what shadow models say of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedaudit.attacks.base import Progress, register
from fedaudit.attacks.records.membership import Score
from fedaudit.attacks.records.shadows import ShadowAttack, chances, confidence
from fedaudit.attacks.records.target import Target, classified
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import Positive, Share

_ENOUGH = 64  # confidences of an example, from which its own variance is better than that of all (Carlini et al.)


@register
class LiRA(ShadowAttack):
    """The likelihood ratio attack (Carlini et al. 2022, Algorithm 1).

    Of each record stands φ = log(p / (1 − p)), p being the probability of its label. Shadow models that weren't trained
    on the record give φ a mean μ and a deviation σ. Offline, the paper's score is the probability Φ((φ − μ) / σ) of a
    smaller φ where the record wasn't trained on; here it is the argument of Φ, which orders records alike and doesn't
    round to 1. Where an example has no class, but several labels, numbers or a mask, φ is minus its loss. Online, half
    of the shadow models are trained on each record, and the score is the logarithm of the ratio of the two normal
    densities. An example with fewer than 64 confidences has the variance of all examples about their own means, as the
    paper advises. Departures: the authors' code takes the variance about one mean of all examples; the model is asked
    of each record as it is, and not of its mirrored and shifted copies, on which clients here don't train; the shadow
    models are trained on public examples, which are fewer than the clients'.

    Args:
        shadows: models; attacks with the same ones share them.
        epochs: of each one's training, by SGD.
        learning_rate: of that.
        batch_size: of that.
        online: the shadow models are trained on the records, too, each on half of them.
    """

    name = "lira"
    summary = "a record of which the model is surer than models that didn't train on it"
    paper = "Carlini et al. 2022 (Membership inference attacks from first principles)"

    online: bool = False

    def check(self, observation: Observation) -> None:
        """Raise unless there are public examples, and shadow models enough."""
        super().check(observation)
        if self.online and self.shadows < 4:
            raise NotApplicable(
                f"{self.name} online needs two shadow models with each record and two without it; set "
                f"attacks.{self.name}.shadows to 4 or more"
            )

    def score(self, observation: Observation, target: Target, generator: torch.Generator, progress: Progress) -> Score:
        """Return (φ − μ) / σ, or the logarithm of the ratio of densities.

        Raises:
            NotApplicable: as :meth:`ShadowAttack.models`.
        """
        shadows = self.models(observation, generator, progress)
        odds = confidence(target, shadows.answers, shadows.labels)

        def score(inputs: Tensor, labels: Tensor) -> Tensor:
            rows = shadows.rows(inputs, labels)
            seen = confidence(target, target.answers(inputs, labels), labels)
            mean, deviation = (part[rows] for part in normals(odds, ~shadows.inside))
            without = (seen - mean) / deviation
            if not self.online:
                return without
            mean, spread = (part[rows] for part in normals(odds, shadows.inside))
            return (without.square() - ((seen - mean) / spread).square()) / 2 + (deviation / spread).log()

        return score


@register
class RMIA(ShadowAttack):
    """A record that the model favours over public examples more than shadow models do (Zarifzadeh et al. 2024).

    With the probability p(x) of an example's own label (e^-loss, where it has no class), and P(x) that which it has on
    average over models, the score of a record x is the share of public examples z with (p(x) / P(x)) / (p(z) / P(z)) ≥
    γ. Online, P is the mean of that over shadow models that were trained on x and of that over the others. Offline
    there are only the latter, of mean Q, and P = ((1 + a)·Q + 1 − a) / 2. No client trained on the z, but half of the
    shadow models did: P(z) is formed as P(x) is, online of both halves, offline of the others alone, with the same a,
    as in the authors' code. As the score of x only grows with p(x) / P(x), γ decides of the order of records no more
    than which are tied: with the paper's 2 fewer of the surest are than with the 1 of the authors' code. Departures: p
    is the softmax's probability, neither tempered nor with a margin; the authors tune a on a shadow model, here it is a
    setting; the model is asked of each record as it is, and not of changed copies; where an example has no class, its
    loss is a mean over pixels or numbers, too small for a ratio of 2, and γ is 1.

    Args:
        shadows: models; attacks with the same ones share them.
        epochs: of each one's training, by SGD.
        learning_rate: of that.
        batch_size: of that.
        online: the shadow models are trained on the records, too, each on half of them.
        gamma: the ratio from which a record is favoured over a public example, where they have classes.
        offline_a: the smaller, the more a record's training is taken to raise its probability; without effect online.
    """

    name = "rmia"
    summary = "a record that the model favours over public examples more than other models do"
    paper = "Zarifzadeh et al. 2024 (Low-cost high-power membership inference attacks)"

    online: bool = False
    gamma: Positive = 2.0
    offline_a: Share = 0.3

    def score(self, observation: Observation, target: Target, generator: torch.Generator, progress: Progress) -> Score:
        """Return the share of public examples over which a record is favoured.

        Raises:
            NotApplicable: as :meth:`ShadowAttack.models`.
        """
        shadows = self.models(observation, generator, progress)
        known = chances(target, shadows.answers, shadows.labels)
        usual = _log_mean(known, ~shadows.inside)
        if self.online:
            usual = usual.logaddexp(_log_mean(known, shadows.inside)) - math.log(2)
        else:
            rest = torch.full_like(usual, 1 - self.offline_a).log()
            usual = (usual + math.log(1 + self.offline_a)).logaddexp(rest) - math.log(2)

        def favoured(inputs: Tensor, labels: Tensor) -> Tensor:
            own = chances(target, target.answers(inputs, labels), labels)
            return own - usual[shadows.rows(inputs, labels)]

        least = math.log(self.gamma) if classified(target.task_info) else 0.0
        records = observation.records
        assert records is not None
        others = favoured(records.public_inputs, records.public_labels)

        def score(inputs: Tensor, labels: Tensor) -> Tensor:
            return (favoured(inputs, labels)[:, None] - others >= least).double().mean(dim=1)

        return score


def normals(values: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return (n,) mean and deviation of each example's ``chosen`` values (s, n).

    Of an example with fewer than 64 the deviation is that of all examples about their own means.
    """
    count = chosen.sum(dim=0)
    mean = _mean(values, chosen)
    squares = (values - mean).square().where(chosen, 0.0).sum(dim=0)
    shared = squares.sum() / (count - 1).clamp(min=0).sum()
    return mean, (squares / (count - 1)).where(count >= _ENOUGH, shared).sqrt().clamp(min=1e-12)


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    return values.where(chosen, 0.0).sum(dim=0) / chosen.sum(dim=0)


def _log_mean(logs: Tensor, chosen: Tensor) -> Tensor:
    """Return (n,) the logarithm of the mean of each example's exp(logs), (s, n), of those that are ``chosen``."""
    return logs.where(chosen, -torch.inf).logsumexp(dim=0) - chosen.sum(dim=0).log()
