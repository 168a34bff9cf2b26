"""TabLeak: its relaxation and pooling against closed forms, what it wins, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from fedaudit.attacks import Attack, RowFinding, make_attack
from fedaudit.attacks.inversion import tableak
from fedaudit.attacks.inversion.engines.restarts import dense, one_by_one, side_by_side
from fedaudit.attacks.inversion.objectives import DISTANCES
from fedaudit.attacks.inversion.tableak import Relaxation
from fedaudit.attacks.victim import Victim
from fedaudit.data import load_dataset
from fedaudit.evaluation import evaluate
from fedaudit.modalities.columns import Column
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.results import FindingResult
from fedaudit.scenario.scenario import scenario_from
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.observation import observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils.errors import NotApplicable

MIXED = (
    Column("colour", "categorical", (0, 1, 2), ("blue", "green", "red")),
    Column("age", "numeric", (3,)),
    Column("sex", "categorical", (4,), ("f", "m"), codes=(-1.0, 2.0)),
)
QUICK = {"iterations": 400, "restarts": 6, "schedule": "cosine"}


def attacked(
    federation: dict[str, Any] | None = None,
    data: str = "breast-cancer",
    attack: dict[str, Any] | None = None,
    threat: dict[str, Any] | None = None,
    module: nn.Module | None = None,
    **rest: Any,
) -> tuple[RowFinding, FindingResult]:
    values = {
        "data": {"name": data},
        "model": {"name": "mlp", "width": 64},
        "federations": [{"name": "f", "clients": 1, "examples": 2, "batch_size": 2, **(federation or {})}],
        "attacks": [{"name": "tableak"}],
        "threat": threat or {},
        **rest,
    }
    (made,) = record(resolve(scenario_from(values), model=module))
    run: Attack = make_attack("tableak", {**QUICK, **(attack or {})})
    observation = observe(made.transcript, ThreatModel(**(threat or {}))).split()[0]
    found = run(observation, generator=torch.Generator().manual_seed(0))
    assert isinstance(found, RowFinding)
    return found, evaluate(found, observation, made.truth, seed=0).result


def share(result: FindingResult, name: str = "cell_accuracy") -> float:
    return next(m.value for m in result.metrics if m.name == name)


def test_a_category_is_a_softmax_and_a_number_itself() -> None:
    table = Relaxation(MIXED, 5)
    assert table.width == 1 + 3 + 2  # numbers first
    variables = torch.tensor([[0.7, 0.0, 1.0, 2.0, 3.0, 3.0]])
    row = table.rows(table.parts(variables))[0]
    e = torch.tensor([0.0, 1.0, 2.0]).exp()
    assert row.tolist() == pytest.approx([*(e / e.sum()).tolist(), 0.7, 0.5])
    hard = table.rows(table.hardened(table.parts(variables)))[0]
    assert hard.tolist() == pytest.approx([0, 0, 1, 0.7, -1.0])


def test_many_columns_have_the_same_softmax_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    table, variables = Relaxation(MIXED, 5), torch.randn(3, 2, 6)
    few = table.parts(variables)
    monkeypatch.setattr(tableak, "_APART", 0)
    assert torch.allclose(table.parts(variables), few)


def test_restarts_are_brought_into_one_order_and_pooled_by_the_median() -> None:
    table = Relaxation(MIXED, 5)
    numbers = torch.tensor([[-2.0], [0.0], [2.0]])
    shares = torch.eye(3) * 0.8 + 0.1
    model = torch.cat([numbers, shares / shares.sum(1, keepdim=True), torch.tensor([[0.9, 0.1]]).expand(3, 2)], dim=1)
    off = torch.tensor([[0.0], [0.1], [-5.0]])
    pool = [model]
    for shift, order in zip(off[1:], ([2, 0, 1], [1, 2, 0]), strict=True):
        other = model.clone()
        other[:, :1] += shift
        pool.append(other[order])
    ordered = torch.stack([pool[0], *(table.in_order_of(model, one) for one in pool[1:])])
    found = table.pooled(ordered)
    assert found[:, 0].tolist() == pytest.approx([-2.0, 0.0, 2.0])  # the median of 0, 0.1 and −5 off
    assert found[:, 1:4].equal(torch.eye(3))


def test_confidence_falls_with_the_entropy() -> None:
    table = Relaxation(MIXED, 5)
    certain = torch.tensor([[0.3, 1.0, 0.0, 0.0, 1.0, 0.0]])
    even = torch.tensor([[0.3, 1 / 3, 1 / 3, 1 / 3, 0.5, 0.5]])
    assert table.confidence(torch.stack([certain] * 4))[0].tolist() == pytest.approx([1, 1, 1])
    assert table.confidence(torch.stack([even] * 4))[0].tolist() == pytest.approx([0, 1, 0], abs=1e-6)
    apart = torch.stack([certain, certain])
    apart[0, 0, 0] += 2 * 0.319  # a standard deviation of the tolerance: 68 % of a normal distribution
    assert table.confidence(apart)[0, 1] == pytest.approx(0.6827, abs=1e-3)


@pytest.mark.parametrize("distance", ["cosine", "squared-l2"])
def test_side_by_side_is_one_by_one(distance: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    victim = Victim(module, nn.functional.cross_entropy, {n: p.detach() for n, p in module.named_parameters()}, {})
    target = [torch.randn_like(p) for p in victim.parameters.values()]
    matched = DISTANCES[distance](target, [1.0] * len(target))
    table, labels = Relaxation(MIXED, 5), torch.tensor([0, 1, 1, 0])
    for training in (TrainingConfig(1.0, 1, (4,)), TrainingConfig(0.3, 2, (2, 2), momentum=0.9)):
        parts = victim, training, matched, lambda v: (table.rows(table.parts(v)), labels)
        variables = torch.randn(3, 4, table.width)
        value, gradient = side_by_side(*parts)(variables)
        exact, wanted = one_by_one(*parts)(variables)
        assert float(value) == pytest.approx(float(exact), rel=1e-5)
        assert torch.allclose(gradient, wanted, rtol=1e-3, atol=1e-6)
        h = 1e-2  # and the gradient is one: by differences, whose rounding grows with the value
        step = torch.zeros_like(variables)
        step[1, 2, 3] = h
        slope = (one_by_one(*parts)(variables + step)[0] - one_by_one(*parts)(variables - step)[0]) / (2 * h)
        rounding = 4 * torch.finfo(exact.dtype).eps * float(exact.abs()) / h
        assert float(slope) == pytest.approx(float(wanted[1, 2, 3]), rel=0.05, abs=max(1e-3, rounding))


@pytest.mark.parametrize(("n", "width"), [(4, 40), (60, 10)])  # fewer examples than the layers are wide, and more
@pytest.mark.parametrize("biases", [True, False])
def test_the_closed_form_is_double_backward(n: int, width: int, biases: bool) -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(5, width, bias=biases), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 7), nn.ReLU()]
    module = nn.Sequential(nn.Flatten(), *parts, nn.Dropout(), nn.Linear(7, 3, bias=biases)).double().eval()
    victim = Victim(module, nn.functional.cross_entropy, {k: p.detach() for k, p in module.named_parameters()}, {})
    target = [torch.randn_like(p) for p in victim.parameters.values()]
    matched = DISTANCES["cosine"](target, [1.0] * len(target))
    table, labels = Relaxation(MIXED, 5), torch.arange(n) % 3
    table.mix = table.mix.double()
    parts_of = victim, TrainingConfig(1.0, 1, (n,)), matched, lambda v: (table.rows(table.parts(v)), labels)
    variables = torch.randn(3, n, table.width, dtype=torch.float64)
    fast = dense(*parts_of)
    assert fast is not None
    value, gradient = fast(variables)
    exact, wanted = one_by_one(*parts_of)(variables)
    assert float(value) == pytest.approx(float(exact), rel=1e-10)
    assert torch.allclose(gradient, wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.slow
def test_rows_of_a_gradient_come_out_with_their_labels_inferred() -> None:
    found, result = attacked()
    assert share(result) > 0.9
    assert result.is_leak
    assert found.label_source == "bias-corrected"
    assert found.confidence is not None
    assert found.confidence.shape == (2, 30)


@pytest.mark.slow
def test_a_batch_is_the_same_as_one_restart_after_another() -> None:
    together, apart = (attacked(attack={"batched": b, "iterations": 40})[0] for b in (True, False))
    assert torch.allclose(together.rows, apart.rows, atol=0.05)


@pytest.mark.slow
def test_categories_and_targets_of_a_regression_come_out() -> None:
    found, result = attacked({"examples": 1, "batch_size": 1}, data="diabetes", threat={"knows_labels": True})
    assert found.label_source == "given"
    assert share(result) > 0.9
    assert set(found.rows[:, 1].tolist()) <= set(load_dataset("diabetes").columns[1].codes)
    found, _ = attacked({"examples": 2, "batch_size": 2}, data="diabetes")
    assert found.label_source == "optimised"
    assert found.labels.shape == (2, 1)


FEDAVG: dict[str, Any] = {"algorithm": "fedavg", "examples": 2, "batch_size": 1, "learning_rate": 0.05}


@pytest.mark.slow
def test_fedavg_is_replayed_and_epochs_are_pooled() -> None:
    found, result = attacked({**FEDAVG, "local_epochs": 2})
    assert len(found.rows) == len(found.labels) == 2
    assert any("2 local epochs" in note for note in found.notes)
    assert share(result) > result.metrics[0].baseline + 0.1  # type: ignore[operator]


def test_a_model_that_cannot_be_run_side_by_side_is_run_one_by_one() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(30, 16), nn.Linear(16, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x).relu()
            return torch.as_tensor(self.last(h if float(h.detach().sum()) > -1 else -h))

    found, _ = attacked(module=Looks(), attack={"iterations": 20}, model={"name": "custom", "initialisation": "given"})
    assert any("one after another" in note for note in found.notes)


def test_what_it_refuses() -> None:
    with pytest.raises(NotApplicable, match="these are images"):
        attacked(data="digits")
    with pytest.raises(NotApplicable, match="how the client trained"):
        attacked(FEDAVG | {"local_steps": 2}, threat={"knows_training": False})


def test_without_column_types_it_says_so() -> None:
    values = {"data": {"name": "diabetes"}, "model": {"name": "mlp"}, "attacks": [{"name": "tableak"}],
              "federations": [{"name": "f", "clients": 1, "examples": 1}]}  # fmt: skip
    (made,) = record(resolve(scenario_from(values)))
    unknown = dataclasses.replace(made.transcript, task_info=dataclasses.replace(made.transcript.task_info, columns=()))
    observation = observe(unknown, ThreatModel()).split()[0]
    found = make_attack("tableak", {**QUICK, "iterations": 5})(observation, generator=torch.Generator())
    assert any("columns aren't known" in note for note in found.notes)
