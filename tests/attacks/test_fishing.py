"""A server that fishes for a class, or for one example of it: what it sends, and what is read of the answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.attacks.active.fishing import Fishing
from fedaudit.scenario.scenario import Scenario
from fedaudit.utils.errors import BadInput, NotApplicable
from tests.attacks.server_cases import SERVERS, each_gradient, examples
from tests.build import recorded, seen_in
from tools.measure.received_checks import federation_of, manipulated

AVG: dict[str, Any] = {"algorithm": "fedavg", "local_steps": 1}
ONE_CLASS: dict[str, Any] = {
    "clients": 10, "clients_per_round": 1, "examples": 300, "batch_size": 30,
    "partition": {"scheme": "classes-per-client", "k": 1},
}  # fmt: skip
PUBLIC: dict[str, Any] = {"knows_public_data": True, "public_examples": 800}
QUICK = {"attack": {"name": "agic", "iterations": 80}}


def scenario(spec: dict[str, Any], seed: int = 0, threat: dict[str, Any] | None = None, **server: Any) -> Scenario:
    return SERVERS["fishing"]({**spec, "server": {"name": "fishing", **server}}, seed=seed, threat=threat or {})


def occurring(spec: dict[str, Any], times: int) -> int:
    """Return a class that so many of the clients' examples have."""
    counts = torch.bincount(examples(recorded(scenario(spec)))[1], minlength=10)
    return int(torch.nonzero(counts == times)[0])


def cosine(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    body = [name for name in a if not name.startswith("fc")]
    one, other = (torch.cat([part[n].flatten() for n in body]).double() for part in (a, b))
    return float(nn.functional.cosine_similarity(one, other, dim=0, eps=1e-300))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "weight"), [({}, None), ({}, 0.5), (AVG, None), ({"clients": 3, "batch_size": 4}, None)]
)
def test_a_class_of_one_example_leaves_its_gradient_and_no_other(spec, weight):
    target = occurring(spec, 1)
    sums = {"sees": "sum"} if "clients" in spec else {}
    made = scenario(spec, threat=sums, target=target, weight=weight)
    recording = recorded(made)
    inputs, labels = examples(recording)
    (position,) = torch.nonzero(labels == target)[:, 0].tolist()
    own = each_gradient(recording)[position]
    (update,) = recording.transcript.rounds[0].updates
    rate = 1.0 if update.kind == "gradient" else -made.federations[0].learning_rate
    atol = 2e-5 if update.kind == "gradient" else 2e-4  # a difference of weights is rounded
    for name in own:
        if not name.startswith("fc"):
            assert torch.allclose(update.tensors[name] / rate * len(labels), own[name], rtol=1e-2, atol=atol), name
    (seen,) = seen_in(made, recording)
    attack = make_attack("fishing", QUICK)
    assert isinstance(attack, Fishing)
    fished = attack.fished(seen)[0].single()  # with the last layer's gradient, which other examples are in
    assert fished.update.num_examples == 1
    for name in own:
        assert torch.allclose(fished.update.tensors[name], own[name], rtol=1e-2, atol=2 * atol), name
    if not spec and weight is None:
        found = attack(seen, generator=torch.Generator().manual_seed(0))
        assert isinstance(found, ImageFinding)
        assert found.notes[0].startswith(f"1 of 12 examples fished by its class, class {target}")
        assert len(found.images) == update.num_examples
        errors = (inputs - found.images[0]).square().flatten(1).mean(dim=1)
        assert int(errors.argmin()) == position
        assert -10 * errors[position].log10() > 11


def test_several_of_a_class_are_counted_and_inverted_together():
    target = occurring({}, 2)
    made = scenario({}, target=target)
    (seen,) = seen_in(made, recorded(made))
    found = make_attack("fishing", {"attack": {"name": "invg", "iterations": 2}})(seen, generator=torch.Generator())
    assert found.notes[0].startswith("2 of 12 examples")
    assert isinstance(found, ImageFinding)
    assert (found.labels == target).all()
    assert not found.images[0].equal(found.images[1])
    assert found.images[0].equal(found.images[2])


@pytest.mark.slow
def test_one_example_is_fished_from_many_of_a_class_by_a_feature():
    alone = 0
    for seed in range(4):
        target = int(examples(recorded(scenario(ONE_CLASS, seed=seed)))[1][0])
        recording = recorded(scenario(ONE_CLASS, seed, PUBLIC, target=target, members=30))
        (record,) = recording.transcript.rounds
        slope = record.weights["fc.weight"][target] - record.weights["fc.weight"]
        (feature,) = torch.nonzero((slope != 0).any(dim=0))[:, 0].tolist()
        gradients = each_gradient(recording)
        assert len(gradients) >= 25
        flat = [torch.cat([g.flatten() for n, g in own.items() if n[:2] != "fc"]).double() for own in gradients]
        sizes = torch.stack([own.norm() for own in flat])
        values = torch.stack([own["fc.weight"][target, feature] / own["fc.bias"][target] for own in gradients])
        lowest = int(sizes.argmax())
        told = values[values.isfinite()]  # of the others the class's probability is one, to rounding
        assert not values[lowest].isfinite() or values[lowest] < told.min() + 0.01 * told.abs().max()
        if sizes[lowest] > 0.9 * sizes.sum():
            alone += 1
            assert cosine(gradients[lowest], record.updates[0].tensors) > 0.999
    assert alone >= 2  # chance has a part in it: two examples may be nearly as low


def test_what_is_sent_differs_in_the_last_layer_alone():
    made = scenario({}, target=3)
    honest = recorded(SERVERS["fishing"]({"server": None}, threat={"adversary": "server"}))
    before, after = (r.transcript.rounds[0].weights for r in (honest, recorded(made)))
    assert [name for name in before if not before[name].equal(after[name])] == ["fc.weight", "fc.bias"]


def test_a_batch_without_the_class_is_refused():
    few = {"examples": 6, "batch_size": 6}
    made = scenario(few, target=occurring(few, 0))
    (seen,) = seen_in(made, recorded(made))
    with pytest.raises(NotApplicable, match="is in this update"):
        make_attack("fishing").check(seen)


def test_a_dead_network_has_no_feature_to_fish_by():
    federation = federation_of("lenet", "even", 0, None)
    dead = {name: torch.zeros_like(old) for name, old in federation.model.state_dict().items()}
    with pytest.raises(BadInput, match="a dead network"):
        manipulated(federation, {"name": "fishing", "target": 3, "members": 20}, dead, 0)


def test_methods_that_optimise_no_images_are_refused():
    with pytest.raises(BadInput, match="doesn't optimise images"):
        make_attack("fishing", {"attack": "labels"})
