"""Likelihood ratios: LiRA and RMIA against closed forms, on members and on others; shadow models are shared."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, logit, logsumexp
from scipy.stats import norm
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from fedaudit.attacks import MembershipFinding, NotApplicable, Observation, ShadowFinding, make_attack
from fedaudit.attacks.records.shadows import ShadowModel
from fedaudit.evaluation import evaluate
from fedaudit.pipeline.trials import Means, Trial, run_trials
from fedaudit.transcript.observation import observe
from fedaudit.transcript.queries import QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import generator
from tests.attacks.membership_cases import logistic, recorded, run_attack, scenario
from tests.conftest import Command

KNOWN = {"knows_public_data": True, "public_examples": 160}
QUICK: dict[str, Any] = {"shadows": 8, "epochs": 30}
ALL = [("lira", {}), ("lira", {"online": True}), ("rmia", {}), ("rmia", {"online": True}), ("stacked", {})]


def known_shadows(
    count: int, online: bool, surer: float = 1.0
) -> tuple[Observation, list[ShadowFinding], dict[str, np.ndarray]]:
    """Return 12 records and 8 public examples, what shadow models said of them, and its log-probabilities."""
    seen = logistic()
    seen = dataclasses.replace(seen, weights=({name: surer * t for name, t in seen.weights[0].items()},))
    assert seen.records is not None
    x, y = seen.records.inputs.clone(), seen.records.labels.clone()
    x[1], y[1] = x[0], (y[0] + 1) % 3  # equal but for its label
    records = QuerySet(x, y, x[:8] + 1, y[:8])
    rng = generator(0, "shadows")
    inside = torch.zeros(count, 20, dtype=torch.bool)
    for one in range(count):
        pool = torch.arange(0 if online else 12, 20)
        half = pool[torch.randperm(len(pool), generator=generator(one // 2)).tensor_split(2)[one % 2]]
        inside[one, half] = True
    outputs = 2 * surer * torch.randn(count, 20, 3, generator=rng) + inside[..., None]
    found = [ShadowFinding(inside=i, answers=o) for i, o in zip(inside, outputs, strict=True)]
    weights = {name: t.double().numpy() for name, t in seen.weights[0].items()}
    inputs, labels = torch.cat([x, x[:8] + 1]).double().numpy(), torch.cat([y, y[:8]]).numpy()
    rows = np.arange(20)
    own = log_softmax(inputs @ weights["weight"].T + weights["bias"], axis=1)[rows, labels]
    shadows = log_softmax(outputs.double().numpy(), axis=2)[:, rows, labels]
    facts = {"own": own, "shadows": shadows, "inside": inside.numpy()}
    return dataclasses.replace(seen, records=records), found, facts


def normal(values: np.ndarray, chosen: np.ndarray) -> list[tuple[float, float]]:
    """Return mean and deviation of each column's chosen values; of fewer than 64 about their means, all together."""
    parts = [column[mask] for column, mask in zip(values.T, chosen.T, strict=True)]
    about = np.concatenate([part - part.mean() for part in parts])
    shared = np.sqrt((about**2).sum() / sum(len(part) - 1 for part in parts))
    return [(part.mean(), part.std(ddof=1) if len(part) >= 64 else shared) for part in parts]


@pytest.mark.parametrize("count", [4, 8, 140])
def test_lira_s_scores_are_the_normal_distribution_s(count: int) -> None:
    for online in (False, True):
        seen, found, facts = known_shadows(count, online)
        scores = make_attack("lira", {"online": online}).prepared(found)(seen)
        assert isinstance(scores, MembershipFinding)
        odds, own = logit(np.exp(facts["shadows"])), logit(np.exp(facts["own"]))
        without = normal(odds, ~facts["inside"])
        if online:
            trained = normal(odds, facts["inside"])
            wanted = [norm.logpdf(own[i], *trained[i]) - norm.logpdf(own[i], *without[i]) for i in range(12)]
            assert scores.scores.numpy() == pytest.approx(np.array(wanted), abs=1e-5)
        else:
            chance = [norm.cdf(own[i], *without[i]) for i in range(12)]
            assert norm.cdf(scores.scores.numpy()) == pytest.approx(np.array(chance), abs=1e-5)


def test_halves_of_the_shadow_models_score_again() -> None:
    seen, found, facts = known_shadows(8, online=False)
    scores = make_attack("lira", {}).prepared(found)(seen)
    assert isinstance(scores, MembershipFinding)
    assert scores.again.shape == (10, 12)
    odds, own = logit(np.exp(facts["shadows"])), logit(np.exp(facts["own"]))
    wanted = []
    for chosen in itertools.combinations(range(4), 2):
        rows = [2 * pair + side for pair in chosen for side in range(2)]
        without = normal(odds[rows], ~facts["inside"][rows])
        wanted.append([(own[i] - without[i][0]) / without[i][1] for i in range(12)])
    nearest = np.abs(scores.again.numpy()[:, None] - np.array(wanted)).max(axis=2)
    assert nearest.min(axis=1) == pytest.approx(0, abs=1e-5)
    assert len(set(nearest.argmin(axis=1))) > 2
    few = make_attack("lira", {}).prepared(found[:6])(seen)
    assert isinstance(few, MembershipFinding)
    assert not len(few.again)


def test_a_probability_that_rounds_to_one_has_a_score_of_its_own() -> None:
    seen, found, _ = known_shadows(8, online=False)
    sure = dataclasses.replace(seen, weights=({name: 100 * t for name, t in seen.weights[0].items()},))
    attack = make_attack("lira").prepared(found)
    scores = attack(sure)
    assert isinstance(scores, MembershipFinding)
    assert bool(scores.scores.isfinite().all())
    assert len(scores.scores.unique()) == 12


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize(("gamma", "a", "surer"), [(2.0, 0.3, 1.0), (1.0, 0.0, 1.0), (2.3, 1.0, 1e3)])
def test_rmia_s_scores_are_counted(gamma: float, a: float, surer: float, online: bool) -> None:
    seen, found, facts = known_shadows(8, online, surer)  # probabilities of one that is 1e3 times as sure round to 0
    settings = {"gamma": gamma, "offline_a": a, "online": online}
    scores = make_attack("rmia", settings).prepared(found)(seen)
    assert isinstance(scores, MembershipFinding)
    ratio = []
    for row in range(20):
        inside = facts["inside"][:, row]
        q, trained = (logsumexp(facts["shadows"][mask, row], b=1 / max(mask.sum(), 1)) for mask in (~inside, inside))
        p = logsumexp([q, trained] if online else [q, 0.0], b=[0.5, 0.5] if online else [(1 + a) / 2, (1 - a) / 2])
        ratio.append(facts["own"][row] - p)
    wanted = [np.mean([ratio[x] - ratio[z] >= np.log(gamma) for z in range(12, 20)]) for x in range(12)]
    assert scores.scores.tolist() == pytest.approx(wanted)
    assert 0 < np.mean(wanted) < 1


def test_stacked_scores_are_weighed_as_shadow_models_in_the_victim_s_place_teach() -> None:
    seen, found, facts = known_shadows(8, online=False)
    assert seen.records is not None
    for row in (1, 13):  # equal inputs have equal outputs
        label = int(torch.cat([seen.records.labels, seen.records.public_labels])[row])
        for one, shadow in enumerate(found):
            shadow.answers[row] = shadow.answers[row - 1]
            facts["shadows"][one, row] = log_softmax(shadow.answers[row].double().numpy())[label]
    scores = make_attack("stacked", {}).prepared(found)(seen)
    assert isinstance(scores, MembershipFinding)

    def said(own: np.ndarray, others: list[int], rows: range) -> np.ndarray:
        logs, outside = facts["shadows"][others], ~facts["inside"][others]
        without = normal(logit(np.exp(logs)), outside)
        usual = [
            logsumexp([*logs[outside[:, j], j], 0.0], b=[*[0.65 / outside[:, j].sum()] * outside[:, j].sum(), 0.35])
            for j in range(20)
        ]
        ratio = own - np.array(usual)
        lira = [(logit(np.exp(own[j])) - without[j][0]) / without[j][1] for j in rows]
        rmia = [np.mean([ratio[j] - ratio[z] >= np.log(2) for z in range(12, 20)]) for j in rows]
        return np.stack([own[list(rows)], lira, rmia], axis=1)

    played = [said(facts["shadows"][i], [j for j in range(8) if j // 2 != i // 2], range(12, 20)) for i in range(8)]
    learnt = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    learnt.fit(np.concatenate(played), facts["inside"][:, 12:].flatten())
    wanted = learnt.decision_function(said(facts["own"], list(range(8)), range(12)))
    assert scores.scores.numpy() == pytest.approx(wanted, abs=1e-4)
    assert scores.members.tolist() == (wanted > 0).tolist()


@pytest.fixture(scope="module")
def overfitted() -> tuple[Observation, Transcript, Truth]:
    threat = {"target_records": 80, **KNOWN}
    transcript, truth = recorded(scenario(threat, rounds=40, examples=80, local_epochs=3))
    return observe(transcript, ThreatModel.model_validate(threat)), transcript, truth


@pytest.mark.parametrize(("name", "settings"), ALL)
def test_an_overfitted_model_gives_its_members_away(name, settings, overfitted) -> None:
    seen, _, truth = overfitted
    result = evaluate(run_attack(name, seen, **settings, **QUICK), seen, truth, seed=0).result
    assert result.metrics[0].value > (0.7 if settings else 0.64)
    assert result.is_leak


@pytest.mark.parametrize(("name", "settings"), ALL)
def test_a_model_that_never_saw_the_records_gives_nobody_away(name, settings) -> None:
    threat = {"target_records": 200, **KNOWN, "public_examples": 40}
    transcript, truth = recorded(scenario(threat, rounds=1, examples=400))  # the only global model is the first one
    seen = observe(transcript, ThreatModel.model_validate(threat))
    found = run_attack(name, seen, **settings, shadows=6, epochs=5)
    result = evaluate(found, seen, truth, seed=0).result
    assert abs(result.metrics[0].value - 0.5) < 0.12
    assert not result.is_leak


@pytest.mark.parametrize("name", ["lira", "rmia"])
def test_public_examples_set_the_threshold_though_shadow_models_train_on_them(name, overfitted) -> None:
    seen, _, truth = overfitted
    found = run_attack(name, seen, false_positives=0.1, **QUICK)
    others = truth.owners < 0
    assert float(found.members[others].double().mean()) < 0.25
    assert float(found.members[~others].double().mean()) > float(found.members[others].double().mean())


@pytest.mark.parametrize(
    ("name", "settings", "threat", "reason"),
    [
        ("lira", {}, {}, r"set threat\.target_records"),
        ("rmia", {}, {"target_records": 60}, r"threat\.public_examples"),
        ("lira", {"online": True, "shadows": 2}, {"target_records": 60, **KNOWN}, "shadows to 4 or more"),
        ("stacked", {}, {"target_records": 60}, r"threat\.public_examples"),
    ],
)
def test_they_say_why_not(name, settings, threat, reason, overfitted) -> None:
    _, transcript, _ = overfitted
    if not threat:
        transcript = dataclasses.replace(transcript, records=None)
    with pytest.raises(NotApplicable, match=reason):
        make_attack(name, settings).check(observe(transcript, ThreatModel.model_validate(threat)))


# Shadow models --------------------------------------------------------------------------------------------------------


def test_every_example_is_in_half_of_the_models(overfitted) -> None:
    seen, _, _ = overfitted
    for online, first in ((True, 0), (False, 80)):
        attack = make_attack("lira", {"online": online, "shadows": 4, "epochs": 1})
        inside = torch.stack([model(own, seed=3).inside for model, own in attack.beforehand(seen)])  # type: ignore[attr-defined]
        assert inside[:, first:].sum(dim=0).tolist() == [2] * (240 - first)
        assert not bool(inside[:, :first].any())
        assert not inside[0].equal(inside[2])


SHARED: list[dict[str, Any]] = [
    {"name": "shadow-models", "shadows": 4, "epochs": 3},
    {"name": "lira", "shadows": 4, "epochs": 3},
    {"name": "rmia", "shadows": 6, "epochs": 3},
]


def scores(attacks: Any, seen: Observation, means: Means) -> list[Tensor]:
    trials = [
        Trial(make_attack(a["name"], {k: v for k, v in a.items() if k != "name"}), seen, 0, "cpu") for a in attacks
    ]
    return [trial.outcome.scores for trial in run_trials(trials, means) if isinstance(trial.outcome, MembershipFinding)]


def test_they_are_trained_once_for_all_attacks_and_kept(overfitted, monkeypatch, tmp_path: Path) -> None:
    seen, _, _ = overfitted
    trained = []
    train = ShadowModel._trained

    def counted(self: ShadowModel, *rest: Any) -> Any:
        trained.append(self.index)
        return train(self, *rest)

    monkeypatch.setattr(ShadowModel, "_trained", counted)
    together = scores(SHARED, seen, Means(store=tmp_path))
    assert sorted(trained) == list(range(6))
    trained.clear()
    (again,) = scores([{**SHARED[2], "gamma": 1.0}], seen, Means(store=tmp_path))  # with the models that are kept
    assert not trained
    assert not again.equal(together[2])
    moved = {name: 2 * t for name, t in seen.weights[-1].items()}
    scores(
        SHARED[1:2], dataclasses.replace(seen, weights=(moved,)), Means(store=tmp_path)
    )  # another federation's model
    assert not trained
    (alone,) = scores(SHARED[1:2], seen, Means())
    assert trained
    assert alone.equal(together[1])


def test_a_shadow_model_that_fails_is_the_outcome(overfitted, monkeypatch) -> None:
    seen, _, _ = overfitted
    train = ShadowModel._trained
    failed: list[int] = []

    def fails_once(self: ShadowModel, *rest: Any) -> Any:
        if self.index == 1 and not failed:
            failed.append(1)
            raise NotApplicable("no such training")
        return train(self, *rest)

    monkeypatch.setattr(ShadowModel, "_trained", fails_once)
    attacks = [make_attack(a["name"], {k: v for k, v in a.items() if k != "name"}) for a in SHARED]
    done = run_trials([Trial(attack, seen, 0, "cpu") for attack in attacks], Means())
    assert [str(trial.outcome) for trial in done] == ["no such training"] * 3


def test_a_buffer_that_the_server_sent_is_part_of_a_shadow_model(overfitted) -> None:
    class Scaled(nn.Module):
        scale: Tensor

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.register_buffer("scale", torch.ones(1))

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.as_tensor(self.inner(self.scale * inputs))

    seen, _, _ = overfitted
    module = Scaled(copy.deepcopy(seen.module))
    state = {f"inner.{name}": tensor for name, tensor in seen.weights[-1].items()}

    def said(scale: float) -> Tensor:
        sent = dataclasses.replace(seen, module=module, weights=({**state, "scale": torch.tensor([scale])},))
        (asked, *_) = make_attack("lira", {"shadows": 2, "epochs": 2}).beforehand(sent)
        found: Any = asked[0](asked[1], seed=0)
        return torch.as_tensor(found.answers)

    assert not said(1.0).allclose(said(0.0))


@pytest.mark.slow
def test_worker_processes_change_nothing(overfitted) -> None:
    seen, _, _ = overfitted
    together, alone = scores(SHARED, seen, Means(workers=2)), scores(SHARED, seen, Means())
    assert all(map(torch.equal, together, alone))


@pytest.mark.slow
def test_an_audit_with_shadow_models_is_verified(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(scenario(KNOWN, SHARED).to_yaml())
    assert command("audit", path, "--out", tmp_path / "out", "--workers", "2").code == 0
    outcome = command("verify", tmp_path / "out")
    assert outcome.code == 0, outcome
