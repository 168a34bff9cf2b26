"""Flower: record a deployment, guard a site, audit an app in process. ``pip install 'PATH_OF_THE_CLONE[flower]'``.

>>> from fedaudit.adapters.flower import AuditStrategy, Guard  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.lazy import lazy

if TYPE_CHECKING:
    from fedaudit.adapters.flower.audit import audit_flower
    from fedaudit.adapters.flower.canaries import CanaryMod
    from fedaudit.adapters.flower.guard import Guard
    from fedaudit.adapters.flower.in_process import parse_config, run_app
    from fedaudit.adapters.flower.mods import ClientDefenceMod
    from fedaudit.adapters.flower.strategies import RobustStrategy, RootTraining
    from fedaudit.adapters.flower.strategy import AuditStrategy
else:
    __getattr__, __dir__ = lazy(__name__, needs="flwr", of="Flower")

__all__ = [
    "AuditStrategy",
    "CanaryMod",
    "ClientDefenceMod",
    "Guard",
    "RobustStrategy",
    "RootTraining",
    "audit_flower",
    "parse_config",
    "run_app",
]
