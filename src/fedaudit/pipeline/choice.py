"""Which attacks are run where the scenario names none: those that fit the data, the updates and the threat model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fedaudit.attacks import ATTACKS
from fedaudit.attacks.analytic.first_layer import first_layer
from fedaudit.data import Dataset
from fedaudit.models import MODELS
from fedaudit.pipeline.vertical import fitting_attacks
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.spec import FederationSpec
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.validation import NamedSpec

_MOST_STEPS = 16  # that are worth simulating; AGIC's one batch takes any number
_MOST_IMAGES = 128  # or rows, in one update; beyond, only which labels they have is asked
_SEARCHED = 24  # images in one update among which a search for exact zeros still finds all
_DENSE = ("logistic", "mlp", "fcn-3", "fcn-3-dropout")  # models that begin with a fully connected layer
_QUICK = {"iterations": 1000}  # what a first audit takes; the attacks' own default is ten times as many
_FEWER = {"restarts": 10}  # likewise, of rows of a table: a third of its own


@dataclass(frozen=True)
class Case:
    """What the choice depends on, of one federation.

    Attributes:
        images: the examples are images.
        table: they are rows of a table.
        tokens: the examples are text.
        classes: the model is a classifier.
        sees: the adversary reads updates.
        labels, training, public: what the threat model grants: labels, how clients train, public examples.
        records: the adversary holds records.
        hidden: it is after an attribute of theirs.
        asked: it is after a property of clients.
        filled: which is one of the model's inputs.
        malicious: behaviour of the malicious clients, where the adversary is one of them.
        gradient: clients send gradients, not weights.
        examples, steps: of an update.
        rounds: of the federation.
        sums: the adversary reads sums of several clients' updates only.
        several: it reads updates of several clients.
        neurons: of the fully connected layer that the model begins with; 0: it begins with something else.
        rectified: a ReLU follows that layer.
        server: what a malicious server does to the model that it sends, if anything.
    """

    images: bool
    table: bool
    tokens: bool
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
    sums: bool = False
    several: bool = False
    neurons: int = 0
    rectified: bool = False
    server: str | None = None
    asked: bool = False

    @property
    def alone(self) -> bool:
        """Whether the adversary has nothing but the updates."""
        return self.sees and not self.records and not self.asked

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
    ("imprint", {}, lambda c: c.server == "imprint" and c.images and c.classes),
    ("fishing", {"attack": {"name": "agic", **_QUICK}}, lambda c: c.server == "fishing" and c.images and c.classes),
    ("loki", {}, lambda c: c.server == "loki" and c.images and c.classes),
    ("trap-weights", {}, lambda c: c.server == "trap-weights" and c.images and c.classes),
    ("gan", {}, lambda c: c.malicious == "gan"),
    ("agrevader", {}, lambda c: c.malicious == "agrevader" and c.members),
    ("attribute-loss", {}, lambda c: c.hidden and c.filled),
    ("attribute-features", {}, lambda c: c.hidden and c.public),
    ("loss-threshold", {}, lambda c: c.members),
    ("gradient-norm", {}, lambda c: c.members),
    ("shadow-models", {}, lambda c: c.members and c.public and c.classes),
    ("source-inference", {}, lambda c: c.members and c.sees and c.several and not c.sums),
    ("property-inference", {}, lambda c: c.asked and c.public and c.sees and c.several and not c.sums and c.told),
    ("exact-linear", {}, lambda c: _exact(c) and c.images and c.examples == 1),
    ("exact-linear-rows", {}, lambda c: _exact(c) and c.table and c.examples == 1),
    ("spear", {}, lambda c: _exact(c) and c.images and c.rectified and 1 < c.examples <= _SEARCHED),
    (
        "cocktail",
        {},
        lambda c: _exact(c) and c.images and (c.examples > _SEARCHED or (not c.rectified and c.examples > 1)),
    ),
    ("spear-rows", {}, lambda c: _exact(c) and c.table and c.rectified and c.examples > 1),
    ("invg", _QUICK, lambda c: _inverts(c) and (c.gradient or (c.training and c.steps <= _MOST_STEPS))),
    ("agic", _QUICK, lambda c: _inverts(c)),
    ("agic-plus", _QUICK, lambda c: _inverts(c) and c.gradient),
    ("tableak", _FEWER, lambda c: _of_table(c)),
    ("dager", {}, lambda c: c.alone and c.tokens and c.told),
    ("which-tokens", {}, lambda c: c.alone and c.tokens),
    ("labels", {}, lambda c: c.alone and c.classes and c.told and not c.labels and (c.examples > 1 or not c.images)),
    ("local-model-exact", {}, lambda c: c.alone and not c.sums and not c.images and not c.classes and c.rounds >= 3),
    (
        "local-model",
        {},
        lambda c: c.alone and not c.sums and not (c.images or c.tokens) and not c.gradient and c.rounds >= 3,
    ),
)
_NOTHING = "loss-threshold"  # its answer says which records the threat model would have to grant


def choose(scenario: Scenario, dataset: Dataset, model: object = None) -> list[NamedSpec]:
    """Return the attacks that fit a federation of ``scenario`` at least, each once.

    Args:
        scenario: whose attacks are left open.
        dataset: that its clients hold.
        model: a user's own module, if any.
    """
    vertical = scenario.federations[0].vertical
    if vertical is not None:
        return [NamedSpec(name=name) for name in fitting_attacks(vertical, scenario.threat, dataset.num_classes)]
    module, name = model if isinstance(model, nn.Module) else None, scenario.model.name
    if module is None and name in _DENSE:
        module = MODELS[name].value(dataset.input_shape, 2, scenario.model.width)
    begins = _beginning(module, dataset.input_shape)
    return _fitting([replace(_case(scenario, spec, dataset), **begins) for spec in scenario.federations])


def _beginning(module: nn.Module | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what a case says of the model's first layer."""
    if module is None:
        return {}
    try:
        layer = first_layer(copy.deepcopy(module).cpu().double().eval(), shape)
    except NotApplicable:
        return {}
    except Exception:
        return {}
    return {"neurons": layer.module.out_features, "rectified": layer.relu}


def choose_for(transcript: Transcript, threat: ThreatModel) -> list[NamedSpec]:
    """Return the attacks that fit at least one update of a transcript.

    Args:
        transcript: to be attacked.
        threat: of the adversary.
    """
    info = transcript.task_info
    if transcript.vertical is not None:
        chosen = fitting_attacks(transcript.vertical.spec, threat, info.num_classes)
        return [NamedSpec(name=name) for name in chosen]
    begins = _beginning(transcript.module, info.input_shape)
    sizes = {
        (u.num_examples, u.training.local_steps if u.training else 1, u.training is not None)
        for r in transcript.rounds
        for u in r.updates
    }
    cases = [
        Case(
            images=info.kind in ATTACKS["invg"].value.examples,
            table=info.kind in ATTACKS["tableak"].value.examples,
            tokens=info.tokens is not None,
            classes=info.num_classes is not None and not info.causal,
            sees=threat.adversary != "client",
            labels=threat.knows_labels,
            training=threat.knows_training and told,
            public=threat.public_examples is not None,
            records=transcript.records is not None and threat.records is not None,
            hidden=threat.hidden_attribute is not None,
            filled=False,
            asked=transcript.records is not None and threat.client_property is not None,
            malicious=None,
            gradient=transcript.update_kind == "gradient",
            examples=examples,
            steps=steps,
            rounds=len(transcript.rounds),
            sums=any(u.members for r in transcript.rounds for u in r.updates),
            several=len({u.client for r in transcript.rounds for u in r.updates}) > 1,
            server=info.front.kind if info.front else None,
            **begins,
        )
        for examples, steps, told in sorted(sizes) or [(1, 1, False)]
    ]
    return _fitting(cases)


def _fitting(cases: Sequence[Case]) -> list[NamedSpec]:
    fitting = [(name, settings) for name, settings, fits in TABLE if any(map(fits, cases))]
    return [NamedSpec.model_validate({"name": name, **settings}) for name, settings in fitting or [(_NOTHING, {})]]


def _inverts(case: Case) -> bool:
    return case.alone and case.images and case.classes and case.examples <= _MOST_IMAGES


def _exact(case: Case) -> bool:
    return case.alone and case.classes and case.examples < case.neurons and case.examples <= _MOST_IMAGES


def _of_table(case: Case) -> bool:
    few = case.examples <= _MOST_IMAGES and case.steps <= _MOST_STEPS
    return case.alone and case.table and case.told and few


def _case(scenario: Scenario, spec: FederationSpec, dataset: Dataset) -> Case:
    threat = scenario.threat
    held = spec.examples or len(dataset.train if scenario.data.split == "train" else dataset.test)
    own = max(1, held // spec.clients)
    batch = min(spec.batch_size, own)
    steps = spec.local_steps or (spec.local_epochs or 0) * math.ceil(own / batch) or 1
    hidden = dataset.attributes.get(threat.hidden_attribute or "")
    together = min(threat.together, spec.clients_per_round or spec.clients)
    return Case(
        images=dataset.kind in ATTACKS["invg"].value.examples,
        table=dataset.kind in ATTACKS["tableak"].value.examples,
        tokens=dataset.tokens is not None,
        classes=dataset.task == "classification" and not (dataset.tokens and dataset.tokens.causal),
        sees=threat.adversary != "client",
        labels=threat.knows_labels,
        training=threat.knows_training,
        public=threat.public_examples is not None,
        records=threat.records is not None,
        hidden=threat.hidden_attribute is not None,
        filled=hidden is not None and bool(hidden.columns),
        asked=threat.client_property is not None,
        malicious=spec.malicious.name if spec.malicious and threat.adversary == "client" else None,
        gradient=spec.algorithm == "fedsgd",
        examples=batch * steps * together,
        steps=steps,
        rounds=spec.rounds,
        sums=together > 1,
        several=spec.clients > 1,
        server=spec.server.name if spec.server else None,
    )
