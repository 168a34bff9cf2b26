"""What was audited: federations, model, data, adversary and attacks, as a result describes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from fedaudit.results.base import Record, optional

_WHO = {
    "server": "The server",
    "malicious-server": "A malicious server",
    "eavesdropper": "An eavesdropper on the network",
    "client": "Another client",
    "party": "A party",
}


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
        default=[],
        description="spent after each round, where there is differential privacy: Rényi, add/remove adjacency, of "
        "the client that took part most often (local noise), or of all rounds (central)",
    )
    epsilon_of_clients: list[list[float]] = Field(
        default=[], description="after each round, of the clients that sent least, median and most often (Rényi)"
    )
    epsilon_pld: float | None = optional("the same after the last round, by the privacy loss distribution")
    stopped: int | None = optional("rounds after which the privacy budget was spent")
    why_stopped: str | None = optional("why the privacy budget ended the federation there")
    honest_accepted: list[float | None] = Field(
        default=[], description="of each round, the share of honest clients' updates that the aggregator took"
    )
    malicious_accepted: list[float | None] = Field(
        default=[], description="the same of malicious clients' updates; null where none was sent"
    )
    timing: HistoryTiming = Field(description="what clients spent")


class ReplayRecord(Record):
    """One recorded update, trained again on the truth."""

    round: int = Field(description="from 0")
    client: str = Field(description="as the framework names it")
    error: float | None = Field(description="‖replayed − sent‖ / ‖sent‖; null: the replayed training diverged")


class RecordingRecord(Record):
    """A federation that really ran, as far as it was recorded."""

    clients: list[str] = Field(description="as the framework names them, in the order of their numbers")
    totals: int = Field(default=0, description="rounds of which only the sum of several updates is known")
    training: list[str] = Field(default=[], description="how clients train, in words: each way once")
    seconds: float | None = optional("that local training took, median; null: not recorded")
    replays: list[ReplayRecord] = Field(default=[], description="of every update whose truth is at hand")
    facts: Literal["verified", "contradicted", "unverified"] = Field(
        description="whether what is recorded of local training gives the updates that travelled, when it is repeated"
    )
    notes: list[str] = Field(default=[], description="what else to know of the recording")


class ReceivedCheck(Record):
    """What a client finds in the models that a malicious server sent, by one of ``fedaudit check-model``'s checks."""

    name: str = Field(description="of the check")
    value: float = Field(description="the largest that was measured, of all models that were sent")
    limit: float = Field(description="above which the check raises an alarm")
    noticed: float = Field(description="share of the models sent that raise it")
    models: int = Field(description="how many were checked")
    text: str = Field(description="what was found in the one of the largest value")


class FederationRecord(Record):
    """One simulated or recorded federation, as the report describes it."""

    name: str = Field(description="its own, and that of its defences where there are several")
    algorithm: str = Field(description="'fedsgd', 'fedavg', 'fedprox', 'vertical', or the framework's")
    update_kind: Literal["gradient", "weights"] = Field(description="what clients sent")
    clients: int = Field(description="how many there are")
    rounds: int = Field(description="how many were run")
    batch_size: int = Field(description="examples in a step")
    local_steps: int | None = Field(description="FedAvg; null: another measure, or not known")
    local_epochs: int | None = Field(description="FedAvg; null: another measure, or not known")
    learning_rate: float = Field(description="of SGD")
    updates_observed: int = Field(description="how many the adversary saw")
    summed: int = Field(
        default=1, description="of how many clients, at most, the adversary reads the sum of the updates only"
    )
    updates_rejected: int = Field(default=0, description="updates that the aggregator left out")
    fallbacks: int = Field(default=0, description="rounds in which the aggregator had to do something else")
    description: str = Field(description="one sentence")
    aggregator: str = Field(default="mean", description="its name")
    sanitiser: str = Field(default="none", description="its name")
    defences: str | None = optional(
        "what these two do, with which settings, in words; empty where neither is a defence"
    )
    replay_error: float | None = optional(
        "relative error with which the recorded local training, repeated on the truth, gives the first "
        "updates; null: not checked"
    )
    recording: RecordingRecord | None = optional("null where the federation was simulated")
    checks: list[ReceivedCheck] = Field(
        default=[], description="where the server is malicious: would a client notice? Each check of a received model"
    )
    course: HistoryRecord | None = optional("null where a transcript was attacked from disk")


class ModelRecord(Record):
    """The audited model."""

    name: str = Field(description="its name, or the class of a module of your own")
    parameters: int = Field(description="how many numbers are trained")
    initialisation: str = Field(description="of the weights")
    batch_norm: str = Field(description="'eval', 'train' or 'none': decides much, see docs/reference/methods.md")
    trained: str = Field(description="'untrained', 'n epochs' or 'checkpoint ...'")
    dropout: Literal["on", "off", "none"] | None = optional(
        "in the clients' training; 'none': the model has none; null: not recorded"
    )
    mode: str | None = optional("in which mode clients train, and who said so; null: no choice")


class DataRecord(Record):
    """The audited data."""

    name: str = Field(description="its name")
    summary: str = Field(description="one line about it")
    classes: int | None = Field(description="how many; null: regression")
    class_names: list[str] | None = Field(description="null: they have none")
    kind: str | None = optional("of the examples: 'image', 'table' or another; null: not recorded")
    input_shape: list[int] = Field(description="of one example")
    words: list[str] | None = optional("of text: what each token stands for; null: not known")


class AdversaryRecord(Record):
    """Who the adversary was."""

    adversary: str = Field(
        description="'server', 'malicious-server', 'eavesdropper', 'client', or 'party' of a vertical federation"
    )
    summary: str = Field(description="one line about it")
    knows: list[str] = Field(description="in words")
    does_not_know: list[str] = Field(description="in words")
    acts: bool = Field(description="whether it interferes; false: it only looks")

    @property
    def who(self) -> str:
        """The adversary, as a sentence begins with it."""
        return _WHO.get(self.adversary, f"The adversary ({self.adversary})")


class MappingRecord(Record):
    """What a standard calls an attack."""

    standard: str = Field(description="title, with its edition")
    id: str = Field(description="the standard's identifier; of the EDPB's tests, which have none, the name as a slug")
    name: str = Field(description="the standard's word")
    nearest: bool = Field(default=False, description="the standard has no word for it; this is the nearest one")


class AttackRecord(Record):
    """An attack that was run, with its settings."""

    name: str = Field(description="in scenarios")
    summary: str = Field(description="one line about it")
    paper: str = Field(description="its source")
    settings: dict[str, Any] = Field(description="all of them, as they were used")
    mapping: list[MappingRecord] = Field(default=[], description="what standards call it; names only, no pass marks")
