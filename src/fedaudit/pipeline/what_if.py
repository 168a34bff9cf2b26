"""What if: the same audit again, without and with the defences that fit what is attacked."""

from __future__ import annotations

from typing import Any

from fedaudit.defences.spec import DefencesSpec
from fedaudit.scenario.scenario import Scenario
from fedaudit.utils.errors import BadInput

_DP = {"name": "dp", "sanitiser": {"name": "dp", "clip": 1.0, "noise": 0.1, "epsilon": None}}
_STRONG_DP = {"name": "dp-strong", "sanitiser": {"name": "dp", "clip": 1.0, "noise": 1.0, "epsilon": None}}
# By what an attack recovers: what withholds or blurs single updates, or keeps malicious ones out.
FITTING: dict[str, tuple[dict[str, Any], ...]] = {
    "training images": (_DP, {"name": "dgc", "sanitiser": "dgc"}, {"name": "ffl", "sanitiser": "ffl"}),
    "labels": (_DP, _STRONG_DP, {"name": "sign", "sanitiser": "sign"}),
    "membership": (_DP, _STRONG_DP, {"name": "top-k", "sanitiser": "top-k"}),
    "attributes": (_DP, _STRONG_DP, {"name": "top-k", "sanitiser": "top-k"}),
    "local models": (_DP, _STRONG_DP, {"name": "top-k", "sanitiser": "top-k"}),
    "images of a class": (
        {"name": "inferguard", "aggregator": "inferguard"},
        {"name": "multi-krum", "aggregator": "multi-krum"},
        {"name": "median", "aggregator": "median"},
    ),
}


def with_what_if(scenario: Scenario) -> Scenario:
    """Return ``scenario`` under no defence and under three that fit what its first attack is after.

    Accuracy is measured after the last round, where the scenario measures none: it is part of the price.

    Raises:
        BadInput: the scenario compares defences already.
    """
    if scenario.other_defences or not scenario.defences.undefended:
        raise BadInput("--what-if chooses the defences, and the scenario names some: leave one of the two out")
    if any(f.vertical for f in scenario.federations):
        raise BadInput(
            "--what-if compares defences of updates, and a vertical federation sends none; change its protocol or top"
        )
    after = scenario.attacks[0].recovers if scenario.attacks else ""
    chosen = [DefencesSpec.model_validate(values) for values in FITTING.get(after, FITTING["training images"])]
    every = scenario.evaluation.accuracy_every or max(f.rounds for f in scenario.federations)
    return Scenario.model_validate(
        {
            **scenario.model_dump(mode="json"),
            "defences": [scenario.defences.model_dump(), *(d.model_dump() for d in chosen)],
            "other_defences": [],
            "evaluation": {**scenario.evaluation.model_dump(), "accuracy_every": every},
        }
    )
