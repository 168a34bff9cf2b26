"""Membership of texts in models that predict the next token: by the words' own probabilities."""

from __future__ import annotations

import zlib
from abc import abstractmethod

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from fedaudit.attacks.base import ATTACK_CONFIG, Case, register
from fedaudit.attacks.records.membership import MembershipAttack, Score
from fedaudit.attacks.records.target import Target, target_of
from fedaudit.modalities import NOTHING
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import Share

_LEAST = 1e-12  # deviation of a token's log-probability: where the model knows one token alone


@dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class TextMembers(MembershipAttack):
    """What those share that score a text by its tokens' probabilities; those alone count that the loss counts."""

    examples = ("tokens",)
    needs = ("records (threat.target_records)", "a model that predicts the next token")

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.asks_for_members and case.next_token

    def check(self, observation: Observation) -> None:
        """Raise unless the model predicts the next token."""
        super().check(observation)
        if not observation.task_info.causal:
            asked = observation.task_info.asked
            raise NotApplicable(f"{self.name} needs a model that predicts the next token; this one predicts {asked}")

    def score(self, _observation: Observation, target: Target, *_: object) -> Score:
        """Return what scores texts by this model."""

        def score(texts: Tensor, labels: Tensor) -> Tensor:
            each = [self.of_tokens(logits.double(), *told) for logits, told in target.in_parts(texts, texts, labels)]
            return torch.cat(each) if each else torch.zeros(0, dtype=torch.float64)

        return score

    @abstractmethod
    def of_tokens(self, logits: Tensor, texts: Tensor, labels: Tensor) -> Tensor:
        """Return (n,) scores of texts (n, length), from logits (n, vocabulary, length) of the labels (n, length)."""


@register
class MinK(TextMembers):
    """A text without any very unlikely word is taken for a member (Shi et al. 2024, Min-K% Prob).

    The score is the mean log-probability of the share ``k`` of its tokens that the model finds least likely. With
    ``plus`` each token's log-probability counts as how many deviations it lies above the mean, both over the
    vocabulary as the model sees it at that place (Zhang et al. 2025, Min-K%++, Eq. 3): so a token counts that the model
    prefers to what could stand there, however many that are.

    Args:
        k: share of the tokens that counts; of a short text at least one.
        plus: Min-K%++.
    """

    name = "min-k"
    summary = "a text none of whose words the model finds unlikely was trained on"
    paper = "Shi et al. 2024 (Detecting pretraining data from large language models); Zhang et al. 2025 (Min-K%++)"

    k: Share = 0.2
    plus: bool = True

    def of_tokens(self, logits: Tensor, texts: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG002
        """Return the mean over the least likely tokens."""
        logs, asked = _own_logs(logits, labels)
        if self.plus:
            every = logits.log_softmax(dim=1)
            chances = every.exp()
            every = every.clamp(min=-1e6)  # 0 times -inf is nothing
            mean = (chances * every).sum(dim=1)
            spread = (chances * (every - mean[:, None]).square()).sum(dim=1).sqrt()
            logs = (logs - mean) / spread.clamp(min=_LEAST)
        ordered = logs.where(asked, torch.inf).sort(dim=1).values
        count = (self.k * asked.sum(dim=1)).floor().clamp(min=1)
        least = torch.arange(logs.shape[1]) < count[:, None]
        found = ordered.where(least & (ordered != torch.inf), 0.0).sum(dim=1) / count
        return found.where(~(logs.isnan() & asked).any(dim=1), torch.nan)


@register
class ZlibRatio(TextMembers):
    """A text that is likelier than its own repetitions explain is taken for a member (Carlini et al. 2021).

    The score is minus the mean loss over the length of the compressed text (zlib). Departure: what is compressed are
    the tokens' numbers, for the adversary of a federation is given no words.
    """

    name = "zlib-ratio"
    summary = "a text with a smaller loss than its compressed length explains was trained on"
    paper = "Carlini et al. 2021 (Extracting training data from large language models)"

    def of_tokens(self, logits: Tensor, texts: Tensor, labels: Tensor) -> Tensor:
        """Return minus the loss a byte."""
        logs, asked = _own_logs(logits, labels)
        means = logs.where(asked, 0.0).sum(dim=1) / asked.sum(dim=1).clamp(min=1)
        ends = (asked * torch.arange(2, asked.shape[1] + 2)).amax(dim=1).tolist()  # a label is of the token behind it
        sizes = [
            len(zlib.compress(text[:end].to(torch.int32).numpy().tobytes()))
            for text, end in zip(texts, ends, strict=True)
        ]
        return means / torch.tensor(sizes)


@register
class ReferenceLoss(TextMembers):
    """A text that training made likelier by more than others is taken for a member (Carlini et al. 2021).

    The score is the logarithm of the ratio of two perplexities: the reference model's, which is the one before the
    first round, and that of the model that is asked; that is the difference of the mean losses. What is easy for any
    model doesn't count so. Mireshghallah et al. 2022 take the model before fine-tuning for the reference.
    """

    name = "reference-loss"
    summary = "a text that training made likelier by more than others was trained on"
    paper = "Carlini et al. 2021; Mireshghallah et al. 2022 (Memorization in fine-tuned language models)"

    @classmethod
    def fits(cls, case: Case) -> bool:
        return super().fits(case) and case.rounds > 1

    def check(self, observation: Observation) -> None:
        """Raise unless a model is known from before."""
        super().check(observation)
        if self.model == "global" and len(observation.weights) < 2:
            raise NotApplicable(
                f"{self.name} compares the model with that before training, and one alone is known; use min-k, or "
                "raise federations[].rounds"
            )

    def score(self, observation: Observation, target: Target, *rest: object) -> Score:
        """Return how much smaller the loss is than the reference model's."""
        now, before = (
            super(ReferenceLoss, self).score(observation, model, *rest)
            for model in (target, target_of(observation, observation.weights[0]))
        )
        return lambda texts, labels: now(texts, labels) - before(texts, labels)

    def of_tokens(self, logits: Tensor, texts: Tensor, labels: Tensor) -> Tensor:  # noqa: ARG002
        """Return minus the mean loss."""
        logs, asked = _own_logs(logits, labels)
        return logs.where(asked, 0.0).sum(dim=1) / asked.sum(dim=1).clamp(min=1)


def _own_logs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (n, length) the log-probability of each label, and which of them count."""
    asked = labels != NOTHING
    own = labels.where(asked, 0)[:, None]
    return logits.log_softmax(dim=1).gather(1, own)[:, 0], asked
