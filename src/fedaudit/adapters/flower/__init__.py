"""Flower: record a deployment, guard a site, audit an app in process. ``pip install 'fedaudit[flower]'``.

>>> from fedaudit.adapters.flower import AuditStrategy, Guard  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from fedaudit.utils.errors import BadInput

if TYPE_CHECKING:
    from fedaudit.adapters.flower.audit import audit_flower
    from fedaudit.adapters.flower.canaries import CanaryMod
    from fedaudit.adapters.flower.guard import Guard
    from fedaudit.adapters.flower.in_process import parse_config, run_app
    from fedaudit.adapters.flower.mods import SanitiserMod
    from fedaudit.adapters.flower.strategies import RobustStrategy, RootTraining
    from fedaudit.adapters.flower.strategy import AuditStrategy

__all__ = [
    "AuditStrategy",
    "CanaryMod",
    "Guard",
    "RobustStrategy",
    "RootTraining",
    "SanitiserMod",
    "audit_flower",
    "parse_config",
    "run_app",
]

_MODULES = {
    "AuditStrategy": "strategy",
    "CanaryMod": "canaries",
    "Guard": "guard",
    "RobustStrategy": "strategies",
    "RootTraining": "strategies",
    "SanitiserMod": "mods",
    "audit_flower": "audit",
    "parse_config": "in_process",
    "run_app": "in_process",
}


def __getattr__(name: str) -> Any:
    """Take a public name from its module when it is first used, so that Flower is imported only then.

    Raises:
        BadInput: Flower isn't installed.
    """
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    if importlib.util.find_spec("flwr") is None:
        raise BadInput("Flower isn't installed: pip install 'fedaudit[flower]'")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
