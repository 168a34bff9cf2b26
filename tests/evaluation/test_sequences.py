"""Recovered sequences: what other people's sentences give is no leak, and what the update gives is one."""

from __future__ import annotations

import pytest
import torch

from fedaudit.attacks import Finding, SequenceFinding, TokenFinding
from fedaudit.data import load_dataset
from fedaudit.evaluation import FINDING_TYPES, evaluate
from fedaudit.evaluation.shift import REMEDY
from fedaudit.evaluation.verdicts import Judgement
from fedaudit.results import FindingResult
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update

NOTES = load_dataset("notes")


def judged(found: Finding, true: torch.Tensor, labels: torch.Tensor, seed: int, truth: Truth | None = None) -> str:
    return judgement(found, true, labels, seed, truth).verdict


def judgement(
    found: Finding, true: torch.Tensor, labels: torch.Tensor, seed: int, truth: Truth | None = None, times: int = 1
) -> Judgement:
    task = TaskInfo(
        "custom", None, "eval", "cross-entropy", "tokens", tuple(true.shape[1:]), 4, (0.0,), (1.0,), tokens=NOTES.tokens
    )
    seen = Observation(
        "f", ThreatModel(), task, torch.nn.Identity(), torch.nn.functional.cross_entropy, "gradient", (),
        (Message(0, 0, {}, Update(0, "gradient", {}, len(true), None)),),
    )  # fmt: skip
    truth = truth or Truth({(0, 0): true}, {(0, 0): labels}, NOTES.test.inputs, NOTES.test.targets, {})
    result: FindingResult = evaluate(found, seen, truth, seed=seed).result
    return FINDING_TYPES[found.kind].verdict([result] * times)


def headed(notes: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return torch.cat([words.expand(len(notes), len(words)), notes[:, len(words) :]], dim=1)


def of_a_site(more: int, *, own: bool) -> list[Judgement]:
    """Judge four notes of a site whose notes all begin alike, or four others of it, and their words.

    So many others are the same client's in another round; held-out notes are of elsewhere.
    """
    site, wards = headed(NOTES.train.inputs[: 8 + more], NOTES.train.inputs[-1, :6]), NOTES.train.targets[: 8 + more]
    inputs, labels = {(0, 0): site[:4]}, {(0, 0): wards[:4]}
    if more:
        inputs[1, 0], labels[1, 0] = site[8:], wards[8:]
    everybody = torch.cat([*inputs.values(), NOTES.test.inputs]), torch.cat([*labels.values(), NOTES.test.targets])
    found = site[:4] if own else site[4:8]
    assert NOTES.tokens is not None
    words = TokenFinding(attack="a", tokens=found.unique(), vocabulary=NOTES.tokens.vocabulary)
    truth = Truth(inputs, labels, *everybody, {})
    return [judgement(f, site[:4], wards[:4], 0, truth) for f in (SequenceFinding(attack="a", sequences=found), words)]


def test_notes_of_a_site_with_words_of_its_own_are_held_against_others_of_the_same_site() -> None:
    assert [j.verdict for j in of_a_site(60, own=True)] == ["recovered", "inferred"]
    assert not {j.verdict for j in of_a_site(60, own=False)} & {"recovered", "inferred"}


def test_where_there_is_nothing_of_the_same_site_it_does_not_conclude_and_says_what_to_give() -> None:
    for own in (True, False):
        for judged in of_a_site(0, own=own):
            assert judged.verdict == "inconclusive"
            assert "can be told from held-out ones" in judged.text
            assert judged.advice == REMEDY


def test_a_form_that_others_have_word_for_word_counts_for_nothing() -> None:
    """Exact matches of it are none; a note of one's own beside it is one."""
    form, own = NOTES.train.inputs[-1:], NOTES.train.inputs[:1]
    held = torch.cat([form, own, form.repeat(300, 1), NOTES.test.inputs])
    labels = torch.zeros(len(held), dtype=torch.int64)
    true = torch.cat([form, own])
    truth = Truth({(0, 0): true}, {(0, 0): labels[:2]}, held, labels, {})
    alone = judgement(SequenceFinding(attack="a", sequences=form), true, labels[:2], 0, truth)
    assert alone.verdict == "not demonstrated"
    both = judgement(SequenceFinding(attack="a", sequences=true), true, labels[:2], 0, truth)
    assert both.verdict == "recovered"
    assert both.evidence is not None
    assert (both.evidence.value, both.evidence.n) == (1.0, 1)
    truth = Truth({(0, 0): form}, {(0, 0): labels[:1]}, held, labels, {})
    only = judgement(SequenceFinding(attack="a", sequences=form), form, labels[:1], 0, truth)
    assert only.verdict == "inconclusive"
    assert "guessing gets them all" in only.advice


def test_notes_that_several_rounds_show_count_once() -> None:
    true = NOTES.train.inputs[:4]
    found = judgement(SequenceFinding(attack="a", sequences=true), true, NOTES.train.targets[:4], 0, times=3)
    assert found.text.startswith("4 of 4 sequences")
    assert found.evidence is not None
    assert found.evidence.n == 4


def test_the_p_value_is_the_share_of_batches_that_enumeration_counts() -> None:
    """One note of two words; of the candidates of its label a quarter has both, in another order."""
    assert NOTES.tokens is not None
    words = torch.tensor([[10, 11], [11, 10], [12, 13], [14, 15], [16, 17], [10, 18], [11, 19], [20, 21]])
    notes = torch.nn.functional.pad(words, (0, NOTES.train.inputs.shape[1] - 2), value=NOTES.tokens.padding)
    labels = torch.zeros(8, dtype=torch.int64)
    truth = Truth({(0, 0): notes[:1]}, {(0, 0): labels[:1]}, notes, labels, {})
    judged = judgement(SequenceFinding(attack="a", sequences=notes[:1]), notes[:1], labels[:1], 0, truth)
    assert judged.evidence is not None
    assert judged.evidence.p_value == pytest.approx(2 / 8, abs=0.06)
    assert judged.verdict == "inconclusive"
    assert "too few other examples" in judged.advice


def test_own_notes_and_their_words_are_told_from_other_people_s() -> None:
    true, labels = NOTES.train.inputs[:4], NOTES.train.targets[:4]
    rest, wards = NOTES.train.inputs[4:], NOTES.train.targets[4:]
    others = torch.stack([rest[wards == label][i] for i, label in enumerate(labels)])
    assert NOTES.tokens is not None
    for notes, of_notes, of_words in (
        (true, "recovered", "inferred"),
        (others, "not demonstrated", "not demonstrated"),
    ):
        assert judged(SequenceFinding(attack="a", sequences=notes), true, labels, seed=0) == of_notes
        words = TokenFinding(attack="a", tokens=notes.unique(), vocabulary=NOTES.tokens.vocabulary)
        assert judged(words, true, labels, seed=0) == of_words
