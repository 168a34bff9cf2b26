"""What differential privacy is accounted for: composition, sampling, and what nobody may assume of either."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from scipy.integrate import trapezoid
from scipy.optimize import brentq
from scipy.stats import norm as gaussian

from fedaudit.defences.privacy import DifferentialPrivacy, account
from fedaudit.epsilon.accounting import Account


def exact_epsilon(sensitivity_over_sigma: float, delta: float) -> float:
    """Balle & Wang 2018, Theorem 8: δ(ε) of one Gaussian mechanism, solved for ε."""
    a = sensitivity_over_sigma

    def excess(eps: float) -> float:
        return float(gaussian.cdf(a / 2 - eps / a) - math.exp(eps) * gaussian.cdf(-a / 2 - eps / a)) - delta

    return float(brentq(excess, 1e-6, 100))


@pytest.mark.parametrize(("noise", "rounds"), [(4.0, 10), (2.0, 3)])
def test_the_accounts_bound_the_exact_epsilon(noise, rounds):
    exact = exact_epsilon(math.sqrt(rounds) / noise, 1e-5)  # n Gaussian mechanisms are one, √n times as revealing
    kept = Account(noise, 1e-5, 1.0, 1)
    assert kept.spent(rounds, "pld") == pytest.approx(exact, rel=0.01)
    assert exact <= kept.spent(rounds) <= 1.25 * exact


def test_an_account_of_next_to_no_noise_fits_into_memory():
    kept = Account(0.01, 1e-5, 1.0, 1)
    assert 5_000 < kept.spent(1, "pld") <= kept.spent(1)


def test_being_one_of_many_amplifies_and_a_budget_ends():
    central = DifferentialPrivacy(noise=1.1, delta=1e-5, level="client", where="central", sampling="poisson")
    sampled = account(central, clients=100, per_round=10, steps=5, batch=4, fewest=20)
    local = account(dataclasses.replace(central, where="local"), clients=100, per_round=10, steps=5, batch=4, fewest=20)
    assert (sampled.rate, sampled.steps) == (0.1, 1)
    assert (local.rate, local.steps) == (1.0, 1)
    assert sampled.spent(10) < local.spent(10)
    example = account(
        dataclasses.replace(central, level="sample", where="local"), clients=9, per_round=3, steps=5, batch=4, fewest=20
    )
    assert (example.rate, example.steps) == (0.2, 5)
    drawn = account(
        dataclasses.replace(central, sampling="drawn"), clients=100, per_round=10, steps=5, batch=4, fewest=20
    )
    assert sampled.spent(10) < drawn.spent(10) < local.spent(10)
    allowed = sampled.rounds(8.0)
    assert sampled.spent(allowed) <= 8.0 < sampled.spent(allowed + 1)
    assert sampled.spent(0) == 0


def divergence(one: list[tuple[float, float]], other: list[tuple[float, float]], noise: float, epsilon: float) -> float:
    """Return δ(ε) of two mixtures of (weight, mean) with Gaussian noise, by integration."""
    x = np.linspace(-12 * noise, 12 * noise + 2, 200_001)
    p, q = (sum(weight * gaussian.pdf(x, mean, noise) for weight, mean in mixture) for mixture in (one, other))
    return float(trapezoid(np.maximum(0.0, p - math.exp(epsilon) * q), x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "n", "noise"),
    [
        (5, 10, 2.0),
        (1, 100, 1.0),
        pytest.param(1, 10, 1.0, marks=pytest.mark.slow),
        pytest.param(1, 2, 0.7, marks=pytest.mark.slow),
    ],
)
def test_a_fixed_number_of_clients_hides_less_than_poisson_sampling(k, n, noise):
    """Whoever is drawn takes another's place: if all others send −1 and I 1, the sum moves by 2; if I send 0, by 1."""
    rate = k / n
    dp = DifferentialPrivacy(noise=noise, delta=1e-5, level="client", where="central")
    drawn = account(dp, clients=n, per_round=k, steps=1, batch=1, fewest=1)
    assumed = account(dataclasses.replace(dp, sampling="poisson"), clients=n, per_round=k, steps=1, batch=1, fewest=1)
    there, absent = [(1 - rate, 0.0), (rate, 2.0)], [(1 - rate, 0.0), (rate, 1.0)]
    for how in ("rdp", "pld"):
        assert divergence(there, absent, noise, drawn.spent(1, how)) <= 1e-5
        assert divergence(absent, there, noise, drawn.spent(1, how)) <= 1e-5
    assert divergence(there, absent, noise, assumed.spent(1, "pld")) > 1.01e-5
    # by Poisson sampling nobody's place is taken
    assert divergence([(1 - rate, 0.0), (rate, 1.0)], [(1.0, 0.0)], noise, assumed.spent(1, "pld")) <= 1e-5


@pytest.mark.parametrize(("k", "n", "noise"), [(10, 10, 2.0), (1, 100, 2.0)])
def test_replacement_moves_the_sum_by_twice_the_clip(k, n, noise):
    """Oracle: the exact ε without sampling, and a pair of neighbours with it."""
    rate = k / n
    dp = DifferentialPrivacy(noise=noise, delta=1e-5, level="client", where="central")
    kept = account(dp, clients=n, per_round=k, steps=1, batch=1, fewest=1)
    replaced = dataclasses.replace(kept, adjacency="replace")
    if k == n:
        assert replaced.spent(1, "pld") == pytest.approx(exact_epsilon(2 / noise, 1e-5), rel=0.01)
    pair = [(1 - rate, 0.0), (rate, 1.0)], [(1 - rate, 0.0), (rate, -1.0)]
    assert divergence(*pair, noise, replaced.spent(1, "pld")) <= 1.001e-5


@pytest.mark.slow
def test_drawing_few_of_many_hides_even_so():
    """A fixed number, too: with much noise, and few of many, ε is well below that of taking part always."""
    dp = DifferentialPrivacy(noise=4.0, delta=1e-5, level="client", where="central")
    drawn, all_ = (account(dp, clients=n, per_round=10, steps=1, batch=1, fewest=1) for n in (1000, 10))
    assert drawn.spent(100, "pld") < all_.spent(100, "pld") / 2


def test_a_pass_over_shuffled_examples_costs_one_step():
    """Whatever the order: batches are disjoint. Oracle: the exact ε of as many Gaussian mechanisms as passes began."""
    dp = DifferentialPrivacy(noise=4.0, delta=1e-5, level="sample", where="local")
    kept = account(dp, clients=3, per_round=3, steps=3, batch=4, fewest=20)  # five steps a pass
    for rounds, passes in ((1, 1), (2, 2), (5, 3), (10, 6)):
        assert kept.spent(rounds, "pld") == pytest.approx(exact_epsilon(math.sqrt(passes) / 4.0, 1e-5), rel=0.01)
    assumed = account(dataclasses.replace(dp, sampling="poisson"), clients=3, per_round=3, steps=3, batch=4, fewest=20)
    assert assumed.spent(10, "pld") < kept.spent(10, "pld")
