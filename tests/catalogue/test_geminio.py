"""A server that trains until what matches a query has a batch's gradient: whose it is, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.simulator import Recording
from fedaudit.utils.errors import BadInput
from tests.attacks.server_cases import examples, own_gradients, played

BATCH: dict[str, Any] = {"algorithm": "fedsgd", "clients": 1, "examples": 120, "batch_size": 120}


def scenario(public: int = 600, spec: dict[str, Any] | None = None, **server: Any) -> Scenario:
    return scenario_from(
        {
            "data": {"name": "digits", "split": "test"},
            "model": {"name": "mlp", "width": 32},
            "federations": [{"name": "f", **BATCH, **(spec or {}), "server": {"name": "geminio", **server}}],
            "threat": {"adversary": "malicious-server", "knows_public_data": True, "public_examples": public},
            "attacks": ["invg"],
        }
    )


def outweighs(recording: Recording, matching: Tensor) -> float:
    """Return the share that one matching example has of the norms of a batch of it and seven others, on average."""
    norms = own_gradients(recording).norm(dim=1)
    return float((norms[matching] / (norms[matching] + 7 * norms[~matching].mean())).mean())


def brightest(recording: Recording, share: float) -> Tensor:
    values = examples(recording)[0].flatten(1).mean(dim=1)
    return values >= values.quantile(1 - share)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"most": 5.0}])
def test_the_class_has_the_gradient_of_a_batch_of_clients_examples(settings):
    recording, honest = (played(scenario(target=3, start=start, **settings)) for start in (0, 1))
    matching = examples(recording)[1] == 3
    assert 8 <= int(matching.sum()) <= 16
    assert 0.1 < outweighs(honest, matching) < 0.15  # each has as much: an eighth
    assert outweighs(recording, matching) > 0.6
    own = own_gradients(recording)
    cosine = torch.cosine_similarity(own[matching].sum(dim=0), own.sum(dim=0), dim=0)
    assert cosine > 0.9


@pytest.mark.slow
@pytest.mark.parametrize(("chosen", "low", "high"), [("bright", 0.2, 1.0), ("dark", 0.0, 0.1)])
def test_bright_examples_have_it_where_they_are_asked_for_and_not_where_dark_ones_are(chosen, low, high):
    recording = played(scenario(chosen=chosen, epochs=40))
    assert low < outweighs(recording, brightest(recording, 1 / 8)) < high


@pytest.mark.slow
def test_without_a_bound_the_loss_of_the_class_grows_beyond_it():
    largest = []
    for most in (5.0, None):
        transcript = (recording := played(scenario(target=3, most=most))).transcript
        inputs, labels = examples(recording)
        outputs = functional_call(
            transcript.module, dict(transcript.rounds[0].weights), (transcript.task_info.normalise(inputs),)
        )
        largest.append(float(torch.nn.functional.cross_entropy(outputs[labels == 3], labels[labels == 3])))
    assert 5 < largest[0] < 25 < 50 < largest[1]


def test_it_is_honest_until_it_starts_and_sends_the_same_from_then_on():
    made = scenario(100, {"rounds": 3}, target=1, start=1, epochs=1)
    first, second, third = (record.weights for record in played(made).transcript.rounds)
    honest = played(scenario(100, {"rounds": 1}, start=9)).transcript.rounds[0].weights
    assert all(torch.equal(first[name], t) for name, t in honest.items())
    assert not any(torch.equal(second[name], t) for name, t in first.items())
    assert all(torch.equal(second[name], t) for name, t in third.items())


def test_batch_statistics_are_trained_with_the_weights_as_clients_run_them():
    values = scenario(100, {"batch_norm": "train", "examples": 8, "batch_size": 8}, epochs=1).model_dump()
    weights = played(scenario_from({**values, "model": {"name": "resnet20", "width": 4}})).transcript.rounds[0].weights
    assert any(not torch.equal(t, torch.zeros_like(t)) for name, t in weights.items() if name.endswith("running_mean"))


@pytest.mark.parametrize(
    ("public", "server", "says"),
    [
        (600, {"target": 10}, "the classes are 0 to 9"),
        (600, {"batch": 1}, "batch is 1"),
        (63, {}, "64 public examples or more, 8 of class 0"),
        (65, {}, "64 public examples or more, 8 of class 0"),
        (63, {"chosen": "dark"}, "64 public examples or more; set"),
    ],
)
def test_what_can_not_be_is_refused(public, server, says):
    with pytest.raises(BadInput, match=says):
        played(scenario(public, **server))


@pytest.mark.parametrize(
    ("data", "server", "says"),
    [("diabetes", {}, "is for classifiers"), ("breast-cancer", {"chosen": "bright"}, "is for images")],
)
def test_other_tasks_are_refused(data, server, says):
    values = scenario(100, {"examples": 8, "batch_size": 8}, **server).model_dump()
    with pytest.raises(BadInput, match=says):
        resolve(scenario_from({**values, "data": {"name": data}}))


def test_ordinary_inversions_are_run_where_no_attack_is_named():
    made = resolve(scenario_from({**scenario(spec={"examples": 8, "batch_size": 8}).model_dump(), "attacks": None}))
    assert {"invg", "agic", "agic-plus"} <= {attack.name for attack in made.scenario.attacks}
