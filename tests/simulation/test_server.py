"""What the server does with updates: by hand for some rules, and in a federation with every aggregator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from fedaudit.defences.aggregation import AGGREGATORS, Aggregate, Cohort
from fedaudit.defences.averaging import AFA
from fedaudit.simulation.server import Server
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import make
from tests.simulation.federation_cases import run, same


def sent(client: int, value: float, mean: float, count: int) -> Update:
    tensors = {"w": torch.full((2, 2), float(value)), "b": torch.tensor([float(value)])}
    buffers = {"mean": torch.tensor([float(mean)]), "seen": torch.tensor(count)}
    training = TrainingConfig(learning_rate=1.0, local_steps=1, batch_sizes=(2 + client,))
    return Update(client, "weights", tensors, 2 + client, training, buffers)


STATE = {"w": torch.zeros(2, 2), "b": torch.zeros(1), "mean": torch.zeros(1), "seen": torch.tensor(0)}


@pytest.mark.parametrize(
    ("name", "value", "mean", "seen"),
    [
        ("mean", (1 + 2 + 3 + 90) / 4, (10 + 20 + 30 + 999) / 4, 9),
        ("fedavg", (2 * 1 + 3 * 2 + 4 * 3 + 5 * 90) / 14, (2 * 10 + 3 * 20 + 4 * 30 + 5 * 999) / 14, 9),
        ("median", 2.5, 25.0, 9),  # looks at every coordinate on its own, so at the statistics, too
        ("inferguard", 2.0, 20.0, 3),  # a client that is left out has no say in the statistics either
    ],
)
def test_statistics_follow_the_parameters(name, value, mean, seen):
    updates = [sent(0, 1, 10, 1), sent(1, 2, 20, 2), sent(2, 3, 30, 3), sent(3, 90, 999, 9)]
    state, _ = Server(make(AGGREGATORS, name), 1.0).apply(STATE, updates)
    torch.testing.assert_close(state["w"], torch.full((2, 2), value))
    torch.testing.assert_close(state["b"], torch.tensor([value]))
    torch.testing.assert_close(state["mean"], torch.tensor([mean]))
    assert int(state["seen"]) == seen


def test_an_update_that_is_not_finite_is_refused():
    with pytest.raises(BadInput, match="client 1 sent NaN"):
        Server(make(AGGREGATORS, "median"), 1.0).apply(STATE, [sent(0, 1, 1, 1), sent(1, float("nan"), 1, 1)])


@pytest.mark.parametrize("name", sorted(AGGREGATORS.names()))
def test_a_federation_runs_with_every_aggregator_and_repeats(name):
    spec = {"clients": 7, "examples": 70, "rounds": 2, "algorithm": "fedavg", "local_steps": 2, "learning_rate": 0.05}
    needed: dict[str, dict[str, Any]] = {
        "fltrust": {"root_examples": 20},
        "adaptive-clipping": {"noise_multiplier": 0.1},
    }
    settings = needed.get(name, {})
    chosen = {"aggregator": {"name": name, **settings}}
    _, transcript, _ = run(spec, defences=chosen)
    _, again, _ = run(spec, defences=chosen)
    assert same(transcript, again)
    assert not transcript.rounds[1].weights["fc.weight"].equal(transcript.rounds[0].weights["fc.weight"])


def test_root_data_are_the_clients_and_must_be_there():
    spec = {"clients": 2, "examples": 4}
    with pytest.raises(BadInput, match="root_examples is 100"):
        run(spec, defences={"aggregator": "fltrust"})


def test_reputations_outlive_a_round_in_the_simulator(monkeypatch):
    seen: list[Any] = []

    def spy(self: AFA, updates: Tensor, cohort: Cohort | None = None) -> Aggregate:
        seen.append(copy.deepcopy(self.state_dict()))
        return real(self, updates, cohort)

    real = AFA.__call__
    monkeypatch.setattr(AFA, "__call__", spy)
    run({"clients": 4, "examples": 8, "rounds": 3}, defences={"aggregator": "afa"})
    assert seen[-3] == {"kept": {}, "dropped": {}}
    kept, dropped = seen[-1]["kept"], seen[-1]["dropped"]
    assert sum(kept.values()) + sum(dropped.values()) == 8  # four clients, two rounds
