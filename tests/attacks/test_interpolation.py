"""Between the model that was sent and the one that came back, one batch's gradient explains several epochs better."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fedaudit
from fedaudit.attacks.findings import ImageFinding
from fedaudit.attacks.inversion.calibration import candidates
from fedaudit.attacks.inversion.methods import AGIC, InvG
from fedaudit.transcript.observation import Observation, observe

EPOCHS: dict[str, Any] = {"name": "f", "algorithm": "fedavg", "clients": 3, "examples": 12, "batch_size": 4,
                          "local_epochs": 10, "learning_rate": 0.1}  # fmt: skip
FEDSGD: dict[str, Any] = {"name": "f", "algorithm": "fedsgd", "clients": 1, "examples": 2}


def victims(federation: dict[str, Any], **rest: Any) -> list[tuple[Observation, Tensor]]:
    made = fedaudit.simulate(
        {
            "data": {"name": "digits"},
            "model": {"name": "lenet"},
            "federations": [federation],
            "threat": {"knows_labels": True},
            "attacks": ["agic"],
            **rest,
        },
        progress=False,
    )
    found = []
    for observation in observe(made, fedaudit.ThreatModel(knows_labels=True)).split():
        message = observation.single()
        found.append((observation, made.truth.inputs[message.round, message.client]))
    return found


def distance(observation: Observation, true: Tensor, place: float) -> float:
    """Return the cosine distance of the truth, by AGIC with no priors."""
    attack = AGIC(interpolation=place, total_variation=0.0)
    prepared = attack.prepare(observation, "cpu")
    images = observation.task_info.normalise(true[: len(prepared.labels)])
    return float(attack.objective(prepared)(images)[0])


@pytest.mark.slow
def test_of_several_epochs_the_truth_is_best_explained_between_the_models() -> None:
    for observation, true in victims(EPOCHS):
        sent, between, back = (distance(observation, true, place) for place in (0.0, 0.5, 1.0))
        assert between < 0.9 * min(sent, back)


def test_at_its_ends_it_is_the_model_that_was_sent_and_the_one_that_came_back() -> None:
    observation, _ = victims(EPOCHS)[0]
    message = observation.single()
    for place in (0.0, 1.0):
        prepared = AGIC(interpolation=place).prepare(observation, "cpu")
        for name, change in message.update.tensors.items():
            torch.testing.assert_close(prepared.victim.parameters[name], message.weights[name] + place * change)


SIGNS = {"client_defence": {"name": "sign"}}


@pytest.mark.parametrize(
    ("federation", "rest", "attack", "why"),
    [
        (FEDSGD, {}, AGIC, "one step"),
        ({**EPOCHS, "batch_size": 12, "local_epochs": 1}, {}, AGIC, "one step"),
        (EPOCHS, {}, InvG, "replays the local steps"),
        (EPOCHS, {"defences": SIGNS}, AGIC, "which model came back"),
    ],
    ids=["gradient", "one step of plain SGD", "simulated", "signs"],
)
def test_where_nothing_lies_between_the_model_that_was_sent_is_used_and_the_finding_says_so(
    federation: dict[str, Any], rest: dict[str, Any], attack: type[InvG], why: str
) -> None:
    observation, _ = victims(federation, **rest)[0]
    between, sent = (attack(interpolation=place, iterations=2)(observation, seed=3) for place in (0.5, 0.0))
    assert isinstance(between, ImageFinding)
    assert isinstance(sent, ImageFinding)
    assert torch.equal(between.images, sent.images)
    assert any("interpolation isn't used" in note and why in note for note in between.notes)
    assert not any("interpolation" in note for note in sent.notes)
    assert not any("interpolation" in line for line in candidates(attack(), observation.single()))
