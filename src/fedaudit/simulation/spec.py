"""What a scenario says of a federation: who trains how, on which share of the data, and who isn't honest."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, field_validator, model_serializer, model_validator

from fedaudit.data.partition import PARTITIONS
from fedaudit.simulation.behaviour import Behaviour
from fedaudit.simulation.server_behaviour import ServerBehaviour
from fedaudit.task.training import LocalPlan
from fedaudit.transcript.sent import SENT, ProtocolSpec, settings_by_kind
from fedaudit.transcript.vertical import VerticalSpec
from fedaudit.utils.distributions import lacking
from fedaudit.utils.errors import unknown_name
from fedaudit.utils.registry import PluginField
from fedaudit.utils.renamed import of_part
from fedaudit.utils.validation import (
    Count,
    Fraction,
    Name,
    NonNegative,
    Positive,
    Share,
    Spec,
    Title,
    Whole,
    from_name,
)


class PartitionSpec(Spec):
    """How the examples are spread over the clients."""

    scheme: str = Field(default="iid", description="how; the table below has them")
    alpha: Positive | None = Field(default=None, description="dirichlet: concentration")
    k: Count | None = Field(default=None, description="classes-per-client: classes a client")
    shards_per_client: Count | None = Field(default=None, description="shards")
    m: Count | None = Field(default=None, description="label-to-clients: clients a label")
    attribute: Title | None = Field(
        default=None, description="attribute: what half of the clients have, an attribute of the data set and its value"
    )
    share: Share | None = Field(default=None, description="attribute: the share of such examples in that half")
    otherwise: Share | None = Field(default=None, description="attribute: the share in the other half")
    labels: Literal["alike", "natural"] | None = Field(
        default=None,
        description="attribute: as many examples of each class at every client, or classes as they come with it",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> PartitionSpec:
        if self.scheme not in PARTITIONS:
            raise ValueError(unknown_name("partition", self.scheme, PARTITIONS.names()))
        takes = PARTITIONS[self.scheme].info["options"]
        for name in self.model_dump(exclude={"scheme"}, exclude_none=True):
            if name not in takes:
                allowed = f"only {', '.join(takes)}" if takes else "no options"
                raise ValueError(f"the partition '{self.scheme}' takes {allowed}; leave '{name}' out")
        if self.scheme == "attribute" and self.attribute is None:
            raise ValueError("the partition 'attribute' needs an attribute and its value, as attribute: sex=Female")
        return self


class MaliciousSpec(Spec):
    """Clients that don't follow the protocol: a registered behaviour, how many, and the behaviour's settings."""

    behaviour: PluginField[Behaviour] = Field(description="which one, by its registered name")
    clients: Count = Field(default=1, description="the last ones; they collude")
    missing_classes: list[Whole] = Field(
        default=[], description="classes of which they hold no example: theirs are left out"
    )

    @property
    def name(self) -> str:
        """The behaviour's."""
        return self.behaviour.name

    @model_validator(mode="before")
    @classmethod
    def _side_by_side(cls, values: Any) -> Any:
        """Tell the behaviour's settings from what every behaviour has: a scenario writes them side by side."""
        values = of_part(cls.__name__, from_name(values))
        if not isinstance(values, dict) or "behaviour" in values:
            return values
        own = {key: value for key, value in values.items() if key in ("clients", "missing_classes")}
        return {**own, "behaviour": {key: value for key, value in values.items() if key not in own}}

    @model_serializer
    def _written(self) -> dict[str, Any]:
        settings = self.behaviour.written()
        return {
            "name": settings.pop("name"),
            "clients": self.clients,
            "missing_classes": self.missing_classes,
            **settings,
        }


class FederationSpec(Spec):
    """One federation: who trains how.

    ``fedsgd`` sends gradients, ``fedavg`` and ``fedprox`` send weights. In a ``vertical`` one the clients are parties
    that hold different features of the same examples, and the server holds the labels. In ``split`` learning the one
    client holds whole examples and the first layers of the model (``vertical.cut``), the server the others and the
    labels. Other packages add algorithms, whose settings stand under a key of their protocol's name: ``trees``.
    """

    model_config = ConfigDict(extra="allow")  # settings of other packages' protocols; any other key is refused

    name: Name = Field(description="for reports and files")
    algorithm: str = Field(
        default="fedsgd",
        description="what clients send: the gradient of one batch (fedsgd), what local training changed (fedavg, "
        "fedprox), embeddings of their own features (vertical), what the first layers put out (split), or boosted "
        "trees (trees, of fedaudit-trees)",
    )
    clients: Count = Field(default=4, description="how many there are; of a vertical federation, parties")
    clients_per_round: Count | None = Field(default=None, description="how many take part in a round; all if null")
    rounds: Count = Field(default=1, description="how often the server sends the model and merges what comes back")
    examples: Count | None = Field(default=None, description="examples that all clients hold together; all if null")
    sampling: Literal["stratified", "first", "uniform"] = Field(
        default="stratified",
        description="which examples these are: drawn by the scenario's seed (seeds that follow each other draw "
        "different ones), of every class in turn (stratified) or without regard to classes (uniform); or the data "
        "set's first of every class in turn (first)",
    )
    batch_size: Count = Field(default=1, description="examples in a client's gradient, or in a local step")
    local_steps: Count | None = Field(default=None, description="FedAvg: mini-batches a round")
    local_epochs: Count | None = Field(default=None, description="FedAvg: or passes over the client's data")
    learning_rate: Positive = Field(
        default=0.01, description="of SGD: the clients' (fedavg, fedprox), or the server's step (fedsgd); of trees η"
    )
    momentum: Fraction = Field(default=0.0, description="FedAvg: of the clients' SGD")
    weight_decay: NonNegative = Field(default=0.0, description="FedAvg: of the clients' SGD")
    proximal_mu: NonNegative = Field(default=0.0, description="FedProx: μ, what holds a client near the global model")
    arithmetic: Literal["torch", "fast"] = Field(
        default="torch",
        description="of local training; fast: channels last, 3x3 convolutions by Winograd (native code): the "
        "same numbers to rounding; torch's where the model or differential privacy of examples doesn't allow it",
    )
    batch_norm: Literal["eval", "train"] | None = Field(
        default=None, description="BatchNorm's mode in this federation's training; model.batch_norm if null"
    )
    partition: PartitionSpec = Field(
        default=PartitionSpec(), description="how the examples are spread over the clients"
    )
    malicious: MaliciousSpec | None = Field(default=None, description="who of the clients isn't honest; nobody if null")
    server: PluginField[ServerBehaviour] | None = Field(
        default=None,
        description="what a malicious server does to the model that it sends, or to the gradients in split learning "
        "(threat.adversary: malicious-server); nothing if null",
    )
    vertical: VerticalSpec | None = Field(
        default=None,
        description="of a vertical federation, or split learning: how features, model and messages are split",
    )
    keep_rounds: Annotated[list[Whole], Field(min_length=1)] | None = Field(
        default=None, description="rounds (from 0) that the transcript keeps and attacks see; all if null"
    )

    @property
    def honest(self) -> int:
        """How many clients are honest: the first ones."""
        return self.clients - (self.malicious.clients if self.malicious else 0)

    @model_validator(mode="before")
    @classmethod
    def _settings_by_default(cls, values: Any) -> Any:
        values = of_part(cls.__name__, values)
        if not isinstance(values, dict):
            return values
        kinds = settings_by_kind()
        for name, kind in kinds.items():
            if values.get("algorithm") in kind.algorithms:
                given = {} if values.get(name) is None else values[name]
                values = {**kind.defaults(values["algorithm"]), **values, name: given}
        own: dict[str, ProtocolSpec] = {}
        for name in [name for name in values if name not in cls.model_fields]:
            elsewhere = lacking(SENT.group, name)
            if name not in kinds and not elsewhere:
                raise ValueError(unknown_name("key", name, [*cls.model_fields, *kinds]))
            if values[name] is None:
                continue
            if name not in kinds:
                raise ValueError(f"protocol '{name}' {elsewhere}")
            own |= TypeAdapter(dict[str, kinds[name]]).validate_python({name: values[name]})  # type: ignore[valid-type]
        return {name: value for name, value in values.items() if name in cls.model_fields} | own

    @field_validator("algorithm")
    @classmethod
    def _of_a_protocol(cls, algorithm: str) -> str:
        known = [name for entry in SENT for name in entry.value.specified.algorithms]
        if algorithm not in known:
            elsewhere = lacking(SENT.group, algorithm)
            raise ValueError(f"'{algorithm}' {elsewhere}" if elsewhere else unknown_name("algorithm", algorithm, known))
        return algorithm

    @classmethod
    def part(cls, name: str) -> Any:
        """Return the settings of a protocol where ``name`` is its."""
        return super().part(name) or settings_by_kind().get(name)

    @property
    def trees(self) -> Any:
        """The settings of boosted trees, if the federation is of these; else None."""
        return (self.model_extra or {}).get("trees")

    @property
    def settings(self) -> ProtocolSpec:
        """The protocol's own settings; of a horizontal federation there are none beside these."""
        return next(iter(self._given()), ProtocolSpec())

    def _given(self) -> list[ProtocolSpec]:
        return [given for name in settings_by_kind() if (given := getattr(self, name, None)) is not None]

    @property
    def drawn(self) -> str:
        """Which examples clients hold, in words."""
        if self.examples is None:
            return "all of the split"
        return {
            "stratified": "drawn by the seed, of every class (if there are classes) in turn",
            "uniform": "drawn by the seed, without regard to classes",
            "first": "the split's first, of every class (if there are classes) in turn",
        }[self.sampling]

    @property
    def plan(self) -> LocalPlan:
        """How clients train, as a malicious server knows it."""
        gradient = self.algorithm == "fedsgd"
        taking_part = self.clients_per_round or self.clients
        return LocalPlan(gradient, gradient or self.local_steps == 1, self.learning_rate, self.batch_size, taking_part)

    @model_validator(mode="after")
    def _fits_together(self) -> FederationSpec:
        changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        for settings in self._given():
            settings.check(self.algorithm, self.clients, changed)
        if not self._given():
            self._check_local_training()
        if self.proximal_mu and self.algorithm != "fedprox":
            raise ValueError("proximal_mu is for fedprox only; leave it out")
        if not self.proximal_mu and self.algorithm == "fedprox":
            raise ValueError("fedprox needs proximal_mu above 0 (at 0 it is fedavg)")
        if self.clients_per_round is not None and self.clients_per_round > self.clients:
            raise ValueError(f"clients_per_round is {self.clients_per_round}, but there are {self.clients} clients")
        if self.malicious is not None and self.malicious.clients >= self.clients:
            raise ValueError(f"malicious.clients is {self.malicious.clients} of {self.clients}; leave an honest one")
        if self.keep_rounds is not None and len(set(self.keep_rounds)) < len(self.keep_rounds):
            raise ValueError("keep_rounds names a round twice; name each once")
        if self.keep_rounds is not None and not 0 <= max(self.keep_rounds) < self.rounds:
            raise ValueError(
                f"keep_rounds names round {max(self.keep_rounds)}, but rounds count from 0 to {self.rounds - 1}"
            )
        if not self.settings.same_examples and self.examples is not None and self.examples < self.clients:
            raise ValueError(
                f"{self.examples} examples can't be partitioned over {self.clients} clients; examples are those of all "
                "clients together"
            )
        return self

    def _check_local_training(self) -> None:
        if self.algorithm == "fedsgd":
            local = ("local_steps", "local_epochs", "momentum", "weight_decay")
            given = [name for name in local if getattr(self, name)]
            if given:
                raise ValueError(
                    f"fedsgd sends one gradient a round: {given[0]} is for fedavg and fedprox; leave it out"
                )
        elif (self.local_steps is None) == (self.local_epochs is None):
            raise ValueError(f"{self.algorithm} needs local_steps or local_epochs, and not both")
