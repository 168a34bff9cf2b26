"""Label inference of multi-label tasks: which labels an update was made from, how often each, and which together."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

from fedaudit import simulate
from fedaudit.attacks import LabelSetFinding, make_attack
from fedaudit.attacks.labels.label_sets import SetEvidence, dealt, infer_label_sets, off_whole
from fedaudit.data.dataset import Dataset
from fedaudit.evaluation import FINDING_TYPES, evaluate
from fedaudit.evaluation.label_sets import average_precision, matched
from fedaudit.pipeline.run import run_audit
from fedaudit.report.label_sets import DrawnSet, DrawnSets, _labels, drawn_sets
from fedaudit.report.page import render_report
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator

K = 10


def network(bias: bool = True) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 36, 128),
        nn.ReLU(),
        nn.Linear(128, K, bias),
    )


def photographs(n: int = 200) -> Dataset:
    rng = generator(0, "label sets")
    coarse = torch.rand(n, 1, 4, 4, generator=rng)
    rare = torch.linspace(0.05, 0.35, K)
    labels = (torch.rand(n, K, generator=rng) < rare).float()
    return Dataset.from_tensors(nn.functional.interpolate(coarse, 16, mode="bilinear"), labels, task="multi-label")


def recorded(size: int, module: nn.Module | None = None, loss: Any = None, **federation: Any) -> tuple[Any, Truth]:
    plan = {"name": "f", "algorithm": "fedsgd", "clients": 3, "rounds": 1, "batch_size": size, "learning_rate": 0.01}
    made = simulate(
        {"federations": [{**plan, **federation}], "attacks": ["labels"], "evaluation": {"max_updates": 3}},
        model=module or network(),
        data=photographs(),
        loss=loss,
        progress=False,
    )
    return made.transcript, made.truth


def found_of(transcript: Any, threat: ThreatModel | None = None) -> list[tuple[LabelSetFinding, Observation]]:
    runs = []
    for seen in observe(transcript, threat or ThreatModel()).split():
        run = make_attack("labels")(seen, generator=generator(0, "attack"))
        assert isinstance(run, LabelSetFinding)
        runs.append((run, seen))
    return runs


def rows(labels: Tensor) -> list[list[float]]:
    return sorted(labels.tolist())


@pytest.mark.parametrize("bias", [True, False])
def test_of_one_example_every_label_is_told(bias):
    transcript, truth = recorded(1, network(bias))
    for run, seen in found_of(transcript):
        assert run.method == "sign"
        assert torch.equal(run.labels, truth.labels[0, seen.messages[0].client])


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, torch.linspace(0.5, 8, K)])
def test_of_a_batch_whole_label_sets_are_told(weights):
    transcript, truth = recorded(6, loss=nn.BCEWithLogitsLoss(pos_weight=weights) if weights is not None else None)
    for run, seen in found_of(transcript):
        true = truth.labels[0, seen.messages[0].client]
        assert run.method == "span"
        assert rows(run.labels) == rows(true)
        assert torch.allclose(run.counts, true.sum(dim=0).double(), atol=0.3)


def test_of_a_large_batch_the_counts_are_told():
    transcript, truth = recorded(40)
    for run, seen in found_of(transcript):
        assert run.method == "counts"
        off = run.labels.sum(dim=0) - truth.labels[0, seen.messages[0].client].sum(dim=0)
        assert float(off.abs().max()) <= 2
        assert float((off == 0).double().mean()) >= 0.6


def decided() -> nn.Module:
    """Return the network with logits twenty times as large: each example's probabilities are its own."""
    module = network()
    with torch.no_grad():
        module[-1].weight.mul_(20)  # type: ignore[index]
    return module


def test_no_label_sets_are_claimed_where_the_counts_do_not_fit():
    """As of trained networks: the same batches give whole sets where the answers hardly vary."""
    transcript, truth = recorded(6, decided())
    for run, seen in found_of(transcript):
        true = truth.labels[0, seen.messages[0].client]
        assert off_whole(run.counts) > 0.05
        assert run.method == "counts"
        assert "occur together" in run.notes[0]
        assert run.labels.sum(dim=0).equal(run.counts.round().float())
        assert rows(run.labels) != rows(true)


def test_what_one_mean_of_the_features_misses_shows_in_the_counts():
    """The estimate is c + n·p(h̄) − Σ p_i, h̄ being the mean weighted by δ; it is whole where features are equal."""
    rng = generator(1, "counts")
    weight = torch.randn(4, 6, generator=rng, dtype=torch.float64)
    labels = torch.tensor([[1.0, 0, 0, 1], [0, 1, 0, 1], [1, 1, 0, 0]]).double()
    for spread, fits in ((0.0, True), (2.0, False)):
        features = 1 + spread * torch.randn(3, 6, generator=rng, dtype=torch.float64)
        chances = (features @ weight.T).sigmoid()
        delta = chances - labels
        sums = delta.sum(dim=0)
        zero, one = torch.zeros(4).double(), torch.ones(4).double()
        evidence = SetEvidence(delta.T @ features, sums, weight, zero, one, False, lambda: (chances, features))  # noqa: B023
        _, counts, _ = infer_label_sets(evidence, 3)
        mean = sums @ (delta.T @ features) / (sums @ sums)
        wanted = (labels.sum(dim=0) + 3 * (weight @ mean).sigmoid() - chances.sum(dim=0)).clamp(0, 3)
        torch.testing.assert_close(counts, wanted)
        assert (off_whole(counts) < 1e-6) == fits


@pytest.mark.slow
def test_local_steps_are_taken_as_one_batch():
    transcript, truth = recorded(4, algorithm="fedavg", local_steps=3, examples=40)
    for run, seen in found_of(transcript):
        assert len(run.labels) == 12
        off = run.counts - truth.labels[0, seen.messages[0].client].sum(dim=0)
        assert float(off.abs().max()) < 1


def test_other_tasks_losses_and_methods_are_refused():
    transcript, _ = recorded(2, loss=lambda z, y: (z - y).abs().mean())
    seen = observe(transcript, ThreatModel()).split()[0]
    with pytest.raises(NotApplicable, match="not from one of your own"):
        make_attack("labels")(seen)
    with pytest.raises(NotApplicable, match="method: auto"):
        make_attack("labels", {"method": "yin"})(seen)


# Evaluation ----------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000), n=st.integers(1, 5))
def test_the_average_precision_is_that_of_the_best_order(seed, n):
    rng = generator(seed, "sets")
    found, true = (torch.rand(2, n, 4, generator=rng) < 0.4).float()
    orders = [found[list(order)] for order in itertools.permutations(range(n))]
    least = min(float((one != true).sum()) for one in orders)
    best = [one for one in orders if float((one != true).sum()) == least]
    hits, whole, order = matched(found, true)
    assert sorted(order.tolist()) == list(range(n))
    assert float((found[order] != true).sum()) == least
    assert hits == int((found[order] * true).sum())
    assert whole == int((found[order] == true).all(dim=1).sum())
    if bool(true.any()):
        scores = [average_precision_score(true.flatten(), one.flatten()) for one in best]
        assert any(average_precision(found, true, hits) == pytest.approx(score) for score in scores)


@pytest.mark.slow
def test_a_finding_of_its_own_update_is_a_leak_and_of_another_is_none():
    transcript, truth = recorded(6)
    runs = found_of(transcript)
    own = [evaluate(run, seen, truth, seed=0).result for run, seen in runs]
    assert all(result.is_leak for result in own)
    assert [result.metrics[0].value for result in own] == [1.0] * 3
    swapped = [evaluate(runs[i - 1][0], seen, truth, seed=0).result for i, (_, seen) in enumerate(runs)]
    assert not any(result.is_leak for result in swapped)


@pytest.mark.slow
def test_findings_that_know_nothing_pass_for_leaks_no_oftener_than_they_may():
    transcript, truth = recorded(6)
    seen = observe(transcript, ThreatModel()).split()[0]
    every = photographs()
    labels = torch.cat([every.train.targets, every.test.targets])
    p_values = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        guess = labels[torch.from_numpy(rng.choice(len(labels), 6, replace=False))]
        other = LabelSetFinding(
            attack="labels", labels=guess, counts=guess.sum(dim=0).double(), method="span", num_classes=K
        )
        key = 0, seen.messages[0].client
        there = torch.from_numpy(rng.choice(len(truth.candidate_labels), 6, replace=False))
        lucky = Truth({key: truth.candidates[there]}, {key: truth.candidate_labels[there]}, truth.candidates,
                      truth.candidate_labels, {})  # fmt: skip
        p_values.append(evaluate(other, seen, lucky, seed=seed).result.p_value or 0.0)
    assert sum(p <= 0.01 for p in p_values) <= 4  # 0.6 are expected; more than 4 with a probability of 0.04 %
    assert 0.3 < float(np.mean([p <= 0.5 for p in p_values])) < 0.7


@pytest.mark.slow
def test_an_audit_says_what_label_sets_tell():
    plan = {"name": "f", "algorithm": "fedsgd", "clients": 3, "rounds": 1, "batch_size": 4}
    made = scenario_from({"federations": [plan], "attacks": ["labels"], "evaluation": {"max_updates": 3}})
    result = run_audit(made, dataset=photographs(), model=network()).result
    (summary,) = result.summaries
    assert summary.verdict == "inferred"
    assert "which labels a client's examples have" in summary.headline
    (drawn,) = drawn_sets(result)
    (whole,) = (metric.value for metric in summary.metrics if metric.name == "whole_label_sets")
    assert (len(drawn.sets), drawn.total) == (12, 12)
    assert drawn.whole == sum(one.whole for one in drawn.sets) == round(whole.mean * 12)
    page = render_report(result, Path())
    assert f"{drawn.whole} of 12 label sets without a fault" in page
    shares = [metric for metric in summary.metrics if metric.name != "whole_label_sets"]
    assert all(0 <= metric.value.low <= metric.value.high <= 1 for metric in shares)


def test_a_label_that_was_missed_and_one_that_is_not_there_are_marked():
    names = ["oedema", "nodule", "mass"]
    one = DrawnSets("f", "labels", [DrawnSet(1, "client 0", _labels({"true": [0, 2], "found": [1, 2]}, names))], 0, 1)
    told = [(label.name, label.true, label.found) for label in one.sets[0].labels]
    assert told == [("oedema", True, False), ("nodule", False, True), ("mass", True, True)]
    assert not one.sets[0].whole
    assert DrawnSet(1, "", _labels({"true": [2], "found": [2]}, None)).whole


@pytest.mark.slow
@pytest.mark.parametrize(("method", "said"), [("counts", True), ("span", False)])
def test_of_counts_alone_the_verdict_does_not_speak_of_sets(method: str, said: bool) -> None:
    transcript, truth = recorded(6)
    results = []
    for seen in observe(transcript, ThreatModel()).split():
        true = truth.labels[0, seen.messages[0].client]
        counts = true.sum(dim=0).double()
        labels = dealt(counts, len(true)).float() if said else true
        made = LabelSetFinding(attack="labels", labels=labels, counts=counts, method=method, num_classes=K)
        results.append(evaluate(made, seen, truth, seed=0).result)
    judged = FINDING_TYPES["label-sets"].verdict(results)
    assert judged.verdict == "inferred"
    assert ("which labels occur" in judged.headline) == said
    assert ("not which of them together: an average precision of 100 %" in judged.headline) == said


@pytest.mark.slow
def test_the_control_of_label_sets_has_the_same_batch_and_noise():
    plan = {"name": "f", "algorithm": "fedsgd", "clients": 2, "rounds": 1, "batch_size": 4}
    noise = {"name": "dp", "clip": 1.0, "noise": 100.0, "where": "local", "epsilon": None}
    made = scenario_from(
        {
            "federations": [plan],
            "attacks": ["labels"],
            "evaluation": {"max_updates": 2},
            "defences": {"client_defence": noise},
        }
    )
    result = run_audit(made, dataset=photographs(), model=network()).result
    (summary,), (control,) = result.summaries, result.controls
    assert summary.verdict == "not demonstrated"
    assert "without the defence" in control.case
    assert control.won
    assert control.without_defence
    assert "average precision is" in summary.headline
