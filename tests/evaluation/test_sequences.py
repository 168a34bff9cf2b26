"""Recovered sequences: what other people's sentences give is no leak, and what the update gives is one."""

from __future__ import annotations

import torch

from fedaudit.attacks import Finding, SequenceFinding, TokenFinding
from fedaudit.data import load_dataset
from fedaudit.evaluation import FINDING_TYPES, evaluate
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
    found: Finding, true: torch.Tensor, labels: torch.Tensor, seed: int, truth: Truth | None = None
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
    return FINDING_TYPES[found.kind].verdict([result])


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
