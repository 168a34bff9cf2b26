"""The bounds of ε beside jax_privacy's, on the same scores."""

from __future__ import annotations

import numpy as np
import pytest

from fedaudit.epsilon import CanaryScores
from tests.epsilon.score_cases import Drawn, gaussian, gaussian_mu

pytestmark = pytest.mark.peers
auditing = pytest.importorskip("jax_privacy.auditing", reason="jax-privacy isn't installed: pip install jax-privacy")

DELTA = 1e-5
OURS = {"epsilon_one_run": CanaryScores.one_run, "epsilon_one_run_fdp": CanaryScores.one_run_fdp}
CASES = [(eps, n, seed) for eps in (0.5, 2, 8, 16) for n in (60, 500) for seed in (0, 1)]


def drawn(epsilon: float, canaries: int, seed: int) -> Drawn:
    return gaussian(gaussian_mu(epsilon, DELTA) if epsilon else 0.0, canaries, seed)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("epsilon", "canaries", "seed"), CASES)
def test_one_run_at_one_threshold(name: str, epsilon: float, canaries: int, seed: int) -> None:
    ins, outs = drawn(epsilon, canaries, seed)
    threshold = float(np.quantile(np.r_[ins, outs], 0.8))
    peer = getattr(auditing.CanaryScoreAuditor(ins, outs), name)
    expected = peer(0.05, DELTA, threshold_strategy=auditing.Explicit(threshold))
    found = OURS[name](CanaryScores(ins, outs), DELTA, thresholds=[threshold])
    assert found.epsilon == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("epsilon", "canaries", "seed"), CASES)
def test_one_run_at_the_best_of_all_thresholds(name: str, epsilon: float, canaries: int, seed: int) -> None:
    """The peer corrects for the thresholds on its ROC curve's hull; ours, given those, likewise."""
    ins, outs = drawn(epsilon, canaries, seed)
    auditor = auditing.CanaryScoreAuditor(ins, outs)
    expected = getattr(auditor, name)(0.05, DELTA)
    found = OURS[name](CanaryScores(ins, outs), DELTA, thresholds=auditor._thresholds.tolist())
    assert found.epsilon == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("delta", [0.0, DELTA, 0.01])
@pytest.mark.parametrize("one_sided", [True, False])
@pytest.mark.parametrize(("epsilon", "canaries", "seed"), CASES)
def test_many_runs(epsilon: float, canaries: int, seed: int, one_sided: bool, delta: float) -> None:
    ins, outs = drawn(epsilon, canaries, seed)
    auditor = auditing.CanaryScoreAuditor(ins, outs)
    for thresholds, strategy in (
        ([0.7], auditing.Explicit(0.7)),
        (auditor._thresholds.tolist(), auditing.Bonferroni()),
    ):
        expected = auditor.epsilon_clopper_pearson(0.05, delta, one_sided, threshold_strategy=strategy)
        found = CanaryScores(ins, outs).clopper_pearson(delta, thresholds=thresholds, one_sided=one_sided)
        assert found.epsilon == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("epsilon", "canaries", "seed"), [case for case in CASES if case[0] >= 8])
def test_many_runs_of_a_gaussian_mechanism(epsilon: float, canaries: int, seed: int) -> None:
    """At thresholds that separate: the peer also reads its upper bounds in reverse, and so finds ε > 2 in nothing."""
    ins, outs = drawn(epsilon, canaries, seed)
    auditor = auditing.CanaryScoreAuditor(ins, outs)
    keep = auditor._tn_counts / len(outs) - auditor._fn_counts / len(ins) > 0.4
    keep[-1] = True  # the last holds the totals
    auditor._thresholds, auditor._tn_counts, auditor._fn_counts = (
        values[keep] for values in (auditor._thresholds, auditor._tn_counts, auditor._fn_counts)
    )
    expected = auditor.epsilon_from_gdp(0.05, DELTA, eps_tol=1e-9)
    found = CanaryScores(ins, outs).clopper_pearson_fdp(DELTA, thresholds=auditor._thresholds.tolist())
    assert found.epsilon == pytest.approx(expected, abs=1e-6)
    assert found.epsilon > 0


def test_on_nothing_the_peer_s_gaussian_bound_is_above_0() -> None:
    found = [auditing.CanaryScoreAuditor(*drawn(0.0, 500, seed)).epsilon_from_gdp(0.05, DELTA) for seed in range(20)]
    assert sum(epsilon > 2 for epsilon in found) > 10
