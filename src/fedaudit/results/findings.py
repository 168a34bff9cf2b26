"""What the parts of a result share, and what an audit found: findings, their summaries and controls, the verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

READING = "fields that only a later fedaudit knows are left out"


def _open(schema: dict[str, Any]) -> None:
    """Let the published schema accept fields of later versions, as :meth:`AuditResult.load` does."""
    schema.pop("additionalProperties", None)


class Record(BaseModel):
    """Refuses unknown fields where it is made, leaves them out where a file is read (docs/reference/results.md)."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_open)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_unknown(cls, values: Any, info: ValidationInfo) -> Any:
        if info.context == READING and isinstance(values, dict):
            return {key: value for key, value in values.items() if key in cls.model_fields}
        return values


def optional(description: str) -> Any:
    """Return a field that may be null, which the description explains; null is its default."""
    return Field(default=None, description=description)


class Timing(Record):
    """What differs from run to run."""

    seconds: float = Field(description="wall seconds")
    started: str | None = optional("ISO 8601, UTC")
    workers: int | None = optional("processes; null: not said")


class Interval(Record):
    """Mean and median over n images, with a 95 % interval of the mean (bootstrap; Student for paired differences)."""

    mean: float = Field(description="of the n")
    median: float = Field(description="of the n")
    low: float = Field(description="lower end of the 95 % interval of the mean")
    high: float = Field(description="upper end of it")
    n: int = Field(description="how many")

    def span(self, form: Callable[[float], str]) -> str:
        """Return the interval in brackets, after a space; nothing for n = 1, which has none."""
        return f" [{form(self.low)}, {form(self.high)}]" if self.n > 1 else ""


# From the worst down; VERDICTS says what each means.
Verdict = Literal["recovered", "identifiable", "inferred", "inconclusive", "not demonstrated", "not applicable"]

VERDICTS: dict[Verdict, str] = {
    "recovered": "Training data came out visibly: someone who looks at the result sees what was trained on.",
    "identifiable": "Nothing came out visibly, but the result singles out the true example among candidates, "
    "more often than luck would.",
    "inferred": "Something about the training data was told better than by guessing: membership, attributes, labels, a "
    "client's own model.",
    "inconclusive": "This audit can't tell: the attack has no power under these conditions, or lost its positive "
    "control, or won an easier case only, or none was run, or there is too little to test, or the federation was "
    "hardly trained.",
    "not demonstrated": "The attack found nothing, although it recovers known examples under these conditions, or won "
    "its positive control. Another attack might find more: this never means safe.",
    "not applicable": "The attack could not be run under this threat model; the reason is given.",
}
LEAKS: tuple[Verdict, ...] = ("recovered", "identifiable", "inferred")

# Of the federation that was attacked, by the criteria in docs/explanation/verdicts.md.
Setting = Literal["diagnostic", "deployment"]


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


class RegisteredResult(Record):
    """Scores of a reconstruction after the move that brings it nearest.

    That is a shift (up to a quarter of the side) and a flip; or quarter turns, a flip and another contrast and
    brightness, which may be negative: then every error is relative to what an even image of the colours has.
    """

    psnr: float = Field(
        description="dB where the moved reconstruction covers the victim; what an even image would gain is taken off"
    )
    ssim: float | None = Field(description="on the same part; null: signals")
    correlation: float | None = optional("of signals, on the same part")
    flipped: bool = Field(description="mirrored from left to right, before the shift")
    down: int = Field(description="pixels that the reconstruction is shifted down; negative: up")
    right: int = Field(description="pixels that it is shifted to the right, of signals points in time; negative: left")
    deep: int = Field(default=0, description="of volumes, slices that it is shifted further; negative: back")
    turns: int = Field(default=0, description="quarter turns to the left, after a flip")
    contrast: float = Field(default=1.0, description="factor of all values; below 0: the reconstruction is a negative")
    rank: int | None = Field(
        description="as the image's, with every candidate after its own best move; null where none helps"
    )
    psnr_nearest_other: float | None = Field(description="as the image's, alike; null where no move helps")
    as_far_by_luck: float | None = optional("as the image's; null: evaluated before that was")
    psnr_mean_image: float = Field(description="baseline: the mean image of the candidates after its own best move")


class ImageResult(Record):
    """One victim image, volume or signal against its reconstruction. Paths are relative to the folder of results.json.

    Signals are measured in units of each channel's range over the candidates.
    """

    true_image: str = Field(description="PNG of the victim")
    reconstruction: str = Field(description="PNG of what the attack recovered")
    true_label: int | None = Field(description="the victim's class; null where examples have none")
    label: int | None = Field(description="label that the attack used for this image")
    mse: float = Field(description="mean squared error on [0, 1] pixels")
    psnr: float = Field(description="dB on [0, 1] pixels, capped at 100")
    ssim: float | None = Field(description="structural similarity, 1 for a perfect copy; null: signals")
    correlation: float | None = optional("of signals (Pearson), each channel's mean taken off, 1 for a perfect copy")
    mse_normalised: float | None = optional("mean squared error on pixels as the model sees them: (x - mean) / std")
    psnr_normalised: float | None = optional(
        "dB, -10 log10 of mse_normalised: the peak is taken for 1, so it may be negative"
    )
    lpips: float | None = optional("null where the weights could not be had: see lpips_missing")
    victim: str = Field(default="", description="equal for equal victims, in whatever round or update they are")
    rank: int = Field(
        description="how many candidates are at least as near to the reconstruction (MSE); 1 = identified"
    )
    rank_pattern: int | None = optional(
        "the same by the correlation of what is left when each channel's mean is taken off: without colour, brightness "
        "and contrast"
    )
    candidates: int = Field(description="size of the candidate set that rank refers to")
    different_candidates: int | None = optional("of them, how many differ from each other")
    by_luck: float | None = optional("probability that naming candidates of its class at random identifies it")
    psnr_nearest_other: float | None = optional(
        "of the reconstruction to the nearest other candidate, in dB; null: there is none"
    )
    as_far_by_luck: float | None = optional(
        "share of the candidates that are, with their own nearest one, as far ahead of any further one as this is with "
        "its victim; null: evaluated before that was"
    )
    alike_candidates: int | None = optional(
        "of how many pictures the candidates' groups are, where they come in groups that are much alike, as several of "
        "a person are; 1: in none; null: evaluated before that was"
    )
    nearer_to_other: float = Field(
        default=0.0,
        description="by how many dB it is nearer to one candidate that is no victim than to any further one",
    )
    uses: int = Field(default=1, description="how often the update used this example (local epochs)")
    rounds: list[int] = Field(default=[], description="the rounds that it was recovered from, where there are several")
    certified: bool | None = optional(
        "whether the attack vouched for it without the truth, as the client's own up to half a grey level; "
        "null: it vouches for none"
    )
    psnr_mean_image: float = Field(description="baseline: the mean image of the candidates, as if it were the recovery")
    psnr_same_class: float | None = Field(description="baseline: a random other image of the same class")
    registered: RegisteredResult | None = optional("after the best shift and flip; null: evaluated before that was")
    toned: RegisteredResult | None = optional(
        "after the best quarter turns, flip, contrast and brightness, a negative included; null: evaluated before that"
    )

    def score(self, name: str) -> float | None:
        """Return the score of that name; ``psnr_registered`` is the registered one's ``psnr``."""
        own = name.removesuffix("_registered")
        holder = self if own == name else self.registered
        value: float | None = None if holder is None else getattr(holder, own)
        return value


class RowResult(Record):
    """One true row of a table against the recovered one that is paired with it, cell by cell."""

    cells: int = Field(description="how many there are")
    right: int = Field(description="of them, how many were recovered: numbers within 0.319 standard deviations")
    found: bool = Field(default=True, description="false: the attack returned fewer rows, and none is left for this")
    certified: bool | None = optional("whether the attack proved, without the truth, that it is a training example")
    true_label: float | None = Field(description="the row's label, or its target; null where it has several")
    label: float | None = optional("that the attack used for the recovered row")
    true: list[str] = Field(default=[], description="its cells in words; none where the report doesn't draw them")
    recovered: list[str] = Field(default=[], description="likewise")
    wrong: list[int] = Field(default=[], description="positions of the cells that were not recovered, where drawn")
    confidence: list[float] = Field(default=[], description="of the attack in each cell, 0 to 1, where drawn")
    uses: int = Field(default=1, description="how often the update used this example (local epochs)")
    by_luck: float = Field(
        default=1.0,
        description="probability that one of as many candidates, drawn at random as were recovered, has all its cells",
    )
    victim: str = Field(default="", description="equal for equal rows, in whatever round or update they are")

    @property
    def exact(self) -> bool:
        """Whether every cell was recovered."""
        return self.found and self.right == self.cells


class SequenceResult(Record):
    """One training sequence against what was recovered of it; padding and the token that ends it are left out."""

    true: list[int] = Field(description="its tokens; what they stand for is in data.words")
    found: list[int] = Field(description="the recovered sequence that is paired with it; empty: none")
    rouge1: float = Field(description="words that both share (F1)")
    rouge2: float = Field(description="pairs of neighbouring words that both share (F1)")
    label: int | None = optional("its class; null where the task is to predict the next token")


class Curve(Record):
    """The attack's progress, at the iterations at which it kept a snapshot."""

    iterations: list[int] = Field(description="of the attack's optimiser, at each snapshot")
    objective: list[float] = Field(description="what the attack minimised (the adversary sees this)")
    psnr: list[float] = Field(description="mean PSNR in dB (the adversary does not see this)")


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


class GroupExposure(Record):
    """How much the members of one class, or of one category of a column, are exposed to an attack on membership."""

    label: int = Field(description="the class, or the number of the category in its column")
    column: str = Field(default="", description="of a table, whose category it is; empty: it is a class")
    value: str = Field(default="", description="the category")
    auc: float = Field(description="probability that a member's score is above another record's, within the group")
    low: float = Field(description="lower end of its 95 % interval (bootstrap, over matched pairs of a class)")
    high: float = Field(description="upper end of it")
    members: int = Field(description="of the group")
    p_value: float = Field(description="one-sided Mann-Whitney, after Holm's correction for all groups of the finding")


class RecordExposure(Record):
    """One record that was trained on, and how surely an attack on membership says so."""

    record: int = Field(description="its position among the records that the adversary holds, from 0")
    client: int = Field(description="who trained on it")
    label: int | None = Field(description="its class; null: it has none")
    as_high: int = Field(description="records that nobody trained on with a score as high or higher")
    others: int = Field(description="records that nobody trained on, in all")
    least: int | None = optional("the least as_high over ten random halves of the shadow models; null: it has none")
    most: int | None = optional("the most of them")


class FindingResult(Record):
    """One run of an attack, on what it receives: one update, one client, or the federation; evaluated."""

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
    things: str = Field(default="images", description="what its images are: images, volumes or signals")
    metrics: list[MetricResult] = Field(default=[], description="how a finding that isn't images was evaluated")
    charts: list[Chart] = Field(default=[], description="figures about this finding")
    sheets: list[Sheet] = Field(default=[], description="rows of images about this finding")
    leak: bool | None = optional(
        "whether it is a leak by itself, by its kind's rule: more than without the attack, luck excluded "
        "(p_value at most 1 %, where there is one); null: images"
    )
    victims: str = Field(default="", description="equal for equal examples, in whatever round or update they are")
    p_value: float | None = optional("probability that guessing does as well, by the test that its kind's rule names")
    p_value_at_best: float | None = optional(
        "the same if everything had been told rightly: above 1 %, there is too little to test"
    )
    exposure: list[GroupExposure] = Field(
        default=[], description="of an attack on membership: by class and category, of at least 7 members and 7 others"
    )
    most_exposed: list[RecordExposure] = Field(
        default=[],
        description="of an attack on membership that is a leak: the records that it is surest of, as many as "
        "evaluation.most_exposed says",
    )
    blind_p_value: float | None = optional(
        "probability that a test of the examples alone would tell those of clients from the others as well, were they "
        "exchangeable; at 1 % or less the others may not serve; null: not tested (of records, fewer than 10 pairs)"
    )
    epsilon: EpsilonResult | None = optional("of an audit of differential privacy")
    record_epsilon: RecordEpsilon | None = optional(
        "of an attack on membership; null: the blind baseline tells members from others, or there are too few for one"
    )
    by_luck: list[float] = Field(
        default=[], description="of random answers, the shares that are right about 0, 1, 2, ... labels"
    )
    details: dict[str, Any] = Field(
        default={}, description="what a kind has beside metrics, charts and sheets, for its panel on the page"
    )
    reason: str | None = optional("why the attack could not be run, and the remedy")
    images: list[ImageResult] = Field(default=[], description="of an attack on images, one a victim")
    certified: int | None = optional("images that the attack vouched for without the truth; null: it vouches for none")
    certified_wrong: int | None = optional("of these, how many are no image of the client's, checked with the truth")
    columns: list[str] = Field(default=[], description="of the rows, by name")
    rows: list[RowResult] = Field(default=[], description="of an attack on tables, one a training example")
    sequences: list[SequenceResult] = Field(default=[], description="of an attack on text: the first 64 of an update")
    label_source: str | None = optional("'given' or the name of the label inference")
    matching: float | None = optional(
        "of the images that the attack tied to updates of several rounds, the share that are the same "
        "example in each of them"
    )
    label_accuracy: float | None = optional("share of labels recovered, as a multiset")
    objective: float | None = optional("final value of what the attack minimised")
    iterations: int = Field(default=0, description="of the attack's optimiser; 0: it has none")
    curve: Curve | None = optional("how the attack went on; null: not kept")
    setting: Setting | None = optional(
        "'deployment': of updates such as federations in use send, by stated criteria, or of a recorded federation; "
        "'diagnostic': of what can leak at worst; null: it is older"
    )
    diagnostic_because: list[str] = Field(default=[], description="criteria of a deployment that aren't met, in words")
    notes: list[str] = Field(default=[], description="what else to know of it")
    timing: Timing | None = optional("null: not run")

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
    by_guessing: float | None = optional("the value without the attack")
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


class AttackSummary(Record):
    """All findings of one attack on one federation: a row of the report's table."""

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
    control: int | None = optional("which of the result's controls belongs to it, from 0")
    cautions: list[str] = Field(default=[], description="what weakens a verdict without a leak")
    advice: list[str] = Field(default=[], description="what to change so that an inconclusive audit can conclude")
    hardly_trained: float | None = optional(
        "the federation's held-out accuracy at the end, where it is too low for a verdict on this attack"
    )
    psnr: Interval | None = optional(
        "in dB, over the different victims, as all that follows: of a victim's several tries the best by the verdicts' "
        "rules; null: no images"
    )
    psnr_of_tries: float | None = optional("in dB, mean over all tries; null: each victim was tried once")
    mse: Interval | None = optional("of pixels in [0, 1]")
    ssim: Interval | None = optional("over images or volumes")
    correlation: Interval | None = optional("over signals")
    lpips: Interval | None = optional("over images; null: see lpips_missing")
    psnr_registered: Interval | None = optional("PSNR after each image's best shift and flip")
    ssim_registered: Interval | None = optional("SSIM after it")
    psnr_mean_image_registered: float | None = optional("baseline: the mean image, alike")
    identification_rate: float | None = optional("share of victims whose image has rank 1")
    label_accuracy: float | None = optional("share of labels recovered; null: they were given")
    psnr_mean_image: float | None = optional("baseline: mean PSNR of the candidates' mean image")
    psnr_same_class: float | None = optional("baseline: mean PSNR of a random other image of the class")
    timing: Timing | None = optional("of all runs together")

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
    order = (*LEAKS, "not demonstrated", "inconclusive", "not applicable")
    return min((s.verdict for s in summaries), key=order.index, default="not applicable")


def with_images(summaries: Sequence[AttackSummary]) -> tuple[list[AttackSummary], list[AttackSummary]]:
    """Return the summaries for a table of images, and those for a table of other metrics.

    What could not be run goes to the images, unless no images came out.
    """
    if all(s.psnr is None for s in summaries):
        return [], list(summaries)
    return [s for s in summaries if not s.metrics or s.psnr is not None], [s for s in summaries if s.metrics]


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
