"""What anybody's own model does for a client is no leak, whatever there is to train one on."""

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn

import fedaudit
from fedaudit.evaluation.limits import Limits, check_limits
from fedaudit.evaluation.local_models import as_good_by_luck
from fedaudit.results import LEAKS
from fedaudit.transcript.truth import Truth
from tools.measure import nulls


@pytest.mark.parametrize(("value", "others"), [(math.inf, [1.0] * 10), (0.1, [1.0] * 9 + [math.inf]), (0.1, [])])
def test_what_is_not_finite_or_not_there_excludes_no_luck(value: float, others: list[float]) -> None:
    assert as_good_by_luck(value, others) == 1.0


def test_without_anybody_elses_examples_no_model_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        nulls, "Truth", lambda inputs, labels, *rest: Truth(inputs, labels, rest[0][:0], rest[1][:0], {})
    )
    found = [nulls.local_models(seed, planted=False, task="digits") for seed in range(4)]
    assert not set(found) & set(LEAKS)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "status"), [(None, "done"), (torch.float32, "not applicable")])
def test_a_users_loss_of_probabilities_is_evaluated_or_refused(dtype: torch.dtype | None, status: str) -> None:
    torch.manual_seed(0)
    rows = torch.rand(60, 6)
    labels = (rows[:, 0] > 0.5).long()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy(outputs, nn.functional.one_hot(targets, 2).to(dtype or outputs.dtype))

    federation: dict[str, Any] = {
        "name": "f", "algorithm": "fedavg", "clients": 2, "examples": 20, "batch_size": 20, "rounds": 3,
        "local_steps": 2, "learning_rate": 0.5,
    }  # fmt: skip
    done = fedaudit.audit(
        model=nn.Sequential(nn.Linear(6, 2), nn.Sigmoid()),
        data=(rows, labels),
        loss=loss,
        federations=[federation],
        attacks=["local-model"],
        progress=False,
    )
    assert {f.status for f in done.result.findings} == {status}


def test_a_limit_that_nothing_measured_names_attacks_that_could() -> None:
    of = functools.partial(check_limits, findings=[], summaries=[])
    (auc,) = of(Limits({"membership_auc": 0.6}))
    assert auc.measured_by == "another attack"
    (level,) = of(Limits(fail_on="recovered"))
    assert level.reason is not None
    assert "invg" in level.reason
    assert "fishing" not in level.reason
    (labels,) = of(Limits({"label_accuracy": 0.5}), kind="table")
    assert labels.measured_by == "another attack"
