"""What to audit: the specifications of a scenario, the threat model, and YAML."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.lazy import lazy

if TYPE_CHECKING:
    from fedaudit.scenario.scenario import EvaluationSpec, Scenario, apply_override, load_scenario, scenario_from
    from fedaudit.simulation.spec import FederationSpec
    from fedaudit.transcript.threat import ThreatModel
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "EvaluationSpec",
    "FederationSpec",
    "Scenario",
    "ThreatModel",
    "apply_override",
    "load_scenario",
    "scenario_from",
]
