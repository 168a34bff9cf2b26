"""What an audit of differential privacy found, and which ε an attack on membership demonstrates."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from fedaudit.results.record import Adjacency, Record, Unit, optional

EpsilonMethod = Literal["clopper_pearson", "clopper_pearson_fdp", "one_run", "one_run_fdp", "gaussian_estimate"]


class CertificateRecord(Record):
    """What the noise of all rounds rules out, whatever the attack, if it is against whom ε holds."""

    candidates: int = Field(description="different ones, equally likely without the messages, of which one was used")
    success: float = Field(description="how often, at most, anybody picks the right one of them, as a share")
    held: float | None = Field(
        default=None,
        description="the same where it is known that one of them was used, so that drawing at random hides nothing; "
        "null: not computed",
    )
    central: bool = Field(description="the server adds the noise: it holds against those who see global models alone")


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
    low: float | None = optional("guessed out up to this score; none: never")
    high: float | None = optional("guessed in from this score on; none: never")
    correction: str = Field(description="for the choice of low and high")
    assumes: str = Field(description="what is taken for granted of the mechanism; empty: nothing")


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
    detectable: float | None = optional(
        "the least ε of a broken promise that these canaries would show to be broken 9 times in 10, of those tried; "
        "null: nothing is claimed, or none is that small"
    )
    joint_noise: bool = Field(
        default=False, description="the canaries' noise was drawn as it is declared, and the code that adds it not run"
    )
    observers: list[ObserverEpsilon] = Field(description="what each of them sees, and what that demonstrates")


class RecordEpsilon(Record):
    """Which ε the scores of an attack on membership demonstrate, beside the claimed one."""

    bound: EpsilonBound = Field(
        description="at 95 %; its canaries are pairs of a member and a matched record that nobody trained on"
    )
    claimed: float | None = Field(
        description="by the defence, for one record in another's place, against this adversary; null: nothing is"
    )
    p_value: float | None = Field(
        description="the least of 0.05, 0.01, 0.005, … at which the claim is refuted, 1: at none; null: no claim"
    )
    attainable: float = Field(description="what as many pairs would demonstrate if the attack were always right")


class EpsilonDetail(Record):
    """Of an audit of differential privacy."""

    epsilon: EpsilonResult | None = optional("of an audit of differential privacy")
