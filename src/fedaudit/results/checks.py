"""What stands beside an audit's findings: comparisons, calibrations, positive controls and margins."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from fedaudit.results.findings import Evidence, MetricResult
from fedaudit.results.images import ImageResult
from fedaudit.results.record import Interval, Record, Timing, optional


class Comparison(Record):
    """A paired comparison of two attacks on the same images (or updates, or clients): difference = a - b."""

    federation: str = Field(description="on which both were run")
    metric: str = Field(description="'psnr', or the first metric of the finding type")
    a: str = Field(description="one attack")
    b: str = Field(description="the other")
    difference: Interval = Field(description="of the pairs")
    unit: str = Field(default="dB", description="of the difference")
    outcome: Literal["a is better", "b is better", "undecided", "meaningless here"] = Field(
        description="undecided: the difference may be 0, all comparisons of the audit together at 5 %"
    )
    p_value: float = Field(default=1.0, description="Student's, paired, after Holm's correction for all comparisons")
    reason: str | None = optional("why it is meaningless here")


class CalibrationStep(Record):
    """Settings that a calibration tried, in one of its rungs."""

    settings: dict[str, Any] = Field(description="that differ from the attack's own; empty: these")
    iterations: int = Field(description="of each run")
    updates: int = Field(description="of own images, that they were tried on")
    psnr: float | None = optional("in dB, mean over the own images, each capped at 60; null: it diverged")


class CalibrationResult(Record):
    """What an attack found out on updates of the adversary's own images, made under the same conditions."""

    attack: str = Field(description="its name")
    federation: str = Field(description="whose conditions they were")
    updates: int = Field(description="of the federation, that were attacked with what was chosen")
    settings: dict[str, Any] = Field(description="that were chosen, as far as they differ from the attack's own")
    tried: list[CalibrationStep] = Field(description="short runs first, the chosen settings last")
    images: int = Field(description="own images that settings were tried on")
    source: str = Field(description="whose images these were")
    iterations: int = Field(description="of all runs together")
    text: str = Field(description="what was chosen, in a sentence")
    timing: Timing | None = optional("null: not run")


class ControlResult(Record):
    """A positive control: the same attack with the same settings on a case that it must win."""

    attack: str = Field(description="its name")
    model: Literal["same", "reference"] = Field(description="the audited model, or fedaudit's reference network")
    federation: str | None = Field(description="the audit's federation that is the control; null: made for it")
    case: str = Field(description="what was attacked, in words")
    won: bool | None = Field(description="null: it could not be run")
    text: str = Field(description="what came of it, in a sentence")
    power: Evidence | None = optional(
        "where the case is known examples under the same conditions: the share of them, or their labels, that came out"
    )
    without_defence: bool = Field(
        default=False, description="whether the case is the same conditions but for the defence, which stops the attack"
    )
    images: list[ImageResult] = Field(default=[], description="of an attack on images")
    metrics: list[MetricResult] = Field(default=[], description="of another")
    timing: Timing | None = optional("null: not run")


class MarginStep(Record):
    """Conditions of an update, and what an attack recovers of known examples under them."""

    text: str = Field(description="the conditions in words")
    examples: int = Field(description="that an update is over, with repetition")
    batch: int = Field(description="examples in a step")
    steps: int = Field(description="of local training")
    changes: list[str] = Field(default=[], description="what else is easier than for the clients")
    recovered: int | None = optional("known examples that came out visibly; null: not tried")
    images: int | None = optional("known examples that were attacked")
    psnr: float | None = optional("in dB, mean over these")
    power: bool | None = optional("whether nearly all came out (80 %, at least 50 % by the 95 % interval)")
    reason: str | None = optional("why it couldn't be tried")


class MarginResult(Record):
    """How much easier conditions would have to be for an attack to recover images."""

    attack: str = Field(description="its name")
    federation: str = Field(description="whose conditions are the first step")
    steps: list[MarginStep] = Field(description="from the federation's conditions down to the easiest")
    nearest: int | None = optional("position of the hardest step in which the attack has power; null: in none")
    factor: float | None = optional(
        "how many times as many examples the clients' updates have as the largest that the attack has power over; "
        "null: no power was found, or only without the defence"
    )
    more: bool = Field(default=False, description="the margin is more than the factor: not even one example comes out")
    text: str = Field(description="the answer in a sentence")
    pictures: list[ImageResult] = Field(default=[], description="known examples at the nearest step, never a victim's")
