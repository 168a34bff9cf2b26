"""Tell what a federation leaks, to whom, and what each defence costs.

>>> import fedaudit
>>> result = fedaudit.audit(model=net, data=(images, labels), attacks=["agic"])  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedaudit.utils.version import __version__

if TYPE_CHECKING:
    from fedaudit.api import (
        Attack,
        Audit,
        AuditResult,
        CanaryClients,
        Dataset,
        Finding,
        Observation,
        Recorder,
        Scenario,
        ThreatModel,
        Transcript,
        attack,
        audit,
        audit_transcript,
        check_attack,
        check_model,
        evaluate,
        load_dataset,
        load_scenario,
        make_attack,
        observe,
        register,
        simulate,
        verify,
    )

__all__ = [
    "Attack",
    "Audit",
    "AuditResult",
    "CanaryClients",
    "Dataset",
    "Finding",
    "Observation",
    "Recorder",
    "Scenario",
    "ThreatModel",
    "Transcript",
    "__version__",
    "attack",
    "audit",
    "audit_transcript",
    "check_attack",
    "check_model",
    "evaluate",
    "load_dataset",
    "load_scenario",
    "make_attack",
    "observe",
    "register",
    "simulate",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Take a public name from ``fedaudit.api`` when it is first used, so that ``import fedaudit`` is quick."""
    if name in __all__:
        return getattr(importlib.import_module("fedaudit.api"), name)
    raise AttributeError(f"module 'fedaudit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
