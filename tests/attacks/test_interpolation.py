"""Between the model that was sent and the one that came back, one batch's gradient explains several epochs better."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fedaudit
from fedaudit.attacks.inversion.methods import AGIC
from fedaudit.transcript.observation import Observation, observe

EPOCHS: dict[str, Any] = {"name": "f", "algorithm": "fedavg", "clients": 3, "examples": 12, "batch_size": 4,
                          "local_epochs": 10, "learning_rate": 0.1}  # fmt: skip
FEDSGD: dict[str, Any] = {"name": "f", "algorithm": "fedsgd", "clients": 1, "examples": 2}


def victims(federation: dict[str, Any]) -> list[tuple[Observation, Tensor]]:
    made = fedaudit.simulate(
        {
            "data": {"name": "digits"},
            "model": {"name": "lenet"},
            "federations": [federation],
            "threat": {"knows_labels": True},
            "attacks": ["agic"],
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


@pytest.mark.parametrize("place", [0.5, 1.0])
@pytest.mark.slow
def test_a_gradient_has_no_model_that_came_back(place: float) -> None:
    observation, true = victims(FEDSGD)[0]
    assert distance(observation, true, place) == distance(observation, true, 0.0)
