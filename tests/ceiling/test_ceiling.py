"""How much an update determines of its examples: against closed forms, other libraries and what is known to be lost."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.covariance import LedoitWolf
from torch import Tensor, nn

import fedaudit
from fedaudit.ceiling import Ceiling, Message, Prior, ceiling_of, message_of, prior_of, products
from fedaudit.ceiling.derivative import Derivative
from fedaudit.ceiling.estimate import BUDGET, by_columns, decibels
from fedaudit.ceiling.spectrum import by_probes, exact
from fedaudit.modalities import example_kind
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.observation import Observation, observe
from fedaudit.utils.errors import NotApplicable

FEDSGD = {"name": "a", "algorithm": "fedsgd", "clients": 2, "batch_size": 1}
FEDAVG = {"name": "a", "algorithm": "fedavg", "clients": 2, "batch_size": 2, "local_steps": 2, "learning_rate": 0.1}


def seen(**scenario: Any) -> tuple[Observation, Tensor, Tensor, Tensor]:
    """Return the first update of a simulated federation, its examples and labels, and the candidates."""
    base = {"data": {"name": "digits"}, "model": {"name": "lenet"}, "federations": [FEDSGD], "attacks": ["invg"]}
    made = fedaudit.simulate({**base, **scenario}, progress=False)
    observation = observe(made, fedaudit.ThreatModel(**scenario.get("threat", {}))).split()[0]
    key = observation.single().round, observation.single().client
    return observation, made.truth.inputs[key], made.truth.labels[key], made.truth.candidates


def found(**scenario: Any) -> Ceiling:
    """Return the ceiling of the first update of a simulated federation."""
    observation, inputs, labels, candidates = seen(**scenario)
    message = message_of(observation, inputs, labels)
    return ceiling_of(message, prior_of(observation.task_info.example_kind, candidates, inputs))


@pytest.mark.slow
def test_rounding_of_a_deep_network_isn_t_taken_for_other_facts() -> None:
    """In float64 it is a per cent off, for rectifiers flip; in the client's own precision it is the update."""
    observation, inputs, labels, _ = seen(
        data={"name": "photos"},
        model={"name": "resnet56", "width": 8, "batch_norm": "train"},
        federations=[{**FEDSGD, "clients": 1, "examples": 2, "batch_size": 2}],
        threat={"knows_labels": True},
    )
    message = message_of(observation, inputs, labels)
    assert 1e-3 < message.relative < 0.1
    assert message.why.startswith("rounding")
    update = observation.single().update
    longer = replace(update, tensors={name: 1.01 * one for name, one in update.tensors.items()})
    other = replace(observation, messages=(replace(observation.single(), update=longer),))
    with pytest.raises(NotApplicable, match="doesn't give this update"):
        message_of(other, inputs, labels)


def linear(matrix: Tensor, examples: Tensor, sigma: float) -> Message:
    """Return a message that is linear in its examples, with noise."""
    uses = torch.arange(len(examples))
    noise = torch.full((len(matrix),), sigma, dtype=torch.float64)
    return Message(lambda x: [matrix @ x.flatten()], examples, uses, noise, "noise", 1.0)


def test_of_a_linear_message_it_is_the_error_of_the_posterior_mean() -> None:
    rng = torch.Generator().manual_seed(0)
    matrix = torch.randn(30, 12, generator=rng, dtype=torch.float64)
    prior = Prior.of(torch.randn(50, 6, generator=rng) * torch.tensor([3.0, 1, 1, 0.5, 0.2, 2]))
    root = torch.block_diag(*[prior.root(torch.eye(6, dtype=torch.float64))] * 2).numpy()
    covariance, sigma = root @ root, 2.0
    posterior = np.linalg.inv(np.linalg.inv(covariance) + matrix.numpy().T @ matrix.numpy() / sigma**2)
    examples = torch.zeros(2, 6, dtype=torch.float64)
    ceiling = ceiling_of(linear(matrix, examples, sigma), prior)
    assert ceiling.exact
    assert ceiling.error().low == pytest.approx(np.trace(posterior) / 12, rel=1e-9)
    assert ceiling.each().flatten().numpy() == pytest.approx(np.diag(posterior), rel=1e-9)
    # played: the estimate that knows prior, matrix and noise errs by as much on draws
    numbers = np.random.default_rng(0)
    truth = numbers.standard_normal((4000, 12)) @ root
    sent = truth @ matrix.numpy().T + sigma * numbers.standard_normal((4000, 30))
    guessed = sent @ matrix.numpy() @ posterior.T / sigma**2
    assert np.mean((guessed - truth) ** 2) == pytest.approx(ceiling.error().low, rel=0.03)
    # and without prior knowledge least squares, which meets Cramér and Rao's bound, does no better
    flat = Prior.even(torch.zeros(6), 1e6, "")
    bound = sigma**2 * np.trace(np.linalg.inv(matrix.numpy().T @ matrix.numpy())) / 12
    assert ceiling_of(linear(matrix, examples, sigma), flat).error().low == pytest.approx(bound, rel=1e-6)
    by_least_squares = np.linalg.lstsq(matrix.numpy(), (sent - truth @ matrix.numpy().T).T, rcond=None)[0]
    assert np.mean(by_least_squares**2) == pytest.approx(bound, rel=0.03)


def test_probes_enclose_the_exact_error() -> None:
    rng = torch.Generator().manual_seed(1)
    size = 60
    basis = torch.linalg.qr(torch.randn(size, size, generator=rng, dtype=torch.float64))[0]
    gram = basis @ torch.diag(torch.logspace(-6, 2, size, dtype=torch.float64)) @ basis.T
    prior = Prior.of(torch.randn(40, size, generator=rng))
    whole = exact(gram, prior.root(torch.eye(size, dtype=torch.float64)), rng)
    probes = by_probes(
        lambda v: (gram @ v.flatten()).view_as(v), prior.root, (1, size), probes=200, steps=12, generator=rng
    )
    for sigma in (1e-3, 1e-1, 1.0, 10.0):
        truth, told = whole.error.at(sigma).low, probes.error.at(sigma)
        assert told.low - 4 * told.spread <= truth <= told.high + 4 * told.spread
        assert probes.open.at(sigma).low <= 1.05 * whole.open.at(sigma).low + 0.1
    assert float(probes.each(1.0).mean()) == pytest.approx(probes.error.at(1.0).low, rel=1e-6)
    few, many = (
        by_probes(lambda v: (gram @ v.flatten()).view_as(v), prior.root, (1, size), probes=1, steps=s,
                  generator=torch.Generator().manual_seed(2)).error.at(0.1)
        for s in (8, 30)
    )  # fmt: skip
    assert few.low <= many.low + 1e-12
    assert many.high <= few.high + 1e-12
    assert many.high - many.low < few.high - few.low


def test_examples_are_probed_apart_where_a_limit_is_asked_for() -> None:
    """Of a message that tells of one example more than of the other, each against its exact error."""
    rng = torch.Generator().manual_seed(0)
    size = 80
    matrix = torch.zeros(150, 2 * size, dtype=torch.float64)
    matrix[:, :size] = torch.randn(150, size, generator=rng, dtype=torch.float64)
    matrix[:, size:] = 0.05 * torch.randn(150, size, generator=rng, dtype=torch.float64)
    message = replace(linear(matrix, torch.zeros(2, size, dtype=torch.float64), 1.0), seconds=0.001)
    prior = Prior.of(torch.randn(60, size, generator=rng))
    whole = ceiling_of(message, prior).each().mean(dim=1)
    limit = float(whole.mean())
    made = ceiling_of(message, prior, budget=0.1, limit=limit)
    assert made.spectrum.error.apart
    brackets = made.spectrum.error.each(1.0)
    for bracket, truth in zip(brackets, whole, strict=True):
        assert bracket.low == pytest.approx(float(truth), rel=0.3)
        assert not bracket.low < limit <= bracket.high
    assert made.each().mean(dim=1).tolist() == pytest.approx([bracket.low for bracket in brackets], rel=0.2)
    assert not ceiling_of(message, prior, budget=0.01, limit=limit).spectrum.error.apart  # too dear


def test_columns_are_taken_where_counting_says_that_they_are_cheap() -> None:
    """A clock has no say: the same update is looked at in the same way on a busy machine."""
    assert by_columns(3072, 0.013, 60)  # one CIFAR-10 image, a small network
    assert not by_columns(1024, 0.1, 60)  # as many numbers are dear where a product is
    assert not by_columns(4100, 0.0, 1e9)
    assert by_columns(60, 10.0, 0.0)  # fewer products than probes take
    message = linear(torch.eye(300, dtype=torch.float64), torch.zeros(5, 60, dtype=torch.float64), 0.1)
    prior = Prior.even(torch.zeros(60), 1.0, "")
    for seconds in (0.0, 1.0):
        counted: list[int] = []
        made = ceiling_of(replace(message, seconds=seconds), prior, report=counted.append)
        assert made.exact == (seconds == 0)
        assert len(counted) <= products(300, seconds, BUDGET)
        assert made.error().low == pytest.approx(1 / 101, rel=1e-6)
    counted = []
    ceiling_of(replace(message, seconds=10.0, examples=torch.zeros(5, 60).double()), prior, report=counted.append)
    assert len(counted) <= products(300, 10.0, BUDGET) == 20  # a deep network is looked at roughly


@pytest.mark.slow
def test_what_a_product_takes_is_counted() -> None:
    one, four = (found(federations=[{**FEDSGD, "batch_size": n}]).message.seconds for n in (1, 4))
    steps = found(federations=[{**FEDAVG, "local_steps": 4}]).message.seconds
    assert one < four < steps
    assert found(federations=[{**FEDSGD, "batch_size": 4}]).message.seconds == four


def test_steps_go_on_until_it_is_settled() -> None:
    rng = torch.Generator().manual_seed(1)
    gram = torch.diag(torch.logspace(-4, 2, 80, dtype=torch.float64))
    counted: list[int] = []
    prior = Prior.even(torch.zeros(80), 1.0, "")
    by_probes(
        lambda v: (gram @ v.flatten()).view_as(v), prior.root, (1, 80), probes=1, steps=5, most=45, draw=False,
        generator=rng, settled=lambda error: error.high - error.low < 1e-3, report=counted.append,
    )  # fmt: skip
    assert 5 < len(counted) <= 45


@pytest.mark.parametrize("federation", [{**FEDSGD, "batch_size": 2}, FEDAVG], ids=["gradient", "weights"])
def test_it_differentiates_what_is_really_sent(federation: dict[str, Any]) -> None:
    observation, inputs, labels, _ = seen(federations=[federation])
    message = message_of(observation, inputs, labels)
    update = observation.single().update
    sent = torch.cat([value.flatten() for value in update.tensors.values()]).double()
    made = torch.cat([value.flatten() for value in message.sent(message.examples)]).detach()
    assert float((sent - made).norm() / sent.norm()) < 1e-5
    derivative = Derivative(message.sent, message.examples)
    rng = torch.Generator().manual_seed(0)
    move = torch.randn(message.examples.shape, generator=rng, dtype=torch.float64)
    step = 1e-6
    ends = [torch.cat([v.flatten() for v in message.sent(message.examples + s * move)]).detach() for s in (step, -step)]
    assert derivative.forward(move).numpy() == pytest.approx(((ends[0] - ends[1]) / (2 * step)).numpy(), abs=1e-6)
    back = torch.randn(sent.shape, generator=rng, dtype=torch.float64)
    left, right = derivative.forward(move) @ back, (derivative.backward(back) * move).sum()
    assert float(left) == pytest.approx(float(right), rel=1e-9)


def test_an_example_that_is_used_twice_is_one_unknown() -> None:
    epochs = {"name": "a", "algorithm": "fedavg", "clients": 2, "batch_size": 2, "local_epochs": 3, "examples": 4}
    observation, inputs, labels, _ = seen(federations=[{**epochs, "learning_rate": 0.1}])
    message = message_of(observation, inputs, labels)
    assert len(message.examples) < len(inputs)
    assert torch.equal(message.examples[message.uses], inputs.double())


def test_a_batch_that_a_linear_layer_spans_has_full_rank() -> None:
    """SPEAR's case (Dimitrov et al. 2024): a fully connected ReLU network, fewer examples than its width."""
    made = found(data={"name": "breast-cancer"}, model={"name": "fcn-3"}, federations=[{**FEDSGD, "batch_size": 5}])
    assert made.spectrum.least is not None
    assert made.spectrum.least > 1e3  # of the rounding's variance
    assert made.open().high < 1e-3
    assert made.lost == 0


def test_batch_norm_in_train_mode_loses_the_contrast_of_the_batch() -> None:
    """Behind a first convolution without bias the update is the same of a batch of another contrast."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 6, 3, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(6, eps=1e-12)
            self.fc = nn.Linear(384, 10)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.fc(torch.relu(self.norm(self.conv(x))).flatten(1)))

    torch.manual_seed(0)
    made = fedaudit.simulate(
        {"data": {"name": "digits"}, "federations": [{**FEDSGD, "batch_size": 4}], "attacks": ["invg"]},
        model=Net(), batch_norm="train", progress=False,
    )  # fmt: skip
    observation = observe(made, fedaudit.ThreatModel()).split()[0]
    key = observation.single().round, observation.single().client
    message = message_of(observation, made.truth.inputs[key], made.truth.labels[key])
    derivative = Derivative(message.sent, message.examples)
    mean = torch.tensor(observation.task_info.mean).view(1, -1, 1, 1)
    contrast = message.examples - mean
    other = torch.randn(contrast.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moves = [float(derivative.forward(v / v.norm()).norm()) for v in (contrast, other)]
    assert moves[0] < 1e-5 * moves[1]
    prior = Prior.even(torch.zeros(64), 0.25, "")
    spectrum = ceiling_of(message, prior).spectrum
    assert spectrum.least is not None
    assert spectrum.least < 1e-6 * spectrum.most


def test_more_unknowns_than_numbers_are_lost_by_counting() -> None:
    few = linear(torch.ones(3, 12, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.float64), 0.1)
    made = ceiling_of(few, Prior.even(torch.zeros(6), 1.0, ""))
    assert made.lost == pytest.approx(9 / 12)
    assert made.error().low >= 11 / 12 - 1e-9  # rank one


def test_noise_lowers_it_and_the_more_the_lower() -> None:
    plain = found().error().high
    noisy = [
        found(defences=[{"name": "d", "client_defence": {"name": "gradient-noise", "variance": v}}]).error()
        for v in (1e-8, 1e-4, 1.0)
    ]
    errors = [plain, *(one.high for one in noisy)]
    assert errors == sorted(errors)
    observation, inputs, _, candidates = seen()
    guess = prior_of(observation.task_info.example_kind, candidates, inputs).variance
    assert noisy[-1].low > 0.9 * guess


def test_what_is_not_sent_tells_nothing() -> None:
    observation, inputs, labels, _ = seen()
    message, prior = message_of(observation, inputs, labels), Prior.even(torch.zeros(64), 0.25, "")
    parts = len(message.sent(message.examples))
    nothing = ceiling_of(message, prior, keep=[False] * parts)
    assert nothing.error().low == pytest.approx(prior.variance)
    assert (
        ceiling_of(message, prior).error().low
        < ceiling_of(message, prior, keep=[i > 0 for i in range(parts)]).error().low
    )
    sparse = found(defences=[{"name": "d", "client_defence": {"name": "dgp"}}])
    assert sparse.message.numbers < len(sparse.message.noise)


@pytest.mark.parametrize(
    ("defence", "why"), [("sign", "signs alone"), ("censor", "isn't known closely")], ids=["signs", "unknown"]
)
def test_what_has_no_derivative_is_refused(defence: str, why: str) -> None:
    with pytest.raises(NotApplicable, match=why):
        found(defences=[{"name": "d", "client_defence": {"name": defence}}])


def test_wrong_facts_are_refused() -> None:
    observation, inputs, labels, _ = seen(federations=[FEDAVG])
    with pytest.raises(NotApplicable, match="doesn't give this update"):
        message_of(observation, inputs.flip(0), labels)


def test_words_are_refused() -> None:
    observation, _, labels, _ = seen()
    with pytest.raises(NotApplicable, match="no derivative"):
        message_of(observation, torch.zeros(1, 8, dtype=torch.int64), labels)


def test_a_sum_of_clients_is_a_function_of_all_their_examples() -> None:
    made = found(federations=[{**FEDSGD, "batch_size": 2}], threat={"sees": "sum"})
    assert len(made.message.examples) == 4


def test_the_prior_is_ledoit_and_wolfs() -> None:
    rows = torch.randn(40, 25, generator=torch.Generator().manual_seed(3)) @ torch.randn(
        25, 25, generator=torch.Generator().manual_seed(4)
    )
    root = Prior.of(rows).root(torch.eye(25, dtype=torch.float64)).numpy()
    assert root @ root == pytest.approx(LedoitWolf().fit(rows.double().numpy()).covariance_, rel=1e-8, abs=1e-9)


def test_the_prior_knows_no_victim() -> None:
    rows = torch.rand(60, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    kind = example_kind("image")
    assert torch.equal(prior_of(kind, rows, rows[:10]).mean, Prior.of(rows[10:]).mean)
    few = prior_of(kind, rows[:25], rows[:10])
    assert few.rest == 0.25
    assert "range" in few.words


@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision"), [("mlp", 1e-5), ("mlp", 1e-3), ("lenet", 1e-5), ("lenet", 1e-4)])
def test_another_example_has_an_update_as_far_away_as_is_said(model: str, precision: float) -> None:
    made = found(model={"name": model}, federations=[{**FEDSGD, "batch_size": 4}])
    here, there = (
        torch.cat([p.flatten() for p in made.message.sent(x)]).detach()
        for x in (made.message.examples, made.other(precision))
    )
    assert 0.4 * precision < float((there - here).norm() / here.norm()) < 2.5 * precision
    moved = float((made.other(precision) - made.message.examples).square().mean())
    assert abs(decibels(moved) - decibels(made.error(precision).low)) < 6


def test_noise_of_a_length_is_even_in_all_numbers() -> None:
    """Of a linear message: as least squares at such a noise."""
    rng = torch.Generator().manual_seed(0)
    matrix, examples = (torch.randn(*size, generator=rng, dtype=torch.float64) for size in ((40, 6), (1, 6)))
    message = linear(matrix, examples, 1e-9)
    length = float((matrix @ examples.flatten()).norm())
    message = replace(message, relative=1e-9 * math.sqrt(40) / length)
    made = ceiling_of(message, Prior.even(torch.zeros(6), 1e3, ""))
    sigma = 0.05 * length / math.sqrt(40)
    bound = sigma**2 * float(torch.linalg.inv(matrix.T @ matrix).trace()) / 6
    assert made.beside_noise(0.05).low == pytest.approx(bound, rel=1e-3)
    # an attack that matches to as much as noise looks like examples: 6 of 40 directions
    assert made.error(0.05 * math.sqrt(6 / 40)).low == pytest.approx(bound, rel=1e-3)


def test_one_step_of_adam_is_never_called_little() -> None:
    """Its step is nearly a sign, which tells more than its derivative."""
    observation, inputs, labels, _ = seen()
    message, rate = observation.single(), 1e-3
    falls = {name: -rate * g / (g.abs() + 1e-8) for name, g in message.update.tensors.items()}
    training = TrainingConfig(rate, 1, (len(inputs),), optimiser="adam")
    update = replace(message.update, kind="weights", tensors=falls, training=training)
    stepped = replace(observation, update_kind="weights", messages=(replace(message, update=update),))
    assert not message_of(stepped, inputs, labels).sure
    assert message_of(observation, inputs, labels).sure


def test_what_a_defence_keeps_back_is_not_called_noise() -> None:
    made = found(defences=[{"name": "d", "client_defence": {"name": "percentile-privacy"}}])
    assert made.message.sure == (made.message.relative < 1e-3)


def test_dropout_is_named() -> None:
    with pytest.raises(NotApplicable, match="dropout"):
        found(model={"name": "fcn-3-dropout"}, data={"name": "breast-cancer"})
