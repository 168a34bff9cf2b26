"""Audits whose right verdict is known beforehand, from mathematics or because the federation was made so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedaudit
from fedaudit.attacks import ATTACKS, Attack, ImageFinding, register
from fedaudit.data import load_dataset
from fedaudit.defences.client_defences import CLIENT_DEFENCES, ClientContext, ClientDefence, changed
from fedaudit.results import AuditResult
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.update import ClientDefenceInfo, Update
from tests.build import only

pytestmark = pytest.mark.slow

SINGLE: dict[str, Any] = {"name": "f", "clients": 10, "examples": 10, "batch_size": 1}
DROWNED = {"name": "dp", "clip": 1.0, "noise": 100.0, "where": "local", "epsilon": None}  # a hundred times the update
NOT_SHOWN = ("not demonstrated", "inconclusive")


def scenario(attack: Any, federation: dict[str, Any] | None = None, **rest: Any) -> dict[str, Any]:
    base = {"data": {"name": "digits"}, "model": {"name": "linear"}, "federations": [federation or SINGLE]}
    return {**base, "attacks": [attack], **rest}


def audited(attack: Any, federation: dict[str, Any] | None = None, **rest: Any) -> AuditResult:
    return fedaudit.audit(scenario(attack, federation, **rest), progress=False).result


class _Silent(ClientDefence):
    """Sends zeros, whatever the client trained on."""

    name = "silent"
    summary = "for tests"
    paper = "none"

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in update.tensors.items()}
        return changed(update, zeros, ClientDefenceInfo("silent"))


class _Elsewhere(Attack):
    """Returns real digits, which no client has."""

    name = "elsewhere"
    summary = "for tests"
    paper = "none"
    threat_model = "server, passive"
    needs = ()
    images: ClassVar[Tensor]

    def _run(self, observation: Observation, *_: Any) -> ImageFinding:
        message = observation.single()
        chosen = [(7 * message.client + i) % len(self.images) for i in range(message.update.num_examples)]
        return ImageFinding(images=self.images[chosen], labels=torch.zeros(len(chosen)).long(), label_source="none")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    made: list[tuple[Any, Any]] = [(CLIENT_DEFENCES, register(_Silent)), (ATTACKS, register(_Elsewhere))]
    yield
    for registry, entry in made:
        del registry._entries[entry.name]


def test_a_linear_models_gradient_over_one_image_is_the_image() -> None:
    summary = only(result := audited("exact-linear"))
    assert summary.verdict == "recovered"
    assert "10 of 10" in summary.headline
    assert not result.margins


def test_a_batch_smaller_than_the_layer_comes_out_exactly() -> None:
    federation = {"name": "f", "clients": 2, "examples": 8, "batch_size": 4}
    summary = only(audited("spear", federation, model={"name": "mlp", "width": 64}))
    assert summary.verdict == "recovered"
    assert "prove" in summary.headline


def test_sending_every_number_is_no_defence() -> None:
    everything = {"client_defence": {"name": "top-k", "ratio": 1.0}}
    assert only(audited("exact-linear", defences=everything)).verdict == "recovered"


def test_nothing_comes_out_of_updates_that_noise_drowns() -> None:
    summary = only(result := audited("exact-linear", defences={"client_defence": DROWNED}))
    assert summary.verdict == "not demonstrated"
    assert "it recovered 6; of the clients' 10, none" in summary.headline
    (margin,) = result.margins
    assert "the defence that stops" in margin.text


def test_nothing_comes_out_of_zeros() -> None:
    summary = only(audited("exact-linear", defences={"client_defence": "silent"}))
    assert summary.verdict in (*NOT_SHOWN, "not applicable")


def test_updates_of_other_clients_images_give_none_of_a_clients_own() -> None:
    recording = fedaudit.simulate(scenario("exact-linear"), progress=False)
    (round_,) = recording.transcript.rounds
    sent = round_.updates
    swapped = [dataclasses.replace(u, tensors=sent[i - 1].tensors) for i, u in enumerate(sent)]
    told = dataclasses.replace(recording.transcript, rounds=[dataclasses.replace(round_, updates=swapped)])
    lied = dataclasses.replace(recording, transcript=told)
    right, wrong = (
        only(fedaudit.audit_transcript(made, ["exact-linear"], progress=False).result) for made in (recording, lied)
    )
    assert right.verdict == "recovered"
    assert wrong.verdict == "inconclusive"


def test_the_cross_entropys_gradient_is_negative_at_the_label() -> None:
    for defences in ({}, {"defences": {"client_defence": {"name": "sign"}}}):  # and signs still say so
        summary = only(audited("labels", **defences))
        assert summary.verdict == "inferred"
        assert "100 % of 10 labels" in summary.headline


def test_noise_has_no_labels() -> None:
    assert only(audited("labels", defences={"client_defence": DROWNED})).verdict in NOT_SHOWN


def test_batches_of_a_trained_network_leave_a_margin_and_no_all_clear() -> None:
    federation = {"name": "f", "clients": 2, "examples": 32, "batch_size": 16}
    trained = {"name": "lenet", "training": {"epochs": 2}}
    summary = only(result := audited({"name": "invg", "iterations": 100}, federation, model=trained))
    assert summary.verdict == "inconclusive"
    (margin,) = result.margins
    assert margin.factor is None or margin.factor >= 1
    assert margin.factor is not None or "can't tell" in margin.text


def test_images_that_look_like_the_clients_are_not_theirs() -> None:
    values = scenario("elsewhere")
    victims = torch.cat(list(fedaudit.simulate(values, progress=False).truth.inputs.values())).flatten(1)
    images = load_dataset("digits").train.inputs
    _Elsewhere.images = images[torch.cdist(images.flatten(1), victims).min(dim=1).values > 2]
    assert only(audited("elsewhere")).verdict in NOT_SHOWN


OVERFITTED: dict[str, Any] = {
    "name": "f", "algorithm": "fedavg", "clients": 2, "rounds": 20, "keep_rounds": [19], "examples": 40, "batch_size":
    10, "local_epochs": 20, "learning_rate": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("learnt", [True, False], ids=["labels memorised", "nothing learnt"])
def test_members_are_told_by_random_labels_that_were_memorised_and_by_nothing_else(learnt: bool) -> None:
    dice = torch.Generator().manual_seed(0)
    images, labels = torch.rand(400, 1, 8, 8, generator=dice), torch.randint(10, (400,), generator=dice)
    federation = OVERFITTED | {"learning_rate": 0.1 if learnt else 1e-9}
    values = scenario("loss-threshold", federation, model={"name": "mlp", "width": 64}, threat={"target_records": 40})
    del values["data"]
    summary = only(fedaudit.audit(values, data=(images, labels), progress=False).result)
    assert summary.verdict == "inferred" if learnt else summary.verdict in NOT_SHOWN
