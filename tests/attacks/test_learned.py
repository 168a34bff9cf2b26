"""Inverters learnt on own updates answer better than a guess, and descents go on from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import fedaudit
from fedaudit.attacks import make_attack
from fedaudit.attacks.findings import ImageFinding
from fedaudit.attacks.inversion import inverter as inverter_module
from fedaudit.attacks.inversion.calibration import Calibration, CalibrationFinding, candidates, psnr_of
from fedaudit.attacks.inversion.inverter import FEWEST, Inverter, descend, joined, learnt, sided, told
from fedaudit.attacks.inversion.methods import AGICPlus, InvG
from fedaudit.attacks.inversion.own_updates import own_client
from fedaudit.data import load_dataset
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import NotApplicable

pytestmark = pytest.mark.slow

SINGLE: dict[str, Any] = {"name": "f", "algorithm": "fedsgd", "clients": 3, "examples": 3, "batch_size": 1}
BATCHES: dict[str, Any] = {"name": "f", "algorithm": "fedavg", "clients": 2, "examples": 8, "batch_size": 2,
                           "local_epochs": 2, "learning_rate": 0.05}  # fmt: skip


def victims(federation: dict[str, Any]) -> tuple[list[tuple[Observation, Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Return updates with their truth, and other examples of the same sort."""
    made = fedaudit.simulate(
        {
            "data": {"name": "digits"},
            "model": {"name": "lenet", "training": {"epochs": 2}},
            "federations": [federation],
            "threat": {"knows_labels": True},
            "attacks": ["invg"],
        },
        progress=False,
    )
    seen = []
    for observation in observe(made, fedaudit.ThreatModel(knows_labels=True)).split():
        key = observation.single().round, observation.single().client
        seen.append((observation, made.truth.inputs[key], made.truth.labels[key]))
    own = load_dataset("digits").train
    taken = torch.cat([inputs for _, inputs, _ in seen]).flatten(1)
    free = torch.cdist(own.inputs.flatten(1), taken).amin(dim=1) > 1e-4
    return seen, (own.inputs[free], own.targets[free])


@pytest.fixture(scope="module")
def single() -> tuple[list[tuple[Observation, Tensor, Tensor]], Inverter, tuple[Tensor, Tensor]]:
    seen, own = victims(SINGLE)
    return seen, learnt(seen[0][0], own, torch.Generator().manual_seed(0)), own


def answered(inverter: Inverter, observation: Observation) -> Tensor:
    update = observation.single().update
    assert update.labels is not None
    return inverter.answer(update, update.labels, observation.task_info)


def test_answers_are_nearer_than_the_mean_of_the_class(
    single: tuple[list[tuple[Observation, Tensor, Tensor]], Inverter, tuple[Tensor, Tensor]],
) -> None:
    seen, inverter, (inputs, labels) = single
    gains = []
    for observation, true, label in seen:
        guess = inputs[labels == label[0]].mean(dim=0, keepdim=True)
        gains.append(psnr_of(answered(inverter, observation), true)[0] - psnr_of(guess, true)[0])
    assert sum(gains) / len(gains) > 3


def test_what_is_left_out_tells_how_good_it_is(
    single: tuple[list[tuple[Observation, Tensor, Tensor]], Inverter, tuple[Tensor, Tensor]],
) -> None:
    """The figure of own examples that were left out is that of new ones; of those that were learnt it is higher."""
    seen, inverter, _ = single
    errors = [float((answered(inverter, observation) - true).square().mean()) for observation, true, _ in seen]
    told = -10 * torch.tensor(sum(errors) / len(errors)).log10()
    assert abs(float(told) - inverter.psnr) < 4


def test_one_inverter_serves_batches_of_any_labels() -> None:
    seen, own = victims(BATCHES)
    inverter = learnt(seen[0][0], own, torch.Generator().manual_seed(0))
    for observation, true, _ in seen:
        different = true.unique(dim=0)
        guess = own[0].mean(dim=0, keepdim=True).expand_as(different)
        labels = observation.single().update.labels
        assert labels is not None
        found = inverter.answer(observation.single().update, labels[:8], observation.task_info)
        assert sum(psnr_of(found, different)) > sum(psnr_of(guess, different))


def test_a_descent_without_a_slope_stays_at_the_answer(
    single: tuple[list[tuple[Observation, Tensor, Tensor]], Inverter, tuple[Tensor, Tensor]],
) -> None:
    seen, inverter, _ = single
    start = torch.rand(1, *seen[0][0].task_info.input_shape)

    def flat(images: Tensor) -> tuple[Tensor, Tensor]:
        return images.new_zeros(()), torch.zeros_like(images)

    draws = torch.Generator()
    (found,), _ = descend(
        flat, start, inverter, seen[0][0].task_info, draws, pull=0.01, iterations=20, learning_rate=0.1
    )
    assert torch.equal(found, start)


def test_descent_goes_down_the_objective(
    single: tuple[list[tuple[Observation, Tensor, Tensor]], Inverter, tuple[Tensor, Tensor]],
) -> None:
    """Towards a target along directions that are open: its distance falls, as by the closed form of a quadratic."""
    seen, inverter, _ = single
    info = seen[0][0].task_info
    start = torch.full((1, *info.input_shape), 0.5)
    std = torch.tensor(info.std).view(1, -1, 1, 1)
    target = start + (2 * inverter.deviations[0] * inverter.left[0]).view_as(start) / std

    def apart(images: Tensor) -> tuple[Tensor, Tensor]:
        return (images - target).square().sum(), 2 * (images - target)

    draws = torch.Generator()
    (found,), _ = descend(apart, start, inverter, info, draws, pull=0.0, iterations=300, learning_rate=0.05)
    assert float((found - target).norm()) < 0.05 * float((start - target).norm())


@pytest.mark.parametrize(("name", "sides"), [("digits", True), ("mirrored", False), ("noise", False)])
def test_examples_are_mirrored_unless_they_have_sides(name: str, sides: bool) -> None:
    """An oracle that knows: a set with its mirrored copies has no sides, nor has noise, and digits have."""
    own = load_dataset("digits").train
    inputs, labels = own.inputs[:600], own.targets[:600]
    if name == "mirrored":
        inputs, labels = torch.cat([inputs, inputs.flip(-1)]), labels.repeat(2)
    elif name == "noise":
        inputs = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(1))
    share = sided(inputs, labels)
    assert share > 0.2 if sides else abs(share) < 0.02


def test_the_share_of_sides_is_that_of_its_closed_form() -> None:
    """Odd parts m + n of mean 1 and deviation 1 have half of their square in the mean; a constant sample has all."""
    rng = torch.Generator().manual_seed(2)
    left = 0.5 + torch.randn(4000, 1, 1, 1, generator=rng) / 2
    pairs = torch.cat([left, -left], dim=-1)  # x − mirrored x is twice that: mean 1, deviation 1
    assert sided(pairs, torch.zeros(4000)) == pytest.approx(0.5, abs=0.03)
    assert sided(pairs[:1].repeat(5, 1, 1, 1), torch.zeros(5)) == pytest.approx(1)


@pytest.mark.parametrize("sides", [True, False])
def test_an_inverter_sees_mirrored_examples_only_of_classes_without_sides(
    sides: bool, monkeypatch: pytest.MonkeyPatch, single: tuple[list[tuple[Observation, Tensor, Tensor]], Inverter, Any]
) -> None:
    seen, _, (inputs, labels) = single
    if not sides:
        flipped = torch.rand(len(inputs), generator=torch.Generator().manual_seed(4)) < 0.5
        inputs = torch.where(flipped.view(-1, 1, 1, 1), inputs.flip(-1), inputs)
    shown = list[Tensor]()

    def watched(observation: Observation, examples: tuple[Tensor, Tensor], generator: torch.Generator) -> Any:
        shown.append(examples[0])
        return own_client(observation, examples, generator)

    monkeypatch.setattr(inverter_module, "own_client", watched)
    learnt(seen[0][0], (inputs, labels), torch.Generator().manual_seed(0), most=600)
    known = (torch.cdist(torch.cat(shown).flatten(1), inputs.flatten(1)).amin(dim=1) < 1e-5).double().mean()
    assert known == 1 if sides else 0.4 < known < 0.6


def test_too_few_examples_are_refused(
    single: tuple[list[tuple[Observation, Tensor, Tensor]], Inverter, tuple[Tensor, Tensor]],
) -> None:
    seen, _, (inputs, labels) = single
    with pytest.raises(NotApplicable, match=f"{FEWEST} examples at least"):
        learnt(seen[0][0], (inputs[: FEWEST - 1], labels[: FEWEST - 1]), torch.Generator())


def test_updates_over_more_examples_than_there_are_to_learn_from_are_refused(
    single: tuple[list[tuple[Observation, Tensor, Tensor]], Inverter, tuple[Tensor, Tensor]],
) -> None:
    seen, _, (inputs, labels) = single
    message = seen[0][0].single()
    training = TrainingConfig(learning_rate=0.01, local_steps=1, batch_sizes=(600,), data_size=600)
    labels_of = torch.zeros(600, dtype=torch.int64)
    update = dataclasses.replace(message.update, num_examples=600, labels=labels_of, training=training)
    large = dataclasses.replace(seen[0][0], messages=(dataclasses.replace(message, update=update),))
    with pytest.raises(NotApplicable, match="one is over 600 examples, and 550 can be learnt from"):
        learnt(large, (inputs[:550], labels[:550]), torch.Generator())


def test_simulated_epochs_refuse_an_answer_to_begin_with() -> None:
    federation = {**BATCHES, "clients": 1, "examples": 4}
    seen, (inputs, labels) = victims(federation)
    with pytest.raises(NotApplicable, match="each simulated epoch has images of its own"):
        InvG(iterations=60, start="learned", calibrate=True).calibrated(
            seen[0][0], inputs[:1000], labels[:1000], updates=6
        )


def test_a_start_that_nobody_learnt_is_refused(
    single: tuple[list[tuple[Observation, Tensor, Tensor]], Inverter, tuple[Tensor, Tensor]],
) -> None:
    with pytest.raises(NotApplicable, match="calibrate=true"):
        AGICPlus(start="learned", calibrate=False, iterations=5)(single[0][0][0], seed=0)


def test_calibration_chooses_it_where_it_recovers_more_and_says_where_it_loses(
    single: tuple[list[tuple[Observation, Tensor, Tensor]], Inverter, tuple[Tensor, Tensor]],
) -> None:
    """Of epochs of batches a short search goes further from the answer, of a single digit from noise."""
    few = AGICPlus(iterations=100)
    for (seen, (inputs, labels)), wins in ((victims(BATCHES), True), ((single[0], single[2]), False)):
        found = Calibration(attack=few, inputs=inputs, labels=labels, updates=6)(seen[0][0], seed=0)
        assert isinstance(found, CalibrationFinding)
        assert "learned" in [rung.settings.get("start") for rung in found.rungs]
        assert (found.settings.get("start") == "learned") == (found.inverter is not None) == wins
        assert f"an inverter was learnt from {found.learnt:,} updates" in str(found)
        assert ("no search from its answer was chosen" in str(found)) != wins
        ready = few.with_settings(found.settings, found.inverter)
        assert ready(seen[0][0], seed=0).iterations == 100


def test_without_an_inverter_no_setting_begins_with_one(
    single: tuple[list[tuple[Observation, Tensor, Tensor]], Inverter, tuple[Tensor, Tensor]],
) -> None:
    message = single[0][0][0].single()
    assert not [line for line in candidates(AGICPlus(), message) if line.get("start") == "learned"]
    assert [line for line in candidates(AGICPlus(), message, learned=True) if line.get("start") == "learned"]


def audited(public: int | None, attack: Any = "learned-inversion") -> fedaudit.Audit:
    threat: dict[str, Any] = {"knows_labels": True}
    if public is not None:
        threat |= {"knows_public_data": True, "public_examples": public}
    federation = {"name": "f", "algorithm": "fedsgd", "clients": 4, "examples": 4, "batch_size": 1}
    return fedaudit.audit(
        {
            "data": {"name": "digits", "split": "test"},
            "model": {"name": "lenet"},
            "federations": [federation],
            "threat": threat,
            "evaluation": {"ceiling": False, "controls": False},
            "attacks": [attack],
        },
        progress=False,
    )


def test_an_audit_learns_it_from_public_examples_and_says_so() -> None:
    """A search may begin where it ends; it says of what it was learnt, and whose examples these were."""
    result = audited(1100).result
    (finding, *_) = result.findings
    assert any("an inverter learnt from" in note for note in finding.notes)
    assert {told.source for told in result.calibrations} == {"public examples"}
    answered = [image.psnr for own in result.findings for image in own.images]
    assert sum(answered) / len(answered) > 12
    ranks = [image.named.embedding for own in result.findings for image in own.images if image.named is not None]
    assert None not in ranks  # an answer is blurred: whom it names is looked for in every way
    assert sum(rank == 1 for rank in ranks) >= 2


@pytest.mark.parametrize(
    ("public", "attack", "reason"),
    [
        (None, "learned-inversion", "500 examples at least, and there are"),
        (200, "learned-inversion", "500 examples at least, and there are"),
        (1100, {"name": "learned-inversion", "updates": 20}, "let it have 500 updates"),
        (None, {"name": "learned-inversion", "calibrate": False}, "the adversary needs examples of its own"),
    ],
)
def test_without_examples_or_time_it_says_what_is_missing(public: int | None, attack: Any, reason: str) -> None:
    (summary,) = audited(public, attack).result.summaries
    assert summary.verdict == "not applicable"
    assert reason in str(summary.model_dump())


def test_public_examples_are_nobodys() -> None:
    made = fedaudit.simulate(
        {
            "data": {"name": "digits"},
            "model": {"name": "lenet"},
            "federations": [SINGLE],
            "threat": {"knows_public_data": True, "public_examples": 300},
            "attacks": ["invg"],
        },
        progress=False,
    )
    seen = observe(made, fedaudit.ThreatModel(knows_public_data=True, public_examples=300))
    assert seen.records is not None
    assert len(seen.records) == 0
    assert len(seen.records.public_inputs) == 300
    victims = torch.cat(list(made.truth.inputs.values())).flatten(1)
    assert float(torch.cdist(seen.records.public_inputs.flatten(1), victims).min()) > 1e-4
    assert observe(made, fedaudit.ThreatModel()).records is None


def test_public_examples_bring_no_records_with_them() -> None:
    """Half of the records are clients' examples: who asks nothing of them doesn't see them."""
    made = fedaudit.simulate(
        {
            "data": {"name": "digits"},
            "model": {"name": "lenet"},
            "federations": [SINGLE | {"examples": 30}],
            "threat": {"knows_public_data": True, "public_examples": 100, "target_records": 20},
            "attacks": ["loss-threshold"],
        },
        progress=False,
    )
    records = observe(made, fedaudit.ThreatModel(knows_public_data=True, public_examples=100)).records
    assert records is not None
    assert (len(records), len(records.labels), len(records.public_inputs)) == (0, 0, 100)
    both = observe(made, fedaudit.ThreatModel(knows_public_data=True, public_examples=100, target_records=20)).records
    assert both is not None
    assert len(both) == 20


def test_without_a_row_for_each_class_a_search_begins_as_ever() -> None:
    """One logit for two classes has one row: no inverter, and the audit goes on."""
    rng = torch.Generator().manual_seed(0)
    examples = torch.rand(1300, 1, 8, 8, generator=rng), torch.randint(2, (1300,), generator=rng)
    result = fedaudit.audit(
        {
            "data": {"name": "own"},
            "model": {"name": "lenet", "loss": "bce-with-logits"},
            "federations": [{"name": "f", "algorithm": "fedsgd", "clients": 2, "examples": 2, "batch_size": 1}],
            "threat": {"knows_labels": True, "knows_public_data": True, "public_examples": 1100},
            "evaluation": {"ceiling": False, "controls": False},
            "attacks": [{"name": "agic-plus", "iterations": 500}],
        },
        data=examples,
        progress=False,
    ).result
    assert [told.settings.get("start") for told in result.calibrations] == [None]
    assert result.findings[0].status == "done"


def test_the_order_of_an_update_s_tensors_says_nothing(
    single: tuple[list[tuple[Observation, Tensor, Tensor]], Inverter, tuple[Tensor, Tensor]],
) -> None:
    seen, inverter, _ = single
    update = seen[0][0].single().update
    turned = dataclasses.replace(update, tensors=dict(reversed(update.tensors.items())))
    assert update.labels is not None
    whole = dataclasses.replace(inverter, share=1.0, features=_sketched(inverter, update))
    answers = [whole.answer(one, update.labels, seen[0][0].task_info) for one in (update, turned)]
    assert torch.equal(*answers)


def _sketched(inverter: Inverter, update: Update) -> Tensor:
    """Return features of as many examples, with a sketch."""
    assert update.labels is not None
    rows, sketch = told(update, update.labels, inverter.layer, inverter.names)
    return joined(rows, sketch, update.labels, 1.0, 10).expand(len(inverter.weights), -1)


class Old(InvG):
    """Somebody's own, from before there were inverters."""

    name = "old"

    def with_settings(self, settings: Mapping[str, Any]) -> Any:  # type: ignore[override]
        return dataclasses.replace(self, **{**settings, "calibrate": False})


@pytest.mark.parametrize("attack", [Old(iterations=60), make_attack("gradinversion", {"iterations": 60, "group": 2})])
def test_who_can_t_begin_with_an_answer_is_calibrated_without(
    attack: Any, single: tuple[list[tuple[Observation, Tensor, Tensor]], Inverter, tuple[Tensor, Tensor]]
) -> None:
    seen, _, (inputs, labels) = single
    fitted = attack.calibrated(seen[0][0], inputs[:600], labels[:600], updates=6)
    assert fitted.start == "noise"
    assert fitted.inverter is None


def test_a_search_that_is_to_begin_with_an_answer_does(
    single: tuple[list[tuple[Observation, Tensor, Tensor]], Inverter, tuple[Tensor, Tensor]],
) -> None:
    seen, _, (inputs, labels) = single
    attack = AGICPlus(iterations=90, start="learned")
    fitted = attack.calibrated(seen[0][0], inputs, labels, updates=6)
    assert fitted.inverter is not None
    at_once = fitted.with_settings({"iterations": 1, "learning_rate": 1e-6}, fitted.inverter)(seen[0][0], seed=0)
    assert isinstance(at_once, ImageFinding)
    torch.testing.assert_close(at_once.images, answered(fitted.inverter, seen[0][0]).clamp(0, 1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["loss-threshold", "shadow-models"])
def test_public_examples_alone_are_no_records_to_ask_about(name: str) -> None:
    federation = {
        "name": "f",
        "algorithm": "fedavg",
        "clients": 2,
        "examples": 8,
        "batch_size": 4,
        "local_steps": 1,
        "learning_rate": 0.1,
    }
    result = fedaudit.audit(
        {
            "data": {"name": "digits"},
            "model": {"name": "mlp", "width": 8},
            "federations": [federation],
            "threat": {"knows_public_data": True, "public_examples": 100},
            "attacks": [name],
        },
        progress=False,
    ).result
    assert result.summaries[0].verdict == "not applicable"
    assert "holds no records" in str(result.summaries[0].model_dump())
