"""A server that trains until what matches a query has a batch's gradient: whose it is, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from fedaudit.simulation.simulator import Recording
from tests.attacks.server_cases import SERVERS, examples, own_gradients
from tests.build import recorded


def playing(**server: Any) -> Recording:
    return recorded(SERVERS["geminio"]({"server": {"name": "geminio", **server}}))


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
    recording, honest = (playing(target=3, start=start, **settings) for start in (0, 1))
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
    recording = playing(chosen=chosen, epochs=40)
    assert low < outweighs(recording, brightest(recording, 1 / 8)) < high


@pytest.mark.slow
def test_without_a_bound_the_loss_of_the_class_grows_beyond_it():
    largest = []
    for most in (5.0, None):
        transcript = (recording := playing(target=3, most=most)).transcript
        inputs, labels = examples(recording)
        outputs = functional_call(
            transcript.module, dict(transcript.rounds[0].weights), (transcript.task_info.normalise(inputs),)
        )
        largest.append(float(torch.nn.functional.cross_entropy(outputs[labels == 3], labels[labels == 3])))
    assert 5 < largest[0] < 25 < 50 < largest[1]


def test_batch_statistics_are_trained_with_the_weights_as_clients_run_them():
    spec = {"batch_norm": "train", "examples": 8, "batch_size": 8, "server": {"name": "geminio", "epochs": 1}}
    made = SERVERS["geminio"](spec, model={"name": "resnet20", "width": 4}, threat={"public_examples": 100})
    weights = recorded(made).transcript.rounds[0].weights
    assert any(not torch.equal(t, torch.zeros_like(t)) for name, t in weights.items() if name.endswith("running_mean"))
