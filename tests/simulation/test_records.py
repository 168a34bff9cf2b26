"""Records: which ones the adversary gets, and how they travel, are kept, granted and counted as used."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedaudit.data.dataset import Split
from fedaudit.evaluation.blind import evaluated
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.record_draw import RecordDraw, draw
from fedaudit.transcript.observation import observe
from fedaudit.transcript.queries import NOBODY, UNUSED
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth, check_belongs, save_recording
from fedaudit.utils.errors import BadInput, CorruptTranscript
from fedaudit.utils.seeds import generator
from tests.attacks.membership_cases import PUBLIC, scenario
from tests.build import Killed, recorded, sent
from tests.transcript.integrity_cases import put_part


def split(rows: list[int], label: int = 3, group: int | None = None) -> Split:
    """Examples that can be told by their number."""
    numbers = torch.tensor(rows, dtype=torch.float32)
    groups = None if group is None else torch.full((len(rows),), group)
    return Split(torch.stack([numbers, -numbers], dim=1), (numbers.long() % label), groups)


def numbers(inputs: Tensor) -> list[int]:
    return [int(x) for x in inputs[:, 0].tolist()]


SHARES = [split([*range(20)]), split([*range(20, 50)]), split([*range(50, 60), 0, 1, 2])]  # the last one is malicious
REST, HELD_OUT = split([*range(80)]), split([*range(100, 200)])


def drawn(records: int = 20, public: int = 30, seed: int = 0) -> RecordDraw:
    return draw(records, public, SHARES, 2, REST, HELD_OUT, generator=generator(seed, "x"))


@given(records=st.integers(1, 47).map(lambda n: 2 * n), public=st.integers(0, 20), seed=st.integers(0, 1000))
def test_half_of_the_records_are_honest_clients_and_half_nobodys(records, public, seed):
    made = drawn(records, public, seed)
    assert made.records is not None
    held = numbers(made.records.inputs)
    assert len(held) == len(set(held)) == records
    theirs = {n: client for client in (0, 1) for n in numbers(SHARES[client].inputs)}
    for number, owner, position in zip(held, made.owners.tolist(), made.positions.tolist(), strict=True):
        assert number not in numbers(SHARES[2].inputs)
        assert owner == theirs.get(number, NOBODY)
        assert owner == NOBODY or numbers(SHARES[owner].inputs)[position] == number
    assert int((made.owners == NOBODY).sum()) == records // 2
    assert made.records.labels.tolist() == [n % 3 for n in held]
    free = numbers(made.records.public_inputs)
    assert len(free) == len(set(free)) == public
    clients = {n for share in SHARES for n in numbers(share.inputs)}
    assert not clients & set(free)
    assert not set(held) & set(free)
    assert not set(numbers(made.held_out.inputs)) & {*held, *free}
    assert set(numbers(made.held_out.inputs)) | {*held, *free} >= set(range(100, 200))


def test_what_nobody_holds_comes_from_the_clients_own_split_first():
    made = drawn(20, 0)
    assert made.records is not None
    non_members = [n for n, o in zip(numbers(made.records.inputs), made.owners.tolist(), strict=True) if o == NOBODY]
    assert all(60 <= n < 80 for n in non_members)
    assert len(made.held_out) == 100


def test_matched_non_members_are_of_the_other_sort_and_of_the_same_class_and_group():
    shares = [split([*range(10)], group=0), split([*range(10, 20)], group=1), split([99], group=2)]
    held_out = Split(torch.cat([split([*range(200, 240)]).inputs]), torch.arange(40) % 3, torch.arange(40) // 20)
    made = draw(20, 0, shares, 2, split([], group=0), held_out, generator=generator(1, "x"))
    assert made.records is not None
    assert made.matched[made.matched].equal(torch.arange(20))
    assert ((made.owners == NOBODY) != (made.owners[made.matched] == NOBODY)).all()
    assert made.records.labels[made.matched].equal(made.records.labels)
    groups = [
        owner if owner != NOBODY else int(number >= 220)
        for number, owner in zip(numbers(made.records.inputs), made.owners.tolist(), strict=True)
    ]
    assert [groups[i] for i in made.matched.tolist()] == groups


def of_classes(first: int, *counts: int) -> Split:
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    numbers = first + torch.arange(len(labels), dtype=torch.float32)
    return Split(torch.stack([numbers, -numbers], dim=1), labels)


@given(seed=st.integers(0, 1000))
def test_classes_of_which_nobody_s_run_out_tell_no_member(seed):
    """Clients hold most of the rare classes: their members are fewer, and each has another of its class."""
    made = draw(
        80, 5, [of_classes(0, 40, 30, 12), of_classes(200, 40, 30, 12)], 2, of_classes(500, 60, 20, 2),
        of_classes(900, 10, 4, 1), generator=generator(seed, "x"),
    )  # fmt: skip
    assert made.records is not None
    labels, members = made.records.labels, made.owners != NOBODY
    assert int(members.sum()) == 40
    assert labels[members].bincount(minlength=3).equal(labels[~members].bincount(minlength=3))
    assert labels[made.matched].equal(labels)
    assert int((labels[members] == 2).sum()) <= 3


def test_records_that_have_no_other_of_their_class_are_refused():
    rest, held_out = of_classes(500, 60, 2), of_classes(900, 3, 0)
    with pytest.raises(BadInput, match=r"of its class .* there are 12; set threat.target_records to 24 or less"):
        draw(40, 0, [of_classes(0, 10, 40)], 1, rest, held_out, generator=generator(1, "x"))


@pytest.mark.slow
def test_members_stand_at_no_particular_place():
    firsts = [int(drawn(2, 0, seed).owners[0] == NOBODY) for seed in range(200)]
    assert 70 <= sum(firsts) <= 130


@pytest.mark.parametrize(
    ("records", "public", "reason"),
    [(96, 0, "asks for 48 examples of honest clients, and they hold 47"), (20, 111, "ask for 121 .* there are 119")],
)
def test_too_many_records_are_refused(records, public, reason):
    with pytest.raises(BadInput, match=reason):
        drawn(records, public)


def test_records_travel_and_survive_the_disk(tmp_path):
    transcript, truth = sent(scenario(PUBLIC))
    save_recording(transcript, truth, tmp_path / "t")
    again = Transcript.load(tmp_path / "t")
    assert transcript.records is not None
    assert again.records is not None
    for name, value in vars(transcript.records).items():
        assert getattr(again.records, name).equal(value)
    known = Truth.load(tmp_path / "t" / "truth.safetensors")
    check_belongs(known, again, tmp_path)
    assert known.owners.equal(truth.owners)
    assert known.matched.equal(truth.matched)


@pytest.mark.parametrize("field", ["owners", "matched"])
def test_a_truth_that_contradicts_the_records_is_refused(field, tmp_path):
    transcript, truth = sent(scenario())
    truth = dataclasses.replace(truth, about={"transcript": transcript.fingerprint()})
    check_belongs(truth, transcript, tmp_path)
    lie = getattr(truth, field).clone()
    lie[0] = -5
    with pytest.raises(CorruptTranscript, match="the adversary's 60 records"):
        check_belongs(dataclasses.replace(truth, **{field: lie}), transcript, tmp_path)


def test_other_records_are_another_transcript(tmp_path):
    transcript, truth = sent(scenario())
    save_recording(transcript, truth, tmp_path / "t")
    assert transcript.records is not None
    before = transcript.fingerprint()
    transcript.records.inputs[0] = 0
    assert transcript.fingerprint() != before


def test_damaged_records_are_refused(tmp_path):
    transcript, truth = sent(scenario())
    save_recording(transcript, truth, tmp_path / "t")
    assert transcript.records is not None
    for name, wrong in (("inputs", torch.full((60, 1, 8, 8), 2.0)), ("labels", torch.full((60,), 10))):
        shutil.copytree(tmp_path / "t", tmp_path / name)
        put_part(tmp_path / name, "queries", {**transcript.records.stored(), name: wrong})
        with pytest.raises(CorruptTranscript, match=r"queries\.safetensors"):
            Transcript.load(tmp_path / name)


def test_an_observation_has_what_the_threat_model_grants():
    transcript, _ = sent(scenario(PUBLIC))
    assert observe(transcript, ThreatModel()).records is None
    some = observe(transcript, ThreatModel(target_records=60)).records
    assert some is not None
    assert len(some) == 60
    assert len(some.public_inputs) == 0
    every = observe(transcript, ThreatModel(target_records=60, knows_public_data=True, public_examples=60)).records
    assert every is not None
    assert len(every.public_inputs) == 60
    knows, ignores = ThreatModel(target_records=60).knowledge()
    assert "60 records with their labels, half of them honest clients'" in knows
    assert any("which of the records are clients'" in line for line in ignores)


def test_the_same_records_under_every_defence_and_other_ones_with_another_seed():
    values = scenario().model_dump(mode="json")
    values["defences"] = [{"aggregator": "mean"}, {"aggregator": "median"}]
    both = record(resolve(scenario_from(values)))
    other = record(resolve(scenario_from({**values, "seed": 1})))
    a, b, c = (r.transcript.records for r in (*both, other[0]))
    assert a is not None
    assert b is not None
    assert c is not None
    assert a.inputs.equal(b.inputs)
    assert not a.inputs.equal(c.inputs)


def test_what_no_update_used_is_no_member():
    transcript, truth = sent(scenario(local_epochs=None, local_steps=1, rounds=1))
    assert transcript.records is not None
    used = {client: inputs for (_, client), inputs in truth.inputs.items()}
    for example, owner in zip(transcript.records.inputs, truth.owners.tolist(), strict=True):
        trained = [c for c, inputs in used.items() if bool((inputs == example).flatten(1).all(1).any())]
        assert trained == ([] if owner in (NOBODY, UNUSED) else [owner])
    assert (truth.owners == UNUSED).any()
    rows = evaluated(truth, None)
    assert not (truth.owners[rows] == UNUSED).any()
    assert len(rows) == 2 * int((truth.owners >= 0).sum())


@pytest.mark.usefixtures("checkpoint_every_round")
def test_a_killed_simulation_remembers_what_was_used(tmp_path):
    made = scenario(local_epochs=None, local_steps=2, rounds=6, clients_per_round=2)
    with pytest.raises(Killed):
        recorded(made, tmp_path / "f", until=9)
    assert recorded(made, tmp_path / "f").truth.owners.equal(recorded(made).truth.owners)


def test_examples_of_pretraining_pass_for_nobodys_never():
    values = scenario({"target_records": 40}, examples=355).model_dump(mode="json")
    values["data"]["split"] = "test"
    values["model"]["training"]["epochs"] = 1
    with pytest.raises(BadInput, match="there are 0"):
        record(resolve(scenario_from(values)))
