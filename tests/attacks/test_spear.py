"""SPEAR: exact batches, what it vouches for, and what it must not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.attacks.analytic import spear as spear_module
from fedaudit.attacks.analytic.sparse_columns import _descended, certify, low_rank, none_yet, on_a_line, search
from fedaudit.attacks.analytic.spear import Spear
from fedaudit.models import build_model
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator
from tests.conftest import core

SHAPE, CLASSES = (1, 6, 6), 5
Module = Callable[[], nn.Module]


def deep(width: int = 80) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, width), nn.ReLU(), nn.Linear(width, 40), nn.ReLU(), nn.Linear(40, CLASSES)
    )


def seen(
    module: nn.Module,
    images: Tensor,
    labels: Tensor,
    training: TrainingConfig | None = None,
    num_classes: int | None = CLASSES,
) -> Observation:
    """Return what a server sees of a gradient, or of local training written out here in plain torch."""
    info = TaskInfo("custom", None, "eval", "cross-entropy", "image", SHAPE, num_classes, (0.5,), (0.25,))
    start = {name: t.detach().clone() for name, t in module.state_dict().items()}
    inputs = info.normalise(images)
    if training is None:
        value = nn.functional.cross_entropy(module(inputs), labels)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        tensors = dict(zip(trained, torch.autograd.grad(value, list(trained.values())), strict=True))
        update = Update(0, "gradient", tensors, len(images), None)
    else:
        optimiser = torch.optim.SGD(
            module.parameters(), training.learning_rate, training.momentum, weight_decay=training.weight_decay
        )
        batches = torch.arange(training.local_steps * training.batch_sizes[0]) % len(images)
        for rows in batches.split(training.batch_sizes[0]):
            optimiser.zero_grad()
            value = nn.functional.cross_entropy(module(inputs[rows]), labels[rows])
            for name, p in module.named_parameters():
                value = value + training.proximal_mu / 2 * (p - start[name]).square().sum()
            value.backward()
            optimiser.step()
        tensors = {name: p.detach() - start[name] for name, p in module.named_parameters()}
        update = Update(0, "weights", tensors, sum(training.batch_sizes), training)
        module.load_state_dict(start)
    message = Message(0, 0, start, update)
    return Observation("f", ThreatModel(), info, module, nn.functional.cross_entropy, update.kind, (start,), (message,))


def images_of(seed: int, count: int) -> tuple[Tensor, Tensor]:
    rng = generator(seed)
    return torch.rand((count, *SHAPE), generator=rng), torch.randint(CLASSES, (count,), generator=rng)


def spear(observation: Observation, seed: int = 0, **settings: Any) -> Any:
    found = make_attack("spear", settings)(observation, generator=generator(seed))
    assert isinstance(found, ImageFinding)
    assert found.certified is not None
    return found


def errors(found: ImageFinding, true: Tensor) -> Tensor:
    """Return, for each image, its mean squared error to the nearest true one."""
    return (found.images[:, None] - true[None]).double().square().flatten(2).mean(dim=2).min(dim=1).values


def make(build: Module = deep, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


@pytest.mark.parametrize("count", [1, 2, 7, 12])
def test_a_batch_comes_out_exactly_and_certified(count):
    images, labels = images_of(count, count)
    found = spear(seen(make(), images, labels))
    assert bool(found.certified.all())
    assert float(errors(found, images).max()) < 1e-10
    nearest = (found.images[:, None] - images[None]).flatten(2).norm(dim=2).argmin(dim=1)
    assert sorted(nearest.tolist()) == list(range(count))
    assert torch.equal(found.labels, labels[nearest])


@pytest.mark.parametrize("seed", core(range(3), 0))
def test_the_model_tells_zeros_from_examples_and_examples_from_zeros(seed):
    # The search for zeros alone finds six directions at most in ten rounds.
    images, labels = images_of(seed, 30)
    found = spear(seen(make(lambda: deep(160), seed), images, labels), seed, rounds=10)
    assert bool(found.certified.all())
    assert float(errors(found, images).max()) < 1e-10


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 8), width=st.integers(60, 90))
def test_what_is_certified_is_right(seed, count, width):
    images, labels = images_of(seed, count)
    found = spear(seen(make(lambda: deep(width), seed), images, labels), seed, rounds=20)
    assert bool((errors(found, images)[found.certified] < (0.5 / 255) ** 2).all())


TRAININGS = {
    "epochs": TrainingConfig(0.01, 4, (6,) * 4, data_size=6),
    "batches": TrainingConfig(0.01, 3, (2,) * 3, data_size=6),
    "momentum": TrainingConfig(0.01, 3, (6,) * 3, momentum=0.9, data_size=6),
    "decay": TrainingConfig(0.01, 3, (6,) * 3, weight_decay=0.1, data_size=6),
    "both": TrainingConfig(0.01, 3, (6,) * 3, momentum=0.9, weight_decay=0.1, data_size=6),
    "fedprox": TrainingConfig(0.01, 3, (6,) * 3, proximal_mu=0.5, data_size=6),
}


@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_local_training_of_several_steps_is_such_a_product_too(training):
    images, labels = images_of(3, 6)
    found = spear(seen(make().double(), images.double(), labels, training))
    assert int(found.certified.sum()) == 6
    assert float(errors(found, images)[found.certified].max()) < 1e-10
    assert len(found.images) == sum(training.batch_sizes)


def test_a_wrong_decay_is_noticed():
    images, labels = images_of(3, 6)
    observation = seen(make().double(), images.double(), labels, TRAININGS["decay"])
    message = observation.messages[0]
    told = dataclasses.replace(message.update, training=dataclasses.replace(TRAININGS["decay"], weight_decay=0.0))
    found = spear(dataclasses.replace(observation, messages=(dataclasses.replace(message, update=told),)), rounds=8)
    assert not bool(found.certified.any())


def test_equal_columns_up_to_a_number_fool_the_zeros_but_not_the_certificate():
    # With two classes and one hidden layer a column is the active set times a row's own number, so the difference of
    # two columns vanishes wherever both examples are active: more zeros than a true column has, and of full rank.
    def shallow() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 120), nn.ReLU(), nn.Linear(120, 2))

    images, labels = images_of(5, 6)
    images = 0.4 * images + 0.6 * images[:1]  # alike, and so are their active sets
    found = spear(seen(make(shallow), images, labels % 2, num_classes=2), rounds=30)
    assert bool((errors(found, images)[found.certified] < 1e-8).all())


def test_noise_leaves_nothing_certified_that_is_wrong():
    images, labels = images_of(4, 6)
    observation = seen(make(), images, labels)
    message = observation.messages[0]
    for level in (1e-7, 1e-5, 1e-3, 1e-1):
        rng = generator(1)
        noised = {n: t + level * torch.randn(t.shape, generator=rng) for n, t in message.update.tensors.items()}
        update = dataclasses.replace(message.update, tensors=noised, sanitised=ClientDefenceInfo("dp", noise=level))
        changed = dataclasses.replace(observation, messages=(dataclasses.replace(message, update=update),))
        found = spear(changed, rounds=8)
        assert bool((errors(found, images)[found.certified] < (0.5 / 255) ** 2).all())
        assert level < 1e-2 or not bool(found.certified.any())


def test_the_same_example_twice_is_one_direction():
    images, labels = images_of(6, 5)
    twice = torch.cat([images, images[:1]])
    found = spear(seen(make(), twice, torch.cat([labels, labels[:1]])))
    assert int(found.certified.sum()) == 5
    assert len(found.images) == 6
    assert float(errors(found, images).max()) < 1e-10
    assert any("rank is 5, of 6" in note for note in found.notes)


def test_the_rank_is_the_one_of_an_svd():
    rng = generator(0)
    product = torch.randn(70, 9, generator=rng).double() @ torch.randn(9, 50, generator=rng).double()
    product[:20] = 0
    parts = low_rank(product + 1e-9 * torch.randn(70, 50, generator=rng) * (product != 0), 12, rng)
    assert parts.rank == 9
    assert int(parts.live.sum()) == 50
    exact = torch.linalg.svdvals(product)[:9]
    torch.testing.assert_close(parts.singular, exact, rtol=1e-6, atol=0)
    assert 0.5e-9 < float(parts.noise.mean()) < 2e-9


def test_zeros_that_hang_on_one_row_define_no_direction():
    # Two columns vanish together in 20 rows, of rank r − 2; one more row makes it r − 1, and the choice is anybody's.
    # Many draws: whether rounding passes for a rank hangs on the processor's arithmetic, too.
    for seed in range(1, 25):
        rng = generator(seed)
        left = torch.randn(60, 4, generator=rng).double()
        left[:20, :2] = 0
        parts = low_rank(left @ torch.randn(4, 30, generator=rng).double(), 6, rng)
        assert parts.rank == 4
        assert not len(search(parts, none_yet(parts), 64, rng))
    left[20:45, 0] = 0
    parts = low_rank(left @ torch.randn(4, 30, generator=rng).double(), 6, rng)
    own = torch.linalg.lstsq(parts.scores, left[:, :1]).solution
    assert bool(certify(parts, own).certain.all())


def refused(build: Module, match: str, **changes: Any) -> None:
    images, labels = images_of(0, changes.pop("count", 3))
    observation = seen(make(build), images, labels)
    update = dataclasses.replace(observation.messages[0].update, **changes)
    message = dataclasses.replace(observation.messages[0], update=update)
    with pytest.raises(NotApplicable, match=match) as caught:
        make_attack("spear").check(dataclasses.replace(observation, messages=(message,)))
    assert "\n" not in str(caught.value)


def test_dropout_behind_the_first_layer_hides_nothing():
    images, labels = images_of(3, 5)
    observation = seen(
        make(lambda: build_model("fcn-3-dropout", input_shape=SHAPE, outputs=CLASSES, width=120)), images, labels
    )
    assert any(isinstance(part, nn.Dropout) and part.training for part in observation.module.modules())
    assert float(errors(spear(observation), images).max()) < 1e-10


def test_what_is_found_once_more_does_not_end_the_search(monkeypatch):
    monkeypatch.setattr(spear_module, "alternate", lambda _parts, _layer, known, *_: known)
    monkeypatch.setattr(spear_module, "_STARTS", 2)
    images, labels = images_of(4, 7)
    found = spear(seen(make(), images, labels))
    assert bool(found.certified.all())
    assert float(errors(found, images).max()) < 1e-10


def two_classes(*behind: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 80), nn.ReLU(), *behind, nn.Linear(80, 2))


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_differences_of_columns_that_are_equal_but_for_their_zeros_are_no_examples(seed):
    images, labels = images_of(seed, 8)
    found = spear(seen(make(two_classes, seed), images, labels % 2, num_classes=2), seed)
    assert bool(found.certified.all())
    assert float(errors(found, images).max()) < 1e-10


def test_zeros_that_dropout_makes_say_nothing_of_what_an_example_activates():
    images, labels = images_of(2, 5)
    found = spear(seen(make(lambda: two_classes(nn.Dropout())), images, labels % 2, num_classes=2))
    assert float(errors(found, images).max()) < 1e-10


@pytest.mark.parametrize("seed", [1, 2])
def test_zeros_that_noise_makes_say_nothing_of_it_either(seed):
    images, labels = images_of(seed, 5)
    observation = seen(make(two_classes, seed), images, labels % 2, num_classes=2)
    message, rng = observation.single(), generator(seed)
    noisy = {name: t + 1e-3 * torch.randn(t.shape, generator=rng) for name, t in message.update.tensors.items()}
    update = dataclasses.replace(message.update, tensors=noisy)
    found = spear(dataclasses.replace(observation, messages=(dataclasses.replace(message, update=update),)))
    assert float(errors(found, images).max()) < 0.05**2


@pytest.mark.parametrize("seed", range(3))
def test_the_last_two_lie_on_a_line(seed):
    images, labels = images_of(seed, 6)
    observation = seen(make(seed=seed), images, labels)
    _, layer, product, most = Spear()._prepare(observation)
    parts = low_rank(product, most, generator(seed))
    inputs = torch.cat([observation.task_info.normalise(images).flatten(1), torch.ones(6, 1)], dim=1).double()
    true = torch.linalg.inv(inputs @ parts.right.T)
    true /= true.norm(dim=0)
    found = on_a_line(parts, layer, certify(parts, true[:, :4]))
    assert float((found.values.T @ true[:, 4:]).abs().max(dim=0).values.min()) > 1 - 1e-8
    assert len(found) == 2


def test_what_it_refuses():
    flat = nn.Flatten
    refused(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), flat(), nn.Linear(32, 5)), "doesn't begin with")
    refused(lambda: nn.Sequential(flat(), nn.Linear(36, 90), nn.Tanh(), nn.Linear(90, 5)), "needs a ReLU right after")
    refused(lambda: nn.Sequential(flat(), nn.Linear(36, 90, bias=False), nn.ReLU(), nn.Linear(90, 5)), "has no bias")
    refused(
        lambda: nn.Sequential(flat(), nn.Dropout(0.5), nn.Linear(36, 90), nn.ReLU(), nn.Linear(90, 5)), "begin with"
    )
    refused(lambda: deep(20), "needs fewer examples", count=36)
    refused(deep, "only their signs were sent", sanitised=ClientDefenceInfo("signs", signs=True))
    refused(deep, "lacks the first layer's '1.weight'", tensors={"1.bias": torch.ones(80)})


def test_inputs_in_another_order_are_put_back():
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = deep()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.transpose(2, 3))  # type: ignore[no-any-return]

    images, labels = images_of(9, 4)
    found = spear(seen(make(Transposed), images, labels))
    assert bool(found.certified.all())
    assert float(errors(found, images).max()) < 1e-10


def test_rows_and_examples_without_a_share_do_not_end_the_search():
    # In a search beside a known column some rows have nothing left, and an example may be active in none of the others.
    rows = torch.randn(200, 5, generator=generator(0, "rows"), dtype=torch.float64)
    rows[:20], rows[:, 4] = 0, 0
    assert torch.isfinite(_descended(rows, 8, generator(0, "starts"))).all()


@pytest.mark.long
@pytest.mark.slow
def test_of_ten_thousand_images_none_is_certified_wrongly():
    certified = wrong = 0
    for seed in range(1000):
        images, labels = images_of(seed, 10)
        found = spear(seen(make(functools.partial(deep, 70 + seed % 60), seed), images, labels), seed, rounds=30)
        certified += int(found.certified.sum())
        wrong += int((errors(found, images)[found.certified] > (0.5 / 255) ** 2).sum())
    assert wrong == 0
    assert certified > 5000
