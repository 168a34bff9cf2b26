"""What was found of records: whom an attack on membership exposes, and which ε it demonstrates."""

from __future__ import annotations

from pydantic import Field

from fedaudit.results.epsilon import RecordEpsilon
from fedaudit.results.record import Record, optional


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
    standing_out: int | None = optional(
        "members with a score above every record that nobody trained on, of whatever group; null: it is older"
    )


class RecordExposure(Record):
    """One record that was trained on, and how surely an attack on membership says so."""

    record: int = Field(
        description="its position among the records that the adversary holds, from 0; where persons are counted, "
        "that of one of this person's"
    )
    client: int = Field(description="who trained on it")
    label: int | None = Field(description="its class; null: it has none")
    nonmembers_above: int = Field(description="records that nobody trained on with a score as high or higher")
    others: int = Field(description="records that nobody trained on, in all")
    nonmembers_above_min: int | None = optional(
        "the least of it over ten random halves of the shadow models; null: it has none"
    )
    nonmembers_above_max: int | None = optional("the most of them")


class MembershipDetail(Record):
    """Of one run of an attack on membership."""

    exposure: list[GroupExposure] = Field(
        default=[], description="of an attack on membership: by class and category, of at least 7 members and 7 others"
    )
    most_exposed: list[RecordExposure] = Field(
        default=[],
        description="of an attack on membership that is a leak: the records that it is surest of, as many as "
        "evaluation.most_exposed says",
    )
    standing_out: int | None = optional(
        "of an attack on membership: members with a score above every record that nobody trained on; null: the "
        "records alone tell members from others, or it is older"
    )
    record_epsilon: RecordEpsilon | None = optional(
        "of an attack on membership; null: the blind baseline tells members from others, or there are too few for one"
    )
