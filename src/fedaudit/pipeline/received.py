"""Would a client notice what a malicious server sends? And the same question about a file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedaudit.defences.received import Check, ReceivedHistory, check_received
from fedaudit.models import read_state
from fedaudit.models.inserted_module import WithInsertedModule
from fedaudit.pipeline.prepare import resolve
from fedaudit.results import ReceivedCheck
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.simulator import Recording
from fedaudit.utils.errors import BadInput
from fedaudit.utils.machine import one_thread

_MOST = 64  # examples


def noticed(recording: Recording) -> list[ReceivedCheck]:
    """Return what the first client of each recorded round finds in the model that it received, on its own examples."""
    transcript, truth = recording.transcript, recording.truth
    module = transcript.module
    agreed = module.body if isinstance(module, WithInsertedModule) else module
    found: dict[str, list[Check]] = {}
    histories: dict[int, ReceivedHistory] = {}
    for record in transcript.rounds:
        for update in record.updates[:1]:
            key = record.index, update.client
            held = update.training.data_size if update.training else None  # of several epochs, the first
            first = slice(min(held or _MOST, _MOST))
            examples = (transcript.task_info.normalise(truth.inputs[key][first]), truth.labels[key][first])
            state = record.sent_to(update.client)
            history = histories.setdefault(update.client, ReceivedHistory()) if len(transcript.rounds) > 1 else None
            known: dict[str, Any] = {"module": module, "loss": transcript.loss, "examples": examples}
            for check in check_received(state, agreed, **known, history=history, index=record.index):
                found.setdefault(check.name, []).append(check)
    return [_together(checks) for checks in found.values()]


def _together(checks: list[Check]) -> ReceivedCheck:
    worst = max(checks, key=lambda check: (check.alarm, not math.isfinite(check.value), check.value))
    share = sum(check.alarm for check in checks) / len(checks)
    return ReceivedCheck(**values_of(worst), noticed=share, models=len(checks))


def values_of(check: Check) -> dict[str, Any]:
    """Return a check's fields for JSON, which has only finite numbers: None is any other value."""
    return dataclasses.asdict(check) | ({} if math.isfinite(check.value) else {"value": None})


@one_thread()
def check_file(
    path: Path,
    scenario: Scenario,
    *,
    data_dir: Path | None = None,
    client: int | None = None,
    model: nn.Module | None = None,
    earlier: Sequence[Path] = (),
) -> list[Check]:
    """Check the weights in a .safetensors, .pt or .pth file against a scenario's network, on a client's examples of it.

    Args:
        scenario: its first federation says what was agreed on.
        data_dir: where data sets that aren't embedded lie.
        client: whose examples are used; None: only weights are looked at.
        model: a user's own, instead of the scenario's.
        earlier: files with the models of the rounds before, in order: does this one go on from them?

    Raises:
        BadInput: a file, the scenario or the client can't be used.
    """
    state = read_state(path)
    (federation, *_) = resolve(scenario, data_dir=data_dir, model=model).federations
    agreed = federation.model.body if isinstance(federation.model, WithInsertedModule) else federation.model
    loss, examples = None, None
    if client is not None:
        if not 0 <= client < len(federation.client_data):
            raise BadInput(f"client={client}: the federation has the clients 0 to {len(federation.client_data) - 1}")
        data = federation.client_data[client]
        loss, examples = federation.loss, (federation.task_info.normalise(data.inputs[:_MOST]), data.targets[:_MOST])
    history = ReceivedHistory() if earlier else None
    for one in earlier:
        check_received(read_state(one), agreed, loss=loss, examples=examples, history=history)
    return check_received(state, agreed, loss=loss, examples=examples, history=history)
