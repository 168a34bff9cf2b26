"""Which words occurred: the rows of the embedding that moved."""

from __future__ import annotations

import math

import torch
from scipy.stats import chi2
from torch import Tensor, nn

from fedaudit.attacks.base import Attack, Case, Progress, register
from fedaudit.attacks.findings import TokenFinding
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import NotApplicable

_BY_CHANCE = 0.01  # probability that noise moves a row of the whole vocabulary so far that it counts
_FAR = 5.0  # times the median: how far a row stands out where all rows moved and nobody knows why


@register
class TokenPresence(Attack):
    """An embedding's gradient is zero in the rows of tokens that don't occur (Melis et al. 2019).

    So which words a client's update was made from can be read off. With Gaussian noise of a known size a row counts
    whose norm noise alone reaches with a probability of 1 % over the whole vocabulary; where every row moved for
    another reason, one that moved five times as far as the median. An output layer that shares the embedding's weights
    moves all rows.
    """

    name = "token-presence"
    summary = "which words occurred: rows of the embedding that moved"
    paper = "Melis et al. 2019, Exploiting Unintended Feature Leakage (IEEE S&P)"
    threat_model = "server or eavesdropper, passive"
    needs = ("an embedding that clients train",)
    examples = ("tokens",)
    recovers = "the words of training sequences"
    finds = TokenFinding
    uses = ("rows",)

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.updates_alone and case.kind in cls.examples

    def check(self, observation: Observation) -> None:
        """Raise where no embedding travels."""
        super().check(observation)
        self._embedding(observation)

    def _embedding(self, observation: Observation) -> str:
        """Return the name of the parameter in which each token has a row."""
        update, tokens = observation.single().update, observation.task_info.tokens
        words = tokens.vocabulary if tokens else 0
        for name, part in observation.module.named_modules():
            weight = f"{name}.weight".lstrip(".")
            if isinstance(part, nn.Embedding) and part.num_embeddings == words and weight in update.tensors:
                return weight
        raise NotApplicable(
            f"{self.name} needs the update of an embedding with a row for each of the {words} tokens; this one has none"
        )

    def _run(self, observation: Observation, _generator: torch.Generator, device: str, _: Progress) -> TokenFinding:
        update = observation.single().update
        rows = update.tensors[self._embedding(observation)].to(device, torch.float64)
        norms = rows.norm(dim=1)
        noise = update.sanitised.noise if update.sanitised else 0.0
        moved, note = _moved(norms, rows.shape[1], noise)
        return TokenFinding(tokens=moved.nonzero()[:, 0].cpu(), vocabulary=len(rows), notes=(note,) if note else ())


def _moved(norms: Tensor, width: int, noise: float) -> tuple[Tensor, str]:
    """Return which of the (vocabulary,) rows moved more than noise explains, and what to know of it."""
    if noise:
        limit = noise * math.sqrt(float(chi2.isf(_BY_CHANCE / len(norms), width)))
        return norms > limit, f"rows count that moved further than {limit:.3g}, which noise hardly reaches"
    moved = norms > 0
    if not bool(moved.all()):
        return moved, ""
    limit = _FAR * float(norms.median())
    return norms > limit, f"every row moved; those count that moved {_FAR:g} times as far as the median"
