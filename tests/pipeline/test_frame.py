"""The frame around attacks: what one run receives, and findings that are not images, from audit to report."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from jsonschema import Draft202012Validator
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from fedaudit.attacks import ATTACKS, Attack, Finding, register
from fedaudit.attacks.base import ATTACK_CONFIG
from fedaudit.evaluation import FINDING_TYPES, Evaluation, FindingType, Limits, Metric, compare, evaluate, summarise
from fedaudit.evaluation.finding_types import by_leaks, done
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import Audit, plan, record, run_audit
from fedaudit.pipeline.trials import Trial
from fedaudit.scenario.scenario import scenario_from
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.threat import Scope, ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import BadInput, NotApplicable

ROOT = Path(__file__).parents[2]
DRIFT = Metric("drift", "norm of all updates together", "units")
SHORTFALL = Metric("shortfall", "one hundred less the drift", higher_is_better=False)


@dataclass(frozen=True, kw_only=True)
class DriftFinding(Finding, kind="drift"):
    """A finding with everything that must survive the disk."""

    total: Tensor
    parts: dict[str, Tensor]
    rounds: tuple[tuple[int, float], ...]


@evaluate.register
def _(finding: DriftFinding, observation: Observation, truth: Truth, *, seed: int) -> Evaluation:
    used = {(m.round, m.client) for m in observation.messages} <= set(truth.inputs)
    norm = float(finding.total.norm())
    metrics = [DRIFT.of(norm, 0.0), SHORTFALL.of(100 - norm)]
    return Evaluation(done(finding, observation, metrics=metrics, is_leak=used and norm > 0))


class Drift(Attack):
    """Adds up what it sees."""

    summary: ClassVar[str] = "adds up updates"
    paper: ClassVar[str] = "none"
    threat_model: ClassVar[str] = "server or eavesdropper, passive"
    needs: ClassVar[tuple[str, ...]] = ("updates",)
    recovers: ClassVar[str] = "drifts"
    finds: ClassVar[type[Finding]] = DriftFinding

    scale = 1.0

    def check(self, observation: Observation) -> None:
        pass

    def _run(self, observation: Observation, generator: torch.Generator, *_: object) -> DriftFinding:
        noise = 1e-6 * torch.rand(1, generator=generator)
        first = next(iter(observation.weights[0]))
        vectors = [torch.cat([t.flatten() for t in m.update.tensors.values()]) for m in observation.messages]
        total = self.scale * torch.stack([*vectors, torch.zeros(1).expand_as(vectors[0])]).sum(dim=0) + noise
        return DriftFinding(
            total=total,
            parts={"a.b": noise, "c": total[:2]},
            rounds=tuple((m.round, float(m.weights[first].sum())) for m in observation.messages),
            notes=(f"{len(observation.messages)} messages",),
        )


def test_nobody_overrides_what_checks_and_times():
    with pytest.raises(TypeError, match="Rude overrides"):

        class Rude(Drift):
            def __call__(self, observation: Observation, **_: Any) -> DriftFinding:  # type: ignore[misc]
                return DriftFinding(total=torch.ones(1), parts={}, rounds=())

    class Polite:
        def __call__(self) -> None:
            pass

    with pytest.raises(TypeError, match="Mixed overrides"):
        type("Mixed", (Polite, Drift), {})


def test_a_call_checks_first_and_fills_in_name_time_and_notes():
    @dataclass(frozen=True, kw_only=True)
    class Refusing(Drift):
        name: ClassVar[str] = "refusing"
        refuses: bool = False

        def check(self, observation: Observation) -> None:
            if self.refuses:
                raise NotApplicable("never")

        def _run(self, observation: Observation, *rest: Any) -> DriftFinding:
            assert not self.refuses
            time.sleep(0.01)
            found = super()._run(observation, *rest)
            return dataclasses.replace(found, attack="somebody else", notes=("a", "b", "a"), seconds=1e9)

    whole = observe(transcript(), ThreatModel())
    with pytest.raises(NotApplicable, match="never"):
        Refusing(refuses=True)(whole, generator=torch.Generator())
    found = Refusing()(whole, generator=torch.Generator())
    assert isinstance(found, DriftFinding)
    assert (found.attack, found.notes) == ("refusing", ("a", "b"))
    assert 0.01 <= found.seconds < 60


def _drift(looks: Scope, factor: float = 1.0) -> type[Attack]:
    class Made(Drift):
        name: ClassVar[str] = f"drift-{looks}" + ("-half" if factor != 1 else "")
        default_scope: ClassVar[Scope] = looks
        scale = factor

    return checked_dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)(Made)  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    made = [_drift("update"), _drift("client"), _drift("federation"), _drift("client", 0.5)]
    for cls in made:
        register(cls)
    FINDING_TYPES["drift"] = FindingType(
        by_leaks("{} of {} drifted"), ("'demonstrated': it drifted.",), (DRIFT, SHORTFALL)
    )
    yield
    del FINDING_TYPES["drift"]
    for cls in made:
        del ATTACKS._entries[cls.name]


SCENARIO: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "logistic"},
    "federations": [
        {
            "name": "f", "algorithm": "fedavg", "clients": 3, "clients_per_round": 2, "rounds": 3, "examples": 12,
            "batch_size": 2, "local_steps": 2,
        }
    ],
    "attacks": ["drift-client"],
}  # fmt: skip


def audit(*attacks: str | dict[str, Any], **rest: Any) -> Audit:
    limits = rest.pop("limits", None)
    values = {**SCENARIO, **rest, "attacks": list(attacks)}
    return run_audit(scenario_from(values)).held_to(limits or Limits())


def transcript() -> Transcript:
    (recording,) = record(resolve(scenario_from(SCENARIO)))
    return recording.transcript


def test_an_observation_splits_into_updates_clients_or_not_at_all():
    sent = transcript()
    whole = observe(sent, ThreatModel())
    assert len(whole.split("update")) == len(whole.split()) == 6
    clients = whole.split("client")
    assert [{m.client for m in part.messages} for part in clients] == [{0}, {1}, {2}]
    assert sum(len(part.messages) for part in clients) == 6
    for part in clients:
        assert [m.round for m in part.messages] == sorted({m.round for m in part.messages})
        assert [id(w) for w in part.weights] == [id(m.weights) for m in part.messages]
    assert whole.split("federation") == [whole]
    blind = observe(sent, ThreatModel(adversary="client"))
    assert (blind.split("update"), blind.split("client")) == ([], [])
    assert len(blind.split("federation")[0].weights) == 3


def test_a_plan_gives_every_attack_what_it_looks_at():
    attacks = [ATTACKS[f"drift-{looks}"].value() for looks in ("update", "client", "federation")]
    sent = transcript()
    trials = plan([observe(sent, ThreatModel())], attacks, updates=1)  # the limit is on updates, not on clients
    assert [len(trial.observation.messages) for trial in trials[:1]] == [1]
    assert [trial.attack.name for trial in trials].count("drift-client") == 3
    few = plan([observe(sent, ThreatModel())], attacks, clients=2)
    assert [trial.attack.name for trial in few] == ["drift-update"] * 6 + ["drift-client"] * 2 + ["drift-federation"]
    assert len(trials[-1].observation.messages) == 6
    blind = plan([observe(sent, ThreatModel(adversary="client"))], attacks)
    assert [trial.outcome is None for trial in blind] == [False, False, True]


@pytest.mark.slow
def test_an_attack_on_whole_clients_goes_through_the_audit(tmp_path):
    quick = {"name": "invg", "iterations": 5}
    finished = audit("drift-client", "drift-client-half", "drift-federation", quick)
    result = finished.result
    by_attack = {name: [f for f in result.findings if f.attack == name] for name in ("drift-client", "invg")}
    assert [(f.client, f.kind) for f in by_attack["drift-client"]] == [(0, "drift"), (1, "drift"), (2, "drift")]
    for f in by_attack["drift-client"]:
        assert f.notes == [f"{len(f.rounds)} messages"]
        assert f.round is None or f.rounds == [f.round]
        assert [m.name for m in f.metrics] == ["drift", "shortfall"]
        assert not f.images
    summaries = {s.attack: s for s in result.summaries}
    summary = summaries["drift-client"]
    assert (summary.verdict, summary.verdict_text) == ("inferred", "3 of 3 drifted")
    assert (summary.updates, summary.images, summary.psnr) == (3, 0, None)
    drift = summary.metrics[0]
    values = [f.metrics[0].value for f in by_attack["drift-client"]]
    assert drift.value.mean == pytest.approx(sum(values) / 3)
    assert drift.baseline is not None
    assert (drift.unit, drift.baseline.mean, drift.summary) == ("units", 0.0, DRIFT.summary)
    assert summaries["drift-federation"].updates == 1
    assert "'demonstrated': it drifted." in result.verdict_rules
    pair = next(c for c in result.comparisons if {c.a, c.b} == {"drift-client", "drift-client-half"})
    assert (pair.metric, pair.unit, pair.difference.n) == ("drift", "units", 3)
    schema = json.loads((ROOT / "docs" / "reference" / "results.schema.json").read_text())
    Draft202012Validator(schema).validate(json.loads(result.model_dump_json()))
    page = finished.save(tmp_path).read_text()
    for words in ("3 of 3 drifted", "norm of all updates together", "0 to 2", "Without the attack"):
        assert words in page, words
    assert not any("attacked on its own" in line for line in result.out_of_scope)


def test_a_client_s_finding_depends_on_all_of_its_rounds_and_on_no_other_client():
    whole = observe(transcript(), ThreatModel())
    attack = ATTACKS["drift-client"].value()
    first, second, _ = whole.split("client")
    key = Trial(attack, first, 0, "cpu").key()
    assert key == Trial(attack, dataclasses.replace(first), 0, "cpu").key()
    assert key != Trial(attack, second, 0, "cpu").key()
    assert key != Trial(attack, dataclasses.replace(first, messages=first.messages[:-1]), 0, "cpu").key()
    last = first.messages[-1]
    moved = {name: t + 1e-6 for name, t in last.update.tensors.items()}
    for update in (
        dataclasses.replace(last.update, tensors=moved),
        dataclasses.replace(last.update, buffers={"n": torch.ones(1)}),
        dataclasses.replace(last.update, training=None),
    ):
        other = dataclasses.replace(first, messages=(*first.messages[:-1], dataclasses.replace(last, update=update)))
        assert key != Trial(attack, other, 0, "cpu").key()
    weights = {name: t + 1 for name, t in last.weights.items()}
    other = dataclasses.replace(first, messages=(*first.messages[:-1], dataclasses.replace(last, weights=weights)))
    assert key != Trial(attack, other, 0, "cpu").key()


def test_a_finding_of_any_kind_survives_the_disk(tmp_path):
    whole = observe(transcript(), ThreatModel())
    found: Any = ATTACKS["drift-federation"].value()(whole, generator=torch.Generator().manual_seed(0))
    found.save(tmp_path / "f.safetensors")
    again = Finding.load(tmp_path / "f.safetensors")
    assert isinstance(again, DriftFinding)
    assert again.total.equal(found.total)
    assert {name: t.tolist() for name, t in again.parts.items()} == {n: t.tolist() for n, t in found.parts.items()}
    assert (again.rounds, again.notes, again.objective) == (found.rounds, found.notes, None)
    (tmp_path / "f.safetensors").write_bytes((tmp_path / "f.safetensors").read_bytes()[:60])
    with pytest.raises(BadInput, match="truncated"):
        Finding.load(tmp_path / "f.safetensors")


def test_limits_work_on_the_metrics_of_any_kind(command, tmp_path):
    scenario = tmp_path / "s.yaml"
    scenario.write_text(json.dumps(SCENARIO))
    kept = command("audit", scenario, "--out", tmp_path / "a", "--workers", "1", "--fail-above", "drift=1e9")
    assert kept.code == 0
    assert "3 of 3 drifted" in kept.out
    broken = command("audit", scenario, "--out", tmp_path / "a", "--workers", "1", "--fail-above", "drift=0")
    assert broken.code == 1
    assert "FAIL: drift at most 0" in broken.out
    refused = command("audit", scenario, "--out", tmp_path / "a", "--fail-above", "shortfall=1")
    assert refused.code == 2
    assert "less is more leakage" in refused.err


def test_the_two_step_way_works_on_whole_clients(command, tmp_path):
    scenario = tmp_path / "s.yaml"
    scenario.write_text(json.dumps(SCENARIO))
    assert command("simulate", scenario, "--out", tmp_path / "t").code == 0
    words = ["attack", tmp_path / "t", "--attack", "drift-client", "--attack", "drift-federation", "--workers", "1"]
    assert command(*words, "--out", tmp_path / "judged").code == 0
    found = json.loads((tmp_path / "judged/results.json").read_text())
    expected = audit("drift-client", "drift-federation").result
    assert [f["metrics"] for f in found["findings"]] == [
        [m.model_dump() for m in f.metrics] for f in expected.findings
    ]  # fmt: skip
    (tmp_path / "t/truth.safetensors").unlink()
    assert "not evaluated" in command(*words, "--out", tmp_path / "blind").out
    rows = json.loads((tmp_path / "blind/findings.json").read_text())
    assert [(row["attack"], row["client"]) for row in rows] == [
        ("drift-client", 0), ("drift-client", 1), ("drift-client", 2), ("drift-federation", None),
    ]  # fmt: skip
    for row in rows:
        assert isinstance(Finding.load(tmp_path / "blind" / row["file"]), DriftFinding)


def test_where_less_is_better_the_lower_one_wins():
    def row(attack: str, value: float, client: int) -> Any:
        seen = dataclasses.replace(whole, messages=tuple(m for m in whole.messages if m.client == client))
        found = DriftFinding(attack=attack, total=torch.ones(1), parts={}, rounds=())
        return done(found, seen, metrics=[SHORTFALL.of(value)], is_leak=value < 3)

    whole = observe(transcript(), ThreatModel())
    rows = [row("x", 1.0 + c / 10, c) for c in range(3)] + [row("y", 5.0 - c / 10, c) for c in range(3)]
    x, y = summarise(rows, resamples=200, seed=0)
    (comparison,) = compare(rows, [x, y])
    assert comparison.outcome == ("b is better" if comparison.b == "x" else "a is better")
    assert (x.verdict, y.verdict) == ("inferred", "not demonstrated")
