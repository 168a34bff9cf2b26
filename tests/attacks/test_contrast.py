"""Brightness and contrast, which gradients behind BatchNorm hide and its buffers give away."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks import make_attack
from fedaudit.attacks.findings import ImageFinding
from fedaudit.attacks.inversion.contrast import pinned, returned_of
from fedaudit.attacks.victim import load_victim
from fedaudit.task.training import Pass, TrainingConfig
from fedaudit.transcript.observation import Message, Observation, observe
from fedaudit.transcript.update import ClientDefenceInfo

FEDSGD: dict[str, Any] = {"algorithm": "fedsgd", "examples": 4, "batch_size": 4}
FEDAVG: dict[str, Any] = {
    "algorithm": "fedavg",
    "examples": 12,
    "batch_size": 4,
    "local_epochs": 1,
    "learning_rate": 1e-6,
}


def victim(federation: dict[str, Any], mode: Literal["train", "eval"] = "train") -> tuple[Observation, Tensor]:
    made = fedaudit.simulate(
        {
            "data": {"name": "photos"},
            "model": {"name": "convnet-small", "batch_norm": mode, "width": 4},
            "federations": [{"name": "f", "clients": 1, **federation}],
            "threat": {"knows_labels": True},
            "attacks": ["invg"],
        },
        progress=False,
    )
    (true,) = made.truth.inputs.values()
    return observe(made, fedaudit.ThreatModel(knows_labels=True)), true


def dimmed(images: Tensor) -> Tensor:
    """Return the batch with a fifth of its contrast lost, and each channel lighter."""
    middle = images.mean((0, 2, 3), keepdim=True)
    return 0.8 * (images - middle) + middle + torch.tensor([0.3, -0.2, 0.1]).view(1, 3, 1, 1)


def restored(observation: Observation, true: Tensor, message: Message | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return true, dimmed, and pinned images, normalised."""
    images = observation.task_info.normalise(true)
    own, _ = load_victim(observation, observation.single(), "cpu")
    return images, dimmed(images), pinned(dimmed(images), own, message or observation.single())


def test_the_gradient_hides_the_contrast_of_a_batch_and_the_buffers_restore_it() -> None:
    observation, true = victim(FEDSGD)
    images, dim, found = restored(observation, true)
    torch.testing.assert_close(found, images, rtol=0, atol=0.02)
    assert (dim - images).abs().max() > 0.3


def test_of_local_steps_the_buffers_tell_the_mean_of_their_batches() -> None:
    observation, true = victim(FEDAVG)
    images, dim, found = restored(observation, true)
    assert (found - images).square().mean() < 0.02 * (dim - images).square().mean()


def test_what_came_back_is_what_torch_made_of_the_batches() -> None:
    """With the model all but unmoved, its statistics are weighed means of those of the batches, by closed form."""
    observation, true = victim(FEDAVG)
    message = observation.single()
    own, _ = load_victim(observation, message, "cpu")
    seen: list[Tensor] = []
    name = "features.layer1.bn"
    own.module.get_submodule(name).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    for batch in observation.task_info.normalise(true).split(4):
        own.outputs(batch)
    weights = torch.tensor([0.1 * 0.9**2, 0.1 * 0.9, 0.1]) / (1 - 0.9**3)
    found = returned_of(own.module, name, message)
    assert found is not None
    for value, one in ((found.mean, torch.mean), (found.variance, torch.var)):
        each = torch.stack([one(s.transpose(0, 1).flatten(1), dim=1) for s in seen])
        torch.testing.assert_close(value, (weights[:, None] * each).sum(0), rtol=1e-3, atol=1e-4)


def accumulated(weights: dict[str, Tensor], name: str, batches: list[Tensor]) -> dict[str, Tensor]:
    """Return the buffers of a BatchNorm layer after several passes, by torch."""
    layer = nn.BatchNorm2d(len(weights[f"{name}.weight"]))
    layer.load_state_dict({key.removeprefix(f"{name}."): t for key, t in weights.items() if key.startswith(f"{name}.")})
    for batch in batches:
        layer(batch)
    return {f"{name}.{key}": t.clone() for key, t in layer.named_buffers() if "running" in key}


@pytest.mark.parametrize("kind", ["gradient", "weights"])
def test_each_pass_of_an_accumulated_step_moves_the_buffers(kind: Literal["gradient", "weights"]) -> None:
    """Two passes a step: taken for one, variances come out below zero, and even true images would be changed."""
    observation, true = victim(FEDSGD)
    message, name = observation.single(), "features.layer1.bn"
    own, _ = load_victim(observation, message, "cpu")
    seen: list[Tensor] = []
    own.module.get_submodule(name).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    for batch in observation.task_info.normalise(true).split(2):
        own.outputs(batch)
    training = TrainingConfig(0.01, 1, (4,), passes=((Pass(2, 0.5), Pass(2, 0.5)),))
    buffers = {**message.update.buffers, **accumulated(dict(message.weights), name, seen)}
    update = dataclasses.replace(message.update, kind=kind, training=training, buffers=buffers)
    found = returned_of(own.module, name, dataclasses.replace(message, update=update))
    assert found is not None
    weights = torch.tensor([0.1 * 0.9, 0.1]) / (1 - 0.9**2)
    for value, one in ((found.mean, torch.mean), (found.variance, torch.var)):
        each = torch.stack([one(s.transpose(0, 1).flatten(1), dim=1) for s in seen])
        torch.testing.assert_close(value, (weights[:, None] * each).sum(0), rtol=1e-3, atol=1e-4)


def test_statistics_that_no_batch_has_are_none() -> None:
    observation, _ = victim(FEDSGD)
    message, name = observation.single(), "features.layer1.bn"
    own, _ = load_victim(observation, message, "cpu")
    below = {key: t.clone() for key, t in message.update.buffers.items()}
    below[f"{name}.running_var"][0] = 0.5 * message.weights[f"{name}.running_var"][0]
    update = dataclasses.replace(message.update, buffers=below)
    assert returned_of(own.module, name, message) is not None
    assert returned_of(own.module, name, dataclasses.replace(message, update=update)) is None


def test_momentum_of_none_is_a_plain_mean() -> None:
    layer, batch = nn.BatchNorm2d(3, momentum=None), torch.randn(8, 3, 4, 4)
    with torch.no_grad():
        for _ in range(5):
            layer(torch.randn(8, 3, 4, 4) + 1)
    model = nn.Sequential(layer)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model(batch)
    observation, _ = victim(FEDSGD)
    message = observation.single()
    after = {name: t.clone() for name, t in model.state_dict().items() if "running" in name}
    found = returned_of(
        model,
        "0",
        dataclasses.replace(message, weights=before, update=dataclasses.replace(message.update, buffers=after)),
    )
    assert found is not None
    torch.testing.assert_close(found.mean, batch.mean((0, 2, 3)), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.variance, batch.transpose(0, 1).flatten(1).var(1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("why", ["running statistics", "no buffers", "clipped", "noisy"])
def test_nothing_is_changed_where_the_buffers_dont_tell(why: str) -> None:
    observation, true = victim(FEDSGD, "eval" if why == "running statistics" else "train")
    message = observation.single()
    update = message.update
    if why == "no buffers":
        update = dataclasses.replace(update, buffers={})
    elif why == "clipped":
        update = dataclasses.replace(update, sanitised=ClientDefenceInfo("dp", clip=1.0))
    elif why == "noisy":
        update = dataclasses.replace(update, sanitised=ClientDefenceInfo("dp", noise=1.0))
    _, dim, found = restored(observation, true, dataclasses.replace(message, update=update))
    assert found.equal(dim)


def test_a_network_without_batch_norm_is_left_alone() -> None:
    made = fedaudit.simulate(
        {
            "data": {"name": "photos"},
            "model": {"name": "lenet"},
            "federations": [{"name": "f", "clients": 1, **FEDSGD}],
            "threat": {"knows_labels": True},
            "attacks": ["invg"],
        },
        progress=False,
    )
    (true,) = made.truth.inputs.values()
    _, dim, found = restored(observe(made, fedaudit.ThreatModel(knows_labels=True)), true)
    assert found.equal(dim)


@pytest.mark.slow
def test_any_search_takes_it_and_ends_with_the_clients_contrast() -> None:
    observation, _ = victim(FEDSGD)
    own, _ = load_victim(observation, observation.single(), "cpu")
    images = []
    for pin in (False, True):
        settings = {"iterations": 30, "statistics": "batch", "pin_contrast": pin}
        finding = make_attack("invg", settings)(observation, seed=0)
        assert isinstance(finding, ImageFinding)
        images.append(finding.images)
    free, found = images
    info = observation.task_info
    wanted = info.denormalise(pinned(info.normalise(free), own, observation.single())).clamp(0, 1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)
    assert (found - free).abs().max() > 0.01
