"""Membership attacks on models of several labels, several numbers and masks: an example's loss is all they need."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaudit import simulate
from fedaudit.attacks import MembershipFinding, make_attack
from fedaudit.attacks.records.target import Target
from fedaudit.data.dataset import Dataset
from fedaudit.evaluation import evaluate
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import generator

ON_LOSSES = ["loss-threshold", "gradient-norm", "loss-series", "shadow-models", "lira", "rmia", "stacked", "fedmia"]
_THREAT = {"target_records": 48, "knows_public_data": True, "public_examples": 48}


def examples(task: str, n: int = 240, seed: int = 0, classes: int = 3) -> Dataset:
    """Examples whose targets nothing in the inputs tells: who fits them has learnt them by heart."""
    rng = generator(seed, "targets of any task")
    if task == "segmentation":
        return Dataset.from_tensors(
            torch.rand(n, 1, 8, 8, generator=rng), torch.randint(classes, (n, 8, 8), generator=rng), task=task
        )
    inputs = torch.randn(n, 24, generator=rng)
    if task == "multi-label":
        return Dataset.from_tensors(inputs, (torch.rand(n, 5, generator=rng) < 0.4).float(), task=task)
    return Dataset.from_tensors(inputs, torch.randn(n, 3, generator=rng), task=task)


class Pixels(nn.Module):
    """A network that sees the whole image at every pixel, and can learn it by heart."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, outputs * 64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.body(x)).view(-1, self.outputs, 8, 8)


def model_of(task: str, classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    if task == "segmentation":
        return Pixels(classes if classes > 2 else 1)
    outputs = {"multi-label": 5, "regression": 3}[task]
    return nn.Sequential(nn.Linear(24, 128), nn.ReLU(), nn.Linear(128, outputs))


def recorded(task: str, rounds: int, classes: int = 3) -> tuple[Observation, Truth]:
    federation: dict[str, Any] = {"name": "f", "algorithm": "fedavg", "clients": 3, "rounds": rounds, "examples": 72}
    federation |= {"batch_size": 8, "local_epochs": 4, "learning_rate": 0.5 if task != "regression" else 0.1}
    made = simulate(
        {
            "federations": [federation],
            "threat": _THREAT,
            "attacks": ["loss-threshold"],
            "evaluation": {"max_updates": 1},
        },
        model=model_of(task, classes),
        data=examples(task, classes=classes),
        progress=False,
    )
    return observe(made.transcript, ThreatModel(**_THREAT)), made.truth


@pytest.fixture(scope="module", params=["multi-label", "regression", "segmentation", "one logit"])
def overfitted(request: pytest.FixtureRequest) -> tuple[Observation, Truth]:
    return recorded("segmentation", 25, 2) if request.param == "one logit" else recorded(request.param, 25)


# Every attack on one task, and on the others one for each way to use a loss.
CASES = [
    (task, name)
    for task in ("multi-label", "regression", "segmentation", "one logit")
    for name in (ON_LOSSES if task == "one logit" else ("loss-threshold", "loss-series", "lira"))
]
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"epochs": 100, "shadows": 8} for name in ("shadow-models", "lira", "rmia", "stacked")},
    "fedmia": {"statistic": "loss", "rounds": 10},
}


def auc(name: str, seen: Observation, truth: Truth) -> float:
    found = make_attack(name, SETTINGS.get(name, {}))(seen, generator=generator(0, "attack"))
    metrics = {m.name: m.value for m in evaluate(found, seen, truth, seed=0).result.metrics}
    return metrics["membership_auc"]


@pytest.mark.slow
@pytest.mark.parametrize(("overfitted", "name"), CASES, indirect=["overfitted"])
def test_an_overfitted_model_of_any_task_gives_its_members_away(name, overfitted):
    assert auc(name, *overfitted) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(("overfitted", "name"), CASES, indirect=["overfitted"])
def test_of_examples_that_nobody_trained_on_nothing_is_told(name, overfitted):
    seen, truth = overfitted
    assert seen.records is not None
    others = examples(seen.task_info.task_kind.name, len(seen.records), seed=1, classes=seen.task_info.target_values)
    inputs, targets = (
        torch.cat([getattr(s, what) for s in (others.train, others.test)]) for what in ("inputs", "targets")
    )
    records = dataclasses.replace(seen.records, inputs=inputs, labels=targets)
    assert 0.25 < auc(name, dataclasses.replace(seen, records=records), truth) < 0.75  # three deviations of 24 pairs


def test_the_loss_of_an_example_is_the_mean_over_its_labels_or_pixels(overfitted):
    seen, _ = overfitted
    assert seen.records is not None
    x, y = seen.records.inputs, seen.records.labels
    seen.module.load_state_dict(seen.weights[-1])
    with torch.no_grad():
        z = seen.module.eval()(seen.task_info.normalise(x)).double()
    if z.shape[1] == 1:
        each = -torch.where(y[:, None] > 0, z, -z).sigmoid().log().flatten(1).mean(dim=1)
    elif y.dtype == torch.int64:
        each = -z.log_softmax(dim=1).gather(1, y[:, None]).flatten(1).mean(dim=1)
    elif seen.task_info.task_kind.real:
        each = (z - y).square().mean(dim=1)
    else:
        each = torch.where(y > 0, -z.sigmoid().log(), -(1 - z.sigmoid()).log()).mean(dim=1)
    found = make_attack("loss-threshold")(seen)
    assert isinstance(found, MembershipFinding)
    assert torch.allclose(found.scores, -each, rtol=1e-5, atol=1e-7)


def test_a_shadow_model_keeps_a_number_an_example_and_holds_few_outputs_at_a_time(overfitted, monkeypatch):
    seen, _ = overfitted
    monkeypatch.setattr("fedaudit.attacks.records.target._MOST_VALUES", 3 * 64 * 10)
    (asked, *_) = make_attack("lira", {"shadows": 2, "epochs": 1}).beforehand(seen)
    found: Any = asked[0](asked[1], seed=0)
    assert seen.records is not None
    assert found.answers.shape == (len(seen.records) + len(seen.records.public_inputs), 1)
    target, sizes = Target(seen.module.eval(), seen.task_info, seen.loss), []
    handle = seen.module.register_forward_hook(lambda _, args, __: sizes.append(len(args[0])))
    few = target.losses(seen.records.inputs, seen.records.labels)
    handle.remove()
    whole = target.losses_of(target.outputs(seen.records.inputs), seen.records.labels)
    torch.testing.assert_close(few, whole, rtol=1e-6, atol=1e-9)
    if seen.task_info.task_kind.dense:
        assert max(sizes) == 10 * 3 // seen.task_info.outputs


def test_the_gradient_of_a_text_is_of_its_whole_tokens():
    made = simulate(
        {
            "data": {"name": "notes"},
            "model": {"name": "encoder", "width": 16},
            "federations": [{"name": "f", "algorithm": "fedavg", "clients": 2, "examples": 16, "local_steps": 1}],
            "threat": {"target_records": 8},
            "attacks": ["gradient-norm"],
        },
        progress=False,
    )
    seen = observe(made.transcript, ThreatModel(target_records=8))
    found = make_attack("gradient-norm")(seen, generator=generator(0, "x"))
    assert isinstance(found, MembershipFinding)
    records = seen.records
    assert records is not None
    module = made.transcript.module.double().eval()
    module.load_state_dict(made.transcript.rounds[-1].weights)
    norms = []
    for text, label in zip(records.inputs, records.labels, strict=True):
        module.zero_grad()
        nn.functional.cross_entropy(module(text[None]), label[None]).backward()
        norms.append(torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm())
    expected = -torch.stack(norms)
    assert (found.scores.flatten().argsort() == expected.argsort()).all()
