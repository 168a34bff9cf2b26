"""What all parts of a result share: how they are written and read, intervals, verdicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from fedaudit.utils.renamed import of_result

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
            values = of_result(cls.__name__, values)
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
class GroupWorst(Record):
    """The most exposed record of a class, or of a category of a column, beside the mean of that group."""

    label: int = Field(description="the class, or the number of the category in its column")
    column: str = Field(default="", description="of a table, whose category it is; empty: it is a class")
    group: str = Field(default="", description="the category")
    n: int = Field(description="of the group: images, rows, or members")
    value: float = Field(description="as of the worst of all")
    mean: float = Field(description="the same over the group; of membership, where a count has none, the AUC")


class Worst(Record):
    """The most exposed record, beside the mean over all."""

    value: float = Field(description="PSNR in dB, a row's share of cells, or of membership how many members stand out")
    mean: float | None = optional("the same of all; null: a count has none")
    n: int = Field(description="over how many records it is the worst")
    p_value: float | None = optional("probability that luck does as well; null: not tested")
    text: str = Field(description="the same in a sentence")
    by_group: list[GroupWorst] = Field(default=[], description="where there are two classes or categories, or more")


Verdict = Literal[
    "recovered",
    "identifiable",
    "inferred",
    "present, not extracted",
    "inconclusive",
    "not demonstrated",
    "not applicable",
]

VERDICTS: dict[Verdict, str] = {
    "recovered": "Training data came out visibly: someone who looks at the result sees what was trained on.",
    "identifiable": "Nothing came out visibly, but the result singles out the true example among candidates, "
    "more often than luck would.",
    "inferred": "Something about the training data was told better than by guessing: membership, attributes, labels, a "
    "client's own model.",
    "present, not extracted": "The attacks failed, but the update determines its examples, so a better attack could "
    "have them: see the ceiling, an estimate that takes the truth.",
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
Unit = Literal["client", "record"]
Adjacency = Literal["add-remove", "replace"]
