"""What there is: attacks, defences, behaviours, models, data sets, ours and other packages'."""

from __future__ import annotations

from typing import Any

from fedaudit.attacks import ATTACKS
from fedaudit.data import DATASETS
from fedaudit.defences import AGGREGATORS, CLIENT_DEFENCES
from fedaudit.models import MODELS
from fedaudit.simulation.behaviour import BEHAVIOURS
from fedaudit.simulation.server_behaviour import SERVER_BEHAVIOURS
from fedaudit.utils.registry import settings_of

_KINDS: dict[str, tuple[Any, ...]] = {
    "attacks": (ATTACKS,),
    "defences": (AGGREGATORS, CLIENT_DEFENCES),
    "behaviours": (BEHAVIOURS, SERVER_BEHAVIOURS),
    "models": (MODELS,),
    "datasets": (DATASETS,),
}


def settings_of_attack(name: str) -> list[str]:
    """Return the names of an attack's settings; BadInput where there is no such attack."""
    return settings_of(ATTACKS[name].value)


def entries(kind: str) -> list[dict[str, Any]] | None:
    """Return name, summary, other declarations and distribution (``package``) of all of a kind; None: no such kind."""
    if kind not in _KINDS:
        return None
    return [
        {"name": entry.name, "summary": entry.summary, **entry.info, "package": registry.distribution(entry)}
        for registry in _KINDS[kind]
        for entry in registry
    ]
