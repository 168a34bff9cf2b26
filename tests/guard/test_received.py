"""What a guard makes of the model that comes in: ordinary ones are let in, manipulated ones as the site says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaudit.guard import SiteGuard
from fedaudit.guard.given import agreed_network, own_examples
from fedaudit.utils.errors import BadInput


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def let_in(state: dict[str, Tensor], policy: str, who: str, **known: Any) -> bool:
    return SiteGuard(on_received=policy, **known).receives(("job", "site"), who, None, lambda: (state, False)).let_in


def fished() -> dict[str, Tensor]:
    state = network().state_dict()
    kept = torch.zeros(10, 1)
    kept[3] = 1.0
    return {**state, "3.weight": state["3.weight"] * kept, "3.bias": 1000 * (1 - kept[:, 0])}


def fronted() -> dict[str, Tensor]:
    return {"front.weight": torch.ones(64, 64) / 64, **network().state_dict()}


@pytest.mark.parametrize(("state", "says"), [(fished(), "silent outputs"), (fronted(), "alike rows")])
def test_a_manipulated_model_is_told_of_or_kept_out(state, says, caplog):
    assert let_in(state, "warn", "site 1, round 2")
    assert f"site 1, round 2: the received model is suspicious: {says}" in caplog.text
    assert "it is trained on nevertheless" in caplog.text
    caplog.clear()
    assert not let_in(state, "refuse", "site 1")
    assert "it isn't trained on" in caplog.text
    caplog.clear()
    assert let_in(state, "ignore", "site 1")
    assert not caplog.text


def test_an_ordinary_model_is_let_in_without_a_word(caplog):
    examples = (torch.rand(32, 1, 8, 8), torch.arange(32) % 10)
    for rest in ({}, {"agreed": network()}, {"agreed": network(), "examples": examples}):
        assert let_in(network().state_dict(), "refuse", "site 1", **rest)
    assert not caplog.text


def test_the_agreed_network_and_examples_tell_more(caplog):
    state = network().state_dict()
    assert not let_in({**state, "more": torch.zeros(3)}, "refuse", "site 1", agreed=network())
    assert "architecture" in caplog.text
    wrong = {**state, "3.bias": torch.tensor([-100.0] + [0.0] * 9)}
    assert let_in(wrong, "refuse", "site 1", agreed=network())
    examples = (torch.rand(32, 1, 8, 8), torch.zeros(32, dtype=torch.int64))
    assert not let_in(wrong, "refuse", "site 1", agreed=network(), examples=examples)
    assert "loss" in caplog.text


def test_a_model_that_jumps_is_kept_out_of_the_site_and_of_its_memory(caplog):
    gate, state = SiteGuard(on_received="refuse"), network().state_dict()
    moved = {name: tensor.clone() for name, tensor in state.items()}

    def step(size: float) -> dict[str, Tensor]:
        for tensor in moved.values():
            tensor.mul_(1 + size)
        return {name: tensor.clone() for name, tensor in moved.items()}

    def lets_in(model: dict[str, Tensor], who: str, job: str = "job") -> bool:
        return gate.receives((job, "site 1"), who, None, lambda: (model, False)).let_in

    for number in range(5):
        assert lets_in(step(0.01), f"round {number}")
    swapped = {name: -tensor for name, tensor in moved.items()}
    assert not lets_in(swapped, "round 5")
    assert "round 5: the received model is suspicious: jump" in caplog.text
    assert lets_in(swapped, "round 0", "another job")
    assert lets_in(step(0.01), "round 6")


def test_a_wrong_policy_is_refused():
    with pytest.raises(BadInput, match="on_received is 'stop'"):
        SiteGuard(on_received="stop")


def held() -> tuple[Tensor, Tensor]:
    return torch.rand(32, 1, 8, 8), torch.arange(32) % 10


NETWORK = network()


def test_a_configuration_names_the_network_and_the_examples():
    state = network().state_dict()
    for given in (NETWORK, f"{__name__}:NETWORK", f"{__name__}:network"):
        made = agreed_network(given)
        assert made is not None
        assert all(tensor.equal(state[name]) for name, tensor in made.state_dict().items())
    for held_here in (held(), f"{__name__}:held"):
        inputs, classes = own_examples(held_here)  # type: ignore[misc]
        assert inputs.shape == (32, 1, 8, 8)
        assert classes.tolist() == (torch.arange(32) % 10).tolist()
    assert agreed_network(None) is None
    assert own_examples(None) is None


@pytest.mark.parametrize(
    ("make", "given", "says"),
    [
        (agreed_network, "network", "give package.module:name"),
        (agreed_network, f"{__name__}:no_such", "has no 'no_such'"),
        (agreed_network, f"{__name__}:held", "agreed is tuple"),
        (agreed_network, f"{__name__}:let_in", "can't be called without arguments"),
        (own_examples, f"{__name__}:network", "two tensors of the same length"),
        (own_examples, (torch.zeros(3, 1), torch.zeros(2)), "two tensors of the same length"),
    ],
)
def test_what_is_neither_is_refused(make, given, says):
    with pytest.raises(BadInput, match=says):
        make(given)
