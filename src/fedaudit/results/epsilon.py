"""An ε that an audit of differential privacy found, and all that it is conditional on."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from fedaudit.results.base import Record

EpsilonMethod = Literal["clopper_pearson", "clopper_pearson_fdp", "one_run", "one_run_fdp", "gaussian_estimate"]
Unit = Literal["client", "record"]
Adjacency = Literal["add-remove", "replace"]


class EpsilonBound(Record):
    """A lower bound of the true ε at δ, or an estimate of it, from the scores of canaries."""

    model_config = ConfigDict(frozen=True)

    method: EpsilonMethod = Field(description="by which the scores become an ε; docs/explanation/epsilon.md has each")
    kind: Literal["bound", "estimate"] = Field(
        description="a bound holds with its confidence; an estimate may be too high"
    )
    epsilon: float = Field(description="the claim of any smaller one, at this delta, is refuted")
    delta: float = Field(description="δ, at which ε is told")
    confidence: float | None = Field(description="probability that a bound isn't above the truth; none of an estimate")
    unit: Unit = Field(description="who is protected, and so what a canary is")
    adjacency: Adjacency = Field(description="an out canary is absent, or another takes its place")
    canaries: int = Field(description="in and out")
    guesses: int = Field(description="canaries that were guessed at; on the others the guesser abstained")
    correct: int = Field(description="guesses that were right")
    low: float | None = Field(default=None, description="guessed out up to this score; none: never")
    high: float | None = Field(default=None, description="guessed in from this score on; none: never")
    correction: str = Field(description="for the choice of low and high")
    assumes: str = Field(description="what is taken for granted of the mechanism; empty: nothing")
