"""Membership counted by persons: several records are of one, and what these have in common is evidence once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

import fedaudit
from fedaudit.attacks import MembershipFinding
from fedaudit.data import Dataset, Split
from fedaudit.data.own import with_persons
from fedaudit.evaluation import evaluate, summarise
from fedaudit.results import AttackSummary, FindingResult
from fedaudit.simulation.record_draw import RecordDraw, draw
from fedaudit.transcript.queries import NOBODY, QuerySet
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import BadInput
from fedaudit.utils.seeds import generator
from tests.attacks.membership_cases import logistic

PAIRS, EACH = 40, 8


def of_persons(
    seed: int,
    shift: float,
    *,
    known: bool = True,
    style: float = 0.0,
    pairs: int = PAIRS,
    members: Tensor | None = None,
) -> FindingResult:
    """Score the records of 40 persons who are in and of 40 others, whose own scores differ more than records do.

    Args:
        shift: of members' scores, in deviations of a record.
        known: whose the records are.
        style: of members' inputs.
        members: the attack's decisions, in place of scores above 0.
    """
    rng = generator(seed, "persons")
    n = 2 * pairs * EACH
    whose = torch.randperm(n, generator=rng) % (2 * pairs)  # in no order; persons 2i and 2i + 1 are a pair
    place = torch.argsort(whose, stable=True).view(2 * pairs, EACH)
    matched = torch.zeros(n, dtype=torch.int64)
    matched[place] = place.view(pairs, 2, EACH).flip(1).reshape(2 * pairs, EACH)
    inside = whose % 2 == 0
    scores = 2 * torch.randn(2 * pairs, generator=rng)[whose] + torch.randn(n, generator=rng) + shift * inside
    inputs = torch.randn(n, 5, generator=rng) + style * inside[:, None]
    labels = torch.zeros(n, dtype=torch.int64)
    seen = dataclasses.replace(logistic(), records=QuerySet(inputs, labels, inputs[:0], labels[:0]))
    truth = Truth({}, {}, inputs[:1], labels[:1], {}, owners=torch.where(inside, 4, NOBODY), matched=matched)
    if known:
        truth = dataclasses.replace(truth, persons=whose)
    found = MembershipFinding(
        attack="m", scores=scores.double(), members=scores > 0 if members is None else members, clients=None
    )
    return evaluate(found, seen, truth, seed=seed).result


def summary(result: FindingResult) -> AttackSummary:
    return summarise([result], resamples=100, seed=0)[0]


def metric(result: FindingResult, name: str) -> Any:
    return next(m for m in result.metrics if m.name == name)


def test_a_person_s_score_is_the_mean_of_their_records_and_n_says_persons() -> None:
    result = of_persons(1, 1.5)
    rng = generator(1, "persons")  # the same draws, counted the slow way
    whose = (torch.randperm(2 * PAIRS * EACH, generator=rng) % (2 * PAIRS)).numpy()
    base, own = (torch.randn(k, generator=rng).numpy() for k in (2 * PAIRS, 2 * PAIRS * EACH))
    scores = 2 * base[whose] + own + 1.5 * (whose % 2 == 0)
    means = np.array([scores[whose == person].mean() for person in range(2 * PAIRS)])
    area = roc_auc_score(np.arange(2 * PAIRS) % 2 == 0, means)
    auc = metric(result, "membership_auc")
    assert auc.value == pytest.approx(area)
    assert (auc.n, auc.of) == (2 * PAIRS, "persons")
    majority = np.array([(scores[whose == person] > 0).sum() > EACH / 2 for person in range(2 * PAIRS)])
    right = metric(result, "membership_accuracy")
    assert right.value == pytest.approx(float((majority == (np.arange(2 * PAIRS) % 2 == 0)).mean()))
    assert (right.n, right.of) == (2 * PAIRS, "persons")
    assert metric(result, "membership_blind_auc").of == "persons"
    assert result.record_epsilon is None, "a promise is about records"
    assert not result.exposure
    assert any("80 persons are counted, by the mean score of their 640 records" in note for note in result.notes)


def test_a_leak_of_persons_is_said_of_persons() -> None:
    result = of_persons(0, 3.0)
    judged = summary(result)
    assert judged.verdict == "inferred"
    assert "whether a person's records were used for training" in judged.headline
    assert " of 80 persons, where guessing gets 50 %" in judged.headline
    assert "n = 80 persons" in judged.verdict_text
    top = result.most_exposed[0]
    assert top.others == PAIRS


@pytest.mark.slow
def test_what_a_person_s_records_have_in_common_is_no_evidence_many_times_over() -> None:
    """No effect, but persons differ: counted by records one audit in ten and more accuses, by persons one in 100."""
    by_records = sum(bool(of_persons(seed, 0.0, known=False, pairs=20).is_leak) for seed in range(40))
    by_persons = sum(bool(of_persons(seed, 0.0, pairs=20).is_leak) for seed in range(40))
    assert by_records >= 4
    assert by_persons <= 1


def test_members_who_write_otherwise_are_told_without_any_model() -> None:
    result = of_persons(0, 3.0, style=0.5)
    assert metric(result, "membership_blind_auc").value > 0.8
    assert summary(result).verdict == "inconclusive"
    alike = sum((of_persons(seed, 0.0, pairs=10).blind_p_value or 0) <= 0.05 for seed in range(40))
    assert alike <= 6


# --- the draw -------------------------------------------------------------------------------------------------------


def split(persons: list[int], start: int = 0, targets: Tensor | None = None) -> Split:
    inputs = torch.arange(start, start + len(persons)).float()[:, None].repeat(1, 3)
    labels = torch.zeros(len(persons), dtype=torch.int64) if targets is None else targets
    return Split(inputs, labels, persons=torch.tensor(persons))


CLIENTS = [split([0] * 6 + [1] * 4, 0), split([2] * 5 + [3], 100)]
OTHERS = split([10] * 9 + [11] * 5 + [12] * 4 + [13] * 4 + [0] * 3, 1000)  # three of person 0, whom a client holds


def drawn(records: int, public: int = 0, seed: int = 0) -> RecordDraw:
    return draw(records, public, CLIENTS, 2, OTHERS[:0], OTHERS, generator=generator(seed, "draw"))


def whose_records(made: RecordDraw) -> tuple[Tensor, Tensor]:
    """Return of which person of the data each record is, and which is a member."""
    assert made.records is not None
    every = torch.cat([*(c.inputs for c in CLIENTS), OTHERS.inputs])
    names = torch.cat([torch.cat([one.persons for one in (*CLIENTS, OTHERS) if one.persons is not None])])
    place = (every[:, 0][None] == made.records.inputs[:, 0][:, None]).long().argmax(dim=1)
    return names[place], made.owners != NOBODY


@pytest.mark.parametrize("seed", range(5))
def test_persons_are_paired_with_as_many_records_each(seed: int) -> None:
    made = drawn(24, seed=seed)
    person, member = whose_records(made)
    assert set(person[member].tolist()) <= {0, 1, 2, 3}
    assert set(person[~member].tolist()) <= {10, 11, 12, 13}, "nobody of whom a client holds any"
    for number in made.persons.unique().tolist():
        rows = made.persons == number
        assert len(person[rows].unique()) == 1
        other = made.matched[rows]
        assert len(person[other].unique()) == 1
        assert len(made.persons[other].unique()) == 1
        assert int((made.persons == made.persons[other][0]).sum()) == int(rows.sum())
    assert made.matched[made.matched].equal(torch.arange(24))


def test_few_records_are_of_as_many_persons_as_there_are() -> None:
    made = drawn(8)
    person, _ = whose_records(made)
    assert len(person.unique()) == 8
    assert not len(made.persons), "each record is another person's: records are counted, as ever"
    more = drawn(16)
    assert len(whose_records(more)[0].unique()) == 8
    counts = sorted(more.persons.unique(return_counts=True)[1].tolist())
    assert counts == [1, 1, 2, 2, 2, 2, 3, 3], "one of each in turn, as long as there are more"


def test_no_public_example_is_of_a_record_s_person() -> None:
    small = [split([0] * 3 + [1] * 3)]
    free = split([10] * 5 + [11] * 5 + [12] * 5 + [13] * 2, 100)
    made = draw(12, 5, small, 1, free[:0], free, generator=generator(0, "public"))
    assert made.records is not None
    assert free.persons is not None
    known, asked = (
        {int(free.persons[int(one) - 100]) for one in rows[:, 0] if one >= 100}
        for rows in (made.records.public_inputs, made.records.inputs)
    )
    assert not known & asked
    with pytest.raises(BadInput, match="beside the records' persons"):
        draw(12, 9, small, 1, free[:0], free, generator=generator(0, "public"))


# --- from the data to the verdict -----------------------------------------------------------------------------------


def written(authors: int = 40, each: int = 4) -> Dataset:
    """Texts of authors, each with favourite words; the first half of them is the train split, with a test of others."""
    rng = generator(0, "authors")
    favourites = torch.randint(2, 40, (authors, 6), generator=rng)
    texts = torch.stack([favourites[a][torch.randint(6, (each, 10), generator=rng)] for a in range(authors)])
    texts[:, :, -1] = 1
    half = authors // 2 * each
    flat, whose = texts.flatten(0, 1), torch.arange(authors).repeat_interleave(each)
    return Dataset.from_tokens(
        flat[:half], vocabulary=40, padding=0, end=1, test=flat[half:], persons=(whose[:half], whose[half:])
    )


@pytest.mark.slow
def test_authors_of_a_language_model_s_texts_are_counted() -> None:
    scenario: dict[str, Any] = {
        "data": {"name": "digits", "split": "train"},
        "model": {"name": "decoder", "width": 16},
        "federations": [
            {"name": "f", "algorithm": "fedavg", "clients": 3, "rounds": 3, "batch_size": 10, "local_epochs": 12,
             "learning_rate": 1.0, "examples": 80}
        ],
        "threat": {"target_records": 80},
        "attacks": [{"name": "reference-loss"}, {"name": "fedmia"}],
    }  # fmt: skip
    recording = fedaudit.simulate(scenario, data=written(), progress=False)
    assert recording.truth.persons.unique(return_counts=True)[1].tolist() == [2] * 40
    found = fedaudit.attack(recording, scenario["attacks"], threat=scenario["threat"], progress=False)
    audit = fedaudit.evaluate(found, controls=False, progress=False).result
    for result in audit.findings:
        auc = metric(result, "membership_auc")
        assert (auc.n, auc.of) == (40, "persons"), result.attack
        assert auc.value > 0.8


@pytest.mark.parametrize(
    ("persons", "said"),
    [
        ((torch.zeros(4), torch.zeros(2).long()), "a whole number for each of 4"),
        (torch.zeros(4).long(), "persons of both splits"),
        ((np.array(list("aabb")), np.arange(2)), "a whole number for each of 4"),
        ((torch.zeros(3).long(), torch.zeros(2).long()), "a whole number for each of 4"),
    ],
)
def test_persons_that_are_none_are_refused_in_a_line(persons: Any, said: str) -> None:
    texts = torch.randint(2, 9, (6, 5))
    with pytest.raises(BadInput, match=said):
        Dataset.from_tokens(texts[:4], vocabulary=9, test=texts[4:], persons=persons)


def test_a_person_s_texts_are_held_out_together() -> None:
    texts = torch.randint(2, 9, (60, 5))
    data = Dataset.from_tokens(texts, vocabulary=9, persons=torch.arange(60) // 3)
    assert data.train.persons is not None
    assert data.test.persons is not None
    assert not set(data.train.persons.tolist()) & set(data.test.persons.tolist())


def test_records_files_say_of_which_person_each_is(tmp_path: Path) -> None:
    inputs, labels, persons = torch.rand(6, 2), torch.arange(6) % 2, torch.arange(6) // 2
    np.savez(tmp_path / "a.npz", inputs=inputs.numpy(), labels=labels.numpy(), persons=persons.numpy())
    lines = [f"{x:.3f},{name},{y:.3f},{label}" for (x, y), name, label in zip(inputs, "bbaa  ", labels, strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(["age,person,weight,ill", *lines]))
    read = with_persons(tmp_path / "a.npz")
    assert read[2] is not None
    assert read[2].equal(persons)
    table = with_persons(tmp_path / "a.csv")
    assert table[0].numpy() == pytest.approx(inputs.numpy(), abs=1e-3)
    assert table[2] is not None
    assert table[2][0] == table[2][1] != table[2][2] == table[2][3]
    assert len(table[2].unique()) == 4, "whoever isn't told is somebody else"
    assert with_persons((inputs, labels))[2] is None
    listed = with_persons((inputs, labels, persons.tolist()))[2]
    assert listed is not None
    assert listed.equal(persons)
    for wrong in (persons[:4], persons.float(), np.array(list("aabbcc")), [[0], [0, 1], 1, 2, 3, 4]):
        with pytest.raises(BadInput, match="a whole number for each of 6"):
            with_persons((inputs, labels, wrong))
    np.savez(tmp_path / "b.npz", inputs=inputs.numpy(), labels=labels.numpy(), persons=np.array(list("aabbcc")))
    with pytest.raises(BadInput, match="'persons' is an array of <U1, not of numbers"):
        with_persons(tmp_path / "b.npz")


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_few_examples_are_no_arrays_of_persons(count: int) -> None:
    examples = [(torch.full((3,), float(i)), i % 2) for i in range(count)]
    for given in (examples, tuple(examples)):
        inputs, labels, persons = with_persons(given)
        assert inputs[:, 0].tolist() == list(range(count))
        assert labels.tolist() == [i % 2 for i in range(count)]
        assert persons is None
