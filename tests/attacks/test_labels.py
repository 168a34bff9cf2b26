"""Label inference: which labels come back from gradients of real networks, and what each method refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedaudit.attacks import make_attack
from fedaudit.attacks.labels.inference import LABEL_INFERENCES, Evidence, evidence_of, infer_labels
from fedaudit.attacks.victim import Victim
from fedaudit.models import build_model, initialise, layer_groups, set_training_mode
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record, run_audit
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.local_training import gradient, train, trainable
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import observe
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator
from tests.build import Scenarios

SHAPE = (3, 12, 12)


def network(name: str, seed: int, classes: int = 10) -> nn.Module:
    model = build_model(name, input_shape=SHAPE, outputs=classes)
    initialise(model, "default", generator(seed, "model"))
    set_training_mode(model, "eval")
    return model


def task_info(classes: int) -> TaskInfo:
    return TaskInfo("", None, "eval", "cross-entropy", "image", SHAPE, classes, (0.0,) * 3, (1.0,) * 3)


def evidence(name: str, labels: Tensor, seed: int, classes: int = 10, steps: int = 0) -> Evidence:
    """Return what the gradient (or, with steps, the FedAvg update) of random images shows."""
    model = network(name, seed, classes)
    state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    images = torch.randn((len(labels), *SHAPE), generator=generator(seed, "images"))
    if steps:
        batches = list(zip(images.chunk(steps), labels.chunk(steps), strict=True))
        train(model, nn.functional.cross_entropy, batches, learning_rate=1e-3)
        sent = {n: (state[n] - p.detach()) / (1e-3 * steps) for n, p in trainable(model).items()}
    else:
        sent = gradient(model, nn.functional.cross_entropy, (images, labels))
    return evidence_of(
        Victim(model, nn.functional.cross_entropy, state, {}),
        layer_groups(model, torch.zeros(2, *SHAPE)),
        sent,
        task_info(classes),
    )


def counts(labels: Tensor) -> list[int]:
    return torch.bincount(labels, minlength=10).tolist()


@settings(deadline=None, max_examples=25)
@given(
    label=st.integers(0, 9),
    classes=st.sampled_from([2, 3, 10]),
    seed=st.integers(0, 1000),
    name=st.sampled_from(["lenet", "convnet-small", "logistic"]),
)
def test_idlg_is_exact_for_one_example(label, classes, seed, name):
    name = "lenet" if classes == 2 and name == "logistic" else name  # two classes need features that aren't negative
    label %= classes
    found, source = infer_labels("auto", evidence(name, torch.tensor([label]), seed, classes), 1)
    assert (found.tolist(), source) == ([label], "idlg")


@settings(deadline=None, max_examples=25)
@given(label=st.integers(0, 9), seed=st.integers(0, 1000))
def test_yin_is_exact_for_one_example_with_features_that_are_not_negative(label, seed):
    assert infer_labels("yin", evidence("convnet-small", torch.tensor([label]), seed), 1)[0].tolist() == [label]


def test_yin_finds_most_labels_of_distinct_batches():
    found = 0
    for seed in range(20):
        labels = torch.randperm(10, generator=generator(seed, "labels"))[:4]
        inferred, _ = infer_labels("yin", evidence("convnet-small", labels, seed), 4)
        assert len(set(inferred.tolist())) == 4
        found += len(set(inferred.tolist()) & set(labels.tolist()))
    assert found >= 72  # of 80


@settings(deadline=None, max_examples=15)
@given(
    labels=st.lists(st.integers(0, 9), min_size=1, max_size=32),
    seed=st.integers(0, 1000),
    name=st.sampled_from(["lenet", "convnet-small"]),
)
def test_counts_with_duplicates_are_found_on_untrained_networks(labels, seed, name):
    shown = evidence(name, torch.tensor(labels), seed)
    for method in ("geng", "bias-corrected"):
        inferred, _ = infer_labels(method, shown, len(labels))
        assert len(inferred) == len(labels)
        assert inferred.tolist() == sorted(inferred.tolist())
        wrong = sum(abs(a - b) for a, b in zip(counts(inferred), counts(torch.tensor(labels)), strict=True)) / 2
        assert wrong <= 0.1 * len(labels), method


def test_counts_by_the_bias_are_exact_where_the_mean_probabilities_are_known():
    """The bias's gradient is p̄ − n/K, so n = K·(p̄ − b)."""
    expected, wanted = torch.tensor([0.7, 0.2, 0.1]), [2, 3, 5]
    bias = expected - torch.tensor(wanted) / 10
    shown = Evidence(bias[:, None] * torch.tensor([[1.0, -1.0]]), bias, lambda: (expected[None], -torch.ones(1, 2)))
    assert counts(infer_labels("bias-corrected", shown, 10)[0])[:3] == wanted


def test_counts_are_found_in_a_fedavg_update():
    labels = torch.tensor([3, 3, 3, 7, 7, 1, 0, 3])
    shown = evidence("convnet-small", labels, 0, steps=4)
    for method in ("geng", "bias-corrected"):
        assert counts(infer_labels(method, shown, 8)[0]) == counts(labels), method


def test_auto_counts_by_the_bias_and_without_one_takes_what_the_rows_tell():
    labels = torch.arange(12) % 10
    shown = evidence("convnet-small", labels, 0)
    inferred, source = infer_labels("auto", shown, 12)
    assert source == "ilrg-pooled"
    assert counts(inferred) == counts(labels)
    bare = dataclasses.replace(shown, bias=None)
    assert [infer_labels("auto", bare, n)[1] for n in (1, 10, 12)] == ["idlg", "yin", "geng"]


def test_on_a_trained_network_classes_that_show_count_and_dummies_that_mislead_do_not():
    """The dummies say that class 0 is sure, the bias that classes 3 and 4 occur more often than predicted."""
    sure = torch.eye(10)[:1].expand(4, 10)
    rows = torch.ones(10, 5)
    rows[3, 2] = rows[4, 0] = -1.0
    bias = torch.full((10,), 0.05)
    bias[3], bias[4] = -0.3, -0.1
    shown = Evidence(rows, bias, lambda: (sure, torch.ones(4, 5)))
    assert infer_labels("bias-corrected", shown, 8)[0].tolist() == [3] * 5 + [4] * 3


@pytest.mark.parametrize("total", [1, 7, 64])
def test_counts_always_add_up(total):
    rows = torch.randn(10, 5, generator=generator(0, "rows"))
    shown = Evidence(rows, rows.sum(dim=1), lambda: (torch.full((4, 10), 0.1), torch.ones(4, 5)))
    for method in ("geng", "bias-corrected"):
        assert len(infer_labels(method, shown, total)[0]) == total


def test_label_inference_says_when_it_cannot_work():
    rows = torch.randn(3, 5, generator=generator(0, "rows"))
    shown = Evidence(rows, None, lambda: (torch.full((4, 3), 1 / 3), torch.zeros(4, 5)))
    for method, count, reason in [
        ("idlg", 2, "one example"),
        ("yin", 4, "at most once"),
        ("bias-corrected", 4, "needs a bias"),
        ("geng", 4, "which is zero here"),
    ]:
        with pytest.raises(NotApplicable, match=reason):
            infer_labels(method, shown, count)
    with pytest.raises(NotApplicable, match="gradient is zero"):
        infer_labels("auto", Evidence(0 * rows, None, shown.probe), 1)
    older = ["idlg", "yin", "geng", "bias-corrected", "signs"]
    assert LABEL_INFERENCES.names() == [*older, "ilrg", "ilrg-pooled", "llg", "llg-star", "llg-plus"]


def test_probing_leaves_running_statistics_and_global_randomness_alone():
    model = network("resnet20", 0)
    model.train()
    state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    sent = {n: torch.ones_like(p) for n, p in trainable(model).items()}
    parameters = {n: state[n] for n in sent}
    buffers = {n: t for n, t in state.items() if n not in sent}
    before = torch.get_rng_state()
    evidence_of(
        Victim(model, nn.functional.cross_entropy, parameters, buffers),
        layer_groups(model, torch.zeros(2, *SHAPE)),
        sent,
        task_info(10),
    ).probe()
    assert all(state[n].equal(t) for n, t in model.state_dict().items())
    assert torch.get_rng_state().equal(before)


# The attack ---------------------------------------------------------------------------------------------------------

FEDAVG = {"name": "f", "algorithm": "fedavg", "clients": 2, "examples": 40, "local_steps": 4, "batch_size": 4}


def scenario(method: str = "auto", **changes: Any) -> Scenario:
    sgd = {"name": "s", "clients": 2, "examples": 40, "batch_size": 16}
    made = Scenarios(model="convnet-small", federations=[sgd, FEDAVG], attacks=[{"name": "labels", "method": method}])
    return made(**changes)


def test_the_attack_finds_the_labels_of_gradients_and_fedavg_updates():
    result = run_audit(scenario("bias-corrected")).result
    assert len(result.findings) == 4
    for finding in result.findings:
        metric, by_count, by_class = finding.metrics
        assert metric.name == "label_accuracy"
        assert (by_count.name, by_class.name) == ("count_accuracy", "existence_accuracy")
        assert by_class.value >= by_count.value >= 0.8
        assert by_class.baseline is not None
        assert metric.value >= 0.9
        assert metric.baseline is not None
        assert metric.baseline < metric.value
        assert finding.is_leak
    assert all(summary.verdict == "inferred" for summary in result.summaries)


def test_the_attack_refuses_what_it_cannot_or_need_not_find_out():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"data": {"name": "diabetes"}, "model": {"name": "linear"}, "federations": [FEDAVG]}, "real values"),
        ({"threat": {"knows_labels": True}}, "is granted the labels"),
        ({"threat": {"knows_training": False}, "federations": [FEDAVG]}, "knows_training"),
    ]
    for changes, reason in cases:
        made = scenario(**changes)
        only, *_ = record(resolve(made))
        with pytest.raises(NotApplicable, match=reason):
            make_attack("labels").check(observe(only.transcript, made.threat).split()[0])
