"""What noise rules out for every attack: against closed forms, and against attackers that are as good as can be."""

from __future__ import annotations

import math
from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld
from numpy.typing import NDArray
from scipy.stats import norm

from fedaudit.epsilon.accounting import Account, PrivacyAccount, RecordedGaussians, SparseVectorAccount
from fedaudit.epsilon.certificate import gaussian_success, in_words, success_of

PRIORS = [1e-6, 1 / 168, 0.1, 0.5, 0.9]
TRIES = 20_000


def gaussians(noise: float, rate: float = 1.0, steps: int = 1) -> Account:
    return Account(noise, 1e-5, rate, steps)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
def test_the_closed_form_is_the_most_that_an_event_as_rare_can_gain(prior: float, mu: float) -> None:
    """By numbers: outcomes are taken in the order of their likelihood ratio until they have ``prior``."""
    x, step = np.linspace(-12, 16, 2_800_001, retstep=True)
    rare = np.cumsum(norm.pdf(x[::-1])) * step <= prior
    assert gaussian_success(prior, mu) == pytest.approx(float(norm.pdf(x[::-1] - mu)[rare].sum() * step), rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("noise", [0.7, 4.0])
def test_privacy_losses_give_the_closed_form_from_above(noise: float, prior: float) -> None:
    losses = pld.PLDAccountant(value_discretization_interval=1e-4)
    losses.compose(dp_accounting.GaussianDpEvent(noise))
    epsilons = np.linspace(0, max(-math.log(prior), losses.get_epsilon(1e-5)), 2001)
    found = success_of(prior, epsilons, np.asarray(losses.get_delta(epsilons)))
    exact = gaussian_success(prior, 1 / noise)
    assert exact <= found <= exact * (1 + 1e-3)
    almost_always = gaussians(noise, rate=1 - 1e-9).success(1, prior)  # whose losses are those of a mixture
    assert almost_always == pytest.approx(exact, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.1), (0.5, 0.01), (2.0, 0.5)])
def test_of_a_step_that_draws_there_is_a_closed_form_too(noise: float, rate: float, prior: float) -> None:
    """The likelihood ratio still grows with the outcome. Above one half the other direction costs a little more."""
    exact = (1 - rate) * prior + rate * gaussian_success(prior, 1 / noise)
    found = gaussians(noise, rate).success(1, prior)
    assert exact * (1 - 1e-9) <= found <= exact + (1e-3 * exact if prior < 0.5 else 0.03)


@pytest.mark.slow
def test_steps_add_up() -> None:
    for adjacency in ("add-remove", "replace"):
        one = RecordedGaussians((2.0, 3.0), 1e-5, adjacency).success(2, 0.01)
        assert one == pytest.approx(gaussian_success(0.01, math.hypot(1 / 2, 1 / 3)))
        assert gaussians(4.0, steps=3).success(5, 0.01) == pytest.approx(gaussian_success(0.01, math.sqrt(15) / 4))
    passes = Account(4.0, 1e-5, 1.0, 3, every=5)  # an example is in one of five steps: in 15 of them 3 times
    assert passes.success(5, 0.01) == pytest.approx(gaussian_success(0.01, math.sqrt(3) / 4))
    drawn = RecordedGaussians((1.0, 2.0), 1e-5, drawn=((4, 0.1), (1, 1.0)))
    assert drawn.success(1, 0.01) == gaussians(1.0, 0.1, 4).success(1, 0.01)
    assert drawn.success(1, 0.01) < drawn.success(2, 0.01) < RecordedGaussians((0.5, 2.0), 1e-5).success(2, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, 0.05])
def test_it_grows_with_what_is_known_and_sent_and_falls_with_noise(rate: float) -> None:
    for made in (
        [gaussians(2.0, rate).success(20, prior) for prior in PRIORS],
        [gaussians(2.0, rate).success(rounds, 0.01) for rounds in (0, 1, 10, 200)],
        [gaussians(noise, rate).success(20, 0.01) for noise in (10.0, 3.0, 1.0, 0.5)],
    ):
        assert made == sorted(set(made))
    assert all(gaussians(50.0, rate).success(1, prior) >= prior for prior in PRIORS)


def test_who_is_known_to_take_part_is_hidden_no_less() -> None:
    """ε by replacement counts two clips. A candidate is one clip from nothing, whatever the others are."""
    for one in (gaussians(2.0), gaussians(2.0, 0.1), RecordedGaussians((1.0,), 1e-5, "add-remove")):
        by_replacement = replace(one, adjacency="replace")
        assert by_replacement.spent(3) > one.spent(3)
        assert by_replacement.success(3, 0.01) == one.success(3, 0.01)
    assert gaussians(2.0).success(1, 0.01) < gaussian_success(0.01, 2 / 2.0)
    known = Account(2.0, 1e-5, 0.1, 1, of=(2, 20))  # as if everybody saw who was drawn
    assert known.success(3, 0.01) == gaussians(2.0).success(3, 0.01)


def test_what_has_a_bound_of_its_epsilon_alone_has_one() -> None:
    account = SparseVectorAccount(0.1, 0.01, 100, 1e-5, adjacency="add-remove")
    epsilon = min(account.spent(3), account.spent(3, "pld"))
    assert account.success(3, 0.01) == pytest.approx(0.01 * math.exp(epsilon) + 1e-5)
    assert replace(account, each=10.0).success(3, 0.01) == 1.0
    for nothing in (RecordedGaussians((1e-200,), 1e-5), RecordedGaussians((1e-200,), 1e-5, drawn=((10, 0.1),))):
        assert nothing.success(1, 0.01) == 1.0


def attacked(account: PrivacyAccount, candidates: NDArray[np.float64], noise: float, rate: float, steps: int) -> float:
    """Return how often the likeliest of the (N, d) candidates is the one that steps with noise were about."""
    rng = np.random.default_rng(0)
    count, width = candidates.shape
    right = 0
    for true in rng.integers(count, size=TRIES):
        taken = rng.random((steps, 1)) < rate
        seen = taken * candidates[true] + noise * rng.standard_normal((steps, width))
        told = (seen @ candidates.T - (candidates**2).sum(axis=1) / 2) / noise**2
        if rate < 1:
            told = np.logaddexp(math.log1p(-rate), told + math.log(rate))
        right += int(told.sum(axis=0).argmax() == true)
    assert right / TRIES <= account.success(1, 1 / count) + 3 * math.sqrt(0.25 / TRIES)
    return right / TRIES


@pytest.mark.parametrize("noise", [0.4, 1.0, 3.0])
def test_the_best_attacker_on_two_opposite_candidates_gets_just_as_much(noise: float) -> None:
    account = gaussians(noise)
    found = attacked(account, np.array([[1.0], [-1.0]]), noise, 1.0, 1)
    assert found == pytest.approx(account.success(1, 1 / 2), abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "steps"), [(0.25, 1), (0.5, 1), (1.0, 9)])
def test_the_best_attacker_on_many_candidates_gets_little_less(noise: float, steps: int) -> None:
    account = gaussians(noise, steps=steps)
    found = attacked(account, np.eye(168), noise, 1.0, steps)
    assert account.success(1, 1 / 168) - 0.08 < found


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "steps"), [(0.3, 1), (0.3, 6), (0.05, 20)])
def test_the_best_attacker_on_steps_that_draw_gets_little_less(rate: float, steps: int) -> None:
    account = gaussians(0.4, rate, steps)
    found = attacked(account, np.eye(30), 0.4, rate, steps)
    assert account.success(1, 1 / 30) - 0.08 < found


def test_it_is_told_in_a_line() -> None:
    assert "168 candidates" in in_words(168, 0.0299)
    assert "more than 3 %" in in_words(168, 0.0299)
    assert "0.6 %" in in_words(168, 0.0299)
    assert "more than 0.034 % (by luck 0.01 %)" in in_words(10_000, 0.000331)
    assert "doesn't rule it out" in in_words(168, 0.999)
    assert "no certificate" in in_words(168, None)
