"""The audit of ε: which canaries were in? Scores of each, for every observer; the evaluation makes bounds of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedaudit.attacks.base import Attack, Progress, register
from fedaudit.attacks.findings import Finding
from fedaudit.epsilon.canaries import OBSERVERS, CanarySpec
from fedaudit.transcript.observation import Observation
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.validation import Count, Number, Positive


@dataclass(frozen=True, kw_only=True)
class EpsilonFinding(Finding, kind="epsilon"):
    """Of each canary, for every observer, how much it looks as if it had been in.

    Attributes:
        observers: who.
        scores: (observers, m) float64; the higher, the more like one that was in.
        confidence: with which bounds are asked for.
    """

    observers: tuple[str, ...]
    scores: Tensor
    confidence: float


@register
class DPCanaries(Attack):
    """Demonstrates ε from canaries that are in or out by fair coins.

    A canary is a client (client level) or a record (sample level) that sends, or has as its gradient, a unit direction
    times the clip: the worst case of the promise. The simulator puts them in; the attack reads, for each observer, the
    inner product of every canary's direction with what the observer sees, round by round, and scores a canary by the
    sum over rounds; where taking part is drawn, by the likelihood ratio that the promised noise and rate give, in which
    rounds where the canary took part weigh more. Which bound on ε the scores give is the evaluation's, see
    :class:`fedaudit.epsilon.CanaryScores`.

    Andrew et al. 2023 draw directions from the sphere and take cosines (Algorithm 1 and 2); departures: the directions
    are rows of a randomly signed and permuted Hadamard matrix, orthogonal where the model is large enough, and absent
    canaries have coins of their own (Steinke et al. 2023), where Andrew et al. compare with directions never used.

    With ``of: texts`` a canary is a text of random tokens that one of the clients trains on, in or out by its coin
    (Carlini et al. 2019), and is scored by how much its mean loss fell from the first model to the final one. What a
    language model remembers of single texts is shown so, through the training itself: beside ε the exposure of the
    planted texts, log₂ of the number of absent ones and one, minus log₂ of the rank among them. Departures: tokens are
    drawn evenly from the vocabulary, each text is planted once, and ranks are counted among texts that weren't planted,
    not extrapolated. With ``temperature`` the model before training draws the texts itself, planted and absent ones
    alike: at a high one they are nearer to what it trains on than random tokens, and as unlikely to be anybody's.

    Args:
        canaries: m, how many.
        of: ``directions``, or ``texts`` of a model that predicts the next token; for these ``strength``, ``clip``,
            ``signs`` and ``noise`` mean nothing.
        temperature: of the draws of texts from the first model, 2 for example; null: tokens are drawn evenly.
        adjacency: an absent canary is replaced by nothing (``add-remove``), or by its opposite (``replace``), the worst
            of what a server that sees who takes part must reckon with.
        confidence: of all bounds on covered observers together.
        observer: who alone is asked: ``updates``, ``sum``, ``models`` or ``final``; null: all of
            whom the adversary can be one.
        strength: length of a canary before it is clipped, in units of the clip: above 1, clipping that isn't done as
            it is claimed is found, too.
        clip: a canary's length where no clip is declared.
        signs: ``paired``: canary clients send their direction for two rounds, then its opposite for two, and so on.
            Noise that is drawn once and added again in other rounds cancels; the final model then shows nothing.
        noise: under local noise every canary's update goes through the federation's own code, one by one (``each``), or
            the noise of their sum and of what is read of each is drawn once, as ``dp`` declares it (``joint``): the
            same distribution at a hundredth of the cost, and that code isn't audited.
    """

    name = "dp-canaries"
    summary = "canaries, each in or out by a fair coin: which ε does an observer demonstrate?"
    paper = "Steinke et al. 2023; Mahloujifar et al. 2024; Andrew et al. 2023"
    threat_model = "server, eavesdropper or client; the auditor puts canaries into the federation"
    needs = ("canaries in the federation",)
    default_scope = "federation"
    on_sums = "works: for those who see the sum, every global model or the final one"
    recovers = "which canaries took part"
    finds = EpsilonFinding

    canaries: Count = 1000
    of: Literal["directions", "texts"] = "directions"
    temperature: Positive | None = None
    adjacency: Literal["add-remove", "replace"] = "add-remove"
    confidence: Annotated[Number, Field(gt=0.5, lt=1)] = 0.95
    observer: Literal["updates", "sum", "models", "final"] | None = None
    strength: Annotated[Number, Field(ge=1, le=1e6)] = 10.0
    clip: Positive = 1.0
    signs: Literal["constant", "paired"] = "constant"
    noise: Literal["each", "joint"] = "each"

    def __post_init__(self) -> None:
        if self.of == "texts" and self.adjacency == "replace":
            raise BadInput(f"{self.name}: an absent text is replaced by nothing; use adjacency: add-remove")
        if self.of != "texts" and self.temperature is not None:
            raise BadInput(f"{self.name}: temperature is that of texts; use of: texts")

    def canary_spec(self) -> CanarySpec:
        """Return the canaries that the simulation is to put in."""
        strength, clip = float(self.strength), float(self.clip)
        joint, texts, hot = self.noise == "joint", self.of == "texts", self.temperature
        return CanarySpec(
            self.canaries, self.adjacency, strength, clip, self.signs, joint=joint, texts=texts,
            temperature=None if hot is None else float(hot),
        )  # fmt: skip

    def check(self, observation: Observation) -> None:
        """Refuse a federation without canaries."""
        super().check(observation)
        if observation.threat.partial:
            raise NotApplicable(
                f"{self.name} is for adversaries who see all of a federation; leave threat.clients and threat.rounds "
                "out"
            )
        if observation.canaries is None or not observation.canaries.readings:
            raise NotApplicable(
                "there are no canaries in this federation: simulate it with the attack 'dp-canaries' in the scenario; "
                "a recording has them where its Recorder was given canaries=… and the last global model: close(weights)"
            )
        if self.observer is not None and self.observer not in observation.canaries.readings:
            raise NotApplicable(
                f"the adversary '{observation.threat.adversary}' isn't {OBSERVERS[self.observer]}; "
                "choose another observer or adversary"
            )

    def _run(self, observation: Observation, generator: torch.Generator, device: str, progress: Progress) -> Finding:  # noqa: ARG002
        canaries = observation.canaries
        assert canaries is not None  # check() saw to it
        names = tuple(name for name in OBSERVERS if name in canaries.readings and self.observer in (None, name))
        scores = torch.stack([canaries.scores(name) for name in names])
        return EpsilonFinding(observers=names, scores=scores, confidence=float(self.confidence))
