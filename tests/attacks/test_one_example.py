"""One example in an update: closed forms tell it whatever the loss and however many classes there are."""

import pytest
import torch
from torch import nn

import fedaudit
from fedaudit.attacks.findings import RowFinding
from fedaudit.attacks.labels.attack import LabelFinding

ROWS = torch.randn(80, 6, generator=torch.Generator().manual_seed(4))
TWO = torch.arange(80) % 2
VALUES = ROWS.sum(dim=1).exp() + 3
FEDERATION = [{"name": "f", "clients": 12, "examples": 12, "batch_size": 1}]


@pytest.mark.parametrize(
    ("net", "loss"),
    [
        (nn.Linear(6, 1), nn.BCEWithLogitsLoss()),
        (nn.Linear(6, 2), None),
        (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), nn.CrossEntropyLoss(label_smoothing=0.1)),
    ],
)
def test_one_of_two_classes_is_the_sign_of_the_bias_gradient(net, loss):
    recording = fedaudit.simulate({"federations": FEDERATION}, model=net, data=(ROWS, TWO), loss=loss, progress=False)
    found = fedaudit.attack(recording, ["labels"], progress=False)
    assert len(found) == 12
    for one, labels in zip(found, recording.truth.labels.values(), strict=True):
        assert isinstance(one, LabelFinding)
        assert one.labels.tolist() == labels.tolist()


@pytest.mark.parametrize("algorithm", [{"algorithm": "fedsgd"}, {"algorithm": "fedavg", "local_steps": 1}])
@pytest.mark.parametrize(
    ("make", "loss", "certified"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)), None, True),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), nn.PoissonNLLLoss(), True),
        (lambda: nn.Linear(6, 1), None, False),  # no equation is left over to vouch for it
    ],
    ids=["relu", "tanh", "linear"],
)
def test_one_record_of_a_regression_is_the_weights_gradient_over_the_bias(make, loss, certified, algorithm):
    net = make()  # by the test's own seed: a bias whose gradient is next to 0 leaves float32 few digits
    federation = [{**FEDERATION[0], "clients": 3, "examples": 3, **algorithm}]
    recording = fedaudit.simulate(
        {"federations": federation}, model=net, data=(ROWS, VALUES), loss=loss, progress=False
    )
    found = fedaudit.attack(recording, ["exact-linear-rows"], progress=False)
    for one, key in zip(found, recording.truth.inputs, strict=True):
        assert isinstance(one, RowFinding)
        torch.testing.assert_close(one.rows, recording.truth.inputs[key], atol=1e-4, rtol=1e-4)
        assert one.certified is not None
        assert bool(one.certified.all()) == certified
        if loss is None:
            torch.testing.assert_close(one.labels, recording.truth.labels[key], atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_an_audit_of_single_records_takes_the_closed_form_by_itself():
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    recording = fedaudit.simulate({"federations": FEDERATION}, model=net, data=(ROWS, VALUES), progress=False)
    done = fedaudit.audit_transcript(recording, ["exact-linear-rows"], progress=False)
    assert done.result.summaries[0].verdict == "recovered"
