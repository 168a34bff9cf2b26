"""Power and margin of attacks that know nothing, of one that knows everything, and what they may cost."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedaudit
from fedaudit.attacks import ATTACKS, Attack, Finding, ImageFinding, make_attack, register
from fedaudit.attacks.inversion.own_updates import own_client
from fedaudit.data import load_dataset
from fedaudit.pipeline import margin
from fedaudit.pipeline.power import KnownClients, power_of
from fedaudit.pipeline.trials import Means
from fedaudit.results import AuditResult, MarginResult
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.observation import Observation, observe
from fedaudit.utils.fingerprint import tensor_digest

FEDERATION: dict[str, Any] = {"name": "f", "clients": 4, "examples": 8, "batch_size": 2}


def scenario(attack: Any, federation: dict[str, Any]) -> dict[str, Any]:
    base = {"data": {"name": "digits"}, "model": {"name": "fcn-3", "width": 16}, "threat": {"knows_labels": True}}
    return {**base, "federations": [federation], "attacks": [attack]}


def audited(attack: Any, **federation: Any) -> AuditResult:
    return fedaudit.audit(scenario(attack, {**FEDERATION, **federation}), progress=False).result


class _Guess(Attack):
    """Returns noise, or the mean image of the class."""

    name = "guess"
    summary = "for tests"
    paper = "none"
    threat_model = "server, passive"
    needs = ()
    means: ClassVar[Tensor]

    by_class: bool = False

    def _run(self, observation: Observation, *arguments: Any) -> ImageFinding:
        labels = observation.single().update.labels
        assert labels is not None
        shape = (len(labels), *observation.task_info.input_shape)
        images = self.means[labels] if self.by_class else torch.rand(shape, generator=arguments[0])
        return ImageFinding(images=images, labels=labels, label_source="given")


class _Oracle(Attack):
    """Knows of every update which images it was made from."""

    name = "oracle"
    summary = "for tests"
    paper = "none"
    threat_model = "server, passive"
    needs = ()
    known: ClassVar[dict[bytes, Tensor]] = {}

    def _run(self, observation: Observation, *_: Any) -> ImageFinding:
        update = observation.single().update
        assert update.labels is not None
        return ImageFinding(images=self.known[_digest(update.tensors)], labels=update.labels, label_source="given")


class _Single(Attack):
    """Inverts single images by a closed form, and claims to have iterated."""

    name = "single"
    summary = "for tests"
    paper = "none"
    threat_model = "server, passive"
    needs = ()
    runs: ClassVar[list[int]] = []

    iterations: int = 100

    def _run(self, observation: Observation, *arguments: Any) -> Finding:
        update = observation.single().update
        self.runs.append(update.num_examples)
        if update.num_examples == 1:
            return make_attack("exact-linear")(observation)
        images = torch.rand(update.num_examples, *observation.task_info.input_shape, generator=arguments[0])
        return ImageFinding(images=images, labels=torch.zeros(update.num_examples).long(), label_source="none")


def _digest(tensors: dict[str, Tensor]) -> bytes:
    return b"".join(tensor_digest(tensor) for tensor in tensors.values())


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    data = load_dataset("digits")
    inputs, labels = data.train.inputs, data.train.targets
    _Guess.means = torch.stack([inputs[labels == label].mean(dim=0) for label in range(10)])
    _Single.runs.clear()
    made = [register(attack) for attack in (_Guess, _Oracle, _Single)]
    yield
    for attack in made:
        del ATTACKS._entries[attack.name]


@pytest.mark.slow
@pytest.mark.parametrize("by_class", [False, True], ids=["noise", "the class's mean image"])
def test_an_attack_that_knows_nothing_has_no_power_anywhere(by_class: bool) -> None:
    for batch in (1, 2):
        result = audited({"name": "guess", "by_class": by_class}, examples=4 * batch, batch_size=batch)
        (summary,), (control,), (found,) = result.summaries, result.controls, result.margins
        assert summary.verdict == "inconclusive"
        assert control.power is not None
        assert not control.won
        assert control.power.value <= (0.4 if by_class else 0)  # some digits look like the mean of their class
        assert (found.nearest, found.factor) == (None, None)
        assert "it can't tell" in found.text
        assert not any(step.power for step in found.steps)


@pytest.mark.slow
def test_an_attack_that_knows_everything_has_power_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    values = scenario("oracle", FEDERATION)
    recording = fedaudit.simulate(values, progress=False)
    seen = observe(recording.transcript, scenario_from(values).threat).split()
    for one in seen:
        message = one.single()
        _Oracle.known[_digest(message.update.tensors)] = recording.truth.inputs[message.round, message.client]

    def told(*arguments: Any) -> Any:
        made = own_client(*arguments)
        for message, order in zip(made.observation.messages, made.orders, strict=True):
            _Oracle.known[_digest(message.update.tensors)] = made.inputs[order]
        return made

    monkeypatch.setattr("fedaudit.pipeline.power.own_client", told)
    runs = [(make_attack("oracle"), seen[0])]
    measured = power_of(KnownClients(runs, recording.truth, seed=0, device="cpu", name="f-power-oracle"), Means())
    assert measured.enough
    assert measured.recovered == measured.images >= 6
    result = audited("oracle")
    assert result.summaries[0].verdict == "recovered"
    assert not result.margins


@pytest.mark.slow
def test_power_and_margin_cost_no_more_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def cost_and_margin() -> tuple[list[float], MarginResult]:
        _Single.runs.clear()
        (found,) = audited("single", clients=1, examples=64, batch_size=64).margins
        return [1 + 0.1 * (size - 1) for size in _Single.runs], found

    cost, whole = cost_and_margin()
    assert whole.factor == 64
    assert sum(cost[1:]) <= 4 * cost[0]  # power and margin, beside the one update
    monkeypatch.setattr(margin, "MOST_WORK", 2)
    monkeypatch.setattr(margin, "_LEAST_RUNS", 1)
    cost, cut = cost_and_margin()
    assert sum(cost[1:]) <= 2 * cost[0] + 6  # the easiest conditions are always tried: six single images
    assert cut.factor is None
    assert "power and margin may cost" in cut.text
    assert cut.nearest is not None
    assert cut.steps[cut.nearest].power
    untried = [step.reason for step in cut.steps[: cut.nearest] if step.power is None]
    assert untried
    assert all("power and margin may cost" in (reason or "") for reason in untried)
