"""What if: the same audit again, without and with the defences that fit what is attacked."""

from __future__ import annotations

from fedaudit.defences.spec import DefencesSpec
from fedaudit.defences.suitable import suitable
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.protocols import protocol_of
from fedaudit.utils.errors import BadInput


def with_compared_defences(scenario: Scenario) -> Scenario:
    """Return ``scenario``, which compares no defences yet, under none and under three that fit its first attack's aim.

    Accuracy, part of the price, is measured after the last round, where the scenario measures none.
    """
    if scenario.other_defences or not scenario.defences.undefended:
        raise BadInput(
            "compare_defences=True chooses the defences, and the scenario names some: leave one of the two out"
        )
    for protocol in map(protocol_of, scenario.federations):
        if not protocol.updates:
            raise BadInput(
                f"compare_defences=True compares defences of updates, and {protocol.described} sends none; change "
                f"{protocol.instead}"
            )
    summed = scenario.threat.sees != "updates"
    fitting = suitable((a.recovers for a in scenario.attacks), summed=summed)
    chosen = [DefencesSpec.model_validate(v) for v in fitting]
    every = scenario.evaluation.accuracy_every or max(f.rounds for f in scenario.federations)
    return Scenario.model_validate(
        {
            **scenario.model_dump(mode="json"),
            "defences": [scenario.defences.model_dump(), *(d.model_dump() for d in chosen)],
            "other_defences": [],
            "evaluation": {**scenario.evaluation.model_dump(), "accuracy_every": every, "compare_defences": True},
        }
    )
