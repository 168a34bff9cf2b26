"""Who was in, asked of models that predict the next token: each score against its formula, and what it tells."""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from functools import cache
from typing import Any

import pytest
import torch

from fedaudit.attacks import MembershipFinding, make_attack
from fedaudit.attacks.records.target import target_of
from fedaudit.evaluation import evaluate
from fedaudit.modalities import NOTHING
from fedaudit.pipeline.choice import choose_for
from fedaudit.results import FindingResult
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.queries import QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import BadInput, NotApplicable
from tests.attacks.test_extraction import NOTES, bigrams
from tests.build import seen, sent

OF_TEXTS: list[tuple[str, dict[str, Any]]] = [
    ("min-k", {}),
    ("min-k", {"plus": False}),
    ("zlib-ratio", {}),
    ("reference-loss", {}),
]
TEXTS = torch.tensor([[3, 1, 2, 3, 1, 2], [2, 2, 1, 0, 0, 0], [1, 3, 2, 1, 3, 0]])


def scored(name: str, observed: Observation, **settings: Any) -> MembershipFinding:
    found = make_attack(name, settings)(observed)
    assert isinstance(found, MembershipFinding)
    return found


def by_hand(row: list[int], table: torch.Tensor) -> list[tuple[float, float, float]]:
    """Return of each word after the first its log-probability, and mean and deviation over all words at its place."""
    told = []
    for before, word in itertools.pairwise(row):
        logs = table[before].double().log_softmax(0)
        chances = logs.exp().tolist()
        mean = sum(p * math.log(p) for p in chances)
        told.append((float(logs[word]), mean, math.sqrt(sum(p * (math.log(p) - mean) ** 2 for p in chances))))
    return told


def test_scores_are_those_of_the_papers() -> None:
    observed = bigrams(TEXTS, 4, padding=0)
    first, last = (state["table.weight"] for state in observed.weights)
    found = {
        (name, settings.get("k"), settings.get("plus")): scored(name, observed, **settings).scores
        for name, settings in (
            ("min-k", {"k": 0.4, "plus": False}),
            ("min-k", {"k": 0.4, "plus": True}),
            ("zlib-ratio", {}),
            ("reference-loss", {}),
        )
    }
    for row, length in enumerate((6, 3, 5)):
        text = TEXTS[row, :length].tolist()
        told, before = by_hand(text, last), by_hand(text, first)
        few = max(1, int(0.4 * len(told)))
        logs = [log for log, *_ in told]
        mean = sum(logs) / len(logs)
        assert float(found["min-k", 0.4, False][row]) == pytest.approx(sum(sorted(logs)[:few]) / few)
        plus = sorted((log - mu) / sigma for log, mu, sigma in told)[:few]
        assert float(found["min-k", 0.4, True][row]) == pytest.approx(sum(plus) / few)
        size = len(zlib.compress(TEXTS[row, :length].to(torch.int32).numpy().tobytes()))
        assert float(found["zlib-ratio", None, None][row]) == pytest.approx(mean / size)
        gain = mean - sum(log for log, *_ in before) / len(before)
        assert float(found["reference-loss", None, None][row]) == pytest.approx(gain)


@pytest.mark.parametrize(("name", "settings"), OF_TEXTS)
def test_what_the_loss_leaves_out_counts_for_nothing(name: str, settings: dict[str, Any]) -> None:
    observed = bigrams(TEXTS[:, :5], 4)
    assert observed.records is not None
    labels = observed.records.labels.clone()
    labels[:, 2:] = NOTHING
    other = TEXTS[:, :5].clone()
    other[:, 3:] = 2

    def of(texts: torch.Tensor) -> torch.Tensor:
        records = QuerySet(texts, labels, texts[:0], texts[:0])
        return scored(name, dataclasses.replace(observed, records=records), **settings).scores

    assert of(TEXTS[:, :5]).equal(of(other))


@cache
def learnt() -> tuple[Observation, Truth]:
    return seen(NOTES())


def judged(name: str, settings: dict[str, Any], observed: Observation, truth: Truth) -> tuple[FindingResult, float]:
    result = evaluate(scored(name, observed, **settings), observed, truth, seed=0).result
    return result, next(m.value for m in result.metrics if m.name == "membership_auc")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [*OF_TEXTS, ("loss-threshold", {})])
def test_texts_that_were_learnt_by_heart_are_told_and_no_others(name: str, settings: dict[str, Any]) -> None:
    result, area = judged(name, settings, *learnt())
    assert area > 0.9
    assert result.is_leak
    assert result.blind_p_value is not None, "the words alone stand beside it"
    if name != "reference-loss":  # which needs a model from before
        result, area = judged(name, settings, *seen(NOTES({"rounds": 1})))
        assert abs(area - 0.5) < 0.2
        assert not result.is_leak


def test_one_model_is_no_reference_and_says_so() -> None:
    observed, _ = seen(NOTES({"rounds": 1}))
    with pytest.raises(NotApplicable, match="compares the model with that before training, and one alone is known"):
        scored("reference-loss", observed)
    found = scored("reference-loss", observed.split("client")[0], model="client")
    assert float(found.scores.mean()) > 0, "its own training made texts likelier"


def test_classifiers_of_texts_are_refused() -> None:
    observed, _ = seen(NOTES({"rounds": 1, "local_epochs": 1}, data="notes"))
    for name, settings in OF_TEXTS:
        with pytest.raises(NotApplicable, match="needs a model that predicts the next token"):
            scored(name, observed, **settings)


@pytest.mark.parametrize("settings", [{"k": 1.5}, {"k": -0.1}, {"plus": "perhaps"}])
def test_wrong_settings_are_refused_in_one_line(settings: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(settings))) as error:
        make_attack("min-k", settings)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_an_audit_of_texts_asks_who_was_in_and_what_comes_out() -> None:
    transcript, _ = sent(NOTES())
    chosen = [spec.name for spec in choose_for(transcript, ThreatModel(target_records=60))]
    assert chosen == ["extraction", "fedmia", "min-k", "reference-loss", "source-inference"]


KNOWN = {"target_records": 60, "knows_public_data": True, "public_examples": 60}
SHADOWS = {"shadows": 6, "epochs": 20}


@pytest.mark.parametrize("name", ["lira", "rmia", "shadow-models"])
@pytest.mark.slow
def test_shadow_models_of_texts_tell_members_and_none_where_nothing_was_learnt(name: str) -> None:
    settings: dict[str, Any] = {**SHADOWS, "learning_rate": 0.5}
    result, area = judged(name, settings, *seen(NOTES({"rounds": 4}, threat=KNOWN)))
    assert area > 0.8
    assert result.is_leak
    result, area = judged(name, settings, *seen(NOTES({"rounds": 2, "learning_rate": 1e-6}, threat=KNOWN)))
    assert abs(area - 0.5) < 0.2
    assert not result.is_leak


@pytest.mark.slow
def test_shadow_adapters_begin_with_the_first_model_and_leave_its_frozen_part() -> None:
    observed, _ = seen(NOTES({"rounds": 2, "learning_rate": 0.5}, model={"name": "decoder-lora"}, threat=KNOWN))
    attack: Any = make_attack("lira", {"shadows": 2, "epochs": 1, "learning_rate": 1e-9})
    (first, _), (model, own) = attack.beforehand(observed)[0], attack.beforehand(observed)[1]
    assert all(own.weights[0][name].equal(value) for name, value in observed.weights[0].items())
    assert first.index != model.index
    found = model(own, generator=torch.Generator())
    records = observed.records
    assert records is not None
    untrained = target_of(observed, observed.weights[0]).losses(records.inputs, records.labels)
    assert found.answers[: len(records), 0].tolist() == pytest.approx(untrained.tolist(), rel=1e-4)
    frozen = [name for name, p in observed.module.named_parameters() if not p.requires_grad]
    assert frozen


def test_shadow_models_of_texts_need_the_model_before_training() -> None:
    observed, _ = seen(NOTES({"rounds": 1}, threat=KNOWN))
    with pytest.raises(NotApplicable, match="before training, and one alone is known"):
        scored("rmia", observed)
