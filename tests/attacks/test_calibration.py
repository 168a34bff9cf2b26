"""Calibration: own updates are made as the victims' were; what recovers most of them is chosen; no truth is used."""

import dataclasses
import itertools
import math
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedaudit
from fedaudit.attacks import make_attack
from fedaudit.attacks.findings import ImageFinding
from fedaudit.attacks.inversion import calibration
from fedaudit.attacks.inversion.calibration import (
    SPACE,
    Calibration,
    CalibrationFinding,
    candidates,
    halving,
    psnr_of,
)
from fedaudit.attacks.inversion.methods import AGICPlus
from fedaudit.attacks.inversion.own_updates import distinct, likely_labels, own_client, own_update
from fedaudit.pipeline.calibrations import calibrated, own_images
from fedaudit.pipeline.run import plan
from fedaudit.pipeline.trials import Means, Trial
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import Observation, observe

FEDSGD: dict[str, Any] = {"name": "f", "algorithm": "fedsgd", "clients": 2, "examples": 4, "batch_size": 2}
FEDAVG: dict[str, Any] = {
    "name": "f", "algorithm": "fedavg", "clients": 2, "examples": 12, "batch_size": 2, "local_epochs": 2,
    "learning_rate": 0.05, "momentum": 0.5,
}  # fmt: skip


def scenario(federation: dict[str, Any] = FEDSGD, **rest: Any) -> dict[str, Any]:
    base = {"data": {"name": "digits"}, "model": {"name": "lenet"}, "federations": [federation], "attacks": ["invg"]}
    return {**base, "threat": {"knows_labels": True}, **rest}


def simulated(made: dict[str, Any]) -> tuple[list[Observation], Recording]:
    recording = fedaudit.simulate(made, progress=False)
    return observe(recording.transcript, scenario_from(made).threat).split(), recording


RESNET: dict[str, Any] = {"data": {"name": "photos", "limit": 40}, "model": {"name": "resnet20", "width": 4}}


@pytest.mark.parametrize(
    "made",
    [
        scenario(),
        scenario(FEDAVG),
        scenario(**RESNET),
        scenario({**FEDAVG, "examples": 8}, **{**RESNET, "model": {**RESNET["model"], "batch_norm": "train"}}),
        scenario({**FEDAVG, "algorithm": "fedprox", "proximal_mu": 0.1, "momentum": 0.0}),
        scenario(defences={"client_defence": {"name": "ffl-random", "ratio": 0.5}}),
    ],
    ids=["gradients", "epochs", "residual", "batch norm", "proximal", "layers"],
)
def test_an_update_of_the_victims_examples_in_their_order_is_the_victims(made: dict[str, Any]) -> None:
    seen, recording = simulated(made)
    for observation in seen:
        message = observation.single()
        key = (message.round, message.client)
        inputs, labels = recording.truth.inputs[key], recording.truth.labels[key]
        order = torch.arange(len(inputs))
        own = own_update(observation, inputs, labels, order, torch.Generator()).single()
        assert own.update.tensors.keys() == message.update.tensors.keys()
        for name, tensor in message.update.tensors.items():
            torch.testing.assert_close(own.update.tensors[name], tensor, rtol=1e-4, atol=1e-6)
        assert own.update.buffers.keys() == message.update.buffers.keys()
        for name, tensor in message.update.buffers.items():
            torch.testing.assert_close(own.update.buffers[name], tensor, rtol=1e-4, atol=1e-6)


def test_an_own_client_goes_through_its_examples_again_and_again() -> None:
    made = scenario({**FEDAVG, "rounds": 2})
    seen = observe(fedaudit.simulate(made, progress=False).transcript, scenario_from(made).threat).split("client")[0]
    inputs, labels = torch.rand(40, 1, 8, 8), torch.arange(40) % 10
    own = own_client(seen, (inputs, labels), torch.Generator().manual_seed(1))
    assert distinct(seen) == len(own.inputs) == 6
    assert [len(order) for order in own.orders] == [12, 12]
    for order in own.orders:
        assert all(sorted(epoch) == list(range(6)) for epoch in (order[:6].tolist(), order[6:].tolist()))
    assert own.orders[0].tolist() != own.orders[1].tolist()
    for message, order in zip(own.observation.messages, own.orders, strict=True):
        assert message.update.labels is not None
        assert message.update.labels.equal(own.labels[order])


def test_a_defence_is_repeated_as_far_as_it_is_known() -> None:
    def noisy(noise: float) -> tuple[Tensor, Tensor]:
        client_defence = {
            "name": "dp",
            "clip": 0.1,
            "noise": noise,
            "where": "local",
            "level": "client",
            "epsilon": None,
        }
        (first, *_), recording = simulated(scenario(defences={"client_defence": client_defence}))
        key = (first.single().round, first.single().client)
        inputs, labels = recording.truth.inputs[key], recording.truth.labels[key]
        own = own_update(first, inputs, labels, torch.arange(len(inputs)), torch.Generator().manual_seed(3)).single()
        return tuple(torch.cat([t.flatten() for t in m.update.tensors.values()]) for m in (own, first.single()))  # type: ignore[return-value]

    own, victim = noisy(0.5)
    assert float(own.norm() / victim.norm()) == pytest.approx(1, abs=0.1)
    assert not torch.allclose(own, victim, atol=1e-3)  # its noise is its own
    own, victim = noisy(1e-4)
    assert float(torch.nn.functional.cosine_similarity(own, victim, dim=0)) > 0.999  # what was clipped is as long


def test_a_clip_alone_is_repeated() -> None:
    clip = {"name": "fixed-clipping", "clipping_norm": 0.1, "side": "client"}
    (first, *_), recording = simulated(scenario(FEDAVG, defences={"aggregator": clip}))
    message = first.single()
    key = (message.round, message.client)
    inputs, labels = recording.truth.inputs[key], recording.truth.labels[key]
    own = own_update(first, inputs, labels, torch.arange(len(inputs)), torch.Generator()).single()
    sent = torch.cat([tensor.flatten() for tensor in own.update.tensors.values()])
    assert float(sent.norm()) == pytest.approx(0.1, rel=1e-4)  # the victim's length


def test_sparse_updates_keep_as_many_numbers() -> None:
    (first, *_), recording = simulated(scenario(defences={"client_defence": {"name": "top-k", "ratio": 0.1}}))
    key = (first.single().round, first.single().client)
    inputs, labels = recording.truth.inputs[key].flip(-1), recording.truth.labels[key]
    own = own_update(first, inputs, labels, torch.arange(len(inputs)), torch.Generator()).single()
    for name, tensor in first.single().update.tensors.items():
        assert int(own.update.tensors[name].count_nonzero()) <= int(tensor.count_nonzero())


def test_candidates_are_what_the_attack_has_and_begin_with_its_own() -> None:
    (gradient, *_), _ = simulated(scenario())
    (steps, *_), _ = simulated(scenario(FEDAVG))
    plus, invg = (candidates(make_attack(name), gradient.single()) for name in ("agic-plus", "invg"))
    assert plus[0] == invg[0] == {}
    assert len(candidates(make_attack("agic-plus"), steps.single(), learned=True)) == len(SPACE) <= 16
    assert len(plus) == len([line for line in SPACE if not line.keys() & {"start", "interpolation"}])
    replayed = candidates(make_attack("invg"), steps.single())
    assert not any("interpolation" in line for line in replayed)
    assert not any("denoising" in line or "subspace" in line for line in invg)
    assert all(invg.count(line) == 1 for line in invg)


class Told(AGICPlus):
    """A search whose outcome is told by its settings: so what a calibration makes of outcomes is seen at once."""

    name = "told"
    best: ClassVar[float] = 0.05  # total variation

    def _run(self, observation: Observation, *_: Any) -> ImageFinding:
        count = observation.single().update.num_examples
        outcome = 20 - abs(math.log10(self.total_variation / self.best)) + self.iterations / 1e4
        images, labels = torch.zeros(count, 1, 8, 8), torch.zeros(count, dtype=torch.int64)
        return ImageFinding(images=images, labels=labels, label_source="given", objective=outcome)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_psnr", lambda finding, *_: [finding.objective])


@pytest.mark.parametrize(
    ("batch", "iterations", "served", "expected"),
    [
        (1, 1000, 5, [(83, 2, 6), (83, 4, 3), (750, 2, 2)]),
        (2, 1000, 5, [(83, 2, 6), (166, 2, 3), (750, 2, 2)]),
        (4, 1000, 5, [(125, 1, 8), (250, 1, 4), (500, 1, 2), (1000, 1, 2)]),
        (1, 1000, 1, [(133, 1, 3), (300, 1, 2)]),
        (1, 10_000, 6, [(166, 4, 12), (332, 4, 6), (664, 4, 3), (9000, 2, 2)]),
        (4, 100, 6, [(100, 1, 3)]),  # as long as the last two's: none is run again
    ],
)
def test_effort_goes_over_more_images_and_then_into_longer_runs(
    outcomes: None, batch: int, iterations: int, served: int, expected: list[tuple[int, int, int]]
) -> None:
    """By hand: three fifths are for the last two, each rung has an equal part of the rest, in runs of 60 at least."""
    (first, *_), _ = simulated(scenario({**FEDSGD, "clients": 1, "examples": batch, "batch_size": batch}))
    told, effort = Told(iterations=iterations), []
    own = own_images(first).inputs, torch.zeros(len(own_images(first).inputs), dtype=torch.int64)
    rungs, images = halving(
        told, first, own, generator=torch.Generator(), iterations=iterations * served,
        progress=lambda done, of: effort.append((done, of)),
    )  # fmt: skip
    groups = itertools.groupby(rungs, lambda rung: (rung.iterations, rung.updates))
    tried = [(*key, [rung.settings for rung in group]) for key, group in groups]
    assert [(length, updates, len(settings)) for length, updates, settings in tried] == expected
    assert images == batch * max(updates for _, updates, _ in expected)
    for (*_, before), (*_, after) in itertools.pairwise(tried[:-1]):  # of settings from worst to best
        assert sorted(map(str, after)) == sorted(map(str, before[-len(after) :]))
    assert {} in tried[-1][-1]
    space = [settings.get("total_variation", told.total_variation) for settings in tried[0][-1]]
    nearest = min(space, key=lambda value: abs(math.log10(value / told.best)))
    assert rungs[-1].settings.get("total_variation") == nearest
    assert sum(rung.iterations * rung.updates for rung in rungs) <= iterations * served


def test_settings_that_recover_no_more_than_its_own_are_not_chosen(outcomes: None) -> None:
    (first, *_), _ = simulated(scenario())
    told = Told(total_variation=Told.best, iterations=1000)
    assert {"denoising": 3.0} in candidates(told, first.single())  # which recovers as much
    own = Calibration(attack=told, inputs=own_images(first).inputs, updates=6)(first, seed=0)
    assert isinstance(own, CalibrationFinding)
    assert not own.settings
    assert {str(rung.settings) for rung in own.rungs} > {"{}"}


BAD = {"total_variation": 1.0, "iterations": 200}  # of which nothing comes out


@pytest.mark.slow
def test_bad_settings_are_replaced_by_such_as_recover_the_victims() -> None:
    single = {**FEDSGD, "examples": 2, "batch_size": 1}
    lenet = {"name": "lenet", "initialisation": "uniform"}
    seen, recording = simulated(scenario(single, model=lenet))
    attack: Any = make_attack("invg", BAD)
    images = own_images(seen[0]).inputs
    fitted = attack.calibrated(seen[0], images, updates=2, seed=1)
    assert fitted.total_variation < BAD["total_variation"]
    assert not fitted.calibrate

    def reached(one: Any) -> float:
        found = one(seen[0], seed=1)
        return psnr_of(found.images, recording.truth.inputs[0, 0])[0]

    assert reached(fitted) > reached(attack) + 3


def test_one_calibration_serves_all_updates_of_the_same_facts_and_no_victim_has_a_part_in_it(tmp_path: Path) -> None:
    def chosen(data: dict[str, Any], **means: Any) -> tuple[list[Trial], CalibrationFinding]:
        made = scenario(data={"name": "digits", **data})
        transcript = fedaudit.simulate(made, progress=False).transcript
        attack = make_attack("invg", {**BAD, "iterations": 24, "calibrate": True})
        trials = calibrated(plan([observe(transcript, scenario_from(made).threat)], [attack]), Means(**means))
        found = {id(t.calibration): t.calibration for t in trials}
        ((own),) = found.values()
        assert isinstance(own, CalibrationFinding)
        return trials, own

    trials, one = chosen({})
    assert len(trials) == 2
    assert trials[0].attack == trials[1].attack
    _, other = chosen({"split": "train"}, workers=2)  # other victims, the same model
    assert one.rungs == other.rungs
    assert one.iterations <= 2 * 24 * 1.5

    kept = tmp_path / "findings"
    _, first = chosen({}, store=kept)
    files = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    _, again = chosen({}, store=kept)
    assert first.settings == again.settings
    assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == files


@pytest.mark.parametrize("seconds", [-1.0, 0.3])
def test_a_calibration_that_the_deadline_stops_is_not_kept(tmp_path: Path, seconds: float) -> None:
    made = scenario()
    transcript = fedaudit.simulate(made, progress=False).transcript
    attack = make_attack("invg", {**BAD, "iterations": 5_000, "calibrate": True})
    means = Means(store=tmp_path, deadline=time.time() + seconds)
    trials = calibrated(plan([observe(transcript, scenario_from(made).threat)], [attack]), means)
    assert all("time" in str(trial.calibration) for trial in trials)
    assert trials[0].attack == attack.with_settings({})
    assert not list(tmp_path.iterdir())


def test_what_nobody_can_repeat_is_not_calibrated_and_says_so() -> None:
    made = scenario(FEDAVG, threat={"knows_labels": True, "knows_training": False})
    made["attacks"] = [{"name": "agic", "iterations": 3, "calibrate": True}]
    result = fedaudit.audit(made, progress=False).result
    assert not result.calibrations
    said = "not calibrated, its own settings are kept: how the clients train"
    assert any(said in note for note in result.findings[0].notes)


def test_an_audit_says_what_was_chosen_and_what_it_cost() -> None:
    attack = {"name": "invg", **BAD, "calibrate": True, "iterations": 24}
    made = scenario(attacks=[attack], evaluation={"controls": False})
    result = fedaudit.audit(made, progress=False).result
    (own,) = result.calibrations
    assert (own.attack, own.federation, own.updates) == ("invg", "f", 2)
    assert own.tried[-1].settings == own.settings
    assert own.iterations == sum(step.iterations * step.updates for step in own.tried) <= 2 * 24 * 1.5
    assert own.text in result.findings[0].notes
    assert result.attacks[0].settings["total_variation"] == BAD["total_variation"]  # what was asked for


def test_public_examples_come_first_and_photographs_are_no_victims() -> None:
    made = scenario(
        threat={"target_records": 4, "knows_public_data": True, "public_examples": 20}, attacks=["loss-threshold"]
    )
    (first, *_), _ = simulated(made)
    assert own_images(first).source == "public examples"
    made = scenario(data={"name": "photos", "split": "train"})
    (first, *_), recording = simulated(made)
    own, held_out = own_images(first), own_images(first, held_out=True)
    assert own.inputs.shape[1:] == held_out.inputs.shape[1:] == (3, 32, 32)
    victims = torch.cat(list(recording.truth.inputs.values())).flatten(1)
    for images in (own.inputs, held_out.inputs):
        assert float(torch.cdist(images.flatten(1), victims).min()) > 0.5
    assert float(torch.cdist(own.inputs.flatten(1), held_out.inputs.flatten(1)).min()) > 0


def test_images_without_labels_get_such_as_the_model_takes_them_for() -> None:
    (first, *_), _ = simulated(scenario())
    message = first.single()
    weights = dict(message.weights)
    last = [name for name in weights if name.endswith("bias")][-1]
    weights[last] = torch.where(torch.arange(10) == 7, 50.0, 0.0)
    sure = dataclasses.replace(first, messages=(dataclasses.replace(message, weights=weights),))
    labels = likely_labels(sure, torch.rand(30, 1, 8, 8), torch.Generator().manual_seed(0))
    assert labels.tolist() == [7] * 30
