"""What will run, said at once: from the scenario as it is written, before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedaudit.utils.progress import about, tell

# CPU seconds that one iteration takes for one image: convnet-small of width 32 at 32 by 32 pixels, by `make audit` on
# the two-core AMD EPYC of docs/performance.md. Other networks and processors differ, which the line says.
_SECONDS = 0.017
_NAMED = 4  # of more, only how many there are is said


def announce(doing: str, workers: int | None = None, work: float = 0.0) -> None:
    """Say on standard error what will run, in how many processes, and about how long.

    Args:
        doing: what will run.
        workers: processes.
        work: iterations times images, see :func:`work_of`; 0: not known.
    """
    processes = "" if workers is None else f", in {workers} process{'' if workers == 1 else 'es'}"
    seconds = work * _SECONDS / (workers or 1)
    how_long = f"; about {about(seconds)} for a network as small as convnet-small" if work else ""
    tell(f"{doing}{processes}{how_long} …")


def work_of(written: dict[str, Any], *, what_if: bool = False) -> float:
    """Return how many iterations the attacks will take, each times its update's images; 0 where that isn't told."""
    iterations = [_number(one, "iterations", 0) * _number(one, "restarts", 1) for one in _items(written, "attacks")]
    images = 0
    for one in _items(written, "federations"):
        updates = _updates(written, [one])
        held = _number(one, "examples", 0) // _number(one, "clients", 4)
        steps = _number(one, "local_steps", 0)
        each = _number(one, "batch_size", 1) * (steps or 1)
        images += updates * (held * _number(one, "local_epochs", 1) if one.get("local_epochs") and held else each)
    return float(sum(iterations) * images * (4 if what_if else 1))


def audit_in_words(written: dict[str, Any], *, what_if: bool = False) -> str:
    """Return what an audit of the scenario will do: federations, updates, attacks, iterations."""
    federations, attacks = _items(written, "federations"), _items(written, "attacks")
    updates = _updates(written, federations)
    rounds = sum(_number(one, "rounds", 1) for one in federations)
    size = f", {_count(rounds, 'round')}, {_count(updates, 'update')} to attack" if updates else ""
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
    """Return how many updates the attacks receive at most."""
    settings = written.get("evaluation")
    settings = settings if isinstance(settings, dict) else {}
    chosen = settings.get("federations")
    defences = written.get("defences")
    updates = 0
    for one in federations:
        if isinstance(chosen, list) and one.get("name") not in chosen:
            continue
        record = one.get("record")
        rounds = len(record) if isinstance(record, list) else _number(one, "rounds", 1)
        sent = rounds * (_number(one, "clients_per_round", 0) or _number(one, "clients", 4))
        updates += min(sent, _number(settings, "updates", sent))
    return updates * (len(defences) if isinstance(defences, list) else 1)


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
