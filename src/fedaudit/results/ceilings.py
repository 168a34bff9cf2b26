"""What an update determines of its examples, whoever attacks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedaudit.results.record import Record, Worst, optional


class CeilingPoint(Record):
    """What whoever knows the update to a precision could have."""

    precision: float = Field(description="to which the update is matched, beside its length")
    low: float = Field(description="at least; in the ceiling's unit")
    high: float = Field(description="at most, by the quadrature")


class CeilingPicture(Record):
    """Another example that gives the same update, up to a precision."""

    precision: float = Field(description="how far its update is from the true one, beside its length")
    path: str = Field(description="PNG of it, relative to the folder of results.json")


class CeilingExample(Record):
    """One example that the update determines, and pictures of it where its kind has any."""

    round: int = Field(description="of the update, from 0")
    client: int = Field(description="who sent it")
    place: int = Field(description="among the update's different examples, from 0")
    value: float | None = optional("in the ceiling's unit; null: by probes their order alone is known")
    low: float | None = optional("at least, where a limit was asked for and it was probed apart; null: it wasn't")
    high: float | None = optional("the same at most")
    true_image: str | None = optional("PNG of it")
    open_image: str | None = optional(
        "PNG of how far each of its numbers stays open for who matches the update to 1 in 1,000: white as far as before"
    )
    others: list[CeilingPicture] = Field(default=[], description="other examples that give the same update")


class CeilingChange(Record):
    """A change of the federation, and what it leaves, computed on updates that were made that way.

    For whoever matches updates to 1 in 10,000, or as closely as they travel, if that is less; by one probe.
    """

    text: str = Field(description="what is changed")
    low: float | None = optional("the ceiling after it, in the same unit, at least; null: not computed")
    high: float | None = optional("the same at most")
    reason: str | None = optional("why it isn't")


class CeilingResult(Record):
    """How much of its examples one federation's updates determine, near the truth, with a Gaussian prior.

    An estimate, no bound: see docs/explanation/ceiling.md.
    """

    federation: str = Field(description="whose updates")
    updates: int = Field(default=0, description="how many were looked at")
    unit: Literal["dB", "share of cells"] = Field(
        default="dB", description="dB: PSNR of pixels in [0, 1], of signals in units of each channel's range"
    )
    low: float | None = optional("the ceiling, at least, at the precision of what travels; null: see reason")
    high: float | None = optional("the same at most: the quadrature tells no closer")
    guess: float | None = optional("what whoever knows the prior's mean alone has")
    left: float | None = optional("share of what a guess leaves open that the update leaves open, too: at least")
    left_at_most: float | None = optional("the same at most")
    open: float | None = optional("share of directions of which the update says less than was known before: at least")
    open_at_most: float | None = optional("the same at most")
    exact: bool = Field(default=False, description="whether by all columns of the derivative, not by probes")
    unknowns: int = Field(default=0, description="numbers of an update's different examples, mean")
    numbers: int = Field(default=0, description="that are sent, mean")
    lost: float = Field(default=0.0, description="least share of directions lost by counting alone, without a prior")
    precision: float | None = optional("to which whoever knows all that travels matches the update, beside its length")
    why: str = Field(default="", description="what limits that precision")
    prior: str = Field(default="", description="whose examples it is of")
    curve: list[CeilingPoint] = Field(default=[], description="over precisions")
    examples: list[CeilingExample] = Field(default=[], description="the most exposed ones first")
    worst: Worst | None = optional("the most exposed example beside all; null: by probes its order alone is known")
    changes: list[CeilingChange] = Field(
        default=[], description="as it is, then what lowers it most; where that was asked for"
    )
    verdict: Literal["high", "low"] | None = optional(
        "high: at most half of what a guess leaves open is left; low: more is; null: it can't be told"
    )
    text: str = Field(description="the answer in a sentence, or why there is none")
    reason: str | None = optional("why there is none")
