"""Tell what a federation leaks, to whom, and what each defence costs.

>>> import fedaudit
>>> result = fedaudit.audit(model=net, data=(images, labels), attacks=["agic"])  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedaudit.version import __version__

if TYPE_CHECKING:
    from fedaudit.api import attack, audit, simulate
    from fedaudit.attacks import Attack, Finding, make_attack, register
    from fedaudit.data import Dataset, load_dataset
    from fedaudit.federation.transcript import Transcript
    from fedaudit.pipeline.run import Audit
    from fedaudit.results import AuditResult
    from fedaudit.scenario import Scenario, load_scenario
    from fedaudit.threat import Observation, ThreatModel, observe


# Where each public name lives; imported at first use, so that `import fedaudit` and `fedaudit --help` are quick.
_HOMES = {
    "attack": "fedaudit.api",
    "audit": "fedaudit.api",
    "simulate": "fedaudit.api",
    "Attack": "fedaudit.attacks",
    "Finding": "fedaudit.attacks",
    "make_attack": "fedaudit.attacks",
    "register": "fedaudit.attacks",
    "Audit": "fedaudit.pipeline.run",
    "Dataset": "fedaudit.data",
    "load_dataset": "fedaudit.data",
    "Transcript": "fedaudit.federation.transcript",
    "AuditResult": "fedaudit.results",
    "Scenario": "fedaudit.scenario",
    "load_scenario": "fedaudit.scenario",
    "Observation": "fedaudit.threat",
    "ThreatModel": "fedaudit.threat",
    "observe": "fedaudit.threat",
}

__all__ = [
    "Attack",
    "Audit",
    "AuditResult",
    "Dataset",
    "Finding",
    "Observation",
    "Scenario",
    "ThreatModel",
    "Transcript",
    "__version__",
    "attack",
    "audit",
    "load_dataset",
    "load_scenario",
    "make_attack",
    "observe",
    "register",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedaudit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
