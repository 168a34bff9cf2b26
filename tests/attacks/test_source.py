"""Source inference: whose a record is, how that is tested, and what the test says where nothing leaks."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks import ATTACKS, Finding, SourceFinding, make_attack
from fedaudit.evaluation import FINDING_TYPES
from fedaudit.evaluation.source import expected, permutation_test
from fedaudit.pipeline.control_cases import memorised_by_client
from fedaudit.pipeline.run import run_audit
from fedaudit.scenario.scenario import Scenario
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.queries import NOBODY, UNUSED, QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.seeds import generator
from tests import build
from tests.attacks.membership_cases import result, summed
from tests.build import Scenarios

_LEVEL = 0.01


_SOURCES = Scenarios(
    data={"split": "train"},
    model="logistic",
    federation={"algorithm": "fedavg", "clients": 3, "rounds": 2, "examples": 60, "batch_size": 10, "local_epochs": 5,
                "learning_rate": 0.1},
    attacks="source-inference",
)  # fmt: skip


def scenario(seed: int = 0, defences: Any = None, records: int = 60, **federation: Any) -> Scenario:
    return _SOURCES(federation, seed=seed, defences=defences or {}, threat={"target_records": records})


def run_attack(seen: Observation, **settings: Any) -> SourceFinding:
    found = make_attack("source-inference", settings)(seen, generator=generator(0, "attack"))
    assert isinstance(found, SourceFinding)
    return found


def p_value(made: Scenario) -> float:
    seen, truth = build.seen(made)
    return float(result(run_attack(seen), seen, truth).p_value)


def linear(kind: Any = "weights", rounds: int = 2, training: TrainingConfig | None = None) -> Observation:
    """A linear model, records, and what three clients sent, that nobody simulated; the third misses the first round."""
    rng = generator(1, "linear")
    shapes = {"weight": (3, 4), "bias": (3,)}
    x, y = torch.randn(20, 4, generator=rng), torch.randint(3, (20,), generator=rng)
    weights = [{n: torch.randn(s, generator=rng) for n, s in shapes.items()} for _ in range(rounds)]
    messages = []
    for r, sent in enumerate(weights):
        for client in (1, 4, 7) if r else (1, 4):
            moved = {n: torch.randn(s, generator=rng) for n, s in shapes.items()}
            messages.append(Message(r, client, sent, Update(client, kind, moved, 5, training)))
    task_info = TaskInfo("custom", None, "eval", "cross-entropy", "table", (4,), 3, (0.0,), (1.0,))
    return Observation("f", ThreatModel(target_records=20), task_info, nn.Linear(4, 3), nn.functional.cross_entropy,
    kind,
                       tuple(weights), tuple(messages), {}, QuerySet(x, y, x[:0], y[:0]))  # fmt: skip


def lowered(seen: Observation, message: Message, step: float) -> Tensor:
    """By how much an update lowers each record's loss, by the formula of softmax regression."""
    assert seen.records is not None
    losses = []
    for factor in (0.0, step):
        w = message.weights["weight"].double() + factor * message.update.tensors["weight"].double()
        b = message.weights["bias"].double() + factor * message.update.tensors["bias"].double()
        z = seen.records.inputs.double() @ w.T + b
        losses.append(z.logsumexp(dim=1) - z.gather(1, seen.records.labels[:, None])[:, 0])
    return losses[0] - losses[1]


# The attack ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "step"), [("weights", 1.0), ("gradient", -0.3)])
@pytest.mark.parametrize("rounds", ["last", "all"])
def test_the_client_that_lowered_the_loss_most_is_named(kind, step, rounds):
    seen = linear(kind, training=TrainingConfig(0.3, 1, (5,)))
    found = run_attack(seen, rounds=rounds)
    assert found.clients.tolist() == [1, 4, 7]
    for column, client in enumerate((1, 4, 7)):
        own = [m for m in seen.messages if m.client == client]
        own = own[-1:] if rounds == "last" else own
        wanted = torch.stack([lowered(seen, m, step) for m in own]).mean(dim=0)
        assert torch.allclose(found.scores[:, column], wanted, atol=1e-5)
    assert found.sources.equal(torch.tensor([1, 4, 7])[found.scores.argmax(dim=1)])
    assert len(found.sources.unique()) == 3


def test_in_one_round_the_order_is_that_of_the_returned_models_losses():
    seen = linear(rounds=2)
    last = dataclasses.replace(seen, messages=tuple(m for m in seen.messages if m.round == 1))
    assert last.records is not None
    losses = []
    for message in last.messages:
        module = nn.Linear(4, 3)
        module.load_state_dict({n: message.weights[n] + t for n, t in message.update.tensors.items()})
        losses.append(nn.functional.cross_entropy(module(last.records.inputs), last.records.labels, reduction="none"))
    assert run_attack(last).sources.equal(torch.tensor([1, 4, 7])[torch.stack(losses, dim=1).argmin(dim=1)])


def test_what_a_client_holds_back_stays_as_it_was_sent():
    seen = linear(rounds=1)
    (first, second) = seen.messages
    part = dataclasses.replace(first.update, tensors={"bias": first.update.tensors["bias"]})
    zero = dataclasses.replace(first.update, tensors={**part.tensors, "weight": torch.zeros(3, 4)})
    scores = [
        run_attack(dataclasses.replace(seen, messages=(dataclasses.replace(first, update=u), second))).scores
        for u in (part, zero)
    ]
    assert scores[0].equal(scores[1])


def test_the_step_of_a_gradient_may_be_given():
    seen = linear("gradient")
    given = run_attack(seen, learning_rate=0.3)
    known = run_attack(linear("gradient", training=TrainingConfig(0.3, 1, (5,))))
    assert given.scores.equal(known.scores)
    assert not given.scores.equal(run_attack(seen, learning_rate=3.0).scores)


REFUSED: list[tuple[Any, Any, str]] = [
    (lambda s: dataclasses.replace(s, records=None), "weights", r"set threat\.target_records"),
    (lambda s: dataclasses.replace(s, messages=()), "weights", "sees no update"),
    (lambda s: dataclasses.replace(s, messages=s.messages[:1]), "weights", "of one only are known"),
    (summed, "weights", r"threat\.sees=updates"),
    (lambda s: s, "gradient", r"set attacks\.source-inference\.learning_rate"),
    (
        lambda s: dataclasses.replace(s, records=dataclasses.replace(s.records, columns=torch.tensor([1]))),
        "weights",
        r"leave threat\.hidden_attribute out",
    ),
]


@pytest.mark.parametrize(("change", "kind", "reason"), REFUSED)
def test_it_says_why_not(change, kind, reason):
    with pytest.raises(NotApplicable, match=reason):
        make_attack("source-inference").check(change(linear(kind)))


def test_a_finding_survives_the_disk(tmp_path):
    found = run_attack(linear())
    found.save(tmp_path / "f.safetensors")
    again = Finding.load(tmp_path / "f.safetensors")
    assert isinstance(again, SourceFinding)
    assert again.scores.equal(found.scores)
    assert again.sources.equal(found.sources)


# The test ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=6))
def test_what_the_labels_explain_is_the_mean_over_all_deals(records):
    named, owners, strata = (torch.tensor(column) for column in zip(*records, strict=True))
    for groups in (None, strata):
        places = [list(range(len(named)))] if groups is None else [
            torch.nonzero(groups == g)[:, 0].tolist() for g in groups.unique()
        ]  # fmt: skip
        total = 0.0
        for own in places:
            deals = [torch.tensor(deal) for deal in itertools.permutations(own)]
            total += sum(float((named[own] == owners[deal]).sum()) for deal in deals) / len(deals)
        assert expected(named, owners, groups) == pytest.approx(total / len(named))


@pytest.mark.parametrize("seed", range(3))
def test_the_permutation_test_is_scipy_s(seed):
    rng = np.random.default_rng(seed)
    worth, owners = rng.random((7, 3)), rng.integers(3, size=7)
    records = np.arange(7)
    exact = stats.permutation_test(
        (owners,),
        lambda dealt: float(worth[records, dealt].sum()),
        permutation_type="pairings",
        n_resamples=5040,
        alternative="greater",
    ).pvalue
    error = 4 * (exact * (1 - exact) / 9999) ** 0.5
    assert permutation_test(worth, owners, seed=0) == pytest.approx(exact, abs=error + 1e-4)


@cache
def small() -> tuple[Observation, Truth]:
    return build.seen(scenario(records=2, rounds=1))


def planted(right: float, seed: int = 0, sizes: tuple[int, ...] = (20, 20, 20)) -> tuple[Any, Observation, Truth]:
    """A finding that knows the owner with a given probability, and else names a client at random."""
    rng = np.random.default_rng(seed)
    seen, truth = small()
    owners = torch.cat([torch.full((size,), k) for k, size in enumerate(sizes)] + [torch.full((sum(sizes),), NOBODY)])
    n = sum(sizes)
    matched = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    scores = torch.from_numpy(rng.random((2 * n, 3)))
    knows = torch.from_numpy(rng.random(n) < right)
    scores[torch.arange(n)[knows], owners[:n][knows]] = 2.0
    found = SourceFinding(clients=torch.arange(3), scores=scores, sources=scores.argmax(dim=1))
    assert seen.records is not None
    records = QuerySet(torch.zeros(2 * n, 1, 8, 8), torch.zeros(2 * n).long(), torch.zeros(0), torch.zeros(0))
    return found, dataclasses.replace(seen, records=records), dataclasses.replace(truth, owners=owners, matched=matched)


@pytest.mark.slow
def test_who_knows_nothing_has_uniform_p_values():
    ps = [result(*planted(0.0, seed, (40, 15, 5))).p_value for seed in range(70)]
    assert stats.kstest(ps, "uniform").pvalue > _LEVEL
    assert stats.kstest([result(*planted(0.3, seed)).p_value for seed in range(20)], "uniform").pvalue < _LEVEL


def with_classes(right: float, seed: int = 0) -> Any:
    """Three clients with a class each and one in four records of another's, whose names are those of the classes."""
    found, seen, truth = planted(right, seed)
    owners = torch.cat([truth.owners[:60]] * 2)
    rng = generator(seed, "classes")
    classes = torch.where(torch.rand(120, generator=rng) < 0.75, owners, torch.randint(3, (120,), generator=rng))
    knows = found.scores.max(dim=1).values == 2.0
    scores = found.scores + 1.0 * torch.nn.functional.one_hot(classes, 3) * ~knows[:, None]
    made = dataclasses.replace(found, scores=scores, sources=scores.argmax(dim=1))
    assert seen.records is not None
    seen = dataclasses.replace(seen, records=dataclasses.replace(seen.records, labels=classes))
    return result(made, seen, truth)


def test_what_classes_tell_of_records_is_no_leak_of_these():
    told = [with_classes(0.0, seed) for seed in range(2)]
    assert not any(f.is_leak for f in told)
    assert all("dealt anew among all" in f.notes[-1] for f in told)
    assert {FINDING_TYPES["source"].verdict([f]).verdict for f in told} == {"inconclusive"}
    assert with_classes(0.9).is_leak


@pytest.mark.parametrize("seed", range(3))
def test_owners_are_dealt_within_strata(seed):
    """The oracle is enumeration of both strata's deals."""
    rng = np.random.default_rng(seed)
    worth, owners = rng.random((8, 3)), rng.integers(3, size=8)
    strata = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0])
    rows = [torch.nonzero(strata == s).flatten().numpy() for s in (0, 1)]
    sums = [[float(worth[own, list(dealt)].sum()) for dealt in itertools.permutations(owners[own])] for own in rows]
    whole = np.add.outer(*map(np.array, sums))
    exact = float((whole >= worth[np.arange(8), owners].sum() - 1e-9).mean())
    error = 4 * np.sqrt(exact * (1 - exact) / 9999)
    assert permutation_test(worth, owners, seed=0, strata=strata) == pytest.approx(exact, abs=error + 2e-4)


def test_few_records_are_too_few():
    told = result(*planted(1.0, sizes=(2, 1, 1)))
    assert told.p_value_at_best == pytest.approx(2 / 24, abs=2e-4)
    assert told.p_value == pytest.approx(2 / 24, abs=0.02)


def test_who_knows_half_is_found():
    found = [result(*planted(0.5, seed)) for seed in range(20)]
    assert sum(f.is_leak for f in found) >= 0.9 * len(found)


def test_perfect_answers_and_their_opposite():
    found, seen, truth = planted(1.0)
    told = result(found, seen, truth)
    accuracy, advantage = told.metrics
    assert (accuracy.value, accuracy.n, told.is_leak) == (1.0, 60, True)
    assert accuracy.baseline == pytest.approx(1 / 3)
    assert advantage.value == pytest.approx(1 - float((found.sources[60:] == truth.owners[:60]).double().mean()))
    assert told.p_value == pytest.approx(told.p_value_at_best) == pytest.approx(1 / 10_000)
    assert told.charts[0].lines[0].y == [1.0, 1.0, 1.0]
    wrong = dataclasses.replace(found, scores=-found.scores, sources=(-found.scores).argmax(dim=1))
    told = result(wrong, seen, truth)
    assert (told.metrics[0].value, told.is_leak) == (0.0, False)
    assert told.p_value > 0.99
    assert told.charts[0].lines[0].y == [0.0, pytest.approx(told.charts[0].lines[0].y[1]), 1.0]


def test_naming_the_largest_client_is_no_leak():
    found, seen, truth = planted(0.0, sizes=(40, 15, 5))
    sizes = [dataclasses.replace(m.update, num_examples=(40, 15, 5)[m.client], training=None) for m in seen.messages]
    messages = tuple(dataclasses.replace(m, update=u) for m, u in zip(seen.messages, sizes, strict=True))
    scores = torch.tensor([3.0, 2.0, 1.0]).double().expand(len(found.scores), 3)
    always = dataclasses.replace(found, scores=scores, sources=torch.zeros(len(scores)).long())
    told = result(always, dataclasses.replace(seen, messages=messages), truth)
    assert told.metrics[0].value == told.metrics[0].baseline == pytest.approx(2 / 3)
    assert not told.is_leak
    assert told.p_value == 1.0


def test_records_that_nobody_used_don_t_count():
    found, seen, truth = planted(1.0)
    owners = truth.owners.clone()
    owners[:10] = UNUSED
    assert result(found, seen, dataclasses.replace(truth, owners=owners)).metrics[0].n == 50
    owners[:60] = UNUSED
    owners[0] = 2
    told = result(found, seen, dataclasses.replace(truth, owners=owners))
    assert told.status == "not applicable"
    assert "raise threat.target_records" in told.reason


def test_a_client_of_whom_no_update_is_known_is_never_right():
    found, seen, truth = planted(1.0)
    two = SourceFinding(clients=found.clients[:2], scores=found.scores[:, :2],
                        sources=found.scores[:, :2].argmax(dim=1))  # fmt: skip
    told = result(two, seen, truth)
    assert told.metrics[0].value == pytest.approx(2 / 3)
    assert told.charts[0].lines[0].y == pytest.approx([2 / 3, 2 / 3])


# Federations ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_federations_drowned_in_noise_have_uniform_p_values():
    """By the whole way: simulated, observed, attacked, evaluated; clients differ in size and in labels."""
    noise = {"client_defence": {"name": "dp", "clip": 1.0, "noise": 1000.0, "epsilon": None}}
    skewed = {"partition": {"scheme": "dirichlet", "alpha": 1.0}, "rounds": 1, "local_epochs": 1}
    ps = [p_value(scenario(seed, noise, records=40, **skewed)) for seed in range(100)]
    assert stats.kstest(ps, "uniform", alternative="greater").pvalue > _LEVEL  # classes of few records: large ones


@pytest.mark.slow
def test_clients_that_learn_by_heart_are_found_out():
    ps = [p_value(scenario(seed, local_epochs=30)) for seed in range(20)]
    assert sum(p <= _LEVEL for p in ps) >= 0.9 * len(ps)


def test_where_labels_differ_the_report_says_what_they_explain(tmp_path):
    finished = run_audit(scenario(partition={"scheme": "shards", "shards_per_client": 2}, records=100, examples=150))
    (summary,) = finished.result.summaries
    assert summary.verdict == "inconclusive"
    assert summary.verdict_text.endswith("the records' classes may explain that")
    (finding,) = finished.result.findings
    assert "luck is excluded" in finding.notes[-1]
    by_label = float(finding.notes[-2].split("class: ")[1].split(",")[0])
    assert by_label > 0.5 > (finding.metrics[0].baseline or 1.0)
    page = finished.save(tmp_path).read_text()
    assert "source accuracy" in page
    assert "which client a record comes from" in page


@pytest.mark.slow
def test_the_control_is_clients_that_learnt_their_own_by_heart():
    frozen = scenario(learning_rate=1e-9, local_epochs=1, records=100)
    (control,) = run_audit(frozen).result.controls
    assert control.won
    assert "by heart" in control.case
    seen = fedaudit.simulate(frozen, progress=False)
    case = memorised_by_client(seen)
    assert case is not None
    records, owners = seen.transcript.records, seen.truth.owners
    assert records is not None
    assert case.recording.truth.owners.equal(owners)
    for client in range(3):
        assert case.recording.truth.inputs[0, client].equal(records.inputs[owners == client])
    alone = dataclasses.replace(seen.truth, owners=torch.where(owners == 0, 0, NOBODY))
    assert memorised_by_client(dataclasses.replace(seen, truth=alone)) is None


def test_sources_are_asked_of_updates_and_of_the_model():
    names = [e.name for e in ATTACKS if e.value.recovers == "whose records are"]
    assert names == ["source-inference", "source-outputs"]
