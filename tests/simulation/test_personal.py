"""Layers that stay with the clients, by pattern: trained on from round to round, and never sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fedaudit
from fedaudit.utils.errors import BadInput
from tests.build import Scenarios, recorded, with_history

_THREE = Scenarios(
    model={"name": "mlp", "width": 16},
    federation={"algorithm": "fedavg", "clients": 3, "examples": 90, "batch_size": 5, "local_epochs": 3, "rounds": 3,
                "learning_rate": 0.1, "partition": {"scheme": "classes-per-client", "k": 2}},
    attacks="labels",
    evaluation={"accuracy_every": 1},
)  # fmt: skip
HEAD = "^fc[.]"  # the last layer


def at_home(keep: bool, pattern: str = HEAD) -> dict[str, Any]:
    return {"defences": {"client_defence": {"name": "exclude-vars", "exclude_vars": pattern, "keep": keep}}}


def bodies(made: Any) -> list[dict[str, Tensor]]:
    return [r.updates[0].tensors for r in recorded(made).transcript.rounds]


def test_of_one_client_a_kept_head_is_as_if_it_had_travelled() -> None:
    one = _THREE.but(federation={"clients": 1, "partition": {"scheme": "iid", "k": None}})
    plain, kept, reset = bodies(one()), bodies(one(**at_home(True))), bodies(one(**at_home(False)))
    for index in range(3):
        assert not [name for name in kept[index] if name.startswith("fc.")]
        for name, value in kept[index].items():
            torch.testing.assert_close(value, plain[index][name], atol=1e-4, rtol=1e-3)
    assert not torch.allclose(reset[1]["hidden.weight"], plain[1]["hidden.weight"], atol=1e-4, rtol=1e-3)


def test_nobody_sees_what_stays_at_home_and_each_clients_model_is_measured() -> None:
    transcript, history = with_history(_THREE(**at_home(True)))
    first = transcript.rounds[0].weights
    for record in transcript.rounds:  # the server's is the first one still
        assert all(record.weights[name].equal(first[name]) for name in first if name.startswith("fc."))
        assert not any(name.startswith("fc.") for update in record.updates for name in update.tensors)
    _, without = with_history(_THREE(**at_home(False)))
    assert history.accuracy[-1] != without.accuracy[-1]
    own = sum(history.per_client[-1]) / 3  # on the classes that a client holds, by the head that it trained
    assert own > 0.8 > sum(without.per_client[-1]) / 3


def test_gradients_train_no_head() -> None:
    made = _THREE.but(federation={"algorithm": "fedsgd", "local_epochs": None})
    with pytest.raises(BadInput, match="keep"):
        recorded(made(**at_home(True)))


def test_an_audit_says_that_labels_need_the_last_layer() -> None:
    result = fedaudit.audit(
        _THREE(**at_home(True), evaluation={"accuracy_every": None, "controls": False}), progress=False
    ).result
    assert all("the last layer" in str(finding.reason) for finding in result.findings)
