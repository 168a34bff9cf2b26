"""Adversaries that see a part of a federation: what reaches them, what doesn't, and what they make of it."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedaudit
from fedaudit.attacks import ATTACKS, Finding, make_attack
from fedaudit.pipeline.partial_view import truth_for
from fedaudit.pipeline.run import plan
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.queries import NOBODY, UNUSED
from fedaudit.transcript.rounds import Round
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput, NotApplicable
from fedaudit.utils.fingerprint import fingerprint
from tests.attacks.attack_cases import quick_attack
from tests.capture import recording_cases
from tests.simulation.federation_cases import run

SGD: dict[str, Any] = {
    "algorithm": "fedsgd", "clients": 4, "examples": 16, "batch_size": 4, "rounds": 8, "learning_rate": 0.1,
}  # fmt: skip
AVG: dict[str, Any] = {
    "algorithm": "fedavg", "clients": 4, "examples": 32, "batch_size": 3, "local_steps": 2, "rounds": 4,
    "learning_rate": 0.05, "partition": {"scheme": "dirichlet", "alpha": 1.0},
}  # fmt: skip
FEDAVG = {"defences": {"aggregator": "fedavg"}}
RECORDS = {"target_records": 20, "knows_public_data": True, "public_examples": 20}


@cache
def simulated(algorithm: str, rule: str = "mean") -> tuple[Transcript, Truth]:
    spec = SGD if algorithm == "fedsgd" else AVG
    _, transcript, truth = run(spec, seed=1, defences={"aggregator": rule}, threat=RECORDS)
    return transcript, truth


def seen(transcript: Transcript, **threat: Any) -> Observation:
    return observe(transcript, ThreatModel(**threat))


def flat(update: Update) -> Tensor:
    return torch.cat([update.tensors[name].flatten().double() for name in sorted(update.tensors)])


def places(observation: Observation) -> list[tuple[int, int]]:
    return [(m.round, m.client) for m in observation.messages]


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# Rounds -------------------------------------------------------------------------------------------------------------


def test_of_n_clients_that_take_turns_each_reads_every_nth_round_without_its_own_update():
    transcript, _ = simulated("fedsgd")
    for own in range(4):
        view = seen(transcript, adversary="aggregating-client", clients=[own])
        others = [client for client in range(4) if client != own]
        assert places(view) == [(index, client) for index in (own, own + 4) for client in others]
        assert len(view.weights) == 8  # as every client
        for message in view.messages:
            sent = next(u for u in transcript.rounds[message.round].updates if u.client == message.client)
            assert flat(message.update).equal(flat(sent))
    together = [set(places(seen(transcript, adversary="aggregating-client", clients=[own]))) for own in range(4)]
    assert sum(map(len, together)) == len(set().union(*together)) == 8 * 3  # nobody aggregates another's round


def test_who_aggregates_which_rounds_may_be_said():
    view = seen(simulated("fedsgd")[0], adversary="aggregating-client", clients=[0, 3], rounds=[7, 1])
    assert places(view) == [(index, client) for index in (1, 7) for client in (1, 2)]


@pytest.mark.parametrize(("rounds", "expected"), [("from 5", [5, 6, 7]), ("2 to 3", [2, 3]), ([6, 0], [0, 6])])
@pytest.mark.parametrize("who", ["server", "eavesdropper"])
def test_a_server_that_comes_late_or_leaves_sees_these_rounds_alone(who, rounds, expected):
    transcript, _ = simulated("fedsgd")
    view = seen(transcript, adversary=who, rounds=rounds)
    assert places(view) == [(index, client) for index in expected for client in range(4)]
    assert all(a is transcript.rounds[i].weights for a, i in zip(view.weights, expected, strict=True))
    client = seen(transcript, adversary="client", rounds=rounds)
    assert not client.messages
    assert len(client.weights) == len(expected)


# Sums ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "rule"), [("fedsgd", "mean"), ("fedavg", "mean"), ("fedavg", "fedavg")])
def test_what_two_clients_subtract_from_the_model_leaves_the_mean_of_the_other_two(algorithm, rule):
    transcript, _ = simulated(algorithm, rule)
    view = seen(transcript, adversary="client", clients=[1, 3])
    assert places(view) == [(index, 0) for index in range(len(transcript.rounds) - 1)]  # no model after the last
    for message in view.messages:
        updates = {u.client: u for u in transcript.rounds[message.round].updates}
        held = [u.training.data_size if u.training and u.training.data_size else 0 for u in updates.values()]
        weights = held if rule == "fedavg" else [1, 1, 1, 1]
        expected = weights[0] * flat(updates[0]) + weights[2] * flat(updates[2])
        assert apart(flat(message.update), expected / (weights[0] + weights[2])) < 1e-4
        assert message.update.members == (0, 2)
        assert message.update.num_examples == updates[0].num_examples + updates[2].num_examples
        assert message.weights is transcript.rounds[message.round].weights
    if algorithm == "fedavg":
        assert len(set(held)) > 1  # else the rules would be one


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_of_one_other_client_they_have_the_update_itself(algorithm):
    transcript, truth = simulated(algorithm)
    threat = ThreatModel(adversary="client", clients=[0, 1, 3])
    view = observe(transcript, threat)
    for message in view.messages:
        sent = next(u for u in transcript.rounds[message.round].updates if u.client == 2)
        assert 0 < apart(flat(message.update), flat(sent)) < 1e-4  # the rounding of the models is in it
        assert not message.update.members
        assert message.update.training == sent.training
    recording = Recording(transcript, truth)
    assert truth_for(recording, observe(recording, threat)).inputs[0, 2].equal(truth.inputs[0, 2])


def test_what_an_aggregating_client_subtracts_from_a_sum_leaves_the_others():
    transcript, _ = simulated("fedavg", "fedavg")
    view = seen(transcript, adversary="aggregating-client", clients=[2], sees="sum")
    (message,) = view.messages
    updates = {u.client: u for u in transcript.rounds[2].updates}
    held = {c: u.training.data_size if u.training and u.training.data_size else 0 for c, u in updates.items()}
    others = [client for client in updates if client != 2]
    expected = sum(held[c] * flat(updates[c]) for c in others) / sum(held[c] for c in others)
    assert apart(flat(message.update), torch.as_tensor(expected)) < 1e-6
    assert message.update.members == (0, 1, 3)
    pairs = seen(transcript, adversary="aggregating-client", clients=[2], sees="aggregate of 2").messages
    assert [m.update.members for m in pairs] == [(0, 1), ()]  # beside its own there is client 3's alone
    assert apart(flat(pairs[1].update), flat(updates[3])) < 1e-6


def test_the_truth_of_a_sum_is_what_its_clients_used():
    transcript, truth = simulated("fedsgd")
    two = ThreatModel(adversary="client", clients=[0, 1])
    own = truth_for(Recording(transcript, truth), observe(transcript, two))
    assert own.inputs[3, 2].equal(torch.cat([truth.inputs[3, 2], truth.inputs[3, 3]]))
    assert own.labels[3, 2].equal(torch.cat([truth.labels[3, 2], truth.labels[3, 3]]))


OTHER_RULES: dict[str, dict[str, Any]] = {
    "a robust rule": {"defences": {"aggregator": "median"}},
    "noise": {"defences": {"client_defence": {"name": "dp", "where": "central", "clip": 0.1, "epsilon": None}}},
    "one round": {},
}


@pytest.mark.parametrize("case", OTHER_RULES)
def test_where_the_model_does_not_move_by_the_mean_clients_subtract_nothing(case):
    _, transcript, _ = run({**AVG, "rounds": 1 if case == "one round" else 3}, seed=1, **OTHER_RULES[case])
    view = seen(transcript, adversary="client", clients=[0, 1])
    assert not view.messages
    with pytest.raises(NotApplicable, match="others' updates"):
        make_attack("labels").check(view)


# Nothing else -------------------------------------------------------------------------------------------------------

PARTS: dict[str, dict[str, Any]] = {
    "aggregates in turn": {"adversary": "aggregating-client", "clients": [1]},
    "aggregates sums": {"adversary": "aggregating-client", "clients": [1], "sees": "sum"},
    "two collude": {"adversary": "client", "clients": [0, 1]},
    "all but one collude": {"adversary": "client", "clients": [0, 1, 2]},
    "comes late": {"adversary": "server", "rounds": "from 2"},
    "leaves": {"adversary": "eavesdropper", "rounds": "0 to 1"},
}


def altered(transcript: Transcript, part: str) -> Transcript:
    """Return another transcript, that differs in all that is outside of the part."""

    def noisy(tensors: dict[str, Tensor], by: float = 1.0) -> dict[str, Tensor]:
        return {name: t + by if t.is_floating_point() else t for name, t in tensors.items()}

    rounds: list[Round] = []
    for record in transcript.rounds:
        outside = {
            "aggregates in turn": record.index % 4 != 1,
            "aggregates sums": record.index % 4 != 1,
            "comes late": record.index < 2,
            "leaves": record.index > 1,
            "all but one collude": True,
            "two collude": True,
        }[part]
        weights = noisy(record.weights) if outside and part in ("comes late", "leaves") else record.weights
        updates = []
        for u in record.updates:
            by = 1.0 if outside or (part == "aggregates in turn" and u.client == 1) else 0.0
            if part == "aggregates sums" and not outside:  # the sum is seen; who of the others sent what isn't
                by = {0: 2.0**-4, 2: -(2.0**-4)}.get(u.client, 0.0)
            if part == "two collude":
                last = record is transcript.rounds[-1]
                by = 1.0 if last else {2: 2.0**-4, 3: -(2.0**-4)}.get(u.client, 0.0)
            if part == "all but one collude":
                by = float(record is transcript.rounds[-1])
            updates.append(dataclasses.replace(u, tensors=noisy(u.tensors, by)))
        rounds.append(dataclasses.replace(record, weights=weights, updates=updates))
    return dataclasses.replace(transcript, rounds=rounds)


def bits(transcript: Transcript, part: str) -> str:
    view = seen(transcript, **PARTS[part], **RECORDS)
    return fingerprint(dataclasses.replace(view, module=torch.nn.Identity()))


@pytest.mark.parametrize("part", PARTS)
def test_what_is_outside_of_the_part_changes_no_bit_that_an_attack_receives(part):
    transcript, _ = simulated("fedsgd")
    short = dataclasses.replace(transcript, rounds=transcript.rounds[:4])
    other = altered(short, part)
    assert fingerprint([r.updates for r in other.rounds]) != fingerprint([r.updates for r in short.rounds])
    if part == "aggregates sums":  # whose rounding alone tells
        own, theirs = (seen(t, **PARTS[part]).messages[0].update for t in (short, other))
        assert apart(flat(theirs), flat(own)) < 1e-6
        return
    assert bits(other, part) == bits(short, part)
    assert bits(altered(short, "comes late" if part != "comes late" else "leaves"), part) != bits(short, part)


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS.names())
def test_every_attack_runs_on_every_part_or_says_why_not(name, tmp_path: Path):
    transcript, _ = simulated("fedavg")
    attack = quick_attack(name, tmp_path)
    for part in PARTS.values():
        threat = ThreatModel(**part, **RECORDS)
        for trial in plan([observe(transcript, threat)], [attack], updates=1, clients=1):
            outcome = trial.outcome or trial.run()
            assert isinstance(outcome, Finding) or "\n" not in str(outcome)


# Records ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("who", "own"), [("client", [0, 2]), ("aggregating-client", [1])])
def test_what_the_adversary_holds_itself_is_no_record(who, own):
    threat = {"adversary": who, "clients": own, "target_records": 40}
    federation, transcript, truth = run({**AVG, "examples": 80, "rounds": 2}, seed=1, threat=threat)
    members = truth.owners[truth.owners != NOBODY]
    assert set(members.tolist()) <= {UNUSED, *range(4)} - set(own)
    assert len(members) == 20
    assert transcript.records is not None
    for owner, record in zip(truth.owners.tolist(), transcript.records.inputs, strict=True):
        if owner >= 0:
            assert any(torch.equal(record, x) for x in federation.client_data[owner].inputs)
        assert not any(torch.equal(record, x) for client in own for x in federation.client_data[client].inputs)
    seen = observe(transcript, ThreatModel(**threat))
    assert truth_for(Recording(transcript, truth), seen).owners.equal(truth.owners)


def test_records_that_were_used_after_the_last_round_that_is_seen_are_left_out():
    spec = {**AVG, "examples": 80, "local_steps": 1, "rounds": 6, "clients_per_round": 1}
    _, transcript, truth = run(spec, seed=1, threat={"target_records": 40})
    recording = Recording(transcript, truth)
    early = truth_for(recording, observe(recording, ThreatModel(target_records=40, rounds="0 to 2")))
    assert transcript.records is not None
    used = torch.cat([x for (index, _), x in truth.inputs.items() if index <= 2])
    for row, record in enumerate(transcript.records.inputs):
        asked = bool((used == record).flatten(1).all(dim=1).any())
        assert early.owners[row] == (truth.owners[row] if asked or truth.owners[row] == NOBODY else UNUSED)
    assert 0 < int((early.owners >= 0).sum()) < int((truth.owners >= 0).sum())
    assert truth_for(recording, observe(recording, ThreatModel(target_records=40, rounds="from 3"))).owners.equal(
        truth.owners
    )


# Audits and recordings ----------------------------------------------------------------------------------------------

SWARM: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "mlp", "width": 16},
    "federations": [{"name": "swarm", "clients": 3, "examples": 3, "batch_size": 1, "rounds": 4}],
    "attacks": ["labels", "exact-linear"],
    "evaluation": {"controls": False, "bootstrap": 100},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("threat", "runs", "words"),
    [
        (
            {"adversary": "aggregating-client", "clients": [2]},
            [(2, 0), (2, 1)],
            "client 2 aggregates round 2 and sees the other clients' updates of these alone",
        ),
        (
            {"adversary": "client", "clients": [0, 2]},
            [(0, 1), (1, 1), (2, 1)],
            "clients 0 and 2 collude: they see the global model of every round and subtract their own updates",
        ),
        ({"rounds": "from 3"}, [(3, 0), (3, 1), (3, 2)], "it sees the rounds from 3 on alone"),
    ],
)
def test_images_come_out_of_what_is_seen_and_the_report_says_whose_and_when(threat, runs, words, tmp_path):
    audit = fedaudit.audit(SWARM, threat=threat, out=tmp_path, progress=False)
    result = audit.result
    for attack in ("labels", "exact-linear"):
        assert [(f.round, f.client) for f in result.findings if f.attack == attack] == runs
    for finding in result.findings:
        if finding.attack == "exact-linear":
            assert all(image.psnr > 40 for image in finding.images)
        else:
            assert next(m.value for m in finding.metrics if m.name == "label_accuracy") == 1
    assert words in result.adversary.summary
    assert result.federations[0].updates_observed == len(runs)
    assert f"the adversary reads {len(runs)} updates, of" in result.federations[0].description
    first, *_ = words.split(" and ")
    assert first[1:] in (tmp_path / "report.html").read_text()  # there a sentence begins with it


def test_a_recording_is_cut_in_the_same_way(tmp_path):
    recording_cases.federation(tmp_path / "r", clients=3, rounds=4, examples=4)
    given: dict[str, Any] = {"module": recording_cases.Net(), "progress": False}
    threats: list[tuple[dict[str, Any], list[tuple[int, int]], int]] = [
        ({"adversary": "aggregating-client", "clients": [1]}, [(1, 0), (1, 2)], 4),
        ({"adversary": "client", "clients": [0, 1]}, [(0, 2), (1, 2), (2, 2)], 4),
        ({"adversary": "client", "clients": [0]}, [(0, 1), (1, 1), (2, 1)], 8),  # sums of two
        ({"adversary": "server", "rounds": "from 3"}, [(3, 0), (3, 1), (3, 2)], 4),
    ]
    for threat, runs, labels in threats:
        result = fedaudit.audit_transcript(tmp_path / "r", ["labels"], threat=threat, controls=False, **given).result
        assert [(f.round, f.client) for f in result.findings] == runs
        accuracies = [m for f in result.findings for m in f.metrics if m.name == "label_accuracy"]
        assert all(m.value >= 0.75 and m.n == labels for m in accuracies)
        assert all(f"threat.{name}=" in result.repeat for name in threat if name != "adversary")
        if threat["adversary"] == "aggregating-client":
            assert "client 1 (site-1) aggregates round 1" in result.adversary.summary


def test_an_update_outside_of_the_part_that_contradicts_its_facts_is_said_in_words():
    four = {**SWARM, "federations": [{**SWARM["federations"][0], "clients": 4, "examples": 4}]}
    recording = fedaudit.simulate(four, progress=False)
    wrong = altered(recording.transcript, "two collude")  # whose sum is as it was, but of the last round
    threat = {"adversary": "client", "clients": [0, 1]}
    audit = fedaudit.audit_transcript(Recording(wrong, recording.truth), ["labels"], threat=threat, progress=False)
    assert (audit.result.federations[0].replay_error or 0) > 0.1
    assert [(f.round, f.client) for f in audit.result.findings] == [(0, 2), (1, 2), (2, 2)]
    assert any("those that travelled" in a for s in audit.result.summaries for a in s.advice)


GAN = {"algorithm": "fedavg", "local_steps": 1, "malicious": {"name": "gan", "missing_classes": [3]}}
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"adversary": "client", "clients": [4]}, {}, "there is no client 4; they are 0 to 3"),
    ({"adversary": "client", "clients": [0, 1, 2, 3]}, {}, "names all 4 clients, which leaves nobody"),
    ({"adversary": "client", "clients": [1, 1]}, {}, "names one twice"),
    ({"adversary": "client", "clients": []}, {}, "at least one is needed"),
    ({"clients": [1]}, {}, "set adversary: client or aggregating-client"),
    ({"adversary": "aggregating-client"}, {}, "set clients: [0]"),
    ({"adversary": "aggregating-client", "clients": [3]}, {"rounds": 2}, "aggregates none of the rounds"),
    ({"adversary": "aggregating-client", "clients": [1]}, {"clients_per_round": 2}, "who aggregates isn't known"),
    ({"rounds": [8]}, {}, "sees none of the rounds that there are, rounds 0 to 7"),
    ({"rounds": "from 8"}, {}, "sees none of the rounds"),
    ({"rounds": "5 to 2"}, {}, "ends before it begins"),
    ({"rounds": "later"}, {}, "give a list as [2, 6], from 10, or 10 to 19"),
    ({"rounds": 3}, {}, "threat.rounds: 3 isn't allowed"),
    ({"rounds": [0]}, {"algorithm": "vertical", "clients": 2, "rounds": 1}, "aren't for a vertical federation"),
    ({"adversary": "client", "clients": [0]}, GAN, "leave threat.clients out"),
    ({"adversary": "aggregating-client", "clients": [0], "sees": "sum"}, {"rule": "median"}, "server sees sums only"),
]  # fmt: skip


@pytest.mark.parametrize(("threat", "spec", "words"), BAD)
def test_a_part_that_there_is_none_of_is_refused_in_one_line(threat, spec, words):
    rest = dict(spec)
    defences = {"aggregator": rest.pop("rule", "mean")}
    if rest.get("algorithm") == "vertical":
        rest |= {"examples": 8, "batch_size": 4}
    with pytest.raises(BadInput) as error:
        run({**SGD, **rest}, threat=threat, defences=defences)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_sums_that_were_recorded_are_not_taken_apart():
    _, transcript, _ = run({**SGD, "rounds": 2}, seed=1, threat={"sees": "sum"})
    with pytest.raises(BadInput, match="sums in place of updates"):
        seen(transcript, adversary="client", clients=[0])


def test_canaries_are_for_who_sees_all():
    dp = {"defences": {"client_defence": {"name": "dp", "epsilon": None}}}
    with pytest.raises(BadInput, match="audit of ε"):
        run({**AVG, "partition": {"scheme": "iid"}}, attacks=["dp-canaries"], threat={"rounds": [0]}, **dp)
