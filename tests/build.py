"""The one builder of what tests begin with: scenarios of one federation, what these leave, and their audits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fedaudit
from fedaudit.pipeline.prepare import resolve
from fedaudit.results import AttackSummary, AuditResult
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.history import History
from fedaudit.simulation.simulator import Recording, simulate
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth

_REPLACED = ("data", "model")  # by what has another name; all other parts go key by key


def merged(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of which ``after`` has changed some: a part that is a mapping key by key."""
    values = dict(before)
    for key, part in after.items():
        part = {"name": part} if key in _REPLACED and isinstance(part, str) else part
        old = values.get(key)
        anew = key in _REPLACED and isinstance(old, dict) and part.get("name", old.get("name")) != old.get("name")
        values[key] = {**old, **part} if isinstance(old, dict) and isinstance(part, dict) and not anew else part
    return values


class Scenarios:
    """Scenarios of one federation, alike but for what a test changes.

    Args:
        settings: of a scenario; ``federation`` is the one that it has unless a test names ``federations``, ``attacks``
            may be one attack's name.
    """

    def __init__(self, **settings: Any) -> None:
        self._settings = merged({"data": {"name": "digits"}, "federation": {"name": "f"}}, settings)

    def but(self, **changes: Any) -> Scenarios:
        """Return these with other settings."""
        return Scenarios(**merged(self._settings, changes))

    def values(self, federation: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
        """Return a scenario's values."""
        values = merged(self._settings, {"federation": dict(federation or {}), **changes})
        if isinstance(values.get("attacks"), str):
            values["attacks"] = [values["attacks"]]
        return {"federations": [values.pop("federation")]} | values

    def __call__(self, federation: Mapping[str, Any] | None = None, **changes: Any) -> Scenario:
        """Return a scenario."""
        return scenario_from(self.values(federation, **changes))


class Killed(Exception):
    """What ends a simulation midway."""


def recorded(made: Scenario, checkpoint: Path | None = None, until: float = math.inf, **own: Any) -> Recording:
    """Return what the scenario's one federation leaves.

    Args:
        made: the scenario.
        checkpoint: where the simulation is kept, from where it goes on.
        until: so many updates, after which it is killed.
        own: the user's objects, as :func:`resolve` takes them.
    """

    def report(done: float) -> None:
        if done >= until:
            raise Killed

    (federation,) = resolve(made, **own).federations
    return simulate(federation, report=report, checkpoint=checkpoint)


def sent(made: Scenario, **own: Any) -> tuple[Transcript, Truth]:
    """Return what travelled, and the truth."""
    recording = recorded(made, **own)
    return recording.transcript, recording.truth


def with_history(made: Scenario) -> tuple[Transcript, History]:
    """Return what travelled, and what the simulation noted by round."""
    recording = recorded(made)
    assert recording.history is not None
    return recording.transcript, recording.history


def seen(made: Scenario, **own: Any) -> tuple[Observation, Truth]:
    """Return all that the scenario's adversary sees, and the truth."""
    transcript, truth = sent(made, **own)
    return observe(transcript, made.threat), truth


def seen_in(made: Scenario, recording: Recording) -> list[Observation]:
    """Return what the scenario's adversary sees, an observation an update."""
    return observe(recording.transcript, made.threat).split()


def only(result: AuditResult) -> AttackSummary:
    """Return the one summary of an audit."""
    (summary,) = result.summaries
    return summary


def audited(made: Scenario | dict[str, Any], **options: Any) -> AuditResult:
    """Return an audit's result."""
    return fedaudit.audit(made, progress=False, **options).result
