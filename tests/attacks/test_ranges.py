"""Whether anybody like a record was trained on: the record itself is never asked about, and members are found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from fedaudit.attacks import NotApplicable, make_attack
from fedaudit.attacks.records.target import Target
from fedaudit.modalities.columns import Column
from tests.attacks.membership_cases import logistic, overfitted, result, run_attack

COLUMNS = (
    Column("a", "numeric", (0,)),
    Column("b", "numeric", (1,)),
    Column("c", "categorical", (2, 3, 4), ("x", "y", "z")),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the model is asked about."""
    inputs: list[Tensor] = []
    losses = Target.losses

    def heard(self: Target, x: Tensor, y: Tensor) -> Tensor:
        inputs.append(x)
        return losses(self, x, y)

    monkeypatch.setattr(Target, "losses", heard)
    return inputs


def table() -> Any:
    seen = logistic(n=40)
    assert seen.records is not None
    x = torch.cat([torch.arange(80.0).view(40, 2), torch.eye(3)[torch.arange(40) % 3]], dim=1)
    records = dataclasses.replace(seen.records, inputs=x, labels=torch.arange(40) % 2)
    return dataclasses.replace(
        seen, records=records, task_info=dataclasses.replace(seen.task_info, columns=COLUMNS, num_classes=3)
    )


def test_members_of_a_model_that_knows_them_by_heart_are_found_though_only_roughly_known():
    seen, _, truth = overfitted()
    near, far = (result(run_attack("range-membership", seen, differs=d), seen, truth) for d in (0.1, 0.9))
    areas = [next(m.value for m in one.metrics if m.name == "membership_auc") for one in (near, far)]
    assert areas[0] > 0.6
    assert near.is_leak
    assert areas[1] < areas[0]  # who is known less, is found less


def test_the_record_itself_is_never_asked_about(asked: list[Tensor]):
    seen, _, _ = overfitted()
    assert seen.records is not None
    run_attack("range-membership", seen, samples=3)
    assert len(asked) == 3
    for inputs in asked:
        assert not bool((inputs == seen.records.inputs).flatten(1).all(dim=1).any())


def test_cells_are_other_people_s_of_the_same_class(asked: list[Tensor]):
    seen = table()
    x, y = seen.records.inputs, seen.records.labels
    run_attack("range-membership", seen, samples=5, differs=0.5)
    changed = 0.0
    for inputs in asked:
        assert bool((inputs[:, 2:].sum(dim=1) == 1).all())  # one category each
        for place in (0, 1):
            donors = (x[:, place][None] == inputs[:, place][:, None]).long().argmax(dim=1)
            assert bool((inputs[:, place] == x[donors, place]).all())
            assert bool((y[donors] == y).all())
            changed += float((donors != torch.arange(40)).double().mean()) / 10
    assert 0.6 < changed < 0.85  # twice with a half: 3/4 of cells, less those that came back


def test_a_range_s_score_is_the_mean_of_the_best_in_it(monkeypatch: pytest.MonkeyPatch):
    seen = logistic()
    calls = iter([torch.full((12,), float(loss)).double() for loss in (4, 1, 3, 2)])
    monkeypatch.setattr(Target, "losses", lambda *_: next(calls))
    assert run_attack("range-membership", seen, samples=4, kept=0.5).scores.tolist() == [-1.5] * 12


def test_texts_are_refused():
    seen = logistic()
    assert seen.records is not None
    words = dataclasses.replace(seen.records, inputs=torch.zeros(12, 5, dtype=torch.int64))
    with pytest.raises(NotApplicable, match="of texts it knows none"):
        make_attack("range-membership").check(dataclasses.replace(seen, records=words))
