"""Federations on another device than the CPU: everything that they compute with is there, and what they leave isn't."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaudit.pipeline.describe import federation_record, with_device
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.pretraining import pretrain, training_once
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.client import Federation
from fedaudit.simulation.simulator import Recording, simulate
from fedaudit.transcript.observation import observe
from fedaudit.utils.errors import BadInput
from fedaudit.utils.progress import Quiet
from tests.attacks.attack_cases import SCENARIOS
from tests.simulation.elsewhere import DEVICE, Elsewhere, elsewhere
from tests.simulation.federation_cases import MLP, scenario

FEDAVG = {"algorithm": "fedavg", "clients": 2, "rounds": 2, "examples": 12, "batch_size": 3, "local_steps": 3}
FEDSGD = {"clients": 2, "rounds": 2, "examples": 8, "batch_size": 4}
CONVNET = {"name": "convnet-small", "width": 4, "batch_norm": "train"}
DP = {"name": "dp", "level": "sample", "epsilon": None}


def of_attack(name: str) -> Scenario:
    parts = {"data": {"name": "digits"}, "model": MLP, "federations": [{"name": "fed", **FEDSGD}], **SCENARIOS[name]}
    return scenario_from({**parts, "attacks": [name]})


CASES: dict[str, Callable[[], Scenario]] = {
    "fedsgd": lambda: scenario(FEDSGD),
    "fedavg": lambda: scenario({**FEDAVG, "momentum": 0.5, "weight_decay": 0.01}, evaluation={"accuracy_every": 1}),
    "fedprox": lambda: scenario({**FEDAVG, "algorithm": "fedprox", "proximal_mu": 0.1}),
    "BatchNorm": lambda: scenario(FEDAVG, model=CONVNET, evaluation={"accuracy_every": 1}),
    "root data": lambda: scenario(FEDAVG, defences={"aggregator": {"name": "fltrust", "root_examples": 4}}),
    "dp of samples": lambda: scenario(FEDAVG, defences={"client_defence": DP}),
    "canary records": lambda: scenario(
        FEDAVG, defences={"client_defence": DP}, attacks=[{"name": "dp-canaries", "canaries": 8}]
    ),
    "table": lambda: scenario(FEDAVG, data={"name": "breast-cancer"}),
    **{name: partial(of_attack, name) for name in ("gan", "agrevader", "dager", "imprint", "loki")},
    **{name: partial(of_attack, name) for name in ("cafe", "direct-labels")},  # vertical federations
}


def tensors(thing: Any) -> list[Tensor]:
    """Return all tensors in what a simulation left, in order."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, nn.Module):
        return list(thing.state_dict().values())
    if dataclasses.is_dataclass(thing):
        thing = {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}
    if isinstance(thing, dict):
        thing = list(thing.values())
    return [tensor for part in thing for tensor in tensors(part)] if isinstance(thing, list | tuple) else []


def federation_of(made: Scenario) -> Federation:
    (federation,) = resolve(made).federations
    return federation


def there(federation: Federation, **options: Any) -> tuple[Recording, list[tuple[int, ...]]]:
    with elsewhere() as moved:
        return simulate(dataclasses.replace(federation, device=DEVICE), **options), moved


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_all_that_trains_is_on_the_device_and_nothing_of_it_is_left(name: str) -> None:
    federation = federation_of(CASES[name]())
    here, (made, moved) = simulate(federation), there(federation)
    assert moved
    own, others = tensors([here.transcript, here.truth]), tensors([made.transcript, made.truth])
    assert len(own) == len(others) > 0
    for one, other in zip(own, others, strict=True):
        assert type(other) is Tensor
        assert other.device.type == "cpu"
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6, equal_nan=True)
    assert made.history is not None
    assert here.history is not None
    assert made.history.accuracy == here.history.accuracy
    assert made.history.bytes == here.history.bytes


def test_arithmetic_for_the_cpu_is_left_there() -> None:
    plain, fast = (federation_of(scenario({**FEDAVG, **own}, model=CONVNET)) for own in ({}, {"arithmetic": "fast"}))
    assert there(fast)[0].transcript.fingerprint() == there(plain)[0].transcript.fingerprint()


def test_a_client_s_data_are_moved_once() -> None:
    federation = federation_of(scenario({**FEDAVG, "rounds": 4}))
    _, moved = there(federation)
    held = {tuple(data.inputs.shape) for data in federation.client_data}
    assert sum(shape in held for shape in moved) == len(federation.client_data)
    assert not [shape for shape in moved if len(shape) == 4 and shape not in held]


def test_a_tensor_that_was_left_behind_is_refused() -> None:
    with elsewhere():
        there, here = torch.ones(3).to(DEVICE), torch.ones(3)
        assert isinstance(there * 2, Elsewhere)
        with pytest.raises(RuntimeError, match="same device"):
            there + here


def test_a_loss_of_one_s_own_is_moved_with_its_tensors() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weights", torch.linspace(0.5, 2.0, 10))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            each = nn.functional.cross_entropy(outputs, targets, reduction="none")
            return (each * self.get_buffer("weights")[targets]).sqrt().mean()

    loss = Weighted()
    (federation,) = resolve(scenario(FEDAVG, model={**MLP, "loss": "custom"}), loss=loss).federations
    made, _ = there(federation)
    assert made.transcript.fingerprint() == simulate(federation).transcript.fingerprint()
    assert loss.get_buffer("weights").device.type == "cpu"


def test_a_checkpoint_of_the_device_goes_on_there_and_only_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedaudit.simulation.checkpoint.EVERY", 0.0)
    federation = federation_of(scenario({**FEDAVG, "momentum": 0.5}))
    whole, _ = there(federation)
    calls, file = 0, tmp_path / "simulation"

    def stop(_: float) -> None:
        nonlocal calls
        calls += 1
        if calls > federation.spec.clients * (federation.spec.rounds - 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        there(federation, checkpoint=file, report=stop)
    said: list[str] = []
    copied = tmp_path / "copied"
    copied.write_bytes(file.read_bytes())
    simulate(federation, say=said.append, checkpoint=copied)
    assert said == []
    again, _ = there(federation, checkpoint=file, say=said.append)
    assert said
    assert again.transcript.fingerprint() == whole.transcript.fingerprint()


def test_the_model_is_trained_there_before_and_comes_back() -> None:
    made = scenario(FEDSGD, model={**CONVNET, "training": {"epochs": 1, "batch_size": 256, "momentum": 0.9}})
    federation = federation_of(scenario(FEDSGD, model=CONVNET))
    own, other = copy.deepcopy(federation.model), copy.deepcopy(federation.model)
    parts = federation.loss, federation.task_info, federation.dataset
    with training_once():
        words = pretrain(own, *parts, made, Quiet())
        with elsewhere():
            told = pretrain(other, *parts, made.model_copy(update={"device": DEVICE}), Quiet())
    assert told == f"{words}, on {DEVICE}"
    assert not own.state_dict()["fc.weight"].equal(federation.model.state_dict()["fc.weight"])
    for one, same in zip(tensors(own), tensors(other), strict=True):
        assert type(same.data) is Tensor
        torch.testing.assert_close(same, one, rtol=1e-4, atol=1e-6)


def test_results_say_on_which_device_it_was() -> None:
    resolved = resolve(scenario(FEDSGD))
    own = [dataclasses.replace(federation, device=DEVICE) for federation in resolved.federations]
    here = record(resolved)
    with elsewhere():
        there = record(dataclasses.replace(resolved, federations=own))
    told = [
        with_device(federation_record(made.transcript, made.history, resolved.scenario, observe(made)), made.truth)
        for made in (*here, *there)
    ]
    assert [one.device for one in told] == [None, DEVICE]
    assert told[1].description == f"{told[0].description}; simulated on {DEVICE}"


def test_a_gpu_that_is_too_small_is_a_line() -> None:
    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    federation = dataclasses.replace(federation_of(scenario(FEDSGD)), loss=full)
    with pytest.raises(BadInput, match=r"memory isn't enough .* device: cpu"):
        simulate(federation)
