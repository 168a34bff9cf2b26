"""The one result of an audit: JSON-serialisable, and the only thing that a report, a table or a figure is drawn from.

Published as a JSON Schema in ``docs/results.schema.json``. Whatever depends on the clock or on the machine's load
stands under a key named ``timing`` (and the machine itself under ``environment``); the rest is bit-identical when
the same scenario is repeated on the same machine.
"""

from __future__ import annotations

import json
import reprlib
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from fedaudit.utils.errors import BadInput
from fedaudit.utils.validation import explain

Verdict = Literal[
    "recognisable", "partly recognisable", "demonstrated", "partly demonstrated", "not demonstrated", "not applicable"
]


SCHEMA_VERSION: Final = 1
_READING = "fields that only a later fedaudit knows are left out"


def _open(schema: dict[str, Any]) -> None:
    """Let the published schema accept fields of later versions, as :meth:`AuditResult.load` does."""
    schema.pop("additionalProperties", None)


class _Record(BaseModel):
    """Refuses unknown fields where it is made, and leaves them out where a file is read: see docs/results.md."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_open)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_unknown(cls, values: Any, info: ValidationInfo) -> Any:
        if info.context == _READING and isinstance(values, dict):
            return {key: value for key, value in values.items() if key in cls.model_fields}
        return values


class Timing(_Record):
    """What differs from run to run."""

    seconds: float = Field(description="wall seconds")
    started: str | None = Field(default=None, description="ISO 8601, UTC")
    workers: int | None = None


class Interval(_Record):
    """Mean and median over n images, with a 95 % interval of the mean (bootstrap; Student for paired differences)."""

    mean: float
    median: float
    low: float
    high: float
    n: int

    def span(self, form: Callable[[float], str]) -> str:
        """Return the interval in brackets, after a space; nothing for n = 1, which has none."""
        return f" [{form(self.low)}, {form(self.high)}]" if self.n > 1 else ""


class ImageResult(_Record):
    """One victim image against its reconstruction. Paths are relative to the folder of results.json."""

    true_image: str = Field(description="PNG of the victim")
    reconstruction: str = Field(description="PNG of what the attack recovered")
    true_label: int
    label: int | None = Field(description="label that the attack used for this image")
    mse: float = Field(description="mean squared error on [0, 1] pixels")
    psnr: float = Field(description="dB on [0, 1] pixels, capped at 100")
    ssim: float
    lpips: float | None = Field(default=None, description="null where the weights could not be had: see lpips_missing")
    rank: int = Field(
        description="how many candidates are at least as near to the reconstruction (MSE); 1 = identified"
    )
    candidates: int = Field(description="size of the candidate set that rank refers to")
    different_candidates: int | None = Field(default=None, description="of them, how many differ from each other")
    uses: int = Field(default=1, description="how often the update used this example (local epochs)")
    rounds: list[int] = Field(default=[], description="the rounds that it was recovered from, where there are several")
    psnr_mean_image: float = Field(description="baseline: the mean image of the candidates, as if it were the recovery")
    psnr_same_class: float | None = Field(description="baseline: a random other image of the same class")


class Curve(_Record):
    """The attack's progress, at the iterations at which it kept a snapshot."""

    iterations: list[int]
    objective: list[float] = Field(description="what the attack minimised (the adversary sees this)")
    psnr: list[float] = Field(description="mean PSNR in dB (the adversary does not see this)")


class MetricResult(_Record):
    """One number by which a finding that isn't images is evaluated."""

    name: str
    value: float
    unit: str = ""
    higher_is_better: bool = Field(description="whether a higher value means that the attack did better")
    baseline: float | None = Field(default=None, description="the same number without the attack")


class Line(_Record):
    """One line of a chart; a single point is drawn as a level across the chart."""

    name: str
    x: list[float]
    y: list[float]


class Chart(_Record):
    """A figure that belongs to a finding, as data."""

    title: str
    caption: str = Field(description="what it shows, in words")
    x_label: str
    y_label: str
    lines: list[Line]


class Sheet(_Record):
    """A row of images that belongs to a finding, side by side in one PNG."""

    title: str
    path: str = Field(description="relative to the folder of results.json")


class FindingResult(_Record):
    """One run of an attack, on what it receives: one update, one client, or the federation; evaluated."""

    attack: str
    federation: str
    update_kind: Literal["gradient", "weights"]
    round: int | None = Field(description="null where the attack received several rounds, or none")
    client: int | None = Field(description="null where the attack received several clients, or none")
    rounds: list[int] = Field(default=[], description="the rounds that it received")
    num_examples: int = Field(description="over how many examples (with repetition) the updates were made")
    status: Literal["done", "not applicable"]
    kind: str | None = Field(default=None, description="what was recovered: 'images' or another finding type")
    metrics: list[MetricResult] = Field(default=[], description="how a finding that isn't images was evaluated")
    charts: list[Chart] = Field(default=[], description="figures about this finding")
    sheets: list[Sheet] = Field(default=[], description="rows of images about this finding")
    leak: bool | None = Field(default=None, description="whether it counts as a leak by its kind's rule; null: images")
    reason: str | None = Field(default=None, description="why the attack could not be run, and the remedy")
    images: list[ImageResult] = []
    label_source: str | None = Field(default=None, description="'given' or the name of the label inference")
    matching: float | None = Field(
        default=None,
        description="of the images that the attack tied to updates of several rounds, the share that are the same "
        "example in each of them",
    )
    label_accuracy: float | None = Field(default=None, description="share of labels recovered, as a multiset")
    objective: float | None = Field(default=None, description="final value of what the attack minimised")
    iterations: int = 0
    curve: Curve | None = None
    notes: list[str] = []
    timing: Timing | None = None

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        where = {"attack": self.attack, "federation": self.federation, "round": self.round, "client": self.client}
        measured = {metric.name: metric.value for metric in self.metrics[:1]}
        return [*where.items(), ("status", self.status), ("images", len(self.images)), *measured.items()]


class MetricSummary(_Record):
    """One metric over all findings of an attack."""

    name: str
    summary: str = Field(description="what it measures, in words")
    unit: str = ""
    higher_is_better: bool
    value: Interval
    baseline: Interval | None = Field(default=None, description="the same without the attack, where it is known")


class AttackSummary(_Record):
    """All findings of one attack on one federation: a row of the report's table."""

    attack: str
    federation: str
    update_kind: Literal["gradient", "weights"]
    updates: int = Field(description="runs of the attack: one an update, or a client, or the federation")
    images: int
    kind: str | None = Field(default=None, description="what was recovered; null where nothing could be run")
    metrics: list[MetricSummary] = Field(default=[], description="of findings that aren't images")
    verdict: Verdict
    verdict_text: str = Field(description="the verdict in a sentence, for a reader who is not an engineer")
    psnr: Interval | None = None
    mse: Interval | None = None
    ssim: Interval | None = None
    lpips: Interval | None = None
    identification_rate: float | None = Field(default=None, description="share of images whose rank is 1")
    label_accuracy: float | None = None
    psnr_mean_image: float | None = None
    psnr_same_class: float | None = None
    timing: Timing | None = None


def with_images(summaries: Sequence[AttackSummary]) -> tuple[list[AttackSummary], list[AttackSummary]]:
    """Return the summaries for a table of images, and those for a table of other metrics.

    What could not be run goes to the images, unless there are only others.
    """
    others = [s for s in summaries if s.metrics]
    if others and not any(s.images for s in summaries):
        return [], list(summaries)
    return [s for s in summaries if not s.metrics], others


class Comparison(_Record):
    """A paired comparison of two attacks on the same images (or updates, or clients): difference = a - b."""

    federation: str
    metric: str = Field(description="'psnr', or the first metric of the finding type")
    a: str
    b: str
    difference: Interval
    unit: str = "dB"
    outcome: Literal["a is better", "b is better", "undecided"]


class HistoryTiming(_Record):
    """Seconds that clients spent."""

    training: float = Field(description="seconds a client update, mean")
    sanitising: float = Field(description="seconds a client update, mean")


class HistoryRecord(_Record):
    """What a federation's rounds brought and cost."""

    rounds: list[int] = Field(default=[], description="finished rounds at each measurement of the accuracy")
    accuracy: list[float] = Field(default=[], description="held-out accuracy at each")
    per_client: list[list[float]] = Field(
        default=[], description="at each, every client's accuracy, held-out classes weighted as its own are"
    )
    examples: int = Field(default=0, description="held-out examples that the accuracy is measured on")
    bytes: float = Field(description="of an update as it was sent, mean")
    parameters: float = Field(description="elements of an update as it was sent, mean")
    epsilon: list[float] = Field(
        default=[], description="after each round (Rényi), where there is differential privacy"
    )
    epsilon_pld: float | None = Field(default=None, description="after the last, by the privacy loss distribution")
    stopped: int | None = Field(default=None, description="rounds after which the privacy budget was spent")
    why_stopped: str | None = Field(default=None, description="why the privacy budget ended the federation there")
    honest_accepted: list[float | None] = Field(
        default=[], description="of each round, the share of honest clients' updates that the aggregator took"
    )
    malicious_accepted: list[float | None] = Field(
        default=[], description="the same of malicious clients' updates; null where none was sent"
    )
    timing: HistoryTiming


class FederationRecord(_Record):
    """One simulated or recorded federation, as the report describes it."""

    name: str
    algorithm: str
    update_kind: Literal["gradient", "weights"]
    clients: int
    rounds: int
    batch_size: int
    local_steps: int | None
    local_epochs: int | None
    learning_rate: float
    updates_observed: int
    updates_rejected: int = Field(default=0, description="updates that the aggregator left out")
    fallbacks: int = Field(default=0, description="rounds in which the aggregator had to do something else")
    description: str = Field(description="one sentence")
    aggregator: str = "mean"
    sanitiser: str = "none"
    defences: str | None = Field(
        default=None, description="what these two do, with which settings, in words; empty where neither is a defence"
    )
    course: HistoryRecord | None = Field(default=None, description="null where a transcript was attacked from disk")


class ModelRecord(_Record):
    """The audited model."""

    name: str
    parameters: int
    initialisation: str
    batch_norm: str = Field(description="'eval', 'train' or 'none': decides much, see docs/methods.md")
    trained: str = Field(description="'untrained', 'n epochs' or 'checkpoint ...'")
    dropout: Literal["on", "off", "none"] | None = Field(
        default=None, description="in the clients' training; 'none': the model has none; null: not recorded"
    )
    mode: str | None = Field(default=None, description="in which mode clients train, and who said so; null: no choice")


class DataRecord(_Record):
    """The audited data."""

    name: str
    summary: str
    classes: int | None
    class_names: list[str] | None
    kind: str | None = Field(
        default=None, description="of the examples: 'image', 'table' or another; null: not recorded"
    )
    input_shape: list[int]


class AdversaryRecord(_Record):
    """Who the adversary was."""

    adversary: str
    summary: str
    knows: list[str]
    does_not_know: list[str]
    acts: bool


class AttackRecord(_Record):
    """An attack that was run, with its settings."""

    name: str
    summary: str
    paper: str
    settings: dict[str, Any]


class Threshold(_Record):
    """A limit that the user set with --fail-above, and the worst value that was met."""

    metric: str
    limit: float
    worst: float | None
    where: str | None = Field(description="attack and federation of the worst value")
    exceeded: bool


class AuditResult(_Record):
    """Everything that an audit found."""

    schema_version: Literal[1] = SCHEMA_VERSION
    fedaudit_version: str
    name: str
    scenario: dict[str, Any] = Field(description="the resolved scenario; repeating it gives the same numbers")
    data: DataRecord
    model: ModelRecord
    adversary: AdversaryRecord
    federations: list[FederationRecord]
    attacks: list[AttackRecord]
    findings: list[FindingResult]
    summaries: list[AttackSummary]
    comparisons: list[Comparison]
    verdict_rules: list[str] = Field(description="how verdicts are reached, in words")
    not_tested: list[str] = Field(description="what this audit says nothing about")
    lpips_missing: str | None = Field(description="why LPIPS is null, if it is")
    repeat: str = Field(default="fedaudit audit scenario.yaml --out DIR", description="the command that repeats it")
    thresholds: list[Threshold]
    environment: dict[str, str]
    timing: Timing

    def save(self, path: Path) -> None:
        """Write ``results.json`` to ``path``."""
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> AuditResult:
        """Read a ``results.json``; fields that only a later fedaudit knows are left out.

        Raises:
            BadInput: the file can't be read, or isn't a result of this schema version.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInput(f"can't read '{path}': {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{path} is truncated or not JSON ({error})") from None
        version = values.get("schema_version") if isinstance(values, dict) else None
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise BadInput(
                f"{path} has schema version {version}, and this fedaudit reads {SCHEMA_VERSION}; "
                f"install the one that wrote it ({reprlib.repr(values.get('fedaudit_version'))}), or a later one"
            )
        try:
            return cls.model_validate(values, context=_READING)
        except ValidationError as error:
            raise BadInput(f"{path} isn't an audit's result: {explain(error, cls)}") from None

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        reached = {summary.verdict for summary in self.summaries}
        return [
            ("name", textwrap.shorten(self.name, 60, placeholder="…")),
            ("federations", len(self.federations)),
            ("attacks", len(self.attacks)),
            ("findings", len(self.findings)),
            ("worst", next((verdict for verdict in get_args(Verdict) if verdict in reached), None)),
        ]
