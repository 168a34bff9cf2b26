"""Every federation of a scenario, under every set of defences."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from fedaudit.data import Dataset
from fedaudit.models.inserted_module import with_inserted_module
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.client import Federation
from fedaudit.simulation.planted_texts import with_planted_texts
from fedaudit.simulation.protocols import protocol_of
from fedaudit.simulation.record_draw import draw_records
from fedaudit.simulation.simulator import check, partition_clients
from fedaudit.simulation.spec import FederationSpec
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import Loss
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.errors import BadInput


def federations_of(
    scenario: Scenario,
    dataset: Dataset,
    task_info: TaskInfo,
    model: nn.Module,
    loss: Loss,
) -> list[Federation]:
    """Return every federation under every set of defences, checked; under all of them clients hold the same."""
    canaries = next((asked for attack in scenario.attacks if (asked := attack.canary_spec())), None)
    names = iter(name for name, _, _ in scenario.runs())
    threat, evaluation = scenario.threat, scenario.evaluation
    split, seed, measured = scenario.data.split, scenario.seed, evaluation.accuracy_every
    federations = []
    for spec in scenario.federations:
        _check_part(threat, spec, canaries is not None)
        client_data = partition_clients(dataset, split, spec, seed=seed)
        info, sent = replace(task_info, batch_norm=spec.batch_norm or task_info.batch_norm), model
        if spec.server is not None:
            info = spec.server.task_info(info, spec.plan)
            sent = with_inserted_module(model, info)
        drawn = draw_records(
            dataset,
            split,
            spec,
            client_data,
            seed=seed,
            records=threat.target_records or 0,
            known=threat.known_records or 0,
            public=threat.public_examples or 0,
            to_server=threat.adversary == "malicious-server",
            hidden=threat.hidden_attribute,
            wanted=threat.client_property,
            own=threat.clients or (),
            pretrained=scenario.model.training.epochs > 0,
            measured=measured is not None,
        )
        client_data = drawn.trained_on(client_data)
        for defences in (scenario.defences, *scenario.other_defences):
            federation = Federation(
                name=next(names),
                spec=spec,
                defences=defences,
                seed=seed,
                dataset=dataset,
                split=split,
                task_info=info,
                model=sent,
                loss=loss,
                reveal_labels=threat.knows_labels,
                client_data=client_data,
                drawn=drawn,
                during_training=threat.adversary == "client",
                accuracy_every=measured,
                accuracy_examples=evaluation.accuracy_examples,
                canaries=canaries,
                group_size=threat.group_size if threat.adversary != "client" else 1,
                device=scenario.device,
            )
            federation = with_planted_texts(federation)
            check(federation)
            if threat.clients is not None:  # who subtract their own updates from sums, as they observe them
                federation = replace(federation, group_size=1)
            federations.append(federation)
    return federations


def _check_part(threat: ThreatModel, spec: FederationSpec, canaries: bool) -> None:
    """Refuse an adversary that sees a part that its federation doesn't have, before anything is simulated."""
    if not threat.partial:
        return
    try:
        protocol = protocol_of(spec)
        if not protocol.updates or canaries:
            what = "an audit of ε" if canaries else protocol.described
            raise BadInput(f"threat.clients and threat.rounds aren't for {what}; leave them out")
        if threat.clients is not None and spec.malicious is not None:
            raise BadInput("malicious clients are the last ones, and collude: leave threat.clients out")
        everybody = spec.clients_per_round in (None, spec.clients)
        threat.seen_of(spec.keep_rounds or range(spec.rounds), range(spec.clients), everybody=everybody)
    except BadInput as error:
        raise BadInput(f"federation '{spec.name}': {error}") from None
