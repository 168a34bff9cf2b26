"""A server whose transformer sorts tokens into bins: text comes out of gradients and of their sums."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedaudit.attacks import SequenceFinding, make_attack
from fedaudit.models.transformer import Transformer
from fedaudit.scenario.scenario import Scenario
from fedaudit.transcript.observation import Observation
from tests.attacks.server_cases import SERVERS, examples
from tests.build import recorded, seen_in

scenario = SERVERS["decepticons"]


def recovered(made: Scenario) -> tuple[Observation, Tensor, SequenceFinding]:
    recording = recorded(made)
    (seen,) = seen_in(made, recording)
    found = make_attack("decepticons")(seen)
    assert isinstance(found, SequenceFinding)
    return seen, examples(recording)[0], found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "model", "rest"),
    [
        ("notes", "encoder", {}),
        ("notes-causal", "decoder", {}),
        ("notes-causal", "decoder-4", {}),
        ("notes", "encoder", {"federation": {"clients": 2, "batch_size": 2}, "threat": {"sees": "sum"}}),
    ],
)
def test_every_token_that_is_named_stands_at_its_place_in_a_sequence_of_its_own(data, model, rest):
    seen, true, found = recovered(scenario(data=data, model={"name": model, "width": 64}, **rest))
    assert seen.task_info.tokens is not None
    padding = seen.task_info.tokens.padding or 0
    assert len(found.sequences) == len(true)
    right = total = 0
    left = list(range(len(true)))
    for sequence in found.sequences:
        told = sequence != padding
        hits = ((true[left] == sequence) & told).sum(dim=1)
        best = left.pop(int(hits.argmax()))
        assert int(hits.max()) == int(told.sum()), "nothing is named that isn't there"
        right, total = right + int(told.sum()), total + int((true[best] != padding).sum())
    assert right > 0.75 * total


def test_bins_are_quantiles_and_tokens_alone_in_one_are_those_that_are_named():
    """The oracle: what the layer really gets, by a hook, and how many of these lie between two biases."""
    made = scenario()
    recording = recorded(made)
    weights, model, info = (
        recording.transcript.rounds[0].weights,
        recording.transcript.module,
        recording.transcript.task_info,
    )
    assert info.tokens is not None
    assert isinstance(model, Transformer)
    model.load_state_dict(weights)
    caught = []
    handle = model.get_submodule("blocks.0.hidden").register_forward_pre_hook(
        lambda _, args: caught.append(args[0].detach())
    )
    true = examples(recording)[0]
    model.eval()(true)
    handle.remove()
    real = true.ne(info.tokens.padding or 0)
    tokens, places = true[real], torch.nonzero(real)[:, 1]
    values = caught[0][real].double() @ weights["blocks.0.hidden.weight"][0].double()
    alone = torch.zeros(len(values), dtype=torch.bool)
    for i in range(2):
        edges = -weights[f"blocks.{i}.hidden.bias"].double()
        assert (edges.diff() >= 0).all()
        which = torch.bucketize(values, edges)
        inside = (which > 0) & (which < len(edges))
        pair = tokens * 100 + places
        for place in which[inside].unique():
            here = which == place
            if len(pair[here].unique()) == 1:
                alone |= here
    (seen,) = seen_in(made, recording)
    found = make_attack("decepticons")(seen)
    assert isinstance(found, SequenceFinding)
    named = {(int(w), p) for row in found.sequences for p, w in enumerate(row) if w != (info.tokens.padding or 0)}
    expected = {(int(w), int(p)) for w, p in zip(tokens[alone], places[alone], strict=True)}
    assert len(named ^ expected) <= 0.05 * len(expected)  # one whose value is next to an edge may be in both bins
