"""The audit of an epsilon, whole: what is claimed, and what canaries demonstrate to every observer."""

from __future__ import annotations

from pydantic import Field

from fedaudit.results.base import Record
from fedaudit.results.epsilon import Adjacency, EpsilonBound, Unit


class ObserverEpsilon(Record):
    """What one observer demonstrates from the canaries."""

    observer: str = Field(description="'updates', 'sum', 'models' or 'final'")
    who: str = Field(description="the observer, in words")
    covered: bool = Field(description="whether the claim is made against this observer")
    demonstrated: float | None = Field(description="the bound that counts, by its method; null: none applies")
    bounds: list[EpsilonBound] = Field(description="every lower bound, each with its confidence")
    estimates: list[EpsilonBound] = Field(description="what may be too high; never counted as demonstrated")


class EpsilonResult(Record):
    """The audit of an epsilon: what is claimed, and what canaries demonstrate."""

    claimed: float | None = Field(description="after the last round, by the privacy loss distribution; or null")
    claimed_in_words: str = Field(default="", description="what the claimed one promises")
    delta: float = Field(description="δ, at which every ε here is told")
    unit: Unit = Field(description="who is protected, and so what a canary is")
    adjacency: Adjacency = Field(description="an out canary is absent, or another takes its place")
    canaries: int = Field(description="in and out")
    canaries_in: int = Field(description="how many of them took part")
    confidence: float = Field(description="that no demonstrated value of a covered observer is above the truth")
    correction: str = Field(description="for several observers")
    demonstrated: float | None = Field(
        description="the largest of the covered observers'; of all where nothing is claimed; null: none applies"
    )
    demonstrated_in_words: str = Field(default="", description="what the demonstrated one refutes")
    attainable: float = Field(description="what as many canaries would demonstrate if every guess were right")
    joint_noise: bool = Field(
        default=False, description="the canaries' noise was drawn as it is declared, and the code that adds it not run"
    )
    observers: list[ObserverEpsilon] = Field(description="what each of them sees, and what that demonstrates")
