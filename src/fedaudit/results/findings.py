"""What an audit found: every run of an attack, and each attack's runs together, with the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from fedaudit.results.epsilon import EpsilonDetail
from fedaudit.results.images import ImageDetail, ImageSummary
from fedaudit.results.membership import MembershipDetail
from fedaudit.results.record import LEAKS, Interval, Record, Setting, Timing, Verdict, Worst, optional
from fedaudit.results.rows import ExtractionDetail, RowDetail, SequenceDetail


class MetricResult(Record):
    """One number by which a finding that isn't images is evaluated."""

    name: str = Field(description="as --fail-above takes it")
    value: float = Field(description="what was measured")
    unit: str = Field(default="", description="empty: none")
    higher_is_better: bool = Field(description="whether a higher value means that the attack did better")
    baseline: float | None = optional("the same number without the attack")
    low: float | None = optional("lower end of the 95 % interval over what n counts")
    high: float | None = optional("upper end of it")
    n: int | None = optional("how many records, labels, ... it is measured on")
    of: str | None = optional("what n counts")


class Line(Record):
    """One line of a chart; a single point is drawn as a level across the chart."""

    name: str = Field(description="for the legend")
    x: list[float] = Field(description="one value a point")
    y: list[float] = Field(description="one value a point")


class Chart(Record):
    """A figure that belongs to a finding, as data."""

    title: str = Field(description="above the figure")
    caption: str = Field(description="what it shows, in words")
    x_label: str = Field(description="with its unit")
    y_label: str = Field(description="with its unit")
    lines: list[Line] = Field(description="at least one")


class Sheet(Record):
    """A row of images that belongs to a finding, side by side in one PNG."""

    title: str = Field(description="above the row")
    path: str = Field(description="relative to the folder of results.json")


class Run(Record):
    """One run of an attack, whatever it is after."""

    attack: str = Field(description="its name")
    federation: str = Field(description="the name of the federation, and of its defences where there are several")
    update_kind: Literal["gradient", "weights"] = Field(description="what clients sent")
    round: int | None = Field(description="null where the attack received several rounds, or none")
    client: int | None = Field(description="null where the attack received several clients, or none")
    rounds: list[int] = Field(default=[], description="the rounds that it received")
    clients: list[int] = Field(default=[], description="those whose sum it received, where no single update is known")
    num_examples: int = Field(description="over how many examples (with repetition) the updates were made")
    status: Literal["done", "not applicable"] = Field(description="'not applicable': it could not be run; see reason")
    kind: str | None = optional("what was recovered: 'images' or another finding type")
    metrics: list[MetricResult] = Field(default=[], description="how a finding that isn't images was evaluated")
    charts: list[Chart] = Field(default=[], description="figures about this finding")
    image_rows: list[Sheet] = Field(default=[], description="rows of images about this finding")
    is_leak: bool | None = optional(
        "whether it is a leak by itself, by its kind's rule: more than without the attack, luck excluded "
        "(p_value at most 1 %, where there is one); null: images"
    )
    victims: str = Field(default="", description="equal for equal examples, in whatever round or update they are")
    p_value: float | None = optional("probability that guessing does as well, by the test that its kind's rule names")
    p_value_at_best: float | None = optional(
        "the same if everything had been told rightly: above 1 %, there is too little to test"
    )
    blind_p_value: float | None = optional(
        "probability that a test of the examples alone would tell those of clients from the others as well, were they "
        "exchangeable; at 1 % or less the others may not serve; null: not tested (of records, fewer than 10 pairs)"
    )
    chance_level: list[float] = Field(
        default=[], description="of random answers, the shares that are right about 0, 1, 2, ... labels"
    )
    details: dict[str, Any] = Field(
        default={}, description="what a kind has beside metrics, charts and sheets, for its panel on the page"
    )
    reason: str | None = optional("why the attack could not be run, and the remedy")
    label_source: str | None = optional("'given' or the name of the label inference")
    label_accuracy: float | None = optional("share of labels recovered, as a multiset")
    objective: float | None = optional("final value of what the attack minimised")
    iterations: int = Field(
        default=0,
        description="of the attack's optimiser, or own examples that an inverter learnt from; 0: neither",
    )
    setting: Setting | None = optional(
        "'deployment': of updates such as federations in use send, by stated criteria, or of a recorded federation; "
        "'diagnostic': of what can leak at worst; null: it is older"
    )
    diagnostic_because: list[str] = Field(default=[], description="criteria of a deployment that aren't met, in words")
    notes: list[str] = Field(default=[], description="what else to know of it")
    timing: Timing | None = optional("null: not run")


class FindingResult(EpsilonDetail, MembershipDetail, ExtractionDetail, SequenceDetail, RowDetail, ImageDetail, Run):
    """One run of an attack, on what it receives: one update, one client, or the federation; evaluated."""

    # What every run has stands in Run. Each kind's own columns are a class beside it, and empty where a finding is of
    # another kind: on disk they stand side by side.

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        where = {"attack": self.attack, "federation": self.federation, "round": self.round, "client": self.client}
        measured = {metric.name: metric.value for metric in self.metrics[:1]}
        return [*where.items(), ("status", self.status), ("images", len(self.images)), *measured.items()]


class Evidence(Record):
    """The number behind a verdict, with its interval or test."""

    what: str = Field(description="what was counted or measured, in words")
    value: float = Field(description="what was counted or measured")
    low: float | None = optional("lower end of the 95 % interval")
    high: float | None = optional("upper end of it")
    n: int = Field(description="how many it rests on")
    of: str = Field(description="what n counts: images, records, ...")
    baseline: float | None = optional("the value without the attack")
    p_value: float | None = optional("probability that guessing does as well")
    method: str = Field(description="of the interval and the test")


class MetricSummary(Record):
    """One metric over all findings of an attack."""

    name: str = Field(description="as --fail-above takes it")
    summary: str = Field(description="what it measures, in words")
    unit: str = Field(default="", description="empty: none")
    higher_is_better: bool = Field(description="whether a higher value means that the attack did better")
    value: Interval = Field(description="over the findings")
    of: str | None = optional("what its n counts; runs: of the attack")
    baseline: Interval | None = optional("the same without the attack, where it is known")


class Runs(Record):
    """All runs of an attack on one federation, whatever it is after."""

    attack: str = Field(description="its name")
    federation: str = Field(description="the name of the federation, and of its defences where there are several")
    update_kind: Literal["gradient", "weights"] = Field(description="what clients sent")
    updates: int = Field(description="runs of the attack: one an update, or a client, or the federation")
    images: int = Field(description="reconstructions, each try counted; evidence counts victims")
    kind: str | None = optional("what was recovered; null where nothing could be run")
    metrics: list[MetricSummary] = Field(default=[], description="of findings that aren't images")
    verdict: Verdict = Field(description="what this attack showed on this federation")
    verdict_text: str = Field(description="what the verdict rests on, in a sentence")
    headline: str = Field(default="", description="the verdict as a sentence for a data-protection officer")
    setting: Setting | None = optional(
        "as of a finding; 'deployment' where each of its findings is of one; null: nothing was run, or it is older"
    )
    diagnostic_because: list[str] = Field(default=[], description="why it is a diagnostic, of all its findings")
    evidence: Evidence | None = optional("the number behind the verdict; null: not run")
    worst: Worst | None = optional("the worst record beside the mean; null: of another kind, not run, or older")
    had_power: bool | None = optional(
        "whether the attack had power, or won its control; null: the verdict isn't 'present, not extracted'"
    )
    control: int | None = optional("which of the result's controls belongs to it, from 0")
    cautions: list[str] = Field(default=[], description="what weakens a verdict without a leak")
    advice: list[str] = Field(default=[], description="what to change so that an inconclusive audit can conclude")
    hardly_trained: float | None = optional(
        "the federation's held-out accuracy at the end, where it is too low for a verdict on this attack"
    )
    timing: Timing | None = optional("of all runs together")


class AttackSummary(ImageSummary, Runs):
    """All findings of one attack on one federation: a row of the report's table."""

    @property
    def measured(self) -> list[MetricSummary]:
        """The metrics, that by which attacks of its kind are compared first: the PSNR of images is one, too."""
        if self.psnr is None:
            return self.metrics
        base = self.psnr_mean_image
        without = None if base is None else Interval(mean=base, median=base, low=base, high=base, n=self.psnr.n)
        psnr = MetricSummary(
            name="psnr",
            summary="of the images, in dB",
            unit="dB",
            higher_is_better=True,
            value=self.psnr,
            baseline=without,
        )
        return [psnr, *self.metrics]


def overall(summaries: Sequence[AttackSummary]) -> Verdict:
    """Return what attacks of one kind on one federation say together: the worst leak, else the best-founded verdict.

    An attack that won its control and found nothing says more than one beside it that is inconclusive.
    """
    order = (*LEAKS, "present, not extracted", "not demonstrated", "inconclusive", "not applicable")
    return min((s.verdict for s in summaries), key=order.index, default="not applicable")


def with_images(summaries: Sequence[AttackSummary]) -> tuple[list[AttackSummary], list[AttackSummary]]:
    """Return the summaries for a table of images, and those for a table of other metrics.

    What could not be run goes to the images, unless no images came out.
    """
    if all(s.psnr is None for s in summaries):
        return [], list(summaries)
    return [s for s in summaries if not s.metrics or s.psnr is not None], [s for s in summaries if s.metrics]
