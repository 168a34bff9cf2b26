"""Power and margin: whether an attack would have found something, and under which conditions it would."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import fedaudit
from fedaudit.attacks import ATTACKS, Attack, ImageFinding, make_attack, register
from fedaudit.cli import app as cli
from fedaudit.defences.client_defences import CLIENT_DEFENCES, ClientContext, ClientDefence, changed
from fedaudit.pipeline.margin import Step, ladder, nearest
from fedaudit.pipeline.power import _known, powerful
from fedaudit.results import AuditResult
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.update import ClientDefenceInfo, Update
from tests.build import only

FEDERATION: dict[str, Any] = {
    "name": "f", "algorithm": "fedavg", "clients": 2, "rounds": 1, "batch_size": 4, "local_steps": 2,
    "learning_rate": 0.1,
}  # fmt: skip
SINGLE: dict[str, Any] = {"name": "f", "clients": 4, "examples": 4, "batch_size": 1}
LENET = {"model": {"name": "lenet", "initialisation": "uniform"}}
NOISE = {"name": "dp", "clip": 1.0, "noise": 1.0, "where": "local", "epsilon": None}


def scenario(federation: dict[str, Any], *attacks: Any, **rest: Any) -> dict[str, Any]:
    base = {"data": {"name": "digits", "limit": 60}, "model": {"name": "fcn-3", "width": 64}}
    return {**base, "federations": [federation], "attacks": list(attacks or ["exact-linear"]), **rest}


def audited(federation: dict[str, Any], *attacks: Any, **rest: Any) -> AuditResult:
    limits = {key: rest.pop(key) for key in ("fail_below",) if key in rest}
    return fedaudit.audit(scenario(federation, *attacks, **rest), progress=False, **limits).result


@pytest.mark.parametrize(
    ("recovered", "images", "enough"),
    [(6, 6, True), (5, 5, False), (5, 6, False), (8, 9, True), (9, 10, True), (8, 10, False), (0, 0, False)],
)
def test_power_is_four_of_five_and_surely_half(recovered: int, images: int, enough: bool) -> None:
    assert powerful(recovered, images) is enough


@given(st.integers(1, 40), st.data())
def test_bisection_finds_the_hardest_conditions_and_asks_for_few(length: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, length - 1))
    edge = data.draw(st.integers(0, length))  # from there on there is power
    asked: list[int] = []

    def has_power(place: int) -> bool:
        asked.append(place)
        return place >= edge

    steps = [Step(None, 1, 1, 1, 1, ())] * length  # type: ignore[arg-type]
    assert nearest(steps, has_power, first) == (None if edge == length else max(edge, first))
    assert min(asked) >= first
    assert len(asked) <= math.ceil(math.log2(length - first)) + 1 if length > first + 1 else 1


def test_a_ladder_goes_from_the_clients_conditions_to_a_single_image_of_an_untrained_network() -> None:
    model = {"name": "resnet20", "width": 4, "batch_norm": "train"}
    made = scenario(FEDERATION, data={"name": "photos", "limit": 40}, model=model, defences={"client_defence": NOISE})
    seen = observe(fedaudit.simulate(made, progress=False).transcript, scenario_from(made).threat).split()[0]
    steps = ladder(seen, 0)
    assert [(s.steps, s.batch, s.examples) for s in steps] == [
        (2, 4, 8), (2, 4, 8), (1, 4, 4), (1, 2, 2), (1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1),
    ]  # fmt: skip
    order = ("no defence", "labels known", "BatchNorm in eval mode", "the network untrained")
    assert steps[0].changes == ()
    assert steps[1].changes == order[:1]
    assert steps[-1].changes == order
    assert steps[-2].observation.task_info.batch_norm == "eval"
    assert steps[-3].observation.single().update.labels is not None
    assert steps[1].observation.single().update.sanitised is None
    assert str(steps[0]) == "updates over 8 images in 2 steps"
    changed = steps[-1].observation.single().weights
    first = next(iter(changed))
    assert not torch.equal(changed[first], seen.single().weights[first])


def test_the_margin_is_by_how_many_times_the_updates_are_too_large() -> None:
    result = audited(FEDERATION, fail_below={"margin": 4})
    (margin,) = result.margins
    assert (margin.factor, margin.more, margin.federation, margin.attack) == (8.0, False, "f", "exact-linear")
    assert margin.nearest is not None
    step = margin.steps[margin.nearest]
    assert (step.examples, step.power, step.recovered, step.images) == (1, True, 6, 6)
    assert all(i.psnr > 60 for i in margin.pictures)
    assert margin.steps[0].text == "updates over 8 images in 2 steps"
    assert result.thresholds[0].outcome == "pass"
    assert result.thresholds[0].where == "exact-linear on f"


def test_pictures_of_a_margin_are_known_examples_and_no_victims() -> None:
    made = scenario(FEDERATION)
    victims = fedaudit.simulate(made, progress=False).truth.inputs
    finished = fedaudit.audit(made, progress=False)
    shown = [finished.image_files[i.true_image] for m in finished.result.margins for i in m.pictures]
    assert shown
    for batch in victims.values():
        for victim in batch:
            assert not any(torch.equal(victim, image) for image in shown)


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "outcome", "code"), [("margin=8", "pass", 0), ("margin=9", "fail", 1)])
def test_a_least_margin_decides_the_exit_code(tmp_path: Path, limit: str, outcome: str, code: int) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(json.dumps(scenario(FEDERATION)))
    out = tmp_path / "out"
    done = CliRunner().invoke(cli, ["audit", str(file), "--out", str(out), "--fail-below", limit, "--workers", "1"])
    assert done.exit_code == code
    (threshold,) = AuditResult.load(out / "results.json").thresholds
    assert (threshold.outcome, threshold.below, threshold.worst) == (outcome, True, 8.0)
    assert f"{outcome.upper()}: margin at least" in done.output


def test_images_that_come_out_leave_a_margin_of_one() -> None:
    result = audited(SINGLE, fail_below={"margin": 2})
    assert not result.margins
    assert [(t.outcome, t.worst) for t in result.thresholds] == [("fail", 1.0)]


def test_without_a_margin_a_least_one_is_not_tested() -> None:
    result = audited(FEDERATION, "labels", fail_below={"margin": 2})
    assert [t.outcome for t in result.thresholds] == ["not tested"]
    (threshold,) = audited(FEDERATION, fail_below={"margin": 2}, evaluation={"controls": False}).thresholds
    assert threshold.outcome == "not tested"


@pytest.mark.parametrize("limits", [{"psnr": 3.0}, {"margin": "four"}, {"margin": math.nan}, {"margin": True}, [4]])
def test_a_limit_that_makes_no_sense_is_refused(limits: Any) -> None:
    with pytest.raises(fedaudit.BadInput, match="margin"):
        fedaudit.audit(scenario(FEDERATION), progress=False, fail_below=limits)


class _Sometimes(Attack):
    """Recovers known examples as often as ``power`` says, and no victim's."""

    name = "sometimes"
    summary = "for tests"
    paper = "none"
    threat_model = "server, passive"
    needs = ()

    power: float = 1.0

    def _run(self, observation: Observation, *arguments: Any) -> ImageFinding:
        message = observation.single()
        known = "-power-" in observation.federation and message.client < 10 * self.power
        found = make_attack("exact-linear")(observation) if known else None
        shape = observation.task_info.input_shape
        images = found.images if isinstance(found, ImageFinding) else torch.rand(1, *shape, generator=arguments[0])
        return ImageFinding(images=images, labels=torch.zeros(1, dtype=torch.int64), label_source="given")


@pytest.fixture
def sometimes() -> Any:
    made = register(_Sometimes)
    yield made
    del ATTACKS._entries["sometimes"]


def test_not_demonstrated_needs_power_under_these_very_conditions(sometimes: Any) -> None:
    summary = only(result := audited(SINGLE, "sometimes"))
    assert summary.verdict == "not demonstrated"
    (control,) = result.controls
    assert control.power is not None
    assert (control.power.n, control.power.value, control.won) == (6, 1.0, True)
    assert "it recovered 6; of the clients' 4, none" in summary.headline
    assert not result.margins


def test_without_power_nothing_is_decided(sometimes: Any) -> None:
    summary = only(result := audited(SINGLE, {"name": "sometimes", "power": 0.5}))
    assert summary.verdict == "inconclusive"
    (control,) = result.controls
    assert control.power is not None
    assert (control.power.n, control.won) == (9, False)  # 5 of the first 9: more couldn't change it
    assert "it recovered 5" in " ".join(summary.advice)


def test_known_examples_go_through_the_same_defence() -> None:
    result = audited(SINGLE, {"name": "invg", "iterations": 3}, defences={"client_defence": NOISE}, **LENET)
    assert only(result).verdict == "inconclusive"
    (control,) = result.controls
    assert control.power is not None
    assert (control.power.value, control.without_defence) == (0, False)  # without the defence nothing, either


def test_what_comes_out_without_the_defence_alone_the_defence_stops() -> None:
    result = audited(SINGLE, defences={"client_defence": NOISE}, fail_below={"margin": 2})
    summary = only(result)
    assert summary.verdict == "not demonstrated"
    (control,) = result.controls
    assert control.power is not None
    assert (control.power.value, control.without_defence) == (1, True)
    assert "recovered 6 of 6 held-out examples without the defence, and 0 of 3 with it" in control.text
    assert "conditions, but without the defence it recovered 6; of the clients' 4, none" in summary.headline
    assert [t.outcome for t in result.thresholds] == ["not tested"]  # the margin is the defence itself


def test_the_first_line_is_how_far_away_a_leak_is() -> None:
    from fedaudit.report.conclusion import headline

    said = headline(audited(FEDERATION))
    assert said.verdict == "inconclusive"
    assert said.title == (
        "That training images come out here was not shown; images come out of updates over single images (6 of 6 "
        "held-out examples, 100.0 dB); the clients send updates over 8 images in 2 steps."
    )


class _Drowned(ClientDefence):
    """Sends random numbers, and tells nobody."""

    name = "drowned"
    summary = "for tests"
    paper = "none"

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:
        tensors = {n: torch.randn(t.shape, generator=generator) for n, t in update.tensors.items()}
        return changed(update, tensors, ClientDefenceInfo("drowned"))


@pytest.fixture
def drowned() -> Any:
    made = register(_Drowned)
    yield made
    del CLIENT_DEFENCES._entries["drowned"]


def test_a_defence_that_nobody_can_repeat_leaves_no_power(drowned: Any) -> None:
    summary = only(audited(SINGLE, defences={"client_defence": "drowned"}))
    assert summary.verdict == "inconclusive"


def test_examples_that_are_used_again_in_every_epoch_count_once() -> None:
    epochs = {**FEDERATION, "examples": 16, "local_steps": None, "local_epochs": 5}
    made = scenario(epochs)
    seen = observe(fedaudit.simulate(made, progress=False).transcript, scenario_from(made).threat).split()[0]
    steps = ladder(seen, 0)
    assert [(s.examples, s.uses, s.steps) for s in steps[:4]] == [(8, 40, 10), (8, 20, 5), (8, 8, 2), (4, 4, 1)]
    (margin,) = audited(epochs).margins
    assert margin.factor == 8


@pytest.mark.slow
def test_a_rung_that_the_model_cannot_be_trained_on_is_no_crash() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.last(self.norm(self.first(images.flatten(1))).relu()))

    made = scenario({"name": "f", "clients": 2, "batch_size": 8}, {"name": "invg", "iterations": 100})
    result = fedaudit.audit(made, model=Net(), batch_norm="train", progress=False).result
    assert only(result).verdict in ("inconclusive", "identifiable")


def test_an_attack_on_images_that_is_named_for_text_is_refused_and_no_more() -> None:
    made = scenario({"name": "f", "clients": 2, "examples": 4, "batch_size": 2}, "invg", "labels")
    made |= {"data": {"name": "notes-causal"}, "model": {"name": "decoder", "width": 16}}
    result = fedaudit.audit(made, progress=False).result
    assert result.summaries[0].verdict == "not applicable"
    assert not result.margins


def test_known_examples_are_none_that_the_adversary_has() -> None:
    threat = {"target_records": 4, "knows_public_data": True, "public_examples": 20}
    made = scenario({**FEDERATION, "local_steps": 1}, threat=threat)
    recording = fedaudit.simulate(made, progress=False)
    seen = observe(recording.transcript, scenario_from(made).threat).split()[0]
    assert seen.records is not None
    known, _, source = _known(recording.truth, make_attack("invg"), seen, 4)
    assert source == "held-out examples"
    apart = torch.cdist(known.flatten(1), seen.records.public_inputs.flatten(1))
    assert float(apart.min()) > 0


def test_what_the_defence_stops_has_no_margin() -> None:
    made = scenario(SINGLE, defences=[{"name": "plain"}, {"name": "noise", "client_defence": NOISE}])
    result = fedaudit.audit(made, progress=False, fail_below={"margin": 0.5}).result
    assert [(m.federation, m.factor, len(m.steps)) for m in result.margins] == [("f-noise", None, 0)]
    assert "the defence that stops" in result.margins[0].text


@pytest.mark.slow
def test_a_least_margin_is_verified_as_one(tmp_path: Path) -> None:
    fedaudit.audit(scenario(FEDERATION), out=tmp_path, progress=False, fail_below={"margin": 4})
    assert fedaudit.verify(tmp_path, progress=False).differences == []
