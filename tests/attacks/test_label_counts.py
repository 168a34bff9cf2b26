"""Class counts by iLRG, LLG and what is made of them: against their equations and on real networks."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedaudit.attacks import make_attack
from fedaudit.attacks.labels.attack import LabelFinding
from fedaudit.attacks.labels.inference import LABEL_INFERENCES, Evidence, infer_labels
from fedaudit.evaluation.labels import class_accuracies
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record, run_audit
from fedaudit.scenario.scenario import Scenario
from fedaudit.transcript.observation import observe
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator
from tests.build import Scenarios

CLASSES, FEATURES = 10, 40
SKEWED = {"scheme": "dirichlet", "alpha": 0.5}
COUNTED = ("ilrg", "ilrg-pooled", "llg", "llg-star")


def shown(counts: list[int], *, spread: float, seed: int = 0, loss: dict[str, Any] | None = None) -> Evidence:
    """Return the evidence of a last layer whose features are the same within a class; autograd is the oracle.

    Args:
        counts: of each class.
        spread: how far the classes' features are from each other.
        seed: of weights and features.
        loss: options of cross-entropy.
    """
    source = generator(seed, "counts")
    own = (1 + spread * torch.randn((CLASSES, FEATURES), generator=source)).abs().double()
    layer = nn.Linear(FEATURES, CLASSES).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source) / FEATURES)
    labels = torch.repeat_interleave(torch.arange(CLASSES), torch.tensor(counts))
    options = dict(loss or {})
    weights = options.get("weight")
    rows, bias = torch.autograd.grad(
        nn.functional.cross_entropy(layer(own[labels]), labels, **options), list(layer.parameters())
    )
    return Evidence(
        rows,
        bias,
        lambda: (layer(own).softmax(dim=1).detach(), own),
        label_smoothing=options.get("label_smoothing", 0.0),
        class_weights=None if weights is None else tuple(weights.tolist()),
        weight=layer.weight.detach(),
        offset=layer.bias.detach(),
    )


def found(method: str, evidence: Evidence, total: int) -> list[int]:
    return torch.bincount(infer_labels(method, evidence, total)[0], minlength=CLASSES).tolist()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", ["ilrg", "ilrg-pooled"])
def test_counts_are_exact_where_classes_have_their_features(method, seed):
    counts = torch.randint(0, 8, (CLASSES,), generator=generator(seed, "wanted")).tolist()
    assert found(method, shown(counts, spread=0.02, seed=seed), sum(counts)) == counts


def test_ilrg_is_its_equations_solved():
    """Equations (Ma et al. 2023), by numpy: Σ_j n_j·(P_ji − δ_ij) = K·b_i, Σ n_j = K, with P of the rows' quotients."""
    counts = [0, 1, 2, 0, 5, 0, 0, 3, 1, 0]
    evidence = shown(counts, spread=0.3)
    assert evidence.bias is not None
    assert evidence.weight is not None
    assert evidence.offset is not None
    features = (evidence.rows / evidence.bias[:, None]).numpy()
    logits = features @ evidence.weight.numpy().T + evidence.offset.numpy()
    predicted = np.exp(logits - logits.max(axis=1, keepdims=True))
    predicted /= predicted.sum(axis=1, keepdims=True)
    total = sum(counts)
    left = np.vstack([np.ones(CLASSES), predicted.T - np.eye(CLASSES)])
    solved = np.linalg.lstsq(left, np.array([total, *(total * evidence.bias.numpy())]), rcond=None)[0]
    assert np.round(solved).clip(0).astype(int).tolist() == found("ilrg", evidence, total) == counts


@pytest.mark.parametrize("method", ["ilrg", "ilrg-pooled"])
@pytest.mark.parametrize("loss", [{"label_smoothing": 0.2}, {"weight": torch.linspace(1, 2, CLASSES).double()}])
def test_smoothed_labels_and_weighted_classes_are_in_the_equations(method, loss):
    counts = [4, 0, 0, 7, 1, 0, 12, 0, 2, 6]
    assert found(method, shown(counts, spread=0.02, loss=loss), 32) == counts


def test_large_batches_in_which_all_classes_occur_equally_unsettle_quotients_and_not_pooled_features():
    """Where K·b_i is about 0 a quotient of row and bias is noise: pooled features come from rows that say something."""
    counts = [100] * 9 + [124]
    evidence = shown(counts, spread=0.02)
    wrong = [
        sum(abs(a - b) for a, b in zip(found(method, evidence, 1024), counts, strict=True))
        for method in ("ilrg", "ilrg-pooled")
    ]
    assert wrong[1] <= 4
    assert wrong[1] <= wrong[0]


def test_llg_counts_off_what_one_example_is_worth():
    """By hand: sums −6, −3, 1, 1 with K = 3 give m = −9/3·(5/4) = −3.75; both negative once, then −2.25 is least."""
    rows = torch.tensor([[-6.0], [-3.0], [1.0], [1.0]])
    evidence = Evidence(rows, None, lambda: (torch.full((2, 4), 0.25), torch.ones(2, 1)))
    assert infer_labels("llg", evidence, 3)[0].tolist() == [0, 0, 1]
    assert infer_labels("llg", evidence, 1)[0].tolist() == [0]  # more negative rows than examples
    assert infer_labels("llg", evidence, 4)[0].tolist() == [0, 0, 0, 1]  # m = −2.8125: −3.19 and −0.19 after both
    one = Evidence(torch.tensor([[-6.0], [0.25], [1.0], [1.0]]), None, evidence.probe)
    assert infer_labels("llg", one, 8)[0].tolist() == [0] * 7 + [1]  # m = −0.9375: −6 + 7·0.9375 is above 0.25


def test_llg_star_takes_impact_and_offset_of_dummies():
    """With p = 1/4 and Σh = 2 an example adds −1.5 to its class and 0.5 to others: m = −1.5/K·5/4, s = 0.5."""
    rows = torch.tensor([[-0.9], [-0.1], [0.5], [0.5]])  # counts 3, 1, 0, 0 of K = 4 would be −1, 0, 0.5, 0.5
    evidence = Evidence(rows, None, lambda: (torch.full((2, 4), 0.25), torch.full((2, 1), 2.0)))
    assert infer_labels("llg-star", evidence, 4)[0].tolist() == [0, 0, 0, 1]
    public = torch.full((4, 4), 0.25), torch.full((4, 1), 2.0), torch.arange(4)
    helped = Evidence(rows, None, evidence.probe, public=lambda: public)
    assert infer_labels("llg-plus", helped, 4)[0].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("method", COUNTED)
@pytest.mark.parametrize("total", [1, 7, 1024])
def test_counts_add_up_and_the_global_randomness_stays(method, total):
    rows = torch.randn(CLASSES, 5, generator=generator(0, "rows"))
    probe = torch.full((4, CLASSES), 0.1), torch.ones(4, 5)
    evidence = Evidence(rows, rows.sum(dim=1), lambda: probe, weight=0 * rows, offset=0 * rows[:, 0])
    before = torch.get_rng_state()
    labels, _ = infer_labels(method, evidence, total)
    assert len(labels) == total
    assert labels.equal(infer_labels(method, evidence, total)[0])
    assert torch.get_rng_state().equal(before)


def test_what_cannot_be_counted_is_refused():
    rows = torch.randn(3, 5, generator=generator(0, "rows"))
    probe = torch.full((4, 3), 1 / 3), torch.zeros(4, 5)
    bare = Evidence(rows, None, lambda: probe)
    for method in ("ilrg", "ilrg-pooled"):
        with pytest.raises(NotApplicable, match="last layer's bias"):
            infer_labels(method, bare, 4)
    with pytest.raises(NotApplicable, match="which is zero here"):
        infer_labels("llg-star", bare, 4)
    with pytest.raises(NotApplicable, match="public examples"):
        infer_labels("llg-plus", bare, 4)
    with pytest.raises(NotApplicable, match="negative gradient"):
        infer_labels("llg", Evidence(rows.abs(), None, lambda: probe), 4)
    signs = Evidence(rows, rows[:, 0], lambda: probe, signs=True, weight=rows, offset=rows[:, 0])
    for method in COUNTED:
        with pytest.raises(NotApplicable, match="use label_inference=signs"):
            infer_labels(method, signs, 4)


def test_a_bias_gradient_of_zeros_gives_no_infinity():
    rows = torch.ones(CLASSES, 5) - 2 * torch.eye(CLASSES, 5)
    evidence = Evidence(rows, 0 * rows[:, 0], lambda: (rows, rows), weight=rows, offset=rows[:, 0])
    for method in ("ilrg", "ilrg-pooled"):
        assert len(infer_labels(method, evidence, 20)[0]) == 20


@pytest.mark.parametrize(
    ("inferred", "true", "expected"),
    [
        ([0, 0, 1], [0, 0, 1], (1.0, 1.0)),
        ([0, 1, 1], [0, 0, 1], (0.5, 1.0)),
        ([2, 2, 2], [0, 0, 1], (0.25, 0.25)),
    ],
)
def test_shares_of_classes_count_absent_ones(inferred, true, expected):
    assert class_accuracies(torch.tensor(inferred), torch.tensor(true), 4) == expected


# The attack ---------------------------------------------------------------------------------------------------------


def scenario(method: str, **changes: Any) -> Scenario:
    sgd = {"name": "s", "clients": 3, "examples": 300, "batch_size": 64, "partition": SKEWED, "learning_rate": 1e-3}
    avg = {**sgd, "name": "f", "algorithm": "fedavg", "batch_size": 16, "local_steps": 4}
    model = {"name": "mlp", "batch_norm": "eval"}
    return Scenarios(model=model, federations=[sgd, avg], attacks=[{"name": "labels", "method": method}])(**changes)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "least"), [("ilrg", 0.85), ("ilrg-pooled", 0.92), ("llg-star", 0.85)])
def test_the_attack_counts_the_classes_of_large_batches_and_fedavg_updates(method, least):
    result = run_audit(scenario(method)).result
    for finding in result.findings:
        assert finding.metrics[0].value >= least, finding.federation
        assert finding.metrics[2].value >= 0.8
        assert finding.label_source == method


def test_public_examples_help_where_they_are_granted():
    threat = {"target_records": 40, "knows_public_data": True, "public_examples": 100}
    only, *_ = record(resolve(scenario("llg-plus", threat=threat)))
    attack = make_attack("labels", {"method": "llg-plus"})
    seen = observe(only.transcript, scenario("llg-plus", threat=threat).threat).split()[0]
    finding = attack(seen, generator=generator(0, "attack"))
    assert isinstance(finding, LabelFinding)
    labels = finding.labels
    true = only.truth.labels[0, seen.messages[0].client]
    overlap = torch.minimum(torch.bincount(labels, minlength=10), torch.bincount(true, minlength=10)).sum()
    assert int(overlap) >= 0.85 * len(true)


def test_the_classes_of_text_are_counted_too():
    made = scenario(
        "ilrg-pooled",
        data={"name": "notes"},
        model={"name": "encoder"},
        federations=[{"name": "s", "clients": 1, "examples": 32, "batch_size": 16}],
    )
    (finding,) = run_audit(made).result.findings
    assert finding.metrics[0].value >= 0.9


def test_the_largest_batch_takes_less_than_a_second():
    rows = torch.randn((100, 512), generator=generator(0, "rows"))
    probe: tuple[Tensor, Tensor] = torch.full((64, 100), 0.01), torch.ones(64, 512)
    evidence = Evidence(rows, rows.mean(dim=1), lambda: probe, weight=rows / 512, offset=0 * rows[:, 0])
    for method in COUNTED:
        started = time.process_time()
        infer_labels(method, evidence, 1024)
        assert time.process_time() - started < 1, method


def test_every_inference_is_registered_with_its_paper():
    for method in (*COUNTED, "llg-plus"):
        assert LABEL_INFERENCES[method].info["paper"]
