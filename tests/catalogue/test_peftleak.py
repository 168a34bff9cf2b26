"""A server whose frozen vision transformer leads patches to its adapters: images come out of adapters' gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.models.vit import AdaptedBlock, ViT
from fedaudit.scenario.scenario import Scenario
from fedaudit.transcript.observation import Observation
from tests.attacks.server_cases import PUBLIC, SERVERS, examples
from tests.build import recorded, seen_in

scenario = SERVERS["peftleak"]


def recovered(made: Scenario) -> tuple[Observation, Tensor, Tensor, ImageFinding]:
    recording = recorded(made)
    (seen,) = seen_in(made, recording)
    found = make_attack("peftleak")(seen)
    assert isinstance(found, ImageFinding)
    return seen, *examples(recording), found


@pytest.mark.slow
@pytest.mark.parametrize(
    "rest", [{}, {"data": "photos", "model": {"name": "vit-adapters", "width": None}}], ids=["digits", "photos"]
)
def test_every_patch_of_an_example_that_is_alone_comes_out(rest):
    _, true, label, found = recovered(scenario(**rest))
    assert torch.allclose(found.images, true, atol=1e-3)
    assert torch.equal(found.labels, label)


def test_of_a_batch_those_patches_come_out_that_are_alone_between_two_edges():
    """The oracle: what each adapter really gets, by a hook, and how many of these lie between two of its biases."""
    made = scenario({"examples": 6, "batch_size": 6}, threat=PUBLIC)
    recording = recorded(made)
    (seen,) = seen_in(made, recording)
    found = make_attack("peftleak")(seen)
    assert isinstance(found, ImageFinding)
    weights, model, info = seen.single().weights, recording.transcript.module, recording.transcript.task_info
    assert isinstance(model, ViT)
    model.load_state_dict(weights)
    caught: list[Tensor] = []
    downs = [b.adapter.down for b in model.blocks if isinstance(b, AdaptedBlock)][:-1]
    handles = [down.register_forward_pre_hook(lambda _, args: caught.append(args[0].detach())) for down in downs]
    true, labels = examples(recording)
    model(info.normalise(true))
    for handle in handles:
        handle.remove()
    expected = torch.zeros((6, 16), dtype=torch.bool)
    for down, received in zip(downs, caught, strict=True):
        active = nn.functional.linear(received.double(), down.weight.double(), down.bias.double()) > 0
        kinds = [tuple(row.tolist()) for row in active.flatten(0, 1)]  # which rows a patch activates: its bin
        for i, kind in enumerate(kinds):
            if any(kind) and kinds.count(kind) == 1:
                example, token = divmod(i, active.shape[1])
                expected[example, token - 1] = True
    gray = torch.tensor(info.mean[0])
    seen_patches = torch.zeros_like(expected)
    for image, label in zip(found.images, found.labels, strict=True):
        patches = nn.functional.unfold(image[None], 2, stride=2)[0].T
        told = ((patches - gray).abs() > 1e-4).any(dim=1)
        own = nn.functional.unfold(true, 2, stride=2).transpose(1, 2)
        errors = ((own - patches).abs() > 1e-3).any(dim=2) & told
        best = int(errors.sum(dim=1).argmin())
        assert not errors[best].any(), "nothing comes out that isn't there"
        assert label == labels[best]
        seen_patches[best] |= told
    assert expected.sum() >= 20
    assert (seen_patches != expected).sum() <= 0.05 * expected.sum()  # one next to an edge may be in both bins


def test_sums_are_read_as_single_updates_are():
    made = scenario(federation={"clients": 2, "examples": 2, "batch_size": 1}, threat={"sees": "sum"})
    _, true, _, found = recovered(made)
    exact = ((found.images[:, None] - true[None]).abs() < 1e-3).flatten(2).float().mean(dim=2)
    assert (exact.max(dim=0).values > 0.3).all()


def test_only_adapters_and_the_last_layer_are_trained():
    recording = recorded(scenario(federation={"rounds": 2}))
    first, second = (record.weights for record in recording.transcript.rounds)
    (update, *_), *_ = (record.updates for record in recording.transcript.rounds)
    assert all("adapter" in name or name.startswith("fc.") for name in update.tensors)
    assert torch.equal(first["blocks.0.adapter.down.weight"], second["blocks.0.adapter.down.weight"])
    assert not torch.equal(first["fc.weight"], second["fc.weight"])
