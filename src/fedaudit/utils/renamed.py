"""Words that were spelled otherwise until 0.3: they are read as before, and one line says the new spelling."""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Mapping
from typing import Any

# Keys of a part of a scenario, by its class, and values that have another name.
KEYS: dict[str, dict[str, str]] = {
    "DataSpec": {"white": "max_pixel_value"},
    "DefencesSpec": {"sanitiser": "client_defence"},
    "EvaluationSpec": {
        "clients": "max_clients",
        "federations": "attacked_federations",
        "least_accuracy": "min_accuracy",
        "updates": "max_updates",
        "what_if": "compare_defences",
    },
    "FederationSpec": {"draw": "sampling", "record": "keep_rounds"},
    "MaliciousSpec": {"lacks": "missing_classes"},
    "ModelSpec": {"spare_outputs": "extra_classes"},
    "ThreatModel": {"records": "target_records"},
}
VALUES: dict[tuple[str, str], dict[Any, str]] = {("FederationSpec", "sampling"): {"random": "stratified"}}
# Of the same, the keys of a scenario beneath which each part lies: for ``--set``.
_PARTS = {
    "data": "DataSpec",
    "defences": "DefencesSpec",
    "other_defences": "DefencesSpec",
    "evaluation": "EvaluationSpec",
    "federations": "FederationSpec",
    "malicious": "MaliciousSpec",
    "model": "ModelSpec",
    "threat": "ThreatModel",
}
# Plug-ins, by the group of their entry points.
PLUGINS: dict[str, dict[str, str]] = {
    "fedaudit.attacks": {
        "epsilon": "dp-canaries",
        "last-returned": "last-update",
        "span": "projection-residual",
        "which-tokens": "token-presence",
    }
}
GROUPS = {"fedaudit.client_defences": "fedaudit.sanitisers"}
LISTS = {"sanitisers": "client-defences"}


def of_part(part: str, values: Any) -> Any:
    """Return what was given for a part of a scenario by the keys and values that it has today.

    Raises:
        ValueError: a key is given by its old and by its new name.
    """
    if not isinstance(values, Mapping):
        return values
    made = dict(values)
    for old, new in KEYS.get(part, {}).items():
        if old in made:
            if new in made:
                raise ValueError(f"'{old}' is '{new}' now, and both are given; leave '{old}' out")
            made[new] = made.pop(old)
            say(old, new)
    for (owner, key), names in VALUES.items():
        if owner == part and isinstance(made.get(key), str) and made[key] in names:
            say(f"{key}: {made[key]}", f"{key}: {names[made[key]]}")
            made[key] = names[made[key]]
    return made


def of_path(path: list[str]) -> list[str]:
    """Return the keys of a path into a scenario, such as ``defences.sanitiser.noise``, by their names today."""
    made: list[str] = []
    part = ""
    for key in path:
        new = KEYS.get(part, {}).get(key, key)
        if new != key:
            say(key, new)
        made.append(new)
        part = _PARTS.get(new, part)
    return made


def of_scenario(node: Any, part: str = "") -> Any:
    """Return a scenario as it was written, by the keys and values of today.

    Raises:
        ValueError: a key is given by its old and by its new name.
    """
    if isinstance(node, list):
        return [of_scenario(item, part) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: of_scenario(value, _PARTS.get(key, "")) for key, value in of_part(part, node).items()}


def of_plugin(group: str | None, name: str) -> str:
    """Return the name that a plug-in has today."""
    new = PLUGINS.get(group or "", {}).get(name, name)
    if new != name:
        say(name, new)
    return new


@functools.cache
def say(old: str, new: str) -> None:
    """Name the new spelling in one line, once, and not in workers again."""
    if multiprocessing.parent_process() is None:
        logging.getLogger("fedaudit").warning("fedaudit: note: '%s' is '%s' now; write that", old, new)
