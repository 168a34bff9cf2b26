"""From a scenario to a finished audit: prepare, simulate, attack, evaluate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.lazy import lazy

if TYPE_CHECKING:
    from fedaudit.pipeline.prepare import ResolvedScenario, resolve
    from fedaudit.pipeline.pretraining import Trained, training_once
    from fedaudit.pipeline.run import Audit, environment, run_audit
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Audit",
    "ResolvedScenario",
    "Trained",
    "environment",
    "resolve",
    "run_audit",
    "training_once",
]
