"""Fragmented FL against cosines taken by hand and by numpy, and what the server makes of its fragments."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedaudit.defences.aggregation import AGGREGATORS
from fedaudit.defences.client_defences import CLIENT_DEFENCES, ClientContext
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.server import Server
from fedaudit.simulation.simulator import simulate
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.registry import make
from tests.models.model_cases import generator as rng

MODULES = (("a.weight", "a.bias"), ("b.weight", "b.bias", "b.running"), ("c.weight",))
# ∇L and θᵏ − θᵏ⁻¹ of each tensor; cosines 3/5, −1, 1/√2, 1, 0, of modules 1/√58, 6/√78, 0
GRADIENT = {"a.weight": [3, 4], "a.bias": [-2], "b.weight": [1, 0], "b.bias": [-5], "c.weight": [0, 7]}
MOVED = {"a.weight": [1, 0], "a.bias": [1], "b.weight": [1, 1], "b.bias": [-1], "c.weight": [2, 0]}
TENSORS = ["b.bias", "b.weight", "a.weight", "c.weight", "a.bias"]  # the greatest cosine first


def of(values: dict[str, list[int]], scale: float = 1.0) -> dict[str, Tensor]:
    return {name: scale * torch.tensor(row, dtype=torch.float32) for name, row in values.items()}


def update(tensors: dict[str, Tensor], kind: Any = "gradient", **rest: Any) -> Update:
    training = TrainingConfig(learning_rate=0.1, local_steps=1, batch_sizes=(4,))
    return Update(rest.pop("client", 0), kind, tensors, 4, training, **rest)


def sent_in_round_two(kind: str = "gradient", **settings: Any) -> set[str]:
    client_defence = make(CLIENT_DEFENCES, "ffl", settings)
    start = of({name: [5] * len(row) for name, row in MOVED.items()})
    then = {name: start[name] + tensor for name, tensor in of(MOVED).items()}
    own = update(of(GRADIENT, 1.0 if kind == "gradient" else -0.3), kind)  # ΔW descends
    client_defence(own, ClientContext(start, MODULES, 4), rng())
    found = client_defence(own, ClientContext(then, MODULES, 4), rng())
    assert all(found.tensors[name].equal(own.tensors[name]) for name in found.tensors)
    assert found.sanitised == ClientDefenceInfo("ffl")
    return set(found.tensors)


@pytest.mark.parametrize("kind", ["gradient", "weights"])
@pytest.mark.parametrize(("ratio", "count"), [(0.2, 1), (0.4, 2), (0.5, 3), (0.6, 3), (0.8, 4), (1.0, 5)])
def test_algorithm_1_sends_the_tensors_of_greatest_cosine_without_turning_a_sign(kind, ratio, count):
    assert sent_in_round_two(kind, ratio=ratio) == set(TENSORS[:count])
    assert sent_in_round_two(kind, ratio=ratio, direction="aligned") == set(TENSORS[::-1][:count])


@pytest.mark.parametrize("kind", ["gradient", "weights"])
def test_a_layer_may_be_a_module(kind):
    a, b, c = ({name for name in module if name in GRADIENT} for module in MODULES)
    assert sent_in_round_two(kind, ratio=0.3, layers="modules") == b
    assert sent_in_round_two(kind, ratio=0.6, layers="modules") == a | b
    assert sent_in_round_two(kind, ratio=0.6, layers="modules", direction="aligned") == a | c


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_numpys(seed):
    draw = np.random.default_rng(seed)
    names = [f"m{i}.{part}" for i in range(6) for part in ("weight", "bias")]
    first, then, gradient = ({name: draw.normal(size=(7, 3)) for name in names} for _ in range(3))
    cosines = {}
    for name in names:
        moved, slope = (then[name] - first[name]).ravel(), gradient[name].ravel()
        cosines[name] = np.dot(moved, slope) / np.linalg.norm(moved) / np.linalg.norm(slope)
    client_defence = make(CLIENT_DEFENCES, "ffl", {"ratio": 0.4})
    own = update({name: torch.tensor(value) for name, value in gradient.items()})
    for weights in (first, then):
        given = {name: torch.tensor(value) for name, value in weights.items()}
        found = client_defence(own, ClientContext(given, (), 4), rng())
    best = sorted(names, key=lambda name: cosines[name])[-math.ceil(0.4 * len(names)) :]
    assert set(found.tensors) == set(best)


def test_layers_are_random_where_nothing_has_moved():
    own, weights = update(of(GRADIENT)), of(MOVED)
    for settings, different in (({"ratio": 0.2}, 5), ({"ratio": 0.3, "layers": "modules"}, 3)):
        client_defence = make(CLIENT_DEFENCES, "ffl", settings)
        choices = [tuple(client_defence(own, ClientContext(weights, MODULES, 4), rng(i)).tensors) for i in range(40)]
        assert len(set(choices)) == different


@pytest.mark.parametrize("layers", ["tensors", "modules"])
@pytest.mark.parametrize("name", ["ffl", "ffl-random"])
def test_statistics_travel_with_every_update(name, layers):
    buffers = {"b.running": torch.ones(2)}
    for seed in range(8):
        client_defence = make(CLIENT_DEFENCES, name, {"ratio": 0.2, "layers": layers})
        found = client_defence(update(of(GRADIENT), buffers=buffers), ClientContext(of(MOVED), MODULES, 4), rng(seed))
        again = client_defence(update(of(GRADIENT), buffers=buffers), ClientContext(of(MOVED), MODULES, 4), rng(seed))
        assert (name == "ffl") or found.tensors.keys() == again.tensors.keys()
        assert len(found.tensors) < len(GRADIENT)
        assert found.buffers.keys() == buffers.keys()


def test_the_server_averages_tensors_over_their_senders_and_statistics_over_all():
    """Also over those who sent none of the tensors that most clients sent."""
    weights = {"a": torch.zeros(1), "b": torch.zeros(1), "c": torch.full((1,), 7.0), "running": torch.zeros(1)}
    parts = [{"a": 1.0}, {"a": 3.0, "b": 1.0}, {"b": 5.0}, {"b": 6.0}]
    updates = [
        update(
            {name: torch.tensor([value]) for name, value in part.items()},
            "weights",
            client=client,
            buffers={"running": torch.tensor([2.0**client])},
        )
        for client, part in enumerate(parts)
    ]
    state, _ = Server(make(AGGREGATORS, "mean"), 1.0).apply(weights, updates)
    assert {name: float(tensor) for name, tensor in state.items()} == {"a": 2.0, "b": 4.0, "c": 7.0, "running": 3.75}


def test_the_recipe_of_the_paper_is_what_the_simulator_does():
    """Momentum, training-mode BatchNorm and averaged statistics under FFL, against a loop in plain PyTorch."""
    federation = {
        "name": "fed",
        "algorithm": "fedavg",
        "clients": 3,
        "examples": 30,
        "batch_size": 4,
        "local_epochs": 1,
        "learning_rate": 0.1,
        "momentum": 0.5,
    }
    made = resolve(
        scenario_from(
            {
                "data": {"name": "digits"},
                "model": {"name": "convnet-small", "width": 4, "batch_norm": "train"},
                "federations": [federation | {"rounds": 2}],
                "defences": {"client_defence": {"name": "ffl", "ratio": 0.5}},
                "attacks": [{"name": "invg", "iterations": 1}],
            }
        )
    ).federations[0]
    recording = simulate(made)
    first, second = recording.transcript.rounds
    ends = []
    for own in first.updates:
        model = copy.deepcopy(made.model)
        model.load_state_dict(first.weights)
        model.train()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        inputs, labels = recording.truth.inputs[0, own.client], recording.truth.labels[0, own.client]
        for x, y in zip(inputs.split(4), labels.split(4), strict=True):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(made.task_info.normalise(x)), y).backward()
            optimiser.step()
        ends.append({name: value.detach().clone() for name, value in model.state_dict().items()})
        assert len(own.tensors) == math.ceil(0.5 * len(list(model.parameters())))
        for name, tensor in own.tensors.items():
            torch.testing.assert_close(tensor, ends[-1][name] - first.weights[name], rtol=1e-4, atol=1e-6)
    for name, after in second.weights.items():
        if "running" in name:
            torch.testing.assert_close(after, sum(end[name] for end in ends) / 3, rtol=1e-4, atol=1e-6)
        elif senders := [u.tensors[name] for u in first.updates if name in u.tensors]:
            torch.testing.assert_close(after - first.weights[name], sum(senders) / len(senders), rtol=1e-4, atol=1e-6)


def test_federations_of_one_audit_may_run_batch_norm_in_different_modes():
    federation = {"algorithm": "fedsgd", "clients": 1, "examples": 4, "batch_size": 4}
    made = resolve(
        scenario_from(
            {
                "data": {"name": "digits"},
                "model": {"name": "convnet-small", "width": 4, "batch_norm": "train"},
                "federations": [federation | {"name": "a"}, federation | {"name": "b", "batch_norm": "eval"}],
                "attacks": [{"name": "invg", "iterations": 1}],
            }
        )
    ).federations
    assert [one.task_info.batch_norm for one in made] == ["train", "eval"]
    sent = [simulate(one).transcript.rounds[0].updates[0] for one in made]
    assert [bool(update.buffers) for update in sent] == [True, False]
