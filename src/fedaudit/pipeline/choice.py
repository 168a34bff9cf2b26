"""Which attacks are run where the scenario names none: those that say that they fit."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from fedaudit.attacks import ATTACKS
from fedaudit.attacks.analytic.first_layer import first_layer
from fedaudit.attacks.base import Case
from fedaudit.attacks.records.membership import LossThreshold
from fedaudit.data import Dataset
from fedaudit.models import MODELS
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.spec import FederationSpec
from fedaudit.task.targets import CLASSIFICATION
from fedaudit.task.training import LOSSES
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.view import view
from fedaudit.utils.validation import NamedSpec

_DENSE = ("logistic", "mlp", "fcn-3", "fcn-3-dropout")  # models that begin with a fully connected layer
# Passive attacks on membership, the strongest first, as far as they were measured side by side.
_OF_TEXTS = ("reference-loss", "min-k", "zlib-ratio")
_ON_MEMBERS = ("fedmia", "rmia", "lira", *_OF_TEXTS, "loss-threshold", "loss-series", "gradient-norm", "shadow-models")
_MOST_ON_MEMBERS = 3


def choose(scenario: Scenario, dataset: Dataset, model: object = None) -> list[NamedSpec]:
    """Return the attacks that fit a federation of ``scenario`` at least, each once."""
    module, name = model if isinstance(model, nn.Module) else None, scenario.model.name
    if module is None and name in _DENSE:
        entry = MODELS[name]
        module = entry.value(dataset.input_shape, 2, scenario.model.width or entry.info["width"])
    begins = _beginning(module, dataset.input_shape)
    return fitting([_case(scenario, spec, dataset, begins) for spec in scenario.federations])


def choose_for(transcript: Transcript, threat: ThreatModel) -> list[NamedSpec]:
    """Return the attacks that fit at least one update of a transcript."""
    info, sent = transcript.task_info, transcript.sent
    threats = [threat]
    if transcript.records is None or transcript.recording:
        threats = [threat.model_copy(update={"target_records": None, "client_property": None})]
    if transcript.records is not None and transcript.recording:  # drawn unasked: what needs none is asked, too
        own = {"target_records": len(transcript.records) or None}
        threats.append(threat.model_copy(update={**own, "client_property": None}))
        if threat.client_property is not None:
            public = len(transcript.records.public_inputs)
            threats.append(threat.model_copy(update={**own, "public_examples": public}))
    rounds = view(transcript, threat)[1] if threat.partial else transcript.rounds
    updates = [update for played in rounds for update in played.updates]
    sizes = {(u.num_examples, u.training.local_steps if u.training else None) for u in updates}
    begins = _beginning(None if sent.no_updates else transcript.module, info.input_shape)
    dishonest = {"server": info.inserted.kind} if info.inserted else {}
    cases = [
        Case(
            kind=info.kind,
            num_classes=None if info.causal else info.num_classes,
            threat=one,
            task=(CLASSIFICATION if info.causal else info.task_kind).name,
            known_loss=info.loss in LOSSES,
            update_kind=transcript.update_kind,
            examples=examples,
            steps=steps,
            rounds=len(rounds),
            clients=len({update.client for update in updates}),
            clients_per_round=max((len(played.updates) for played in rounds), default=0),
            sums=any(update.members for update in updates),
            noisy=any(update.sanitised is not None and update.sanitised.noise > 0 for update in updates),
            **{**begins, **dishonest, **sent.case(transcript.adversary_log)},
        )
        for one in threats
        for examples, steps in sizes or {(1, None)}
    ]
    return fitting(cases)


def fitting(cases: Sequence[Case]) -> list[NamedSpec]:
    """Return the attacks that fit one of the cases, in the order in which they were registered.

    First comes the attack of a malicious party, which reads what that has done, whatever package has it. Of those that
    ask for members the best three are enough. Where nothing fits, it is one whose answer says which records the threat
    model would have to grant.
    """
    of_kind = [entry.value for entry in ATTACKS if entry.value.reads.kind == cases[0].protocol]
    chosen = [attack for attack in of_kind if any(map(attack.fits, cases))]
    best = [name for name in _ON_MEMBERS if name in {attack.name for attack in chosen}][:_MOST_ON_MEMBERS]
    chosen = [attack for attack in chosen if attack.name in best or attack.name not in _ON_MEMBERS]
    malicious = {name for case in cases for name in (case.malicious, case.server)}
    chosen.sort(key=lambda attack: attack.name not in malicious)
    return [
        NamedSpec.model_validate({"name": attack.name, **attack.first_settings}) for attack in chosen or [LossThreshold]
    ]


def _beginning(module: nn.Module | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what a case says of the model's first layer."""
    if module is None:
        return {}
    try:
        layer = first_layer(copy.deepcopy(module).cpu().double().eval(), shape)
    except Exception:  # it begins with something else, or takes other inputs
        return {}
    return {"neurons": layer.module.out_features, "rectified": layer.relu}


def _case(scenario: Scenario, spec: FederationSpec, dataset: Dataset, begins: dict[str, Any]) -> Case:
    threat = scenario.threat
    held = spec.examples or len(dataset.train if scenario.data.split == "train" else dataset.test)
    own = max(1, held // spec.clients)
    batch = min(spec.batch_size, own)
    steps = spec.local_steps or (spec.local_epochs or 0) * math.ceil(own / batch) or 1
    hidden = dataset.attributes.get(threat.hidden_attribute or "")
    per_round, own = spec.clients_per_round or spec.clients, len(threat.clients or ())
    others = max(1, min(per_round, spec.clients - own))
    group = others if own and threat.adversary == "client" else min(threat.group_size, others)
    recorded = spec.keep_rounds or range(spec.rounds)
    rounds = len(threat.seen_of(recorded, range(spec.clients))) if threat.partial else spec.rounds
    return Case(
        kind=dataset.kind,
        num_classes=None if dataset.tokens and dataset.tokens.causal else dataset.num_classes,
        threat=threat,
        task=dataset.task,
        known_loss=scenario.model.loss != "custom",
        update_kind="gradient" if spec.algorithm == "fedsgd" else "weights",
        examples=batch * steps * group,
        steps=steps,
        rounds=rounds,
        clients=spec.clients - own,
        clients_per_round=others,
        sums=group > 1,
        noisy=any(defences.client_defence.adds_noise() for _, _, defences in scenario.runs()),
        attribute_is_input=hidden is not None and bool(hidden.columns),
        malicious=spec.malicious.name if spec.malicious and threat.adversary == "client" else None,
        server=spec.server.name if spec.server else None,
        protocol=spec.settings.kind,
        **spec.settings.case(),
        **begins,
    )
