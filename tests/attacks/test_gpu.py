"""On a GPU: every attack finds there what it finds on the CPU. Skipped where there is none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedaudit.api import audit
from fedaudit.attacks import ATTACKS, Attack, Finding, make_attack
from fedaudit.attacks.inversion.engines.guarded import AGREEMENT
from fedaudit.attacks.inversion.objectives import weighted_cosine
from fedaudit.attacks.victim import Victim
from fedaudit.models import build_model
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import scenario_from
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.machine import full_precision
from fedaudit.utils.seeds import generator
from tests.attacks.attack_cases import SCENARIOS, quick_attack
from tests.attacks.test_engines import engine_and_notes, images, target_of, victim_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

SMALL = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "width": 8},
    "federations": [{"name": "gpu", "clients": 2, "examples": 4, "rounds": 2}],
}


def observed(attack: Attack) -> Observation:
    own = {"name": attack.name, **attack.settings()}
    scenario = scenario_from({**SMALL, **SCENARIOS.get(attack.name, {}), "attacks": [own]})
    (recording,) = record(resolve(scenario))
    whole = observe(recording.transcript, scenario.threat)
    return (whole.split(attack.scope()) or [whole])[0]


def tensors(found: Finding) -> dict[str, Tensor]:
    return {f.name: v for f in dataclasses.fields(found) if isinstance(v := getattr(found, f.name), Tensor)}


@pytest.mark.parametrize("name", ATTACKS.names())
def test_every_attack_finds_what_it_finds_on_the_cpu(name: str, tmp_path: Path) -> None:
    attack = quick_attack(name, tmp_path)
    if "l-bfgs" in attack.settings().values():  # whose line searches make much of rounding, the fast engine's above all
        attack = make_attack(name, {**attack.settings(), "iterations": 1, "engine": "reference"})
    seen = observed(attack)
    here, there = (attack(seen, generator=generator(0, "attack"), device=device) for device in ("cpu", "cuda"))
    assert there.notes == here.notes
    if here.objective is not None:
        assert there.objective == pytest.approx(here.objective, rel=0.02, abs=1e-6)
    for key, own in tensors(here).items():
        other = tensors(there)[key]
        assert (other.device, other.dtype, other.shape) == (own.device, own.dtype, own.shape), key
        if own.numel():  # of signs a few differ, so all pixels needn't be the same
            off = float((other.double() - own.double()).abs().nanmedian())
            assert off <= 2e-3 * max(1.0, float(own.double().abs().max())), key
    there.save(tmp_path / "finding.safetensors")


@pytest.mark.parametrize("name", ["invg", "gradinversion"])
def test_labels_are_inferred_there_too(name: str, tmp_path: Path) -> None:
    attack = quick_attack(name, tmp_path)
    parts = {**SMALL, **SCENARIOS.get(name, {}), "threat": {"knows_labels": False}}
    (recording,) = record(resolve(scenario_from({**parts, "attacks": [{"name": name, **attack.settings()}]})))
    seen = observe(recording.transcript, ThreatModel(knows_labels=False)).split()[0]
    here, there = (attack(seen, generator=generator(0, "attack"), device=device) for device in ("cpu", "cuda"))
    assert tensors(there)["labels"].equal(tensors(here)["labels"])


def moved_to_gpu(victim: Victim) -> Victim:
    parameters = {n: p.cuda() for n, p in victim.parameters.items()}
    return Victim(victim.module.cuda(), victim.loss, parameters, {n: b.cuda() for n, b in victim.constants.items()})


@pytest.mark.parametrize("batches", [(2,), (1, 1)])
@pytest.mark.parametrize(
    ("name", "model"),
    [("first-order", "convnet-small"), ("compiled", "convnet-small"), ("auto", "convnet-small"), ("auto", "resnet20")],
)
def test_the_fast_engines_agree_before_and_after_they_are_recorded(
    name: str, batches: tuple[int, ...], model: str
) -> None:
    victim = victim_of(build_model(model, input_shape=(3, 12, 12), outputs=5))
    training = TrainingConfig(0.1, len(batches), batches)
    target = [t.cuda() for t in target_of(victim, training)]
    distance = weighted_cosine(target, [1.0] * len(target))
    moved = moved_to_gpu(victim)
    (engine, notes), (exact, _) = (engine_and_notes(n, moved, training, distance) for n in (name, "reference"))
    with full_precision("cuda"):
        for seed in range(6):
            x = images(2, seed).cuda()
            (value, own), (exact_value, wanted) = engine(x), exact(x)
            assert F.cosine_similarity(own.flatten(), wanted.flatten(), dim=0) >= AGREEMENT
            torch.testing.assert_close(value, exact_value, rtol=1e-3, atol=1e-5)
    assert notes == []


def test_a_gpu_s_recording_gives_the_bits_of_the_steps() -> None:
    victim = victim_of(build_model("convnet-small", input_shape=(3, 12, 12), outputs=5))
    training = TrainingConfig(1.0, 1, (2,))
    target = [t.cuda() for t in target_of(victim, training)]
    distance = weighted_cosine(target, [1.0] * len(target))
    engine, _ = engine_and_notes("first-order", moved_to_gpu(victim), training, distance)
    x = images(2).cuda()
    with full_precision("cuda"):
        results = [engine(x) for _ in range(8)]
        other = engine(images(2, 1).cuda())
    assert all(value.equal(results[0][0]) and grad.equal(results[0][1]) for value, grad in results)
    assert not other[1].equal(results[0][1])


def test_precision_is_given_back() -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic, torch.get_float32_matmul_precision()
    with full_precision("cuda"):
        assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.deterministic
        assert torch.get_float32_matmul_precision() == "highest"
    after = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.deterministic, torch.get_float32_matmul_precision()
    assert after == before


def test_an_audit_on_a_gpu_says_so(tmp_path: Path) -> None:
    parts = {**SMALL, "model": {"name": "convnet-small"}, "attacks": [{"name": "invg", "iterations": 30}]}
    made = audit({**parts, "device": "cuda"}, out=tmp_path, progress=False)
    assert made.result.environment["device"] == torch.cuda.get_device_name()
    assert {finding.status for finding in made.result.findings} == {"done"}


TRAINING = {"algorithm": "fedavg", "batch_size": 8, "examples": 64, "local_steps": 4, "learning_rate": 0.05}


@pytest.mark.parametrize("model", ["mlp", "convnet-small", "resnet20"])
@pytest.mark.parametrize("own", [{}, {**TRAINING, "momentum": 0.5}])
def test_a_federation_trains_there_as_on_the_cpu(model: str, own: dict[str, Any]) -> None:
    federations = [{"name": "gpu", "clients": 2, "examples": 16, "rounds": 2, **own}]
    width = {"mlp": 8, "convnet-small": 8, "resnet20": 16}[model]
    parts = {**SMALL, "model": {"name": model, "width": width, "batch_norm": "train"}, "federations": federations}
    here, there = (
        record(resolve(scenario_from({**parts, "attacks": ["invg"], "device": device})))[0]
        for device in ("cpu", "cuda")
    )
    assert there.truth.about["device"] == torch.cuda.get_device_name()
    pairs = zip(here.transcript.rounds, there.transcript.rounds, strict=True)
    for one, other in ((u, v) for r, s in pairs for u, v in zip(r.updates, s.updates, strict=True)):
        for name, tensor in one.tensors.items():
            assert other.tensors[name].device.type == "cpu"
            off = float((other.tensors[name] - tensor).abs().max())
            assert off <= 1e-4 * max(1.0, float(tensor.abs().max())), name
    for key, inputs in here.truth.inputs.items():
        assert there.truth.inputs[key].equal(inputs)


def test_a_model_is_trained_there_before() -> None:
    model = {"name": "convnet-small", "width": 8, "training": {"epochs": 1, "batch_size": 128}}
    parts = {**SMALL, "model": model, "attacks": ["invg"]}
    here, there = (resolve(scenario_from({**parts, "device": device})) for device in ("cpu", "cuda"))
    assert there.model.trained.endswith(f", on {torch.cuda.get_device_name()}")
    state = there.federations[0].model.state_dict()
    for name, value in here.federations[0].model.state_dict().items():
        assert state[name].device.type == "cpu"
        torch.testing.assert_close(state[name], value, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["gan", "agrevader", "cafe", "direct-labels", "dp-canaries", "imprint", "dager"])
def test_whoever_acts_in_a_federation_does_so_there(name: str) -> None:
    parts = {**SMALL, **SCENARIOS[name], "attacks": [name]}
    here, there = (record(resolve(scenario_from({**parts, "device": device})))[0] for device in ("cpu", "cuda"))
    assert there.transcript.adversary_log.keys() == here.transcript.adversary_log.keys()
    for key, own in here.transcript.adversary_log.items():
        torch.testing.assert_close(there.transcript.adversary_log[key], own, rtol=1e-2, atol=1e-2)
