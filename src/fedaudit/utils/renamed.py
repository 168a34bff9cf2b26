"""Words that were spelled otherwise until 0.3: they are read as before, and one line says the new spelling."""

from __future__ import annotations

import functools
import logging
import multiprocessing
from collections.abc import Mapping, Sequence
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
# Fields of results of schema version 2, by their class.
RESULTS: dict[str, dict[str, str]] = {
    "AuditResult": {"not_tested": "out_of_scope", "not_tried": "not_asked"},
    "Evidence": {"by_guessing": "baseline"},
    "FederationRecord": {"course": "history", "sanitiser": "client_defence"},
    "FindingResult": {
        "by_luck": "chance_level",
        "leak": "is_leak",
        "sheets": "image_rows",
        "things": "example_noun",
    },
    "HistoryTiming": {"sanitising": "client_defence"},
    "ImageResult": {"by_luck": "chance_level", "nearer_to_other": "distractor_margin_db", "toned": "tone_aligned"},
    "RecordExposure": {
        "as_high": "nonmembers_above",
        "least": "nonmembers_above_min",
        "most": "nonmembers_above_max",
    },
    "RowResult": {"by_luck": "chance_level"},
    "SharedRecord": {"least": "min_group_size"},
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
FLAGS = {"--what-if": "--compare-defences"}
# Exported names, by their package.
PYTHON: dict[str, dict[str, str]] = {
    "fedaudit": {"Sanitiser": "ClientDefence"},
    "fedaudit.adapters.flower": {"SanitiserMod": "ClientDefenceMod"},
    "fedaudit.attacks": {
        "Epsilon": "DPCanaries",
        "LastReturned": "LastUpdate",
        "SpanMembership": "ProjectionResidual",
        "WhichTokens": "TokenPresence",
    },
    "fedaudit.defences": {
        "NoSanitiser": "NoClientDefence",
        "SANITISERS": "CLIENT_DEFENCES",
        "Sanitiser": "ClientDefence",
        "SanitiserInfo": "ClientDefenceInfo",
    },
}


def of_part(part: str, values: Any, tell: bool = True) -> Any:
    """Return what was given for a part of a scenario by the keys and values that it has today; ``tell`` says which.

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
            if tell:
                say(old, new)
    for (owner, key), names in VALUES.items():
        if owner == part and isinstance(made.get(key), str) and made[key] in names:
            if tell:
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
        made.append(of_plugin("fedaudit.attacks", new) if made[-1:] == ["attacks"] else new)
        part = _PARTS.get(new, part)
    return made


def of_scenario(node: Any, part: str = "", tell: bool = True) -> Any:
    """Return a scenario as it was written, by the keys and values of today.

    Raises:
        ValueError: a key is given by its old and by its new name.
    """
    if isinstance(node, list):
        return [of_scenario(item, part, tell) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: of_scenario(value, _PARTS.get(key, ""), tell) for key, value in of_part(part, node, tell).items()}
    if isinstance(made.get("attacks"), list):
        made["attacks"] = [_attack(one, tell) for one in made["attacks"]]
    return made


def _attack(given: Any, tell: bool) -> Any:
    """Return a scenario's attack, a name or a mapping, by its name of today."""
    if isinstance(given, str):
        return of_plugin("fedaudit.attacks", given, tell)
    if isinstance(given, dict) and isinstance(given.get("name"), str):
        return {**given, "name": of_plugin("fedaudit.attacks", given["name"], tell)}
    return given


def of_result(owner: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a result as it was read, its fields by their names of today."""
    names = RESULTS.get(owner, {})
    made = {names.get(key, key): value for key, value in values.items()}
    for key in ("a", "b") if owner == "Comparison" else ("attack",):  # by name, wherever a part has one
        if isinstance(made.get(key), str):
            made[key] = of_plugin("fedaudit.attacks", made[key], tell=False)
    return made


def of_name(package: str, name: str) -> str:
    """Return the name that a package exports today."""
    new = PYTHON.get(package, {}).get(name, name)
    if new != name:
        say(name, new)
    return new


def of_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line, its flags as they are spelled today."""
    for old in FLAGS.keys() & set(arguments):
        say(old, FLAGS[old])
    return [FLAGS.get(argument, argument) for argument in arguments]


def of_plugin(group: str | None, name: str, tell: bool = True) -> str:
    """Return the name that a plug-in has today."""
    new = PLUGINS.get(group or "", {}).get(name, name)
    if new != name and tell:
        say(name, new)
    return new


@functools.cache
def say(old: str, new: str) -> None:
    """Name the new spelling in one line, once, and not in workers again."""
    if multiprocessing.parent_process() is None:
        logging.getLogger("fedaudit").warning("fedaudit: note: '%s' is '%s' now; write that", old, new)
