"""Sources, spans, pushed records, properties and attributes where models are asked for labels, numbers or masks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedaudit import simulate
from fedaudit.attacks import PropertyFinding, make_attack
from fedaudit.attacks.records.property import stock
from fedaudit.data.dataset import Attribute, Dataset, with_column
from fedaudit.evaluation import evaluate
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.queries import QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator
from tests.attacks.test_members_of_any_task import examples, model_of

TASKS: tuple[str, ...] = ("multi-label", "regression", "segmentation")


def seen_of(
    task: str, threat: dict[str, Any], data: Dataset | None = None, **federation: Any
) -> tuple[Observation, Truth]:
    spec = {"name": "f", "algorithm": "fedavg", "clients": 3, "rounds": 3, "examples": 72, "batch_size": 8,
            "local_epochs": 20, "learning_rate": 0.5 if task != "regression" else 0.1, **federation}  # fmt: skip
    made = simulate(
        {"federations": [spec], "threat": threat, "attacks": ["loss-threshold"], "evaluation": {"max_updates": 1}},
        model=model_of(task),
        data=data or examples(task),
        progress=False,
    )
    return observe(made.transcript, ThreatModel(**threat)), made.truth


def metric(name: str, settings: dict[str, Any], seen: Observation, truth: Truth, wanted: str) -> float:
    found = make_attack(name, settings)(seen, generator=generator(0, "attack"))
    return next(m.value for m in evaluate(found, seen, truth, seed=0).result.metrics if m.name == wanted)


@pytest.mark.parametrize("task", TASKS)
def test_the_client_that_trained_on_a_record_is_named(task: str) -> None:
    seen, truth = seen_of(task, {"target_records": 48})
    found: Any = make_attack("source-inference")(seen)
    own = truth.owners >= 0
    assert int(own.sum()) >= 20
    assert float((found.sources == truth.owners)[own].double().mean()) > 0.8  # a third by luck


@pytest.mark.parametrize("task", TASKS)
def test_what_a_batch_made_layers_receive_gives_it_away(task: str) -> None:
    seen, truth = seen_of(
        task,
        {"target_records": 16},
        algorithm="fedsgd",
        clients=1,
        rounds=1,
        examples=8,
        batch_size=8,
        local_epochs=None,
    )
    assert metric("projection-residual", {}, seen, truth, "membership_auc") == 1


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_records_are_pushed_and_repaired(task: str) -> None:
    threat = {"adversary": "client", "target_records": 40}
    seen, truth = seen_of(
        task,
        threat,
        clients=4,
        examples=80,
        rounds=14,
        local_epochs=4,
        malicious={"behaviour": {"name": "agrevader", "start": 2}},
    )
    losses = seen.adversary_log["agrevader/losses"]
    assert losses.shape == (12, 40)
    found: Any = make_attack("agrevader")(seen)
    torch.testing.assert_close(found.scores, -losses[1:][5:].mean(dim=0))
    assert metric("agrevader", {}, seen, truth, "membership_auc") > 0.7


@pytest.mark.parametrize("task", ["multi-label", "regression"])
def test_an_attribute_is_filled_in_by_the_loss(task: str) -> None:
    threat = {"target_records": 30, "hidden_attribute": "side", "knows_public_data": True, "public_examples": 40}
    inputs = torch.randn(240, 24, generator=generator(0, "rows"))
    inputs[:, 0] = (inputs[:, 1] + inputs[:, 2] > 0).float()
    wanted = {
        "multi-label": torch.stack(
            [inputs[:, 0], inputs[:, 3] > 0, inputs[:, 4] > 0, inputs[:, 0], inputs[:, 5] > 0], 1
        ),
        "regression": inputs[:, :1] * torch.tensor([3.0, -2.0, 1.0]) + 0.1 * inputs[:, 3:6],
    }[task]
    data = with_column(Dataset.from_tensors(inputs, wanted, task=task), "side", [0], ["left", "right"])
    seen, truth = seen_of(task, threat, data)
    for prior in (False, True):
        found: Any = make_attack("attribute-loss", {"prior": prior})(seen)
        assert float((found.values == truth.values).double().mean()) > 0.9
    for features, least in (("inputs", 0.7), ("penultimate", 0.5)):
        found = make_attack("attribute-features", {"features": features})(seen)
        assert float((found.values == truth.values).double().mean()) > least


def marked(data: Dataset) -> Dataset:
    """Say of every example whether it is bright on the left, which is none of the inputs by itself."""
    splits = []
    for split in (data.train, data.test):
        left = split.inputs.flatten(1)[:, :4].mean(dim=1)
        splits.append(dataclasses.replace(split, attributes={"left": (left > left.median()).long()}))
    return dataclasses.replace(
        data, train=splits[0], test=splits[1], attributes={"left": Attribute(("dark", "bright"))}
    )


def test_an_attribute_of_images_with_masks_is_told_from_features_or_refused() -> None:
    threat = {"target_records": 30, "hidden_attribute": "left", "knows_public_data": True, "public_examples": 60}
    seen, truth = seen_of("segmentation", threat, marked(examples("segmentation", 400)))
    found: Any = make_attack("attribute-features")(seen)
    assert float((found.values == truth.values).double().mean()) > 0.6
    with pytest.raises(NotApplicable, match="model's inputs"):
        make_attack("attribute-loss")(seen)
    nets = nn.Conv2d(1, 3, 3, padding=1)
    with pytest.raises(NotApplicable, match="no fully connected layer"):
        make_attack("attribute-features")(dataclasses.replace(seen, module=nets, weights=(nets.state_dict(),)))


# Properties, and the labels that go with them -------------------------------------------------------------------------


def records_of(labels: Tensor, marks: Tensor) -> QuerySet:
    return QuerySet(torch.zeros(0, 24), labels[:0], torch.randn(len(labels), 24), labels, public_property=marks)


def test_stand_ins_have_the_labels_that_go_with_the_property_alike() -> None:
    rng = generator(0, "labels")
    marks = torch.rand(600, generator=rng) < 0.5
    labels = (torch.rand(600, 5, generator=rng) < 0.3).float()
    labels[:, 2] = (torch.rand(600, generator=rng) < torch.where(marks, 0.85, 0.15)).float()
    seen, _ = seen_of("multi-label", {"target_records": 8}, rounds=1, local_epochs=1)
    held = stock(records_of(labels, marks), seen.task_info)
    assert held.matched is None
    with_it, without = held.pair(400, 1.0, 0.0, rng)
    assert labels[with_it].mean(dim=0).sub(labels[without].mean(dim=0)).abs().max() < 0.03
    assert bool(marks[with_it].all())
    assert not bool(marks[without].any())
    # of so many labels that no two examples are alike only those that go with it most
    many = torch.cat([labels, (torch.rand(600, 12, generator=rng) < 0.5).float()], dim=1)
    info = dataclasses.replace(seen.task_info, num_targets=17)
    held = stock(records_of(many, marks), info)
    assert held.matched is not None
    assert "of 17 labels, which aren't matched," in held.matched
    with_it, without = held.pair(400, 1.0, 0.0, rng)
    assert abs(float(many[with_it, 2].mean() - many[without, 2].mean())) < 0.03


@pytest.mark.parametrize("task", ["multi-label", "segmentation"])
def test_a_property_that_the_labels_tell_is_no_leak_of_the_updates(task: str) -> None:
    data = examples(task, 800)
    splits = []
    for split in (data.train, data.test):
        flat = split.targets.flatten(1).double()
        said = flat[:, 0] if task == "multi-label" else (flat == 0).double().mean(dim=1)
        splits.append(dataclasses.replace(split, attributes={"left": (said > said.median()).long()}))
    data = dataclasses.replace(
        data, train=splits[0], test=splits[1], attributes={"left": Attribute(("dark", "bright"))}
    )
    threat = {"client_property": "left=bright", "knows_public_data": True, "public_examples": 100}
    spread = {"scheme": "attribute", "attribute": "left=bright", "labels": "natural"}
    seen, truth = seen_of(task, threat, data, clients=24, examples=480, rounds=1, local_epochs=1, partition=spread)
    names = sorted({m.client for m in seen.messages})
    own = [truth.labels[0, c] for c in names]
    rows = [y[:, 0].mean() if task == "multi-label" else (y == 0).double().mean() for y in own]
    noise = 1e-3 * torch.randn(len(names), generator=generator(1, "noise"), dtype=torch.float64)
    by_labels = PropertyFinding(clients=torch.tensor(names), scores=torch.stack(rows).double() + noise)
    result = evaluate(by_labels, seen, truth, seed=0).result
    assert not result.is_leak
    assert "AUC of 1.000" in " ".join(result.notes)
    found = make_attack("property-inference", {"updates": 10})(seen, generator=generator(0, "attack"))
    assert np.isfinite(found.scores.numpy()).all()  # type: ignore[attr-defined]
    differ = "1 of 5 labels, which aren't matched," if task == "multi-label" else "targets aren't classes, and"
    assert any(f"{differ} differ between stand-ins" in note for note in found.notes)
