"""Which attacks are run where the scenario names none: those that fit the data, the updates and the threat model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedaudit.attacks import ATTACKS
from fedaudit.data import Dataset
from fedaudit.federation.spec import FederationSpec
from fedaudit.federation.transcript import Transcript
from fedaudit.scenario import Scenario
from fedaudit.threat import ThreatModel
from fedaudit.utils.validation import NamedSpec

_MOST_STEPS = 16  # that are worth simulating; AGIC's one batch takes any number
_MOST_IMAGES = 128  # in one update; beyond, only which labels they have is asked
_QUICK = {"iterations": 1000}  # what a first audit takes; the attacks' own default is ten times as many


@dataclass(frozen=True)
class Case:
    """What the choice depends on, of one federation.

    Attributes:
        images: the examples are images.
        classes: the model is a classifier.
        sees: the adversary reads updates.
        labels, training, public: what the threat model grants: labels, how clients train, public examples.
        records: the adversary holds records.
        hidden: it is after an attribute of theirs.
        filled: which is one of the model's inputs.
        malicious: behaviour of the malicious clients, where the adversary is one of them.
        gradient: clients send gradients, not weights.
        examples, steps: of an update.
        rounds: of the federation.
    """

    images: bool
    classes: bool
    sees: bool
    labels: bool
    training: bool
    public: bool
    records: bool
    hidden: bool
    filled: bool
    malicious: str | None
    gradient: bool
    examples: int
    steps: int
    rounds: int

    @property
    def alone(self) -> bool:
        """Whether the adversary has nothing but the updates."""
        return self.sees and not self.records

    @property
    def members(self) -> bool:
        """Whether it asks whose its records are."""
        return self.records and not self.hidden

    @property
    def told(self) -> bool:
        """Whether it knows what an update is a multiple of."""
        return self.gradient or self.training


# Attack, settings, when it fits.
TABLE: tuple[tuple[str, dict[str, Any], Callable[[Case], bool]], ...] = (
    ("gan", {}, lambda c: c.malicious == "gan"),
    ("agrevader", {}, lambda c: c.malicious == "agrevader" and c.members),
    ("attribute-loss", {}, lambda c: c.hidden and c.filled),
    ("attribute-features", {}, lambda c: c.hidden and c.public),
    ("loss-threshold", {}, lambda c: c.members),
    ("gradient-norm", {}, lambda c: c.members),
    ("shadow-models", {}, lambda c: c.members and c.public and c.classes),
    ("invg", _QUICK, lambda c: _inverts(c) and (c.gradient or (c.training and c.steps <= _MOST_STEPS))),
    ("agic", _QUICK, lambda c: _inverts(c)),
    ("labels", {}, lambda c: c.alone and c.classes and c.told and not c.labels and (c.examples > 1 or not c.images)),
    ("local-model-exact", {}, lambda c: c.alone and not c.images and not c.classes and c.rounds >= 3),
    ("local-model", {}, lambda c: c.alone and not c.images and not c.gradient and c.rounds >= 3),
)
_NOTHING = "loss-threshold"  # its answer says which records the threat model would have to grant


def choose(scenario: Scenario, dataset: Dataset) -> list[NamedSpec]:
    """Return the attacks that fit a federation of ``scenario`` at least, each once.

    Args:
        scenario: whose attacks are left open.
        dataset: that its clients hold.
    """
    return _fitting([_case(scenario, spec, dataset) for spec in scenario.federations])


def choose_for(transcript: Transcript, threat: ThreatModel) -> list[NamedSpec]:
    """Return the attacks that fit at least one update of a transcript.

    Args:
        transcript: to be attacked.
        threat: of the adversary.
    """
    info = transcript.task_info
    sizes = {
        (u.num_examples, u.training.local_steps if u.training else 1, u.training is not None)
        for r in transcript.rounds
        for u in r.updates
    }
    cases = [
        Case(
            images=info.kind in ATTACKS["invg"].value.examples,
            classes=info.num_classes is not None,
            sees=threat.adversary != "client",
            labels=threat.knows_labels,
            training=threat.knows_training and told,
            public=threat.public_examples is not None,
            records=transcript.records is not None and threat.records is not None,
            hidden=threat.hidden_attribute is not None,
            filled=False,
            malicious=None,
            gradient=transcript.update_kind == "gradient",
            examples=examples,
            steps=steps,
            rounds=len(transcript.rounds),
        )
        for examples, steps, told in sorted(sizes) or [(1, 1, False)]
    ]
    return _fitting(cases)


def _fitting(cases: Sequence[Case]) -> list[NamedSpec]:
    fitting = [(name, settings) for name, settings, fits in TABLE if any(map(fits, cases))]
    return [NamedSpec.model_validate({"name": name, **settings}) for name, settings in fitting or [(_NOTHING, {})]]


def _inverts(case: Case) -> bool:
    return case.alone and case.images and case.classes and case.examples <= _MOST_IMAGES


def _case(scenario: Scenario, spec: FederationSpec, dataset: Dataset) -> Case:
    threat = scenario.threat
    held = spec.examples or len(dataset.train if scenario.data.split == "train" else dataset.test)
    own = max(1, held // spec.clients)
    batch = min(spec.batch_size, own)
    steps = spec.local_steps or (spec.local_epochs or 0) * math.ceil(own / batch) or 1
    hidden = dataset.attributes.get(threat.hidden_attribute or "")
    return Case(
        images=dataset.kind in ATTACKS["invg"].value.examples,
        classes=dataset.task == "classification",
        sees=threat.adversary != "client",
        labels=threat.knows_labels,
        training=threat.knows_training,
        public=threat.public_examples is not None,
        records=threat.records is not None,
        hidden=threat.hidden_attribute is not None,
        filled=hidden is not None and bool(hidden.columns),
        malicious=spec.malicious.name if spec.malicious and threat.adversary == "client" else None,
        gradient=spec.algorithm == "fedsgd",
        examples=batch * steps,
        steps=steps,
        rounds=spec.rounds,
    )
