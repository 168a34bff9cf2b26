"""Source inference from the model alone: what is granted, what is named, and that only what the model adds counts."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import binomtest
from torch import nn

from fedaudit.attacks import Finding, SourceFinding, make_attack
from fedaudit.evaluation import FINDING_TYPES
from fedaudit.evaluation.blind import CONFOUNDED
from fedaudit.pipeline.control_cases import memorised_by_one
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.queries import NOBODY, QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import BadInput, CorruptTranscript, NotApplicable
from fedaudit.utils.fingerprint import tensor_digest
from tests import build
from tests.attacks.membership_cases import result
from tests.attacks.test_source import planted
from tests.build import Scenarios

_TURNS = Scenarios(
    data={"split": "train"},
    model={"name": "mlp", "width": 32},
    federation={"algorithm": "fedavg", "clients": 2, "clients_per_round": 1, "rounds": 4, "examples": 280,
                "batch_size": 20, "local_epochs": 1, "learning_rate": 0.1},
    attacks="source-outputs",
    threat={"adversary": "client", "target_records": 160, "known_records": 40},
)  # fmt: skip


@cache
def turns() -> tuple[Any, Observation, Truth]:
    """Two clients that take turns."""
    recording = record(resolve(_TURNS()))[0]
    return recording, observe(recording.transcript, _TURNS().threat), recording.truth


def found(seen: Observation, **settings: Any) -> SourceFinding:
    made = make_attack("source-outputs", settings)(seen)
    assert isinstance(made, SourceFinding)
    return made


def blind(made: SourceFinding) -> torch.Tensor:
    assert made.blind is not None
    return made.blind


# What is granted -----------------------------------------------------------------------------------------------------


def test_known_records_are_their_client_s_own_and_none_that_is_asked_about():
    recording, seen, _ = turns()
    records = seen.records
    assert records is not None
    assert records.known_clients.tolist() == [0] * 40 + [1] * 40
    resolved = resolve(_TURNS()).federations[0]
    for client in range(2):
        held = {tensor_digest(x) for x in resolved.client_data[client].inputs}
        mine = {tensor_digest(x) for x in records.known_inputs[records.known_clients == client]}
        assert len(mine) == 40
        assert mine <= held
        assert not mine & {tensor_digest(x) for x in records.inputs}
    plain = observe(recording.transcript, ThreatModel(target_records=160)).records
    assert plain is not None
    assert not len(plain.known_clients)


def test_matches_are_the_client_s_own_which_it_keeps_from_training():
    recording, seen, truth = turns()
    records = seen.records
    assert records is not None
    member = truth.owners != NOBODY
    assert int(member.sum()) == 80
    assert truth.homes[truth.matched].equal(truth.homes)
    assert truth.homes[truth.owners >= 0].equal(truth.owners[truth.owners >= 0])
    assert records.labels[truth.matched].equal(records.labels)
    assert (truth.owners[truth.matched] == NOBODY).equal(member)
    federation, plain = (resolve(_TURNS(threat=t)).federations[0] for t in ({}, {"known_records": None}))
    marks = [tensor_digest(x) for x in records.inputs]
    for client in range(2):
        whole, trained = ({tensor_digest(x) for x in f.client_data[client].inputs} for f in (plain, federation))
        own = truth.homes == client
        assert trained | {marks[i] for i in torch.nonzero(own & ~member).flatten().tolist()} == whole
        assert not trained & {marks[i] for i in torch.nonzero(own & ~member).flatten().tolist()}
        for i in torch.nonzero(own & member).flatten().tolist():
            at = int(federation.drawn.positions[i])
            assert federation.client_data[client].inputs[at].equal(records.inputs[i])
    assert sum(len(data) for data in federation.client_data) == 280 - 80
    assert len(recording.truth.inputs)


def test_who_holds_too_little_keeps_nothing_back():
    drawn = resolve(_TURNS(threat={"known_records": 60})).federations[0].drawn
    assert not len(drawn.homes)
    assert not drawn.kept


def test_without_them_nothing_is_told():
    drawn = resolve(_TURNS(threat={"known_records": None})).federations[0].drawn.records
    assert drawn is not None
    assert not len(drawn.known_inputs)
    assert not {"known_inputs", "known_labels", "known_clients"} & set(drawn.stored())


@pytest.mark.parametrize(
    ("threat", "says"),
    [
        ({"target_records": None}, "set target_records"),
        ({"target_records": 20, "known_records": 250}, "lower it"),
        ({"target_records": 400, "known_records": 60}, r"beside threat.known_records 160 are left; lower either"),
    ],
)
def test_what_can_t_be_granted_is_refused(threat, says):
    with pytest.raises(BadInput, match=says):
        resolve(_TURNS(threat=threat))


def test_they_survive_the_disk_and_what_is_broken_is_refused(tmp_path):
    recording, seen, _ = turns()
    recording.transcript.save(tmp_path / "t")
    kept = Transcript.load(tmp_path / "t").records
    assert kept is not None
    assert seen.records is not None
    for name in ("known_inputs", "known_labels", "known_clients"):
        assert getattr(kept, name).equal(getattr(seen.records, name))
    broken = dataclasses.replace(recording.transcript)
    broken.records = dataclasses.replace(seen.records, known_clients=seen.records.known_clients[1:])
    broken.save(tmp_path / "b")
    with pytest.raises(CorruptTranscript, match="known records"):
        Transcript.load(tmp_path / "b")


# What is named -------------------------------------------------------------------------------------------------------


def series(*learnt: tuple[int, ...]) -> tuple[Observation, Truth]:
    """Two clients alike, of each 40 records and 25 known ones, and linear models that fit exactly what clients hold.

    Each model has learnt the records of those clients, by the least squares of least norm.
    """
    rng = torch.Generator().manual_seed(3)
    x = torch.randn((2, 105, 150), generator=rng)
    y = torch.randint(2, (2, 105), generator=rng)
    y[:, 65:] = y[:, :40]  # the matched ones have their members' labels
    states = []
    for clients in learnt:
        own = list(clients)
        w = torch.linalg.pinv(x[own, :65].flatten(0, 1)) @ (4.0 * y[own, :65].flatten() - 2)
        states.append({"weight": torch.stack([-w, w]), "bias": torch.zeros(2)})
    known = {"known_inputs": x[:, 40:65].flatten(0, 1), "known_labels": y[:, 40:65].flatten()}
    inputs, labels = (torch.cat([t[:, :40].flatten(0, 1), t[:, 65:].flatten(0, 1)]) for t in (x, y))
    records = QuerySet(inputs, labels, inputs[:0], labels[:0], known_clients=torch.arange(50) // 25, **known)
    info = TaskInfo("custom", None, "eval", "cross-entropy", "table", (150,), 2, (0.0,), (1.0,))
    seen = Observation(
        *("f", ThreatModel(), info, nn.Linear(150, 2), nn.functional.cross_entropy, "weights", tuple(states), ()),
        records=records,
    )
    owners = torch.cat([torch.arange(80) // 40, torch.full((80,), NOBODY)])
    homes = (torch.arange(80) // 40).repeat(2)
    return seen, Truth({}, {}, inputs, labels, {}, owners=owners, matched=torch.arange(160).roll(80), homes=homes)


def test_a_model_that_learnt_one_client_tells_whose_a_record_is():
    seen, truth = series((1,))
    made = found(seen)
    told = result(made, seen, truth)
    accuracy, advantage, alone = told.metrics
    right = (made.sources == truth.owners)[:80].double().mean()
    assert accuracy.value == pytest.approx(float(right))
    assert accuracy.value > 0.8
    assert accuracy.baseline == max(0.5, alone.value)
    assert advantage.value > 0.2
    assert (accuracy.n, accuracy.of) == (80, "records of clients")
    assert "it knows 50 records of 2 clients, and asks 1 model" in told.notes
    judgement = FINDING_TYPES["source"].verdict([told])
    assert judgement.verdict == "inferred"
    assert f"where {100 * accuracy.baseline:.0f} % are without the model" in judgement.headline


def test_who_took_part_when_is_seen_in_earlier_models_alone():
    """The last model has learnt both clients alike; the one before, one of them."""
    seen, truth = series((0,), (0, 1))
    last, every = (result(found(seen, models=models), seen, truth) for models in ("last", "all"))
    assert (last.is_leak, every.is_leak) == (False, True)


@pytest.mark.slow
def test_the_finished_model_alone_is_one_model():
    seen, _ = series((0,), (0, 1))
    last = dataclasses.replace(seen, weights=seen.weights[-1:])
    for way in ("scores", "sources", "blind"):
        assert getattr(found(seen), way).equal(getattr(found(last), way))
    assert torch.equal(*(blind(found(seen, models=models)) for models in ("last", "all")))


def test_what_records_tell_themselves_the_blind_classifier_tells():
    """Two sites in other units, and a model that says the same of everything."""
    _, seen, _ = turns()
    rng = torch.Generator().manual_seed(0)
    x = torch.rand((80, 1, 8, 8), generator=rng)
    whose = torch.arange(80) % 2
    x[whose == 1] *= 0.5
    none = torch.zeros(0, dtype=torch.int64)
    labels = torch.zeros(80, dtype=torch.int64)
    records = QuerySet(x[:40], labels[:40], x[:0], none, known_inputs=x[40:], known_labels=labels[40:],
                       known_clients=whose[40:])  # fmt: skip
    still = {name: torch.zeros_like(t) for name, t in seen.weights[-1].items()}
    made = found(dataclasses.replace(seen, records=records, weights=(still,)))
    assert blind(made).equal(whose[:40])
    assert made.sources.equal(whose[:40])


def test_a_finding_survives_the_disk(tmp_path):
    made = found(turns()[1])
    made.save(tmp_path / "f.safetensors")
    again = Finding.load(tmp_path / "f.safetensors")
    assert isinstance(again, SourceFinding)
    assert blind(again).equal(blind(made))


@pytest.mark.parametrize("known", [0, 4])
def test_it_says_what_it_lacks(known):
    _, seen, _ = turns()
    assert seen.records is not None
    rows = torch.cat([torch.arange(known), 40 + torch.arange(known)])
    few = {name: getattr(seen.records, name)[rows] for name in ("known_inputs", "known_labels", "known_clients")}
    with pytest.raises(NotApplicable, match=r"set threat\.known_records"):
        make_attack("source-outputs").check(dataclasses.replace(seen, records=dataclasses.replace(seen.records, **few)))


@pytest.mark.slow
@pytest.mark.parametrize("most", [None, 48])
def test_it_wins_its_control(most):
    recording, seen, _ = turns()
    case = memorised_by_one(recording, most)
    assert case is not None
    control = observe(case.recording.transcript, seen.threat)
    assert result(found(control), control, case.recording.truth).is_leak


def test_with_one_client_s_records_there_is_no_control():
    recording, _, truth = turns()
    owners = torch.where(truth.owners == 1, NOBODY, truth.owners)
    assert memorised_by_one(dataclasses.replace(recording, truth=dataclasses.replace(truth, owners=owners))) is None


# What counts ---------------------------------------------------------------------------------------------------------


def judged(right: float, alone: float, seed: int = 0) -> Any:
    """A finding that knows so many owners, beside a blind one; both name others at random."""
    made, seen, truth = planted(right, seed)
    rng = torch.Generator().manual_seed(seed + 1)
    owners = torch.cat([truth.owners[:60]] * 2)
    knows = torch.rand(120, generator=rng) < alone
    named = torch.where(knows, owners, torch.randint(3, (120,), generator=rng))
    homes = truth.owners[:60].repeat(2)
    return dataclasses.replace(made, blind=named), seen, dataclasses.replace(truth, homes=homes)


def test_the_p_value_is_the_largest_of_three():
    made, seen, truth = judged(0.8, 0.5)
    told = result(made, seen, truth)
    owners = truth.owners[:60]
    right = made.sources[:60] == owners
    for other in (made.blind[:60] == owners, made.sources[60:] == owners):
        better, worse = int((right & ~other).sum()), int((~right & other).sum())
        assert told.p_value >= binomtest(better, better + worse, alternative="greater").pvalue
    named = made.blind[:60] == owners
    better, worse = int((right & ~named).sum()), int((~right & named).sum())
    assert told.p_value == pytest.approx(binomtest(better, better + worse, alternative="greater").pvalue)
    assert told.metrics[0].baseline == pytest.approx(float((made.blind[:60] == owners).double().mean()))


def test_what_the_record_tells_itself_is_no_leak_of_the_model():
    made, seen, truth = judged(0.8, 0.0)
    assert result(made, seen, truth).is_leak
    assert not result(dataclasses.replace(made, blind=made.sources), seen, truth).is_leak


def test_what_the_model_tells_of_records_that_it_never_saw_is_no_leak_of_training():
    made, seen, truth = judged(0.8, 0.0)
    scores = torch.cat([made.scores[:60]] * 2)
    told = result(dataclasses.replace(made, scores=scores, sources=scores.argmax(dim=1)), seen, truth)
    assert (told.p_value, told.is_leak) == (1.0, False)
    assert told.metrics[1].value == 0


def test_where_members_differ_by_themselves_it_is_inconclusive():
    made, seen, truth = judged(0.8, 0.0)
    assert seen.records is not None
    inputs = torch.rand(seen.records.inputs.shape, generator=torch.Generator().manual_seed(0))
    inputs[truth.owners != NOBODY] += 0.5
    seen = dataclasses.replace(seen, records=dataclasses.replace(seen.records, inputs=inputs))
    told = result(made, seen, truth)
    assert not told.is_leak
    judgement = FINDING_TYPES["source"].verdict([told])
    assert (judgement.verdict, judgement.advice) == ("inconclusive", CONFOUNDED)


@pytest.mark.parametrize("homes", ["of nobody's", "of another client"])
def test_without_matches_of_the_member_s_own_client_it_is_at_most_inconclusive(homes):
    made, seen, truth = judged(0.8, 0.0)
    other = truth.homes.clone()
    other[60] = 1 - min(1, int(other[60]))
    strange = dataclasses.replace(truth, homes=truth.homes[:0] if homes == "of nobody's" else other)
    told, usual = result(made, seen, strange), result(made, seen, truth)
    assert usual.is_leak
    assert (told.is_leak, told.p_value) == (False, usual.p_value)
    assert told.metrics == usual.metrics
    judgement = FINDING_TYPES["source"].verdict([told])
    assert judgement.verdict == "inconclusive"
    assert "aren't of the member's own client" in judgement.advice


def test_where_the_records_tell_all_a_model_can_add_nothing():
    made, seen, truth = judged(1.0, 1.0)
    judgement = FINDING_TYPES["source"].verdict([result(made, seen, truth)])
    assert judgement.verdict == "inconclusive"
    assert "the records themselves tell their client" in judgement.advice


@pytest.mark.slow
def test_an_audit_of_the_finished_model_says_what_it_adds():
    summary = build.audited(_TURNS()).summaries[0]
    assert summary.attack == "source-outputs"
    assert summary.verdict in ("inferred", "not demonstrated")
