"""A long simulation that is killed goes on from its checkpoint, to the same bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaudit.data import load_dataset
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.history import History
from fedaudit.simulation.simulator import simulate
from fedaudit.task.training import Loss
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import BadInput
from tests.build import Killed, Scenarios
from tests.conftest import Command, core
from tests.simulation.federation_cases import Counting, add_counting

DEFENCES: dict[str, dict[str, Any]] = {
    "none": {},
    "top-k that remembers": {"client_defence": {"name": "top-k", "ratio": 0.2}},
    "dgc": {"client_defence": {"name": "dgc", "ratio": 0.3, "warmup": 3}},
    "ffl": {"client_defence": {"name": "ffl", "ratio": 0.5}},
    "layers that stay": {"client_defence": {"name": "exclude-vars", "exclude_vars": "bias", "keep": True}},
    "ffl at random": {"client_defence": {"name": "ffl-random", "ratio": 0.5}},
    "local privacy": {"client_defence": {"name": "dp", "noise": 0.5, "epsilon": None}},
    "central privacy": {
        "client_defence": {"name": "dp", "where": "central", "clip": 0.01, "noise": 1.0, "epsilon": None}
    },
    "a user's own that counts": {"client_defence": "counting"},
    "afa, which remembers": {"aggregator": {"name": "afa"}},
    "fltrust, whose server trains": {"aggregator": {"name": "fltrust", "root_examples": 8}},
}


_SIX = Scenarios(
    model={"name": "convnet-small", "width": 4},
    federation={"algorithm": "fedavg", "clients": 4, "clients_per_round": 3, "examples": 40, "batch_size": 3,
                "local_steps": 2, "rounds": 6, "momentum": 0.5},
    attacks="invg",
    evaluation={"accuracy_every": 2},
)  # fmt: skip


def scenario(defences: dict[str, Any], **federation: Any) -> Scenario:
    return _SIX(federation, defences=defences)


def simulated(
    made: Scenario, checkpoint: Path | None, until: int = 10**9, told: list[float] | None = None, **own: Any
) -> tuple[Transcript, Truth, History]:
    def report(done: float) -> None:
        if told is not None:
            told.append(done)
        if done >= until:
            raise Killed

    recording = simulate(resolve(made, **own).federations[0], report=report, checkpoint=checkpoint)
    assert recording.history is not None
    return recording.transcript, recording.truth, recording.history


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.equal(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


@pytest.mark.slow
@pytest.mark.usefixtures("checkpoint_every_round")
@pytest.mark.parametrize("name", core(DEFENCES, "top-k that remembers", "fltrust, whose server trains"))
def test_it_goes_on_to_the_same_bits(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add_counting(monkeypatch)
    made = scenario(DEFENCES[name])
    whole, truth, history = simulated(made, None)
    checkpoint = tmp_path / "f.simulation"
    for until in (5, 11):  # in the midst of the second and of the fourth round
        with pytest.raises(Killed):
            simulated(made, checkpoint, until)
    begun: list[float] = []
    again, truth_again, own = simulated(made, checkpoint, told=begun)
    assert min(begun) > 9, "it began anew"
    assert again.fingerprint() == whole.fingerprint()
    for one, other in zip(whole.rounds, again.rounds, strict=True):
        assert same(one.weights, other.weights)
        assert (one.index, one.rejected, one.fallback) == (other.index, other.rejected, other.fallback)
        for a, b in zip(one.updates, other.updates, strict=True):
            assert (a.client, a.training, a.sanitised, a.num_examples) == (
                b.client,
                b.training,
                b.sanitised,
                b.num_examples,
            )
            assert same(a.buffers, b.buffers)
    for part in ("inputs", "labels", "rows"):
        assert same(getattr(truth, part), getattr(truth_again, part))
    for field in ("rounds", "accuracy", "per_client", "bytes", "parameters", "epsilon", "epsilon_pld"):
        assert getattr(history, field) == getattr(own, field), field


@pytest.mark.slow
@pytest.mark.usefixtures("checkpoint_every_round")
def test_a_checkpoint_of_something_else_or_half_of_one_is_not_used(tmp_path: Path) -> None:
    checkpoint = tmp_path / "f.simulation"
    with pytest.raises(Killed):
        simulated(scenario({}), checkpoint, 8)
    whole = checkpoint.read_bytes()
    other = scenario({}, learning_rate=0.02)
    assert simulated(other, checkpoint)[0].fingerprint() == simulated(other, None)[0].fingerprint()
    undisturbed = simulated(scenario({}), None)[0].fingerprint()
    for damage in (whole[: len(whole) // 2], b"", b"nothing of the kind"):
        checkpoint.write_bytes(damage)
        assert simulated(scenario({}), checkpoint)[0].fingerprint() == undisturbed


@pytest.mark.slow
@pytest.mark.usefixtures("checkpoint_every_round")
def test_a_checkpoint_that_was_changed_or_has_another_key_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "f.simulation"

    def begins(secret: str) -> float:
        told: list[float] = []
        monkeypatch.setenv("FEDAUDIT_KEY", secret)
        with pytest.raises(Killed):
            simulated(scenario({}), checkpoint, 11, told=told)
        return min(told)

    assert begins("") == 1
    assert begins("") > 1
    left = torch.load(checkpoint, weights_only=True)
    rounds = left["state"]["rounds"]
    name = next(iter(rounds[0]["weights"]))
    rounds[0]["weights"][name][0] += 1
    torch.save(left, checkpoint)
    assert begins("") == 1
    assert begins("the secret") == 1
    assert begins("the secret") > 1
    assert begins("another") == 1
    assert begins("") == 1


def weighted(weight: float) -> Loss:
    return lambda outputs, targets: weight * functional.cross_entropy(outputs, targets)


class Weighted:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.weight * functional.cross_entropy(outputs, targets)


def net(activation: Callable[[Tensor], Tensor]) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 10)
            for parameter in self.parameters():
                nn.init.constant_(parameter, 0.01)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(activation(self.first(x.flatten(1))))
            return out

    return Net()


DIGITS = load_dataset("digits")
FEWER = dataclasses.replace(DIGITS, train=DIGITS.train[100:])  # the clients hold the other split
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a function's constant": ({"loss": weighted(1.0)}, {"loss": weighted(2.0)}),
    "another function": ({"loss": weighted(1.0)}, {"loss": lambda a, b: functional.multi_margin_loss(a, b)}),
    "an object's attribute": ({"loss": Weighted(1.0)}, {"loss": Weighted(2.0)}),
    "a module's": ({"loss": nn.CrossEntropyLoss()}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.5)}),
    "a module's buffer": ({"loss": nn.CrossEntropyLoss()}, {"loss": nn.CrossEntropyLoss(torch.arange(1.0, 11.0))}),
    "what a model computes": ({"model": net(torch.relu)}, {"model": net(torch.tanh)}),
    "the held-out examples": ({"dataset": DIGITS}, {"dataset": FEWER}),
}


@pytest.mark.usefixtures("checkpoint_every_round")
@pytest.mark.parametrize("change", core(CHANGES, "what a model computes"))
def test_a_checkpoint_of_another_loss_model_or_held_out_set_is_not_used(tmp_path: Path, change: str) -> None:
    before, after = CHANGES[change]
    made = scenario({})
    loss, own = {"loss": "custom"} if "loss" in before else {}, {"name": "custom"} if "model" in before else {}
    made = made.model_copy(update={"model": made.model.model_copy(update={"width": None, **loss, **own})})
    checkpoint = tmp_path / "f.simulation"
    with pytest.raises(Killed):
        simulated(made, checkpoint, 8, **before)
    left = checkpoint.read_bytes()
    resumed, _, _ = simulated(made, checkpoint, **before)
    checkpoint.write_bytes(left)
    assert resumed.fingerprint() == simulated(made, None, **before)[0].fingerprint()
    told: list[float] = []
    transcript, _, history = simulated(made, checkpoint, told=told, **after)
    assert min(told) == 1, "it went on from another simulation"
    fresh, _, right = simulated(made, None, **after)
    assert (transcript.fingerprint(), history.accuracy) == (fresh.fingerprint(), right.accuracy)


@pytest.mark.usefixtures("checkpoint_every_round")
def test_a_checkpoint_of_the_same_loss_and_model_is_used(tmp_path: Path) -> None:
    made = scenario({}, rounds=4)
    made = made.model_copy(update={"model": made.model.model_copy(update={"name": "custom", "loss": "custom"})})
    checkpoint = tmp_path / "f.simulation"
    with pytest.raises(Killed):
        simulated(made, checkpoint, 8, model=net(torch.relu), loss=weighted(1.0))
    told: list[float] = []
    simulated(made, checkpoint, told=told, model=net(torch.relu), loss=weighted(1.0))
    assert min(told) > 6


@pytest.mark.usefixtures("checkpoint_every_round")
def test_a_checkpoint_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="can't write the checkpoint"):
        simulated(scenario({}), tmp_path / "file" / "f.simulation")


@pytest.mark.usefixtures("checkpoint_every_round")
def test_a_memory_that_a_checkpoint_cannot_hold_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_counting(monkeypatch)
    monkeypatch.setattr(Counting, "state_dict", lambda self: {"own": lambda: 0})
    with pytest.raises(BadInput, match="plain values"):
        simulated(scenario({"client_defence": "counting"}), tmp_path / "f.simulation")


def test_short_simulations_leave_nothing(tmp_path: Path, command: Command) -> None:
    simulated(scenario({}), tmp_path / "f.simulation")
    assert not list(tmp_path.iterdir())
    path = tmp_path / "scenario.yaml"
    path.write_text(scenario({}).to_yaml())
    assert command("simulate", path, "--out", tmp_path / "transcript").code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["scenario.yaml", "transcript"]
