"""The scenario: everything needed to repeat an audit. YAML in and out; unknown keys are refused."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_serializer, field_validator, model_validator

from fedaudit.attacks import Attack
from fedaudit.data.table_file import TABLE_FILE
from fedaudit.defences.spec import DefencesSpec
from fedaudit.scenario.yaml import apply_override as apply_override
from fedaudit.scenario.yaml import describe_source, read_scenario
from fedaudit.scenario.yaml import parse_setting as parse_setting
from fedaudit.simulation.spec import FederationSpec
from fedaudit.transcript.sent import SENT, settings_by_kind
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils import plain_yaml
from fedaudit.utils.errors import BadInput, unknown_name
from fedaudit.utils.registry import PluginField
from fedaudit.utils.validation import (
    Count,
    File,
    Fraction,
    Number,
    Positive,
    Spec,
    Title,
    Whole,
    explain,
    no_boolean,
)


class DataSpec(Spec):
    """Which data set, and which part of it the clients hold."""

    name: str = Field(default="photos", description="which data set; `fedaudit list datasets` has their names")
    kind: Title | None = Field(
        default=None,
        description="of the examples of arrays (data set arrays, or from Python), where their shape doesn't tell: "
        "image, volume, signal or table",
    )
    image_size: Count | None = Field(default=None, description="side in pixels; the data set's own if null")
    limit: Count | None = Field(default=None, description="at most so many examples per split are loaded")
    max_pixel_value: Positive | None = Field(
        default=None,
        description="of folders of images, the value that is white in their files, 4095 for 12 bits; the largest of "
        "their depth if null",
    )
    split: Literal["train", "test"] = Field(
        default="test", description="the split that the clients hold; of a table-file it is train where nothing is said"
    )
    path: File | None = Field(default=None, description="table-file: the file, text with separators or another table")
    target: Title | None = Field(default=None, description="table-file: the column that models predict")
    client: Title | None = Field(
        default=None, description="table-file: the column that says whose a row is, for the partition natural"
    )
    person: Title | None = Field(
        default=None, description="table-file: the column that says of which person a row is; these stay together"
    )
    drop: list[Title] = Field(default=[], description="table-file: columns to leave out")
    types: dict[Title, Literal["numeric", "categorical"]] = Field(
        default={}, description="table-file: of columns that aren't what they seem"
    )
    missing: list[str | Number] = Field(
        default=[], description="table-file: what stands for an empty cell, beside NA and the like: -999, for example"
    )
    empty: Literal["ask", "median", "leave-out"] = Field(
        default="ask",
        description="table-file: missing numbers are asked about, are their column's median, or rows are left out",
    )
    separator: Literal[",", ";", "\t", "|", " ", ":"] | None = Field(
        default=None, description="table-file: between columns of a text; as the rows tell if null"
    )
    decimal: Literal[".", ","] | None = Field(
        default=None, description="table-file: before decimals of numbers in texts; as they tell if null"
    )
    encoding: Title | None = Field(default=None, description="table-file: of a text; UTF-8 or its mark if null")

    @model_validator(mode="before")
    @classmethod
    def _of_file(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("name") == TABLE_FILE:
            return {"split": "train", **values}
        return values

    @model_validator(mode="after")
    def _file_or_name(self) -> DataSpec:
        given = [key for key in self.of_file() if getattr(self, key) not in (None, [], {}, "ask")]
        if self.name == TABLE_FILE and (self.path is None or self.target is None):
            raise ValueError(
                f"data set '{TABLE_FILE}' needs path, the file, and target, the column that models predict"
            )
        if self.name != TABLE_FILE and given:
            raise ValueError(f"{given[0]} is for the data set '{TABLE_FILE}', and this is '{self.name}'; leave it out")
        return self

    @staticmethod
    def of_file() -> tuple[str, ...]:
        """Return the settings of a table in a file."""
        return (
            *("path", "target", "client", "person", "drop", "types", "missing", "empty"),
            *("separator", "decimal", "encoding"),
        )


class TrainingSpec(Spec):
    """How the model is trained before the audited rounds (in one place, on the train split)."""

    epochs: Annotated[Whole, Field(le=10**6)] = Field(default=0, description="passes over the train split; 0: none")
    learning_rate: Positive = Field(default=0.05, description="of SGD")
    batch_size: Count = Field(default=64, description="examples in a step")
    momentum: Fraction = Field(default=0.9, description="of SGD")


class ModelSpec(Spec):
    """Which model, and in which state: both decide what can be recovered (docs/explanation/what-decides.md)."""

    name: str = Field(default="convnet-small", description="which network; `fedaudit list models` has their names")
    width: Annotated[Count, Field(le=65_536)] | None = Field(
        default=None, description="channels of the first layer, or units of the hidden one; the network's own if null"
    )
    extra_classes: Annotated[Whole, Field(le=1000)] = Field(
        default=0, description="outputs beyond one a class, for a label that no example has: an eleventh of ten classes"
    )
    initialisation: Literal["default", "he", "uniform", "given"] = Field(
        default="default",
        description="of the weights: PyTorch's own, He's, uniform on [-0.5, 0.5] (the DLG paper's), or given: those of "
        "the checkpoint or of a module of your own",
    )
    batch_norm: Literal["eval", "train"] | None = Field(
        default=None, description="BatchNorm's mode in local training; null: that of a module of your own, else eval"
    )
    dropout: Annotated[bool, Field(strict=True)] | None = Field(
        default=None, description="whether clients train with dropout; null: as a module of your own is, else true"
    )
    training: TrainingSpec = Field(
        default=TrainingSpec(),
        description="how the model is trained before the federation begins; by default it isn't",
    )
    checkpoint: File | None = Field(default=None, description="safetensors file with the model's weights")
    loss: Literal["auto", "cross-entropy", "bce-with-logits", "mse", "dice", "dice-cross-entropy", "custom"] = Field(
        default="auto",
        description="auto: cross-entropy for classes and masks, bce-with-logits for several labels, mse for numbers; "
        "bce-with-logits: two classes by one logit, too; dice, dice-cross-entropy: of masks, the latter their sum; "
        "custom: a function of your own, from Python",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> ModelSpec:
        if self.initialisation == "given" and self.name != "custom" and self.checkpoint is None:
            raise ValueError(
                "initialisation 'given' is for a checkpoint, or for a model of your own; give a checkpoint"
            )
        return self


class EvaluationSpec(Spec):
    """How findings are evaluated."""

    max_updates: Count | None = Field(default=None, description="attack only the first so many updates; all if null")
    max_clients: Count | None = Field(
        default=None, description="run attacks on clients on the first so many only; all if null"
    )
    attacked_federations: list[str] | None = Field(
        default=None, description="names of the federations that are attacked; the others only train; all if null"
    )
    controls: bool = Field(
        default=True,
        description="run a positive control beside every attack that found nothing",
    )
    bootstrap: Annotated[Count, Field(ge=100, le=10**6)] = Field(
        default=2000, description="resamples of the 95 % intervals"
    )
    accuracy_every: Count | None = Field(
        default=None, description="measure held-out accuracy every so many rounds and after the last; never if null"
    )
    ceiling: bool | Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None,
        description="compute how much updates determine of their examples, whoever attacks; a number: and go on until "
        "it can be told whether it is above that; null: where no attack on images or rows found anything, and it takes "
        "less than a fifth of their work",
    )
    embedding: bool | None = Field(
        default=None,
        description="teach a small network on held-out pictures, and say whom or what reconstructions name by it; "
        "null: of attacks of 1,000 iterations or more, or inverters of as many examples, beside which it takes little",
    )
    min_accuracy: Fraction = Field(
        default=0.5,
        description="a federation whose global model classified fewer of the held-out examples correctly at the end "
        "was hardly trained: whatever a malicious client drew of a class is inconclusive then, and so is that nothing "
        "was found by an attack on what a model has learnt (membership, source, attribute)",
    )
    compare_defences: bool = Field(
        default=False,
        description="the defences but for none are tried, not used: the answer and the limits are about the others",
    )
    most_exposed: Annotated[Whole, Field(le=50)] = Field(
        default=10,
        description="records that an attack on membership is surest of, in the results and the report, which are for "
        "the site's own eyes; 0 leaves them out",
    )
    mask_texts: bool = Field(
        default=False,
        description="results and report hold no text, true, recovered or recited: of each only which words were found",
    )
    accuracy_examples: Count = Field(default=1000, description="held-out examples for it, at most")
    sort_by: Literal["leakage", "accuracy", "worst client", "bytes", "time", "epsilon"] = Field(
        default="leakage", description="what the comparison of defences is sorted by, the best first"
    )


class Scenario(Spec):
    """Everything needed to repeat an audit.

    ``defences`` may be a list in YAML: each federation is then simulated under every one of them, on the same data in
    the same order, and the report compares them. The first is ``defences``, the rest ``other_defences``.
    """

    version: Annotated[Literal[1], BeforeValidator(no_boolean)] = Field(default=1, description="of this format")
    name: Title = Field(default="audit", description="the audit's, for the report")
    seed: Whole = Field(default=0, description="of everything random: the same seed gives the same audit, bit for bit")
    device: Literal["cpu", "cuda"] = Field(
        default="cpu",
        description="where federations are trained and attacks are computed; on a GPU the last bits are others, and "
        "results say which it was",
    )
    data: DataSpec = Field(default=DataSpec(), description="the data set that clients hold")
    model: ModelSpec = Field(default=ModelSpec(), description="the network that they train")
    federations: Annotated[list[FederationSpec], Field(min_length=1)] = Field(
        description="who trains how; each has a transcript and findings of its own"
    )
    defences: DefencesSpec = Field(
        default=DefencesSpec(),
        description="what protects the updates; of a list, each federation runs under every one, and the report "
        "compares them",
    )
    other_defences: list[DefencesSpec] = Field(
        default=[], description="the second and further ones of such a list, as a written scenario keeps them"
    )
    threat: ThreatModel = Field(default=ThreatModel(), description="who the adversary is and what it knows")
    attacks: Annotated[list[PluginField[Attack]], Field(min_length=1)] = Field(
        default=[], description="null or left out: those that fit the data, the updates and the threat model"
    )
    evaluation: EvaluationSpec = Field(default=EvaluationSpec(), description="what is attacked and how it is judged")

    @model_validator(mode="before")
    @classmethod
    def _defences_from_list(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("defences"), list):
            return values
        if not values["defences"] or values.get("other_defences"):
            raise ValueError("defences: give one or more, and other_defences only beside a single one")
        return {**values, "defences": values["defences"][0], "other_defences": values["defences"][1:]}

    @model_validator(mode="before")
    @classmethod
    def _attacks_left_open(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("attacks", values) is None:
            return {key: value for key, value in values.items() if key != "attacks"}
        return values

    @field_serializer("attacks")
    def _open_or_named(self, attacks: list[Attack]) -> list[dict[str, Any]] | None:
        return [attack.written() for attack in attacks] or None

    @model_validator(mode="after")
    def _attacked_exist(self) -> Scenario:
        known = [federation.name for federation in self.federations]
        chosen = self.evaluation.attacked_federations
        if chosen is not None and len(set(chosen)) < max(1, len(chosen)):
            raise ValueError("evaluation.attacked_federations: name one or more, each once; null for all")
        for name in chosen or []:
            if name not in known:
                raise ValueError("evaluation.attacked_federations: " + unknown_name("federation", name, known))
        return self

    @model_validator(mode="after")
    def _server_acts(self) -> Scenario:
        acts = [federation.name for federation in self.federations if federation.server]
        if acts and self.threat.adversary != "malicious-server":
            raise ValueError(
                f"federation '{acts[0]}' has a server that alters the model; set threat.adversary: malicious-server"
            )
        if self.threat.adversary == "malicious-server" and not acts:
            raise ValueError(
                "threat.adversary is malicious-server, and no federation says what it does; set federations[].server: "
                "imprint, for example, or fsha in split learning"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _model_of_protocol(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(values.get("federations"), list) or values.get("model"):
            return values
        named = {f.get("algorithm") for f in values["federations"] if isinstance(f, dict)}
        kinds = settings_by_kind().values()
        own = next((kind.model for kind in kinds if kind.model and named & set(kind.algorithms)), "")
        return {**values, "model": {"name": own}} if own else values

    @model_validator(mode="after")
    def _one_model(self) -> Scenario:
        first, in_words = self.federations[0], {entry.name: entry.value.federations for entry in SENT}
        own = {kind.model: kind for kind in settings_by_kind().values() if kind.model}
        for other in self.federations[1:]:
            if first.settings.kind != other.settings.kind:
                one, another = (in_words[f.settings.kind] for f in (first, other))
                raise ValueError(f"{one} and {another} train different models; give each a scenario of its own")
            if first.settings.of_model(first.clients) != other.settings.of_model(other.clients):
                raise ValueError(
                    f"the {in_words[first.settings.kind]} '{first.name}' and '{other.name}' train different "
                    "models (clients, features, embedding, top or cut); give each a scenario of its own"
                )
        if first.settings.model != (self.model.name if self.model.name in own else ""):
            sort = own.get(self.model.name, type(first.settings))
            raise ValueError(
                f"{in_words[sort.kind]} (algorithm: {sort.algorithms[0]}) are of the model {sort.model}, and "
                f"only such are; the model is '{self.model.name}', and the algorithm {first.algorithm}: leave "
                f"{'model out' if first.settings.model else 'one of the two out'}"
            )
        return self

    @model_validator(mode="after")
    def _distinct_runs(self) -> Scenario:
        names = [name.lower() for name, _, _ in self.runs()]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two defences would both be called '{twice}'; give each a name of its own")
        if any(len(name) > 64 for name in names):
            raise ValueError("the names of a federation and of its defences are together longer than 64 letters")
        return self

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return [
            ("name", textwrap.shorten(self.name, 60, placeholder="…")),
            ("data", self.data.name),
            ("model", self.model.name),
            ("runs", len(self.runs())),
            ("adversary", self.threat.adversary),
            ("attacks", len(self.attacks)),
            ("seed", self.seed),
        ]

    def attacked(self, run: str) -> bool:
        """Whether the updates of the run of that name are attacked."""
        chosen = self.evaluation.attacked_federations
        return chosen is None or any(name == run and spec.name in chosen for name, spec, _ in self.runs())

    def runs(self) -> list[tuple[str, FederationSpec, DefencesSpec]]:
        """Return every federation under every set of defences, and before them the name that their transcript has."""
        if not self.other_defences:
            return [(federation.name, federation, self.defences) for federation in self.federations]
        return [
            (f"{federation.name}-{defences.label}", federation, defences)
            for federation in self.federations
            for defences in (self.defences, *self.other_defences)
        ]

    @field_validator("federations", "attacks")
    @classmethod
    def _unique_names(cls, value: list[Any]) -> list[Any]:
        names = [item.name.lower() for item in value]  # they become file names, and some disks don't tell A from a
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"the name '{min(twice)}' is used twice; names must differ")
        return value

    def to_yaml(self) -> str:
        """Return the scenario as YAML; loading it gives an equal scenario."""
        return plain_yaml.dumps(self.model_dump(mode="json"))


def scenario_from(values: Any, *, where: str = "scenario") -> Scenario:
    """Validate ``values`` (as read from YAML).

    Raises:
        BadInput: one line that names the key, what is wrong with it, and what is allowed.
    """
    if not isinstance(values, dict):
        raise BadInput(f"{where}: expected a mapping of keys such as data, model, federations, attacks")
    try:
        return Scenario.model_validate(values)
    except ValidationError as error:
        raise BadInput(f"{where}: {explain(error, Scenario)}") from None


def load_scenario(path: Path | str | None, overrides: list[str] | None = None, seed: int | None = None) -> Scenario:
    """Read a scenario (the embedded default if ``path`` is None) and apply ``key=value`` overrides.

    Raises:
        BadInput: the file can't be read, isn't YAML, or isn't a scenario; an override doesn't fit.
    """
    path = Path(path) if isinstance(path, str) else path
    return scenario_from(read_scenario(path, overrides, seed), where=describe_source(path, overrides))
