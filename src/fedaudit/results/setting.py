"""What was audited: federations, model, data, adversary and attacks, as a result describes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from fedaudit.results.base import Record

_WHO = {"server": "The server", "eavesdropper": "An eavesdropper on the network", "client": "Another client"}


class HistoryTiming(Record):
    """Seconds that clients spent."""

    training: float = Field(description="seconds a client update, mean")
    sanitising: float = Field(description="seconds a client update, mean")


class HistoryRecord(Record):
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


class ReplayRecord(Record):
    """One recorded update, trained again on the truth."""

    round: int
    client: str = Field(description="as the framework names it")
    error: float | None = Field(description="‖replayed − sent‖ / ‖sent‖; null: the replayed training diverged")


class RecordingRecord(Record):
    """A federation that really ran, as far as it was recorded."""

    clients: list[str] = Field(description="as the framework names them, in the order of their numbers")
    totals: int = Field(default=0, description="rounds of which only the sum of several updates is known")
    training: list[str] = Field(default=[], description="how clients train, in words: each way once")
    seconds: float | None = Field(default=None, description="that local training took, median; null: not recorded")
    replays: list[ReplayRecord] = Field(default=[], description="of every update whose truth is at hand")
    facts: Literal["verified", "contradicted", "unverified"] = Field(
        description="whether what is recorded of local training gives the updates that travelled, when it is repeated"
    )
    notes: list[str] = Field(default=[], description="what else to know of the recording")


class FederationRecord(Record):
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
    replay_error: float | None = Field(
        default=None,
        description="relative error with which the recorded local training, repeated on the truth, gives the first "
        "updates; null: not checked",
    )
    recording: RecordingRecord | None = Field(default=None, description="null where the federation was simulated")
    course: HistoryRecord | None = Field(default=None, description="null where a transcript was attacked from disk")


class ModelRecord(Record):
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


class DataRecord(Record):
    """The audited data."""

    name: str
    summary: str
    classes: int | None
    class_names: list[str] | None
    kind: str | None = Field(
        default=None, description="of the examples: 'image', 'table' or another; null: not recorded"
    )
    input_shape: list[int]


class AdversaryRecord(Record):
    """Who the adversary was."""

    adversary: str
    summary: str
    knows: list[str]
    does_not_know: list[str]
    acts: bool

    @property
    def who(self) -> str:
        """The adversary, as a sentence begins with it."""
        return _WHO.get(self.adversary, f"The adversary ({self.adversary})")


class MappingRecord(Record):
    """What a standard calls an attack."""

    standard: str = Field(description="title, with its edition")
    id: str = Field(description="the standard's identifier; of the EDPB's tests, which have none, the name as a slug")
    name: str
    nearest: bool = Field(default=False, description="the standard has no word for it; this is the nearest one")


class AttackRecord(Record):
    """An attack that was run, with its settings."""

    name: str
    summary: str
    paper: str
    settings: dict[str, Any]
    mapping: list[MappingRecord] = Field(default=[], description="what standards call it; names only, no pass marks")
