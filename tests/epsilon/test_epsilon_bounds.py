"""Lower bounds of ε: oracles, what they say of nothing and of known mechanisms, and what must not change them."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, norm

from fedaudit.epsilon import CanaryScores, EpsilonBound
from fedaudit.epsilon.bounds import (
    FRACTIONS,
    Guesses,
    demonstrated,
    gaussian_epsilon,
    gaussian_log_delta,
    p_value,
    refuted_mu,
    words,
)
from fedaudit.utils.errors import BadInput
from tests.epsilon.score_cases import Drawn, gaussian, gaussian_mu

DELTA = 1e-5
METHODS = ("one_run", "one_run_fdp", "clopper_pearson", "clopper_pearson_fdp")


def bound(name: str, drawn: Drawn, *, delta: float = DELTA, confidence: float = 0.95, **rest: Any) -> EpsilonBound:
    made: EpsilonBound = getattr(CanaryScores(*drawn, confidence), name)(delta, **rest)
    return made


def ideal(mu: float, canaries: int) -> Drawn:
    """Return scores that are spread exactly as a Gaussian mechanism's."""
    spread = norm.ppf((np.arange(canaries // 2) + 0.5) / (canaries // 2))
    return spread + mu, spread


def too_many(runs: int, rate: float) -> int:
    """Return how many failures no procedure has, but one in a thousand, that fails at ``rate`` at most."""
    return int(binom.ppf(0.999, runs, rate))


# --- Oracles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.67, 6.0, 30.0])
@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.1])
def test_gaussian_epsilon_is_the_closed_form(mu: float, delta: float) -> None:
    epsilon = gaussian_epsilon(mu, delta)
    exact = norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
    if epsilon > 0:
        assert exact == pytest.approx(delta, rel=1e-6)
        assert gaussian_mu(epsilon, delta) == pytest.approx(mu, rel=1e-6)
    else:
        assert 2 * norm.cdf(mu / 2) - 1 <= delta
    assert math.exp(gaussian_log_delta(epsilon + 0.01, mu)) < delta


@given(st.integers(1, 40), st.data(), st.floats(0, 6), st.sampled_from([0.0, 1e-4, 0.01]))
def test_the_p_value_is_steinke_s_formula(made: int, data: st.DataObject, epsilon: float, delta: float) -> None:
    right, canaries = data.draw(st.integers(0, made)), made + data.draw(st.integers(0, 20))
    chance = math.exp(epsilon) / (1 + math.exp(epsilon))
    mass = binom.pmf(np.arange(made + 1), made, chance)
    excess = max((mass[right - i : right].sum() / i for i in range(1, right + 1)), default=0.0)
    expected = min(1.0, mass[right:].sum() + 2 * canaries * delta * excess)
    assert p_value(canaries, Guesses(None, 0.0, made, right, 0.05), epsilon, delta) == pytest.approx(
        expected, abs=1e-12
    )


@given(st.integers(2, 60), st.data(), st.sampled_from([0.05, 0.01]))
@settings(max_examples=40, deadline=None)
def test_mu_is_where_the_recursion_of_mahloujifar_changes_its_mind(
    made: int, data: st.DataObject, error: float
) -> None:
    right, canaries = data.draw(st.integers(0, made)), made + data.draw(st.integers(0, 30))

    def refuted(mu: float) -> bool:
        r, h = error * right / canaries, error * (made - right) / canaries
        for i in range(right - 1, -1, -1):
            new = max(h, float(norm.cdf(norm.ppf(r) - mu)))
            r, h = r + i / (made - i) * (new - h), new
        return r + h > made / canaries

    mu, by = refuted_mu(canaries, [Guesses(None, 0.0, made, right, error)])
    assert (by is None) == (not refuted(0.0))
    assert not refuted(mu + 1e-6)
    assert mu == 0 or refuted(mu - 1e-6)


@pytest.mark.parametrize(("guesses", "error"), [(20, 0.05), (300, 0.01)])
def test_where_all_guesses_are_right_the_bound_is_a_closed_form(guesses: int, error: float) -> None:
    """Without δ: (e^ε / (1 + e^ε))^n = α."""
    found = CanaryScores(np.ones(guesses), np.zeros(guesses), 1 - error).one_run(0, thresholds=[0.5])
    right = error ** (1 / guesses)
    assert found.epsilon == pytest.approx(math.log(right / (1 - right)), rel=1e-8)
    assert (found.guesses, found.correct, found.canaries, found.high) == (guesses, guesses, 2 * guesses, 0.5)


@pytest.mark.parametrize("delta", [0.0, 0.02])
def test_clopper_pearson_is_the_exact_interval_of_both_rates(delta: float) -> None:
    ins, outs = gaussian(1.5, 400, 3)
    scores = CanaryScores(ins, outs)
    hits, false = int((ins >= 1).sum()), int((outs >= 1).sum())
    rates = [binomtest(k, n).proportion_ci(0.95, "exact") for k, n in ((hits, len(ins)), (false, len(outs)))]
    there = math.log((rates[0].low - delta) / rates[1].high)
    back = math.log((1 - rates[1].high - delta) / (1 - rates[0].low))
    assert scores.clopper_pearson(delta, thresholds=[1.0]).epsilon == pytest.approx(max(there, back), rel=1e-9)
    assert scores.clopper_pearson(delta, thresholds=[1.0], one_sided=True).epsilon == pytest.approx(there)
    tight = scores.clopper_pearson_fdp(0.02, thresholds=[1.0])
    mu = norm.isf(rates[1].high) - norm.isf(rates[0].low)
    assert tight.epsilon == pytest.approx(gaussian_epsilon(mu, 0.02), rel=1e-9)


def test_the_estimate_is_of_two_normal_distributions() -> None:
    ins, outs = ideal(2.0, 100_000)
    estimate = CanaryScores(3 * ins + 7, 3 * outs + 7).gaussian_estimate(DELTA)
    assert estimate.epsilon == pytest.approx(gaussian_epsilon(2.0, DELTA), rel=0.01)
    assert (estimate.kind, estimate.confidence) == ("estimate", None)


# --- Power, on nothing, and on known mechanisms -------------------------------------------------------------------


def test_a_gaussian_mechanism_of_epsilon_8_is_found_to_have_much_of_it() -> None:
    mu = gaussian_mu(8.0, DELTA)
    least = {"one_run": 2.5, "one_run_fdp": 4.0, "clopper_pearson": 1.8, "clopper_pearson_fdp": 5.5}
    for name in METHODS:
        found = [bound(name, gaussian(mu, 1000, seed)).epsilon for seed in range(9)]
        assert bound(name, ideal(mu, 1000)).epsilon >= least[name]
        assert np.median(found) >= least[name]
        assert max(found) <= 8


RUNS, CANARIES = 1000, 200


@pytest.fixture(scope="module")
def nothing() -> list[Drawn]:
    return [gaussian(0.0, CANARIES, seed) for seed in range(RUNS)]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_on_nothing_at_most_one_bound_in_twenty_is_above_0(name: str, nothing: list[Drawn]) -> None:
    above = sum(bound(name, drawn).epsilon > 0 for drawn in nothing)
    assert above <= too_many(RUNS, 0.05)
    if name.startswith("one_run"):  # the others err less often: both of two intervals would have to
        assert above >= 1


@pytest.mark.parametrize("name", ["one_run", "one_run_fdp"])
def test_on_nothing_one_side_shows_nothing_either(name: str, nothing: list[Drawn]) -> None:
    above = sum(bound(name, drawn, one_sided=True).epsilon > 0 for drawn in nothing)
    assert 1 <= above <= too_many(RUNS, 0.05)


def test_where_few_are_drawn_one_side_shows_more() -> None:
    """Of those that are in one in ten takes part; the others look as if they were out."""
    rng = np.random.default_rng(5)
    outs, ins = rng.standard_normal((2, 1500))
    ins += 4 * (rng.random(1500) < 0.1)
    one, both = (CanaryScores(ins, outs).one_run(DELTA, one_sided=one_sided) for one_sided in (True, False))
    assert one.epsilon > 2 > 2 * both.epsilon
    assert (one.low, one.guesses) == (None, math.ceil(3000 / 32))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_run", "one_run_fdp"])
def test_without_the_correction_nothing_would_be_taken_for_something(name: str, nothing: list[Drawn]) -> None:
    """What the test above would catch."""
    above = sum(
        any(bound(name, drawn, fractions={fraction: 1.0}).epsilon > 0 for fraction in FRACTIONS)
        for drawn in nothing[:500]
    )
    assert above > too_many(500, 0.05)


@pytest.mark.parametrize(("n", "thresholds"), [(400, 2 * 9), (30, 2 * 5)])
def test_the_error_of_many_runs_is_split_over_all_thresholds(n: int, thresholds: int) -> None:
    """Ranks 0, 1, 2, 4, … up to half, of the out scores and of the in ones."""
    drawn = ideal(3.0, 2 * n)
    whole = CanaryScores(*drawn).clopper_pearson(DELTA)
    assert whole.high is not None
    one = CanaryScores(*drawn, 1 - 0.05 / thresholds).clopper_pearson(DELTA, thresholds=[whole.high], one_sided=True)
    assert one.epsilon == pytest.approx(whole.epsilon, rel=1e-9)
    assert f"over {thresholds} thresholds" in whole.correction


def randomised_response(epsilon: float, canaries: int, seed: int) -> Drawn:
    rng = np.random.default_rng(seed)
    taken = rng.integers(0, 2, canaries)
    said = np.where(rng.random(canaries) < math.exp(epsilon) / (1 + math.exp(epsilon)), taken, 1 - taken).astype(float)
    return said[taken == 1], said[taken == 0]


def laplace(epsilon: float, canaries: int, seed: int) -> Drawn:
    rng = np.random.default_rng(seed)
    taken = rng.integers(0, 2, canaries)
    scores = taken + rng.laplace(scale=1 / epsilon, size=canaries)
    return scores[taken == 1], scores[taken == 0]


def normal(epsilon: float, canaries: int, seed: int) -> Drawn:
    return gaussian(gaussian_mu(epsilon, DELTA), canaries, seed)


MECHANISMS = {"randomised response": randomised_response, "laplace": laplace, "gaussian": normal}
COVERED = [
    *[(method, mechanism) for method in ("one_run", "clopper_pearson") for mechanism in MECHANISMS],
    *[(method, "gaussian") for method in ("one_run_fdp", "clopper_pearson_fdp")],
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mechanism"), COVERED)
def test_no_bound_is_above_the_truth_more_often_than_it_says(name: str, mechanism: str) -> None:
    runs, epsilon = 200, 1.5
    above = 0
    for seed in range(runs):
        drawn = MECHANISMS[mechanism](epsilon, CANARIES, seed)
        above += bound(name, drawn).epsilon > epsilon
    assert above <= too_many(runs, 0.05)


def test_randomised_response_uses_the_whole_error_of_one_run() -> None:
    """Its guesses are as good as ε allows, so a test of twice the error, or of ε less, would fail here."""
    above = sum(
        CanaryScores(*randomised_response(1.5, 300, seed)).one_run(0, fractions={1.0: 1.0}).epsilon > 1.5
        for seed in range(1000)
    )
    assert 20 <= above <= too_many(1000, 0.05)


# --- What must not change a bound, and what must -----------------------------------------------------------------


scores = st.lists(st.integers(-50, 50), min_size=3, max_size=60)


@pytest.mark.parametrize("name", METHODS)
@given(scores, scores)
@settings(max_examples=25, deadline=None)
def test_only_the_order_of_the_scores_counts(name: str, ins: list[int], outs: list[int]) -> None:
    plain, mapped = (
        bound(name, (f(np.array(ins, float)), f(np.array(outs, float))), confidence=0.8)
        for f in (lambda x: x, lambda x: x**3 + 7 * x - 5)
    )
    assert plain.epsilon == mapped.epsilon
    assert (plain.guesses, plain.correct) == (mapped.guesses, mapped.correct)


@pytest.mark.parametrize("name", METHODS)
@given(st.integers(0, 1000), st.integers(20, 120), st.floats(0, 3), st.floats(0, 2))
@settings(max_examples=25, deadline=None)
def test_what_is_further_apart_has_no_smaller_bound(name: str, seed: int, n: int, mu: float, more: float) -> None:
    ins, outs = gaussian(mu, n, seed)
    near, far = (bound(name, (ins + shift, outs)).epsilon for shift in (0.0, more))
    assert far >= near - 1e-8


@given(scores, scores, st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_the_order_in_which_scores_come_doesn_t_count(ins: list[int], outs: list[int], random: Any) -> None:
    before = CanaryScores(ins, outs).bounds(DELTA, independent=True)
    random.shuffle(ins)
    random.shuffle(outs)
    assert CanaryScores(ins, outs).bounds(DELTA, independent=True) == before


def test_equal_scores_are_guessed_alike() -> None:
    """All the same: no guess at all; and the coins never decide a tie."""
    for name in ("one_run", "one_run_fdp"):
        same = bound(name, (np.zeros(100), np.zeros(100)))
        assert (same.epsilon, same.guesses) == (0.0, 0)
        few = bound(name, (np.r_[np.ones(60), np.zeros(40)], np.zeros(100)))
        assert (few.guesses, few.correct) == (60, 60)  # zeros are both the highest and the lowest of the rest


def test_more_confidence_and_a_larger_delta_give_less() -> None:
    drawn = gaussian(2.0, 500, 0)
    for name in METHODS:
        usual = bound(name, drawn).epsilon
        assert bound(name, drawn, confidence=0.99).epsilon < usual, name
        assert bound(name, drawn, delta=0.01).epsilon < usual, name


def test_the_demonstrated_one_is_chosen_by_method_not_by_value() -> None:
    scores = CanaryScores(*gaussian(2.0, 400, 1))
    for independent, plain, expected in (
        (False, True, "one_run_fdp"),
        (True, True, "clopper_pearson_fdp"),
        (False, False, "one_run"),
        (True, False, "one_run"),
    ):
        found = scores.bounds(DELTA, independent=independent, gaussian=plain)
        chosen = demonstrated(found)
        assert chosen is not None
        assert chosen.method == expected
        assert {"gaussian_estimate"} & {b.method for b in found} == ({"gaussian_estimate"} if plain else set())
    assert demonstrated([scores.gaussian_estimate(DELTA)]) is None
    tight, loose = scores.one_run_fdp(DELTA), scores.one_run(DELTA)
    assert demonstrated([loose.model_copy(update={"epsilon": 99.0}), tight]) == tight


def test_a_bound_says_what_it_is_conditional_on() -> None:
    drawn = gaussian(2.0, 400, 1)
    scores = CanaryScores(*drawn, confidence=0.9, unit="record", adjacency="replace")
    bound = scores.one_run_fdp(DELTA)
    assert (bound.unit, bound.adjacency, bound.confidence, bound.delta) == ("record", "replace", 0.9, DELTA)
    assert bound.correction == "Bonferroni over 6 numbers of guesses, 80% of the error for 25% guesses at canaries"
    assert "Gaussian" in bound.assumes
    assert scores.one_run(DELTA).assumes == ""
    assert bound.low is not None
    assert bound.high is not None
    ins, outs = drawn
    guessed = sum(int((s >= bound.high).sum() + (s <= bound.low).sum()) for s in (ins, outs))
    assert guessed == bound.guesses
    assert EpsilonBound.model_validate_json(bound.model_dump_json()) == bound


@pytest.mark.parametrize("name", METHODS)
def test_5000_canaries_take_well_under_a_second(name: str) -> None:
    drawn = gaussian(1.7, 5000, 0)
    began = time.process_time()
    bound(name, drawn)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inside": []}, "canaries that were in"),
        ({"outside": [[1.0]]}, "canaries that were out"),
        ({"inside": [1.0, math.nan]}, "no numbers"),
        ({"delta": 1.0}, "delta is 1.0"),
        ({"delta": 0.0}, "needs a delta above 0"),
        ({"confidence": 1.0}, "confidence is 1.0"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    usual: dict[str, Any] = {"inside": [1.0, 2.0], "outside": [0.0, 1.0], "confidence": 0.95, "delta": DELTA}
    values = {**usual, **change}
    delta = values.pop("delta")
    with pytest.raises(BadInput, match=message):
        CanaryScores(**values).bounds(delta, gaussian=True)


@pytest.mark.parametrize(
    "known", [{}, {"gaussian": True}, {"independent": True, "gaussian": True}, {"one_sided": True}]
)
def test_what_is_refuted_is_what_the_bound_is_above(known):
    for seed in range(4):
        made = CanaryScores(*gaussian(2.0, 300, seed), 0.95)
        bound = demonstrated(made.bounds(DELTA, **known))
        assert bound is not None
        assert made.refute(max(0.99 * bound.epsilon, 1e-3), DELTA, **known) is (bound.epsilon > 1e-3)
        assert not made.refute(1.01 * bound.epsilon + 1e-3, DELTA, **known)


# --- Words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "delta", "says"),
    [
        (0.0, 0.0, "is right at most 50 of 100 times"),
        (math.log(3), 1e-5, "is right at most 75 of 100 times"),
        (math.log(3), 0.2, "is right at most 80 of 100 times"),
        (8.0, 1e-5, "is right at most 9,997 of 10,000 times"),
        (70_333.0, 1e-5, "may always be right"),
    ],
)
def test_an_epsilon_in_words(epsilon: float, delta: float, says: str) -> None:
    assert words(epsilon, delta) == f"whoever guesses from the outcome whether you took part {says}"


def test_a_demonstrated_epsilon_in_words() -> None:
    assert words(math.log(3), 1e-5, demonstrated=True) == (
        "no promise holds that whoever guesses from the outcome whether you took part "
        "is right less than 75 of 100 times"
    )
    assert "nothing keeps" in words(40.0, 0.0, demonstrated=True)
