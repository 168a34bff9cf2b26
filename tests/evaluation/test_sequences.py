"""Recovered sequences: what other people's sentences give is no leak, and what the update gives is one."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from fedaudit.attacks import SequenceFinding
from fedaudit.data import load_dataset
from fedaudit.evaluation import FINDING_TYPES, evaluate
from fedaudit.results import FindingResult
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.seeds import generator

AUDITS = 60
NOTES = load_dataset("notes")


def judged(found: torch.Tensor, true: torch.Tensor, labels: torch.Tensor, seed: int) -> str:
    task = TaskInfo(
        "custom", None, "eval", "cross-entropy", "tokens", tuple(true.shape[1:]), 4, (0.0,), (1.0,), tokens=NOTES.tokens
    )
    seen = Observation(
        "f", ThreatModel(), task, torch.nn.Identity(), torch.nn.functional.cross_entropy, "gradient", (),
        (Message(0, 0, {}, Update(0, "gradient", {}, len(true), None)),),
    )  # fmt: skip
    truth = Truth({(0, 0): true}, {(0, 0): labels}, NOTES.test.inputs, NOTES.test.targets, {})
    result: FindingResult = evaluate(SequenceFinding(attack="a", sequences=found), seen, truth, seed=seed).result
    return FINDING_TYPES["sequences"].verdict([result]).verdict


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 8])
def test_other_people_s_notes_are_no_leak_and_half_of_the_own_ones_are(size: int) -> None:
    null, planted = list[str](), list[str]()
    for seed in range(AUDITS):
        rng = generator(seed, "notes")
        rows = torch.randperm(len(NOTES.train), generator=rng)[: 8 * size]
        true, labels = NOTES.train.inputs[rows[:size]], NOTES.train.targets[rows[:size]]
        # the most that the labels alone tell: notes of the very same wards
        pool = NOTES.train.inputs[rows[size:]]
        of = NOTES.train.targets[rows[size:]]
        others = torch.stack([(pool[of == label] if bool((of == label).any()) else pool)[0] for label in labels])
        null.append(judged(others, true, labels, seed))
        planted.append(judged(torch.cat([true[: size // 2], others[size // 2 :]]), true, labels, seed))
    assert sum(v in ("recovered", "inferred") for v in null) <= stats.binom.ppf(0.999, AUDITS, 0.01)
    if size == 8:
        assert sum(v == "recovered" for v in planted) >= 0.9 * AUDITS
