"""Property inference: which clients' data have a property, how that is tested, and what labels and sizes explain."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import fedaudit
from fedaudit.attacks import ATTACKS, PropertyFinding, make_attack
from fedaudit.attacks.records.property import flat, send, stock
from fedaudit.data.partition import partition
from fedaudit.evaluation.properties import covariates, partial_test
from fedaudit.pipeline.control_cases import with_and_without
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record, run_audit
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.queries import QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth, check_belongs, save_recording
from fedaudit.utils.errors import BadInput, CorruptTranscript, NotApplicable
from fedaudit.utils.seeds import generator
from tests import build
from tests.attacks.membership_cases import result, summed
from tests.build import Scenarios

_LEVEL = 0.01
LARGE = "large=5 to 9"
PUBLIC: dict[str, Any] = {"knows_public_data": True, "public_examples": 300}


_CLIENTS = Scenarios(
    data={"name": "digits-parity", "split": "train"},
    model={"name": "mlp", "width": 16},
    federation={"algorithm": "fedavg", "clients": 12, "rounds": 1, "examples": 360, "batch_size": 10,
                "local_epochs": 1, "learning_rate": 0.1},
    attacks=[{"name": "property-inference", "updates": 20}],
)  # fmt: skip


def scenario(seed: int = 0, partition: Any = None, defences: Any = None, threat: Any = None, **federation: Any) -> Any:
    spread = {"scheme": "attribute", "attribute": LARGE, **(partition or {})}
    threat = threat or {"client_property": LARGE, **PUBLIC}
    return _CLIENTS({"partition": spread, **federation}, seed=seed, defences=defences or {}, threat=threat)


@cache
def small() -> tuple[Observation, Truth]:
    return build.seen(scenario())


def run_attack(seen: Observation, **settings: Any) -> PropertyFinding:
    found = make_attack("property-inference", {"updates": 20, **settings})(seen, generator=generator(0, "attack"))
    assert isinstance(found, PropertyFinding)
    return found


def p_value(made: Scenario) -> float:
    seen, truth = build.seen(made)
    return float(result(run_attack(seen), seen, truth).p_value)


# The attack ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("classifier", ["logistic", "forest"])
@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_clients_with_the_property_score_higher(classifier, algorithm):
    local: dict[str, Any] = {"local_epochs": None, "batch_size": 30} if algorithm == "fedsgd" else {}
    seen, truth = build.seen(scenario(algorithm=algorithm, **local))
    found = run_attack(seen, classifier=classifier)
    assert found.clients.tolist() == list(range(12))
    assert truth.shares.unique().tolist() == [0.0, 1.0]
    assert found.scores[truth.shares == 1].min() > 0 > found.scores[truth.shares == 0].max()


def test_a_stand_in_trains_as_the_client_did():
    """Made of the client's own examples, in its order, it sends what the client sent."""
    seen, truth = small()
    message = seen.messages[3]
    inputs, labels = truth.inputs[0, 3], truth.labels[0, 3]
    marks = torch.arange(len(labels)) % 2 == 0
    own = QuerySet(inputs[:0], labels[:0], inputs, labels, public_property=marks)
    held = stock(own, seen.task_info)

    class InOrder:
        def __call__(self, count: int, **_: Any) -> Tensor:
            return torch.arange(count)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "randperm", InOrder())
        sent = send(seen, message, held, torch.arange(len(labels)), generator(0, "x"))
    assert torch.allclose(sent, flat(message.update.tensors, message), atol=1e-6)


@given(st.integers(1, 40), st.integers(0, 10**6), st.sampled_from([(1.0, 0.0), (0.75, 0.25), (0.5, 0.0)]))
def test_stand_ins_have_the_same_classes_and_the_wanted_shares(size, seed, shares):
    seen, _ = small()
    assert seen.records is not None
    held = stock(seen.records, seen.task_info)
    labels, marks = seen.records.public_labels, seen.records.public_property
    with_it, without = held.pair(size, shares[0], shares[1], generator(seed, "pair"))
    assert torch.equal(labels[with_it].bincount(minlength=2), labels[without].bincount(minlength=2))
    for rows, share in zip((with_it, without), shares, strict=True):
        assert len(rows) == len(set(rows.tolist())) == size
        assert abs(float(marks[rows].double().sum()) - share * size) <= 1.0  # half an example a class


def test_where_examples_are_few_they_are_drawn_again():
    x = torch.rand(3, 1, 8, 8)
    few = QuerySet(x[:0], torch.zeros(0).long(), x, torch.tensor([0, 0, 1]),
                  public_property=torch.tensor([True, False, True]))  # fmt: skip
    held = stock(few, small()[0].task_info)
    with_it, without = held.pair(5, 1.0, 0.0, generator(0, "pair"))  # class 1 has none without it
    assert (with_it.tolist(), without.tolist()) == ([0] * 5, [1] * 5)


def test_the_first_and_the_last_round_can_be_taken_alone():
    seen, _ = build.seen(scenario(rounds=3))
    for rounds, index in (("first", 0), ("last", 2)):
        alone = dataclasses.replace(seen, messages=tuple(m for m in seen.messages if m.round == index))
        assert run_attack(seen, rounds=rounds).scores.equal(run_attack(alone).scores)


def test_long_updates_are_sketched(monkeypatch):
    seen, truth = small()
    plain = run_attack(seen).scores
    monkeypatch.setattr("fedaudit.attacks.records.property._COORDINATES", 300)
    sketched = run_attack(seen).scores
    assert not sketched.equal(plain)
    assert sketched[truth.shares == 1].min() > sketched[truth.shares == 0].max()


def _trained(seen: Observation, **changes: Any) -> Observation:
    messages = []
    for m in seen.messages:
        assert m.update.training is not None
        new = dataclasses.replace(m.update.training, **changes) if changes else None
        messages.append(dataclasses.replace(m, update=dataclasses.replace(m.update, training=new)))
    return dataclasses.replace(seen, messages=tuple(messages))


def _marked(seen: Observation, marks: Tensor) -> Observation:
    assert seen.records is not None
    return dataclasses.replace(seen, records=dataclasses.replace(seen.records, public_property=marks))


REFUSED: list[tuple[Any, str]] = [
    (lambda s: dataclasses.replace(s, records=None), r"set threat\.client_property"),
    (lambda s: dataclasses.replace(s, messages=()), "sees no update"),
    (lambda s: dataclasses.replace(s, messages=s.messages[:1]), "of one only are known"),
    (summed, r"threat\.sees=updates"),
    (_trained, r"threat\.knows_training: true"),
    (lambda s: _trained(s, optimiser="adam"), "plain SGD"),
    (lambda s: _marked(s, torch.ones(300, dtype=torch.bool)), r"raise threat\.public_examples"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED)
def test_it_says_why_not(change, reason):
    with pytest.raises(NotApplicable, match=reason):
        make_attack("property-inference").check(change(small()[0]))


def test_settings_that_ask_for_nothing_are_refused():
    with pytest.raises(BadInput, match="above otherwise"):
        make_attack("property-inference", {"share": 0.3, "otherwise": 0.3})


# The scenario --------------------------------------------------------------------------------------------------------


@given(st.integers(2, 9), st.sampled_from([(1.0, 0.0), (0.8, 0.2), (0.6, 0.0)]), st.booleans(), st.integers(0, 10**6))
def test_half_of_the_clients_get_the_share(clients, shares, alike, seed):
    rng = generator(seed, "examples")
    targets, marks = torch.randint(3, (600,), generator=rng), torch.rand(600, generator=rng) < 0.4
    parts = partition("attribute", targets, clients, generator(seed, "p"), marks=marks, share=shares[0],
                      otherwise=shares[1], labels="alike" if alike else "natural")  # fmt: skip
    assert len(torch.cat(parts).unique()) == sum(map(len, parts))
    assert len({len(part) for part in parts}) == 1
    have = [float(marks[part].double().mean()) for part in parts]
    slack = 3 * 0.5 / len(parts[0]) + 1e-9
    assert sum(abs(h - shares[0]) <= slack for h in have) == clients // 2
    assert sum(abs(h - shares[1]) <= slack for h in have) == clients - clients // 2
    if alike:
        counts = [tuple(targets[part].bincount(minlength=3).tolist()) for part in parts]
        assert len(set(counts)) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"partition": {"attribute": "small=no"}}, "attribute 'small'"),
        ({"partition": {"attribute": "large=no"}}, "no value 'no'|value"),
        ({"threat": {"client_property": "large=no", **PUBLIC}}, "value"),
        ({"threat": {"client_property": LARGE}}, r"threat\.public_examples"),
        ({"clients": 300}, "too few of one sort"),
        ({"clients": 1}, "2 clients or more"),
    ],
)
def test_what_can_t_be_shared_out_or_asked_is_refused(changes, reason):
    with pytest.raises(BadInput, match=reason):
        resolve(scenario(**changes))


@pytest.mark.parametrize(
    "spread", [{}, {"scheme": "iid", "share": 0.5}, {"attribute": LARGE, "share": 2}]
)  # fmt: skip
def test_partitions_that_contradict_themselves_are_refused(spread):
    with pytest.raises(BadInput, match=r"needs an attribute|leave 'share' out|less than or equal"):
        scenario(partition={"attribute": None, **spread})


def test_it_is_chosen_where_a_property_is_asked_for():
    made = scenario().model_copy(update={"attacks": []})
    assert [a.name for a in resolve(made).scenario.attacks] == ["property-inference"]
    assert [e.name for e in ATTACKS if e.value.recovers == "properties of clients"] == ["property-inference"]


def test_what_is_known_survives_the_disk_and_its_damage_is_found(tmp_path):
    made = scenario()
    (only,) = record(resolve(made))
    save_recording(only.transcript, only.truth, tmp_path / "t")
    again = Transcript.load(tmp_path / "t")
    truth = Truth.load(tmp_path / "t" / "truth.safetensors")
    check_belongs(truth, again, tmp_path)
    assert again.records is not None
    assert only.transcript.records is not None
    assert again.records.public_property.equal(only.transcript.records.public_property)
    assert truth.shares.equal(only.truth.shares)
    for wrong in (truth.shares[:5], truth.shares * 2, truth.shares.float()):
        with pytest.raises(CorruptTranscript, match="property"):
            check_belongs(dataclasses.replace(truth, shares=wrong), again, tmp_path)
    blind = observe(again, ThreatModel(knows_public_data=True, target_records=2, public_examples=300))
    assert blind.records is not None
    assert not len(blind.records.public_property)
    told = fedaudit.audit_transcript(
        tmp_path / "t", ["property-inference"], threat={"client_property": LARGE, **PUBLIC}, progress=False
    )
    assert told.result.summaries[0].verdict == "inferred"


def test_public_examples_are_no_client_s():
    seen, truth = small()
    assert seen.records is not None
    theirs = {example.numpy().tobytes() for batch in truth.inputs.values() for example in batch}
    assert not theirs & {example.numpy().tobytes() for example in seen.records.public_inputs}
    assert len(seen.records) == 0


# The test ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_without_covariates_it_is_scipy_s_permutation_test(seed):
    rng = np.random.default_rng(seed)
    has, scores = np.arange(6) % 2 * 1.0, rng.normal(size=6)
    r, p = partial_test(scores, has, np.ones((6, 1)), seed=0)
    exact = stats.permutation_test(
        (scores,),
        lambda dealt: float(np.corrcoef(dealt, has)[0, 1]),
        permutation_type="pairings",
        n_resamples=1000,
        alternative="greater",
    ).pvalue
    assert r == pytest.approx(np.corrcoef(scores, has)[0, 1])
    assert p == pytest.approx(exact, abs=4 * (exact * (1 - exact) / 9999) ** 0.5 + 1e-4)


def test_the_partial_correlation_is_that_of_two_regressions():
    rng = np.random.default_rng(0)
    z = np.column_stack([np.ones(30), rng.normal(size=(30, 3))])
    x, y = rng.normal(size=30) + z[:, 1], rng.normal(size=30) + 2 * z[:, 1]
    left = [v - z @ np.linalg.lstsq(z, v, rcond=None)[0] for v in (x, y)]
    assert partial_test(y, x, z, seed=0)[0] == pytest.approx(np.corrcoef(*left)[0, 1])


def clients(rng: Any, k: int = 20, classes: int = 2, by: str = "nothing") -> tuple[Any, Any, Any, Any]:
    """Labels, sizes, property and scores of clients; the latter two depend on ``by``, and on nothing else in common."""
    sizes = rng.integers(20, 200, k) if by == "size" else np.full(k, 40)
    labels = [torch.from_numpy(rng.choice(classes, n, p=rng.dirichlet(np.ones(classes)))) for n in sizes]
    shares = np.stack([np.bincount(own.numpy(), minlength=classes) / len(own) for own in labels])
    cause = {"size": np.log(sizes), "labels": shares @ rng.normal(size=classes), "nothing": np.zeros(k)}[by]
    cause = (cause - cause.mean()) / (cause.std() + 1e-9)
    has = 2 * cause + rng.logistic(size=k) > 0
    return labels, sizes.tolist(), has, cause + 0.3 * rng.normal(size=k)


@pytest.mark.parametrize(
    ("by", "classes"), [("nothing", 2), ("labels", 2), pytest.param("labels", 10, marks=pytest.mark.slow), ("size", 2)]
)
def test_labels_and_sizes_that_explain_it_leave_uniform_p_values(by, classes):
    ps, plain = [], []
    for seed in range(100):
        labels, sizes, has, scores = clients(np.random.default_rng(seed), classes=classes, by=by)
        if 0 < has.sum() < 20:
            others = covariates(labels, sizes, np.zeros(20))
            ps.append(partial_test(scores, has * 1.0, others, seed=seed, deals=999)[1])
            plain.append(partial_test(scores, has * 1.0, np.ones((20, 1)), seed=seed, deals=999)[1])
    assert stats.kstest(ps, "uniform").pvalue > _LEVEL
    assert bool(np.mean(np.array(plain) <= _LEVEL) > 0.3) is (by != "nothing")  # the trap that there is


def test_too_many_covariates_leave_nothing_to_tell_by():
    labels, sizes, has, _ = clients(np.random.default_rng(0), k=10, classes=10)
    assert partial_test(has * 1.0, has * 1.0, covariates(labels, sizes, np.zeros(10)), seed=0) == (0.0, 1.0)


def planted(scores: Any, shares: Any, labels: Any = None) -> Any:
    seen, truth = small()
    k = len(scores)
    messages = tuple(dataclasses.replace(seen.messages[0], client=i, update=dataclasses.replace(
        seen.messages[0].update, client=i)) for i in range(k))  # fmt: skip
    found = PropertyFinding(clients=torch.arange(k), scores=torch.as_tensor(scores, dtype=torch.float64))
    own = {(0, i): torch.tensor([0, 1] * 5) if labels is None else labels[i] for i in range(k)}
    known = dataclasses.replace(truth, shares=torch.tensor(shares, dtype=torch.float64), labels=own)
    return result(found, dataclasses.replace(seen, messages=messages), known)


def test_perfect_scores_and_their_opposite():
    shares = [1.0, 0.0] * 8
    told = planted(shares, shares)
    auc, partial = told.metrics
    assert (auc.value, auc.baseline, auc.n, told.is_leak) == (1.0, 0.5, 16, True)
    assert auc.low == pytest.approx(stats.binomtest(8, 8).proportion_ci(method="exact").low)
    assert partial.value == pytest.approx(1.0)
    assert told.p_value == told.p_value_at_best
    assert told.p_value < 0.001
    told = planted([-s for s in shares], shares)
    assert (told.metrics[0].value, told.is_leak) == (0.0, False)
    assert told.p_value > 0.99


def test_few_clients_are_too_few():
    told = planted([1.0, 0.0] * 2, [1.0, 0.0] * 2)
    assert told.p_value_at_best == 1.0
    told = planted([1.0, 0.0] * 3, [1.0, 0.0] * 3)
    assert told.p_value_at_best == pytest.approx(1 / 20, abs=0.01)


def test_labels_that_say_it_all_are_no_leak_of_the_property():
    rng = np.random.default_rng(0)
    shares = [1.0, 0.0] * 10
    odd = rng.integers(0, 4, 20) + 5 * np.array(shares)  # large digits are odd more often
    labels = [torch.tensor([1] * int(n) + [0] * (10 - int(n))) for n in odd]
    told = planted(odd + 0.01 * rng.normal(size=20), shares, labels)
    assert told.metrics[0].value > 0.99
    assert told.metrics[0].baseline > 0.99
    assert not told.is_leak
    assert told.p_value > _LEVEL
    assert "labels and sizes" in told.notes[-1]


def test_nothing_to_tell_apart_is_said():
    for shares in ([0.2] * 6, [0.9] * 6):
        told = planted([1.0, 0.0] * 3, shares)
        assert told.status == "not applicable"
        assert "nothing to tell apart" in told.reason


# Federations ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("labels", ["alike", "natural"])
def test_federations_drowned_in_noise_have_uniform_p_values(labels):
    """By the whole way: simulated, observed, attacked, evaluated."""
    noise = {"client_defence": {"name": "dp", "clip": 1.0, "noise": 1000.0, "epsilon": None}}
    ps = [p_value(scenario(seed, {"labels": labels}, noise)) for seed in range(80)]
    assert stats.kstest(ps, "uniform").pvalue > _LEVEL


@pytest.mark.slow
def test_clients_with_most_of_a_property_are_found_out():
    ps = [p_value(scenario(seed, {"share": 0.8, "otherwise": 0.2})) for seed in range(20)]
    assert sum(p <= _LEVEL for p in ps) >= 0.9 * len(ps)


def test_the_report_shows_it(tmp_path):
    finished = run_audit(scenario(partition={"share": 0.9, "otherwise": 0.1}))
    (summary,) = finished.result.summaries
    assert summary.verdict == "inferred"
    (finding,) = finished.result.findings
    assert [line.name for line in finding.charts[0].lines] == ["attack", "labels alone", "guessing"]
    page = finished.save(tmp_path).read_text()
    assert "property auc" in page
    assert "which clients&#39; data have a property" in page or "which clients' data have a property" in page


def test_where_labels_explain_it_the_verdict_says_so():
    """Two in three odd digits are large here and no even one: clients with large digits are those with odd ones."""
    spread = {"scheme": "classes-per-client", "k": 1, "attribute": None}
    asked = scenario(partition=spread, threat={"client_property": LARGE, "property_share": 0.45, **PUBLIC})
    (summary,) = run_audit(asked).result.summaries
    assert summary.verdict == "inconclusive"


def test_the_control_is_known_clients():
    frozen = scenario(defences={"client_defence": {"name": "dp", "clip": 1.0, "noise": 100.0, "epsilon": None}})
    (control,) = run_audit(frozen).result.controls
    assert control.won
    assert "nothing but the property" in control.case
    (only,) = record(resolve(frozen))
    case = with_and_without(only)
    assert case is not None
    given, kept = only.transcript.records, case.recording.transcript.records
    assert given is not None
    assert kept is not None
    theirs = {x.numpy().tobytes() for batch in case.recording.truth.inputs.values() for x in batch}
    own = {x.numpy().tobytes() for x in kept.public_inputs}
    assert not theirs & own
    assert theirs | own <= {x.numpy().tobytes() for x in given.public_inputs}
    assert case.recording.truth.shares.tolist() == [1.0, 0.0] * 12
    none = dataclasses.replace(only.transcript, records=None)
    assert with_and_without(Recording(none, only.truth)) is None
