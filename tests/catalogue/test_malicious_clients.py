"""Malicious clients: what they hold, what they send, what they record, and how that is evaluated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from fedaudit.attacks import make_attack
from fedaudit.defences.spec import DefencesSpec
from fedaudit.evaluation import evaluate
from fedaudit.evaluation.finding_types import FINDING_TYPES, Judgement
from fedaudit.pipeline.run import run_audit
from fedaudit.report import frontier
from fedaudit.report.terminal import print_summary
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.behaviour import BEHAVIOURS, Behaviour, ClientStep
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.seeds import generator
from fedaudit_catalogue.attacks import ClassImagesFinding
from fedaudit_catalogue.class_images import likeness
from tests.build import Killed, Scenarios, recorded

QUICK = {
    "name": "gan",
    "start": 1,
    "images": 6,
    "steps": 3,
    "batch_size": 4,
    "width": 8,
    "keep": 3,
    "every": 2,
    "missing_classes": [3],
}


_CLIENTS = Scenarios(
    model={"name": "convnet-small", "width": 4, "initialisation": "he"},
    federation={"algorithm": "fedavg", "clients": 4, "rounds": 4, "examples": 40, "batch_size": 4, "local_steps": 2},
    threat={"adversary": "client"},
    attacks="gan",
)


def scenario(malicious: dict[str, Any] | None, **federation: Any) -> Scenario:
    return _CLIENTS({"malicious": malicious, **federation})


def simulated(made: Scenario, checkpoint: Path | None = None, until: float = math.inf) -> tuple[Transcript, Truth]:
    """Play a federation; one that isn't kept on disk is played once for all tests."""
    return _once(made.to_yaml()) if checkpoint is None else _played(made, checkpoint, until)


@cache
def _once(text: str) -> tuple[Transcript, Truth]:
    return _played(scenario_from(yaml.safe_load(text)))


def _played(made: Scenario, checkpoint: Path | None = None, until: float = math.inf) -> tuple[Transcript, Truth]:
    recording = recorded(made, checkpoint, until)
    return recording.transcript, recording.truth


@pytest.fixture(autouse=True, scope="module")
def _forgotten() -> Iterator[None]:
    """Leave no truth behind: other tests look for those that are in memory."""
    yield
    _once.cache_clear()


def seen(made: Scenario) -> Observation:
    return observe(simulated(made)[0], made.threat)


class Recorder(Behaviour):
    """Behaves as if honest, and keeps what it was handed."""

    def __init__(self) -> None:
        self.turns: list[ClientStep] = []

    def __call__(self, step: ClientStep) -> dict[str, Tensor]:
        self.turns.append(dataclasses.replace(step, weights={n: t.clone() for n, t in step.weights.items()}))
        return step.train(step.batches)

    def adversary_log(self) -> dict[str, Tensor]:
        return {"turns": torch.tensor(len(self.turns))}

    def settings(self) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def anew(self) -> Recorder:
        return self  # a simulation works with another, and the test wants what it was handed


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    entry = dataclasses.replace(BEHAVIOURS["gan"], name="recorder", value=cast(Any, lambda: made))
    monkeypatch.setitem(BEHAVIOURS._entries, "recorder", entry)
    return made


def test_a_behaviour_gets_what_its_client_has_and_no_more(recorder: Recorder) -> None:
    made = scenario({"name": "recorder", "clients": 2})
    transcript, truth = _played(made)
    assert {step.client for step in recorder.turns} == {2, 3}
    assert len(recorder.turns) == 4 * 2
    for step in recorder.turns:
        assert all(step.weights[n].equal(t) for n, t in transcript.rounds[step.round].weights.items())
        held = step.task_info.normalise(truth.inputs[step.round, step.client])
        assert torch.cat([inputs for inputs, _ in step.batches]).equal(held)
        tensors = [x for batch in step.batches for x in batch]
        for other in range(2):
            foreign = step.task_info.normalise(truth.inputs[step.round, other])
            assert not any(
                t.shape[1:] == foreign.shape[1:] and bool((t[:, None] == foreign).flatten(2).all(2).any())
                for t in tensors
            )
    fields = {field.name for field in dataclasses.fields(ClientStep)}
    told = {"round", "client", "model", "weights", "batches", "train", "task_info", "loss", "generator", "records"}
    assert fields == told
    assert all(step.records is None for step in recorder.turns)


def test_honest_training_in_malicious_hands_changes_nothing(recorder: Recorder) -> None:
    handed, honest = (_played(scenario(one))[0] for one in ({"name": "recorder"}, None))
    handed.adversary_log.clear()  # of what it was handed
    assert handed.fingerprint() == honest.fingerprint()


def test_before_its_start_the_malicious_client_is_honest_and_then_it_is_not() -> None:
    honest, _ = simulated(scenario({**QUICK, "start": 3}))
    poisoned, _ = simulated(scenario({**QUICK, "start": 2}))
    for r in range(2):
        for a, b in zip(honest.rounds[r].updates, poisoned.rounds[r].updates, strict=True):
            assert all(a.tensors[n].equal(b.tensors[n]) for n in a.tensors)
    last = [t.rounds[2].updates[3].tensors for t in (honest, poisoned)]
    assert not all(last[0][n].equal(last[1][n]) for n in last[0])
    first = [t.rounds[2].updates[0].tensors for t in (honest, poisoned)]
    assert all(first[0][n].equal(first[1][n]) for n in first[0])


def test_the_adaptive_client_stays_within_its_limit() -> None:
    def farthest(name: str, **settings: Any) -> float:
        transcript, _ = simulated(scenario({**QUICK, "name": name, **settings}, learning_rate=0.1))
        return max(float(t.abs().max()) for t in transcript.rounds[2].updates[3].tensors.values())

    assert farthest("gan") > 1e-3
    assert farthest("gan-adaptive", limit=1e-3) == pytest.approx(1e-3, rel=1e-3)


def test_pictures_are_kept_now_and_then_and_in_the_last_round() -> None:
    adversary_log = seen(scenario({**QUICK, "every": 2}, rounds=5)).adversary_log
    assert sorted(adversary_log) == ["gan/round-00001", "gan/round-00003", "gan/round-00004", "gan/target"]
    assert all(adversary_log[n].shape == (3, 1, 8, 8) for n in adversary_log if "round" in n)


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_every_kind_of_update_can_be_poisoned(algorithm: str) -> None:
    steps = {"local_steps": None} if algorithm == "fedsgd" else {}
    clean = simulated(scenario(None, algorithm=algorithm, **steps))[0].rounds[-1].updates[3].tensors
    dirty = simulated(scenario(QUICK, algorithm=algorithm, **steps))[0].rounds[-1].updates[3].tensors
    assert not all(clean[n].equal(dirty[n]) for n in clean)


def test_colluders_share_one_generator() -> None:
    alone = seen(scenario(QUICK)).adversary_log
    together = seen(scenario({**QUICK, "clients": 2})).adversary_log
    assert alone.keys() == together.keys()


def test_only_the_client_has_its_adversary_log(tmp_path: Path) -> None:
    transcript, _ = simulated(scenario(QUICK))
    assert observe(transcript, ThreatModel(adversary="server")).adversary_log == {}
    assert observe(transcript, ThreatModel(adversary="eavesdropper")).adversary_log == {}
    transcript.save(tmp_path / "t")
    again = Transcript.load(tmp_path / "t")
    assert again.adversary_log.keys() == transcript.adversary_log.keys()
    assert all(again.adversary_log[n].equal(t) for n, t in transcript.adversary_log.items())


@pytest.mark.usefixtures("checkpoint_every_round")
@pytest.mark.parametrize("upsampling", ["transposed", pytest.param("nearest", marks=pytest.mark.slow)])
def test_a_killed_simulation_goes_on_with_the_same_generator(tmp_path: Path, upsampling: str) -> None:
    made = scenario({**QUICK, "upsampling": upsampling})
    whole, _ = simulated(made)
    checkpoint = tmp_path / "f.simulation"
    with pytest.raises(Killed):
        simulated(made, checkpoint, 11)  # in the third round
    again, _ = simulated(made, checkpoint)
    assert again.fingerprint() == whole.fingerprint()
    assert all(again.adversary_log[n].equal(t) for n, t in whole.adversary_log.items())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({**QUICK, "target": 10}, "target is 10, but classes are 0 to 9"),
    ({**QUICK, "clients": 4}, "leave an honest one"),
    ({"name": "gann"}, "unknown behaviour 'gann'.*gan"),
    ({**QUICK, "step": 3}, "step"),
]


@pytest.mark.parametrize(("malicious", "reason"), REFUSED)
def test_what_cannot_be_is_refused(malicious: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        simulated(scenario(malicious))


def test_the_attack_says_why_not() -> None:
    made = scenario(None)
    with pytest.raises(NotApplicable, match="malicious: gan"):
        make_attack("gan").check(seen(made))
    transcript, _ = simulated(scenario(QUICK))
    with pytest.raises(NotApplicable, match=r"set threat\.adversary=client"):
        make_attack("gan").check(observe(transcript, ThreatModel()))


def test_the_finding_doesn_t_depend_on_the_truth() -> None:
    observation = seen(scenario(QUICK))
    found = make_attack("gan")(observation, generator=generator(0, "x"))
    assert isinstance(found, ClassImagesFinding)
    assert found.rounds == (1, 3)
    assert found.target == 3
    assert 0 <= found.images.min() <= found.images.max() <= 1


def test_pairs_are_the_nearest_ones_and_all() -> None:
    real = torch.rand(5, 1, 8, 8, generator=generator(0, "real"))
    found = likeness(real[[1, 1, 4]], real)
    assert found["psnr nearest"] == 100
    assert found["ssim nearest"] == pytest.approx(1)
    errors = [(real[i] - real[j]).double().square().mean().clamp_min(1e-10) for i in (1, 1, 4) for j in range(5)]
    assert found["psnr"] == pytest.approx(float(torch.stack([-10 * e.log10() for e in errors]).mean()))


def evaluated(images: Tensor, truth: Truth, observation: Observation) -> dict[str, tuple[float, float | None]]:
    finding = ClassImagesFinding(attack="gan", images=images[None], rounds=(1,), target=3)
    result = evaluate(finding, observation, truth, seed=0).result
    return {m.name: (m.value, m.baseline) for m in result.metrics}


def test_real_threes_pass_for_threes_and_noise_and_sevens_do_not() -> None:
    made = scenario(QUICK)
    transcript, truth = simulated(made)
    observation = observe(transcript, made.threat)
    pick = {d: truth.candidates[truth.candidate_labels == d][-8:] for d in (3, 7)}  # victims stand in front
    threes, sevens = (evaluated(pick[d], truth, observation) for d in (3, 7))
    noise = evaluated(torch.rand(8, 1, 8, 8, generator=generator(0, "noise")), truth, observation)
    assert threes["recognised"][0] >= 0.9
    assert threes["nearest_pair_psnr"][0] == 100
    assert sevens["recognised"][0] <= 0.1
    assert noise["recognised"][0] <= 0.5
    assert noise["nearest_pair_psnr"][0] < sevens["nearest_pair_psnr"][0] < 100
    baseline = threes["recognised"][1]
    assert baseline is not None
    assert baseline <= 0.2


@pytest.mark.slow
def test_grey_threes_are_closest_to_the_class_and_decide_nothing() -> None:
    made = scenario(QUICK)
    transcript, truth = simulated(made)
    observation = observe(transcript, made.threat)
    labels = truth.candidate_labels
    threes = truth.candidates[labels == 3][-8:]
    grey = 0.2 * threes + 0.6
    clear, faint = (evaluated(images, truth, observation) for images in (threes, grey))
    for name in ("closest_class", "class_correlation"):
        assert faint[name] == pytest.approx(clear[name]), "brightness and contrast don't count"
    assert faint["closest_class"][0] >= 0.7
    baseline = faint["closest_class"][1]
    assert baseline is not None
    assert baseline <= 0.2
    assert faint["recognised"][0] == 0
    mean = truth.candidates[labels == 3].mean(dim=0).flatten()
    oracle = sum(float(np.corrcoef(image.flatten(), mean)[0, 1]) for image in threes) / len(threes)
    assert clear["class_correlation"][0] == pytest.approx(oracle, abs=0.05)

    def verdict(images: Tensor, target: int = 3) -> Judgement:
        finding = ClassImagesFinding(attack="gan", images=images[None], rounds=(1,), target=target)
        return FINDING_TYPES[finding.kind].verdict([evaluate(finding, observation, truth, seed=0).result])

    assert verdict(threes).verdict == "recovered"
    assert verdict(grey).verdict == "inconclusive"
    assert "75% of them" in verdict(grey).text
    assert verdict(1 - grey).verdict == "not demonstrated"
    assert {verdict(torch.full_like(grey, 0.5), target).verdict for target in range(10)} == {"not demonstrated"}


def test_two_held_out_images_of_a_class_are_enough_wherever_they_fall() -> None:
    made = scenario(QUICK)
    transcript, truth = simulated(made)
    own = (truth.candidate_labels == 3).nonzero().flatten()
    rows = torch.cat([(truth.candidate_labels != 3).nonzero().flatten()[:60], own[-2:]])
    few = dataclasses.replace(truth, candidates=truth.candidates[rows], candidate_labels=truth.candidate_labels[rows])
    finding = ClassImagesFinding(attack="gan", images=truth.candidates[own[-2:]][None], rounds=(1,), target=3)
    for seed in range(10):
        evaluate(finding, observe(transcript, made.threat), few, seed=seed)


def test_what_judges_drawings_doesn_t_depend_on_the_rounds_that_are_recorded() -> None:
    images = torch.rand(8, 1, 8, 8, generator=generator(0, "drawn"))
    found = []
    for record in ([0], [2]):
        made = scenario(QUICK, record=record)
        made = made.model_copy(update={"data": made.data.model_copy(update={"split": "train"})})
        transcript, truth = simulated(made)
        found.append(evaluated(images, truth, observe(transcript, made.threat)))
        victims = torch.cat(list(truth.inputs.values()))
        likest = evaluated(
            victims[torch.cat(list(truth.labels.values())) == 3][:8], truth, observe(transcript, made.threat)
        )
        assert likest["nearest_pair_psnr"][0] < 100
    assert found[0] == found[1]


def test_the_report_shows_what_was_drawn(tmp_path: Path) -> None:
    finished = run_audit(scenario({**QUICK, "every": 1}))
    page = finished.save(tmp_path).read_text()
    (finding,) = finished.result.findings
    assert finished.result.adversary.acts
    assert [sheet.title.split(":")[0] for sheet in finding.image_rows] == ["real", "round 1", "round 2", "round 3"]
    assert all((tmp_path / sheet.path).is_file() for sheet in finding.image_rows)
    assert page.count('class="image-row"') == 4


def test_an_honest_server_does_not_act_whoever_else_is_malicious() -> None:
    values = scenario(QUICK).model_dump(mode="json") | {"threat": {"adversary": "server"}}
    values |= {"attacks": ["labels"], "evaluation": {"max_updates": 1}}
    assert not run_audit(scenario_from(values)).result.adversary.acts


def test_what_malicious_clients_lack_is_left_out() -> None:
    _, truth = simulated(scenario({**QUICK, "missing_classes": [3, 5], "clients": 2}, examples=None))
    held = {client: truth.labels[0, client] for client in range(4)}
    assert not any(bool(torch.isin(held[client], torch.tensor([3, 5])).any()) for client in (2, 3))
    with pytest.raises(BadInput, match="nothing left"):
        simulated(scenario({**QUICK, "missing_classes": list(range(10))}))


def test_who_was_accepted_is_told_round_by_round() -> None:
    made = scenario({**QUICK, "start": 0})
    made = made.model_copy(update={"defences": DefencesSpec.model_validate({"aggregator": {"name": "krum", "f": 0}})})
    finished = run_audit(made)
    (federation,) = finished.result.federations
    assert federation.history is not None
    honest, malicious = federation.history.honest_accepted, federation.history.malicious_accepted
    assert len(honest) == len(malicious) == 4
    for h, m in zip(honest, malicious, strict=True):  # Krum takes one of four
        assert h is not None
        assert m is not None
        assert 3 * h + m == pytest.approx(1)


@pytest.mark.slow
def test_the_page_and_the_comparison_know_other_leaks_than_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = scenario(QUICK)
    values = made.model_dump(mode="json")
    values["other_defences"] = [{"aggregator": {"name": "krum", "f": 0}}]
    values["evaluation"]["accuracy_every"] = 2
    audit = run_audit(scenario_from(values))
    rows = frontier.prices(audit.result)
    found = {s.federation: s.metrics[0].value for s in audit.result.summaries}
    assert frontier.scale(audit.result).name == "recognised"
    assert {row.federation: row.leak for row in rows} == found
    page = audit.save(tmp_path).read_text()
    for part in ("recognised [95 %]", "Accuracy by round", "Updates that the server took by round"):
        assert part in page
    assert "True and reconstructed images" not in page, "a part about images of which there are none"
    print_summary(audit.result)
    assert "recognised" in capsys.readouterr().out


def test_many_rounds_are_averaged_in_groups() -> None:
    audit = run_audit(scenario(QUICK))
    (federation,) = audit.result.federations
    assert federation.history is not None
    history = federation.history.model_copy(
        update={"honest_accepted": [1.0, 0.0] * 50, "malicious_accepted": [None, 1.0, None, 0.0] * 25}
    )
    result = audit.result.model_copy(update={"federations": [federation.model_copy(update={"history": history})]})
    (chart,) = frontier.taken(result)
    honest, malicious = chart.lines
    assert honest.x[:2] == [1.5, 5.5]  # four rounds each
    assert set(honest.y) == {50.0}
    assert set(malicious.y) == {50.0}
