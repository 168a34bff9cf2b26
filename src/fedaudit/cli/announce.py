"""What will run, said at once: from the scenario as it is written, before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedaudit.utils.progress import tell

_NAMED = 4  # of more, only how many there are is said


def announce(doing: str, workers: int | None = None) -> None:
    """Say on standard error what will run, and in how many processes; how long is said once it can be measured.

    Args:
        doing: what will run.
        workers: processes.
    """
    processes = "" if workers is None else f", in {workers} process{'' if workers == 1 else 'es'}"
    tell(f"{doing}{processes} …")


def audit_in_words(written: dict[str, Any], *, what_if: bool = False) -> str:
    """Return what an audit of the scenario will do: federations, updates, attacks, iterations."""
    federations, attacks = _items(written, "federations"), _items(written, "attacks")
    updates = _updates(written, federations)
    rounds = sum(_number(one, "rounds", 1) for one in federations)
    size = f", {_count(rounds, 'round')}" if rounds else ""
    size += f", {_count(updates, 'update')} to attack" if updates else ""
    defences = " without defence and under those that fit" if what_if else _defences(written)
    return (
        f"{_name(written)}: auditing {_list('federation', _names(federations))}{defences}{size}, "
        f"with {_list('attack', [_with_iterations(one) for one in attacks]) if attacks else 'the attacks that fit'}"
    )


def simulation_in_words(written: dict[str, Any], federation: str | None) -> str:
    """Return what a simulation of the scenario will do."""
    federations = _items(written, "federations")
    names = [federation] if federation else _names(federations)
    rounds = sum(_number(one, "rounds", 1) for one in federations if not federation or one.get("name") == federation)
    size = f", {_count(rounds, 'round')}" if rounds else ""
    return f"{_name(written)}: simulating {_list('federation', names)}{'' if federation else _defences(written)}{size}"


def attack_in_words(transcript: Path, attacks: Sequence[dict[str, Any]]) -> str:
    """Return what attacks on a transcript will do."""
    chosen = _list("attack", [_with_iterations(one) for one in attacks]) if attacks else "the attacks that fit"
    return f"attacking '{transcript}' with {chosen}"


def _name(written: dict[str, Any]) -> str:
    name = written.get("name")
    return name if isinstance(name, str) and name.isprintable() and len(name) <= 60 else "audit"


def _items(written: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the mappings under ``key``; what isn't one is refused in a moment, by whoever checks the scenario."""
    values = written.get(key)
    items = [{"name": one} if isinstance(one, str) else one for one in (values if isinstance(values, list) else [])]
    return [one for one in items if isinstance(one, dict)]


def _names(items: Sequence[dict[str, Any]]) -> list[str]:
    return [str(one.get("name", "?")) for one in items]


def _number(values: dict[str, Any], key: str, default: int) -> int:
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default


def _defences(written: dict[str, Any]) -> str:
    defences = written.get("defences")
    return f" under {len(defences)} defences each" if isinstance(defences, list) and len(defences) > 1 else ""


def _updates(written: dict[str, Any], federations: Sequence[dict[str, Any]]) -> int:
    """Return how many updates the attacks receive at most; parties of a vertical federation send none."""
    settings = written.get("evaluation")
    settings = settings if isinstance(settings, dict) else {}
    chosen = settings.get("federations")
    defences = written.get("defences")
    updates = 0
    for one in federations:
        if one.get("algorithm") == "vertical" or (isinstance(chosen, list) and one.get("name") not in chosen):
            continue
        record = one.get("record")
        rounds = len(record) if isinstance(record, list) else _number(one, "rounds", 1)
        sent = rounds * _sums(written, _number(one, "clients_per_round", 0) or _number(one, "clients", 4))
        updates += min(sent, _number(settings, "updates", sent))
    return updates * (len(defences) if isinstance(defences, list) else 1)


def _sums(written: dict[str, Any], clients: int) -> int:
    """Return how many updates of a round's ``clients`` can be read, or sums of them."""
    threat = written.get("threat")
    sees = str(threat.get("sees", "updates")) if isinstance(threat, dict) else "updates"
    size = sees.removeprefix("aggregate of ")
    return 1 if sees == "sum" else max(1, clients // int(size)) if size.isdecimal() and int(size) else clients


def _with_iterations(attack: dict[str, Any]) -> str:
    iterations = _number(attack, "iterations", 0)
    name = str(attack.get("name", "?"))
    return f"{name}, {_count(iterations, 'iteration')}" if iterations else name


def _list(thing: str, names: Sequence[str]) -> str:
    if not names:
        return f"no {thing}"
    return _count(len(names), thing) + (f" ({'; '.join(names)})" if len(names) <= _NAMED else "")


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
