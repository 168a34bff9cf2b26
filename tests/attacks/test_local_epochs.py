"""Updates of several local epochs: n examples, of which each epoch has images of its own until they are averaged."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fedaudit
from fedaudit.attacks import AGIC, ImageFinding, make_attack
from fedaudit.attacks.base import silent
from fedaudit.attacks.inversion.local_epochs import agreed, same_set, search_epochs
from fedaudit.attacks.local_training import whole_epochs
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import Recording
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.observation import Observation, observe
from fedaudit.utils.seeds import generator

EPOCHS: dict[str, Any] = {
    "name": "f",
    "algorithm": "fedavg",
    "clients": 1,
    "examples": 4,
    "batch_size": 2,
    "local_epochs": 3,
    "learning_rate": 0.01,
}
SCENARIO: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "lenet", "initialisation": "uniform"},
    "threat": {"knows_labels": True},
}


def seen(**changes: Any) -> tuple[Observation, Recording]:
    given = {**SCENARIO, **changes, "federations": [{**EPOCHS, **changes.get("federation", {})}]}
    given.pop("federation", None)
    recording = fedaudit.simulate(given, progress=False)
    (client,) = observe(recording.transcript, scenario_from(given).threat).split("client")
    return client, recording


def run(name: str, observation: Observation, **settings: Any) -> ImageFinding:
    found = make_attack(name, settings)(observation, generator=generator(0, "epochs"))
    assert isinstance(found, ImageFinding)
    return found


def different(images: Tensor) -> int:
    return len(torch.unique(images.flatten(1), dim=0))


def psnr(images: Tensor, true: Tensor) -> float:
    return float(-10 * (images - true).square().flatten(1).mean(dim=1).log10().mean())


def training(*sizes: int, held: int | None) -> TrainingConfig:
    return TrainingConfig(0.1, len(sizes), sizes, data_size=held)


@pytest.mark.parametrize(
    ("sizes", "held", "labels", "expected"),
    [
        ((2, 2), 4, None, (4, 1)),
        ((2, 2, 2, 2), 4, None, (4, 2)),
        ((3, 1, 3, 1), 4, None, (4, 2)),
        ((3, 3, 2), 4, None, (8, 1)),  # no batch ends where an epoch would
        ((2, 2, 2), 4, None, (6, 1)),
        ((2, 2), None, None, (4, 1)),
        ((2, 2, 2, 2), 4, [0, 1, 2, 2, 2, 1, 2, 0], (4, 2)),
        ((2, 2, 2, 2), 4, [0, 1, 2, 2, 2, 1, 1, 0], (8, 1)),  # drawn otherwise than epoch by epoch
    ],
)
def test_whole_epochs_are_told_by_batches_and_labels(sizes, held, labels, expected):
    given = None if labels is None else torch.tensor(labels)
    assert whole_epochs(sum(sizes), training(*sizes, held=held), given) == expected


def shuffled(images: Tensor, epochs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return ``epochs`` copies of the images, each in an order of its own, and these orders."""
    start = generator(seed, "orders")
    orders = torch.stack([torch.randperm(len(images), generator=start) for _ in range(epochs)])
    return torch.cat([images[order] for order in orders]), orders.flatten()


def test_the_prior_knows_content_and_not_order():
    truth = torch.rand((4, 3, 5, 6), generator=generator(0, "truth"), dtype=torch.float64)
    prior = same_set(3)
    whole, _ = shuffled(truth, 3)
    value, slope = prior(whole)
    assert float(value) == pytest.approx(0, abs=1e-30)
    assert float(slope.abs().max()) < 1e-15
    other = torch.rand(whole.shape, generator=generator(1, "other"), dtype=torch.float64)
    again = torch.cat([epoch[torch.randperm(4, generator=generator(2, "order"))] for epoch in other.split(4)])
    torch.testing.assert_close(prior(other)[0], prior(again)[0])
    summaries = [epoch.mean(dim=0) for epoch in other.split(4)]
    pairs = [(a - b).square().mean() for a in summaries for b in summaries]
    torch.testing.assert_close(prior(other)[0], torch.stack(pairs).sum() / 9)


def test_the_prior_s_gradient_is_autograd_s():
    images = torch.rand((6, 1, 3, 3), generator=generator(0, "g"), dtype=torch.float64).requires_grad_()
    sets = images.view(3, 2, 1, 3, 3)
    summaries = sets.mean(dim=1)
    wanted = (summaries[:, None] - summaries[None]).square().flatten(2).mean(dim=2).sum() / 9
    (exact,) = torch.autograd.grad(wanted, images)
    torch.testing.assert_close(same_set(3)(images.detach())[1], exact)


def test_images_are_averaged_with_those_of_the_same_example():
    truth = torch.rand((4, 1, 6, 6), generator=generator(0, "truth"))
    images, orders = shuffled(truth, 5)
    noise = 0.05 * torch.randn(images.shape, generator=generator(0, "noise"))
    found = agreed((images + noise)[None], torch.zeros(20), 5)[0]
    for example in range(4):
        own = orders == example
        torch.testing.assert_close(found[own], (images + noise)[own].mean(dim=0).expand(5, -1, -1, -1))


def test_images_of_equal_label_are_matched_before_others_and_every_stage_alike():
    first, second = torch.zeros(2, 1, 2, 2), torch.zeros(2, 1, 2, 2)
    first[1], second[1] = 1.0, 1.0
    images = torch.stack([torch.cat([first, second]), torch.arange(16.0).view(4, 1, 2, 2)])
    found = agreed(images, torch.tensor([7, 8, 8, 7]), 2)  # by content it would be the other way round
    assert found[0].unique().tolist() == [0.5]
    assert found[1].equal(torch.stack([images[1, [0, 3]].mean(dim=0), images[1, [1, 2]].mean(dim=0)])[[0, 1, 1, 0]])


def test_shared_images_fit_the_whole_update_where_averaged_ones_do_not():
    """Σ_e w_e ‖x_e − t_e‖² is least at t where epochs have images of their own, and at Σ w_e t_e / Σ w_e where not."""
    truth = torch.rand((3, 1, 4, 4), generator=generator(0, "truth"))
    wanted, orders = shuffled(truth, 2)
    wanted = wanted + 0.05 * torch.randn(wanted.shape, generator=generator(0, "noise"))
    weights = torch.tensor([3.0, 1.0]).repeat_interleave(3).view(6, 1, 1, 1)
    found, trace = search_epochs(
        lambda images: ((weights * (images - wanted).square()).sum(), 2 * weights * (images - wanted)),
        torch.zeros_like(wanted),
        torch.zeros(6),
        2,
        (torch.zeros(1), torch.ones(1)),
        generator(0, "search"),
        silent,
        iterations=200,
        separate=0.5,
        learning_rate=0.1,
        schedule="linear",
    )
    least = torch.stack([(weights * wanted)[orders == i].sum(dim=0) / 4 for i in range(3)])
    torch.testing.assert_close(found[0], least[orders], atol=1e-3, rtol=0)
    assert trace.iterations[-1] == 200
    assert trace.objective[-1] == pytest.approx(float((weights * (least[orders] - wanted).square()).sum()), rel=1e-3)


@pytest.mark.parametrize("name", ["invg", "dlg-adam", "agic"])
@pytest.mark.parametrize("knows", [True, False])
def test_an_update_of_several_epochs_has_as_many_images_as_examples(name, knows):
    observation, recording = seen(threat={"knows_labels": knows})
    found = run(name, observation, iterations=4)
    assert len(found.images) == len(recording.truth.inputs[0, 0]) == 12
    assert different(found.images) == different(recording.truth.inputs[0, 0]) == 4
    assert found.trace is not None
    assert found.trace.snapshots[-1].equal(found.images)
    labelled = zip(found.images.unbind(), found.labels.tolist(), strict=True)
    assert len({(image.numpy().tobytes(), label) for image, label in labelled}) == 4
    if knows:
        epochs = recording.truth.labels[0, 0].view(3, 4).sort(dim=1).values
        assert found.labels.view(3, 4).sort(dim=1).values.equal(epochs)


def test_what_is_simulated_is_in_the_order_of_the_granted_labels():
    observation, recording = seen()
    assert run("invg", observation, iterations=2).labels.equal(recording.truth.labels[0, 0])


@pytest.mark.parametrize("federation", [{"local_epochs": 1}, {"local_epochs": None, "local_steps": 3}])
def test_nothing_changes_where_no_example_is_known_to_be_used_again(federation):
    observation, _ = seen(federation=federation)
    plain, odd = (run("invg", observation, iterations=5, same_set=weight) for weight in (0.0, 10.0))
    assert plain.images.equal(odd.images)
    assert different(plain.images) == len(plain.images)
    update = observation.single().update
    assert update.training is not None
    unknown = dataclasses.replace(update, training=dataclasses.replace(update.training, data_size=None))
    message = dataclasses.replace(observation.single(), update=unknown)
    untold = run("invg", dataclasses.replace(observation, messages=(message,)), iterations=5)
    assert untold.images.equal(plain.images)


def test_one_batch_of_several_epochs_is_that_of_its_examples():
    """Its gradient is the mean over repeated examples, so that the truth, each example once, has distance 0."""
    observation, recording = seen(federation={"learning_rate": 1e-4})
    attack = AGIC(total_variation=0, engine="reference")
    prepared = attack.prepare(observation, "cpu")
    objective = attack.objective(prepared)
    true = observation.task_info.normalise(recording.truth.inputs[0, 0][:4])
    assert prepared.labels.equal(recording.truth.labels[0, 0][:4])
    assert float(objective(true)[0]) < 1e-4
    assert float(objective(true.flip(0))[0]) > 1e-2


@pytest.mark.parametrize("method", ["agic", pytest.param("invg", marks=pytest.mark.slow)])
def test_rounds_of_several_local_epochs_are_evaluated_once_an_example(method):
    attack = {"name": "epochs", "attack": {"name": method, "iterations": 3}, "epochs": 2}
    scenario = {**SCENARIO, "federations": [{**EPOCHS, "rounds": 2}], "attacks": [attack]}
    (finding,) = fedaudit.audit(scenario, progress=False).result.findings
    assert finding.status == "done"
    assert len(finding.images) == 4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["agic", "invg", "dlg-adam"])
def test_an_example_is_evaluated_once_however_often_it_was_used(method):
    attacks = [{"name": method, "iterations": 3}]
    (finding,) = fedaudit.audit(
        {**SCENARIO, "federations": [EPOCHS], "attacks": attacks}, progress=False
    ).result.findings
    assert [image.uses for image in finding.images] == [3] * 4
    assert finding.label_accuracy == 1.0


@pytest.mark.slow
def test_n_images_are_nearer_to_the_examples_than_separate_ones():
    observation, recording = seen()
    update = observation.single().update
    assert update.training is not None
    unknown = dataclasses.replace(update, training=dataclasses.replace(update.training, data_size=None))
    alone = dataclasses.replace(observation, messages=(dataclasses.replace(observation.single(), update=unknown),))
    true = recording.truth.inputs[0, 0]
    together, separate = (psnr(run("invg", one, iterations=150).images, true) for one in (observation, alone))
    assert together > separate + 3
