"""Real-valued targets: standardised where only their scale counts, as they are where a loss gives them a meaning."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedaudit
from fedaudit import BadInput

ROWS = torch.randn(100, 5, generator=torch.Generator().manual_seed(0))
COUNTS = torch.arange(100) % 7 + 2.0
ONES = torch.arange(100) % 2 * 1.0
FEDERATION = [{"name": "f", "clients": 2, "examples": 8, "batch_size": 4}]


def trained_on(targets: Tensor, loss: Any, model: nn.Module | None = None) -> tuple[set[float], str]:
    """Return the different targets of the simulated clients, and what the report says of the data."""
    done = fedaudit.audit(
        {"federations": FEDERATION},
        model=model or nn.Linear(5, 1),
        data=(ROWS, targets),
        loss=loss,
        attacks=["labels"],
        progress=False,
    )
    recording = fedaudit.simulate(
        {"federations": FEDERATION}, model=model or nn.Linear(5, 1), data=(ROWS, targets), loss=loss, progress=False
    )
    found = torch.cat(list(recording.truth.labels.values()))
    return set(found.flatten().tolist()), done.result.data.summary


@pytest.mark.parametrize(
    ("targets", "loss", "model"),
    [
        (COUNTS, nn.PoissonNLLLoss(), nn.Linear(5, 1)),
        (ONES, nn.BCELoss(), nn.Sequential(nn.Linear(5, 1), nn.Sigmoid())),
        (COUNTS, lambda z, y: functional.gaussian_nll_loss(z, y, torch.ones_like(y)), nn.Linear(5, 1)),
        (COUNTS, nn.L1Loss(), nn.Linear(5, 1)),
    ],
)
def test_targets_with_a_meaning_stay_as_they_are(targets, loss, model):
    found, said = trained_on(targets, loss, model)
    assert found <= set(targets.tolist())
    assert "targets as given" in said


@pytest.mark.parametrize("loss", [None, nn.MSELoss(), functional.mse_loss])
def test_squared_errors_take_standardised_targets_and_the_report_says_so(loss):
    found, said = trained_on(COUNTS, loss)
    data = fedaudit.Dataset.from_tensors(ROWS, COUNTS)
    assert float(data.train.targets.mean()) == pytest.approx(0, abs=1e-6)
    assert float(data.train.targets.std(correction=0)) == pytest.approx(1, abs=1e-6)
    assert found <= set(data.train.targets.flatten().tolist())
    assert "targets standardised (mean " in said


def test_a_data_set_says_itself_whether_targets_stay():
    made = fedaudit.Dataset.from_tensors(ROWS, COUNTS, raw_targets=True)
    assert set(made.train.targets.flatten().tolist()) == set(COUNTS.tolist())
    frame = {"a": ROWS[:, 0].numpy(), "b": ROWS[:, 1].numpy(), "n": COUNTS.numpy()}
    assert set(fedaudit.data.from_frame(frame, "n", raw_targets=True).train.targets.flatten().tolist()) <= set(
        COUNTS.tolist()
    )
    assert "targets standardised" in fedaudit.data.from_frame(frame, "n").summary


@pytest.mark.parametrize(
    ("targets", "words"),
    [(torch.arange(100) % 10 * 1.0, "give classes as whole numbers"), (torch.arange(100) % 10 + 1, "give labels - 1")],
)
def test_labels_that_are_none_of_the_model_s_are_refused_with_the_remedy(targets, words):
    with pytest.raises(BadInput, match=words):
        fedaudit.audit(model=nn.Linear(5, 10), data=(ROWS, targets), attacks=["labels"], progress=False)


def test_what_a_loss_of_ones_own_raises_under_an_attack_is_one_line():
    done = fedaudit.audit(
        model=nn.Sequential(nn.Linear(5, 1), nn.Sigmoid()),
        data=(ROWS, ONES),
        loss=nn.BCELoss(),
        federations=[{**FEDERATION[0], "clients": 1}],
        attacks=[{"name": "tableak", "iterations": 20, "restarts": 1}],
        progress=False,
    )
    (found,) = done.result.findings
    assert (found.status, "between 0 and 1" in (found.reason or "")) == ("not applicable", True)
