"""Degenerate data: constant, duplicated, alone, huge, tiny, empty: no certificate is wrong by them, no answer lost."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks import (
    ExampleLabelFinding,
    ImageFinding,
    LabelScoreFinding,
    LocalModelFinding,
    RowFinding,
    SequenceFinding,
    TokenFinding,
)
from fedaudit.attacks.dp_canaries import EpsilonFinding
from fedaudit.attacks.findings import Finding
from fedaudit.attacks.labels.attack import LabelFinding, LabelSetFinding
from fedaudit.attacks.records.attribute import AttributeFinding
from fedaudit.attacks.records.property import PropertyFinding
from fedaudit.attacks.records.source import SourceFinding
from fedaudit.attacks.records.target import MembershipFinding
from fedaudit.attacks.text.extraction import ExtractionFinding
from fedaudit.epsilon.canaries import Canaries
from fedaudit.evaluation import FINDING_TYPES, evaluate, summarise
from fedaudit.evaluation.statistics import rank_test
from fedaudit.modalities import TokenInfo
from fedaudit.modalities.packed import Packing, Part
from fedaudit.results import AttackSummary, FindingResult
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.queries import NOBODY, QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth
from fedaudit.transcript.update import Update
from fedaudit.utils.seeds import generator
from fedaudit_catalogue.attacks import ClassImagesFinding

LEAKS = ("recovered", "identifiable", "inferred")


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so few luck isn't excluded by cells, and whole rows are counted without any."""
    for name in ("rows.DRAWS", "label_sets._DRAWS", "label_sets._FEWEST", "other_batches.DEALS", "shift._DEALS"):
        monkeypatch.setattr(f"fedaudit.evaluation.{name}", 99)


def some(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Return all cases, those that aren't ``fast`` as slow ones."""
    return [pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=[] if c in fast else pytest.mark.slow)
            for c in cases]  # fmt: skip


def task(kind: str, shape: tuple[int, ...], classes: int | None = 2, **rest: Any) -> TaskInfo:
    channels = shape[0] if kind in ("image", "volume", "signal") else 1
    loss = "cross-entropy" if classes else "mse"
    mean, std = rest.pop("mean", (0.0,) * channels), rest.pop("std", (1.0,) * channels)
    return TaskInfo("custom", None, "eval", loss, kind, shape, classes, mean, std, **rest)


def sees(info: TaskInfo, examples: int, clients: int = 1, **rest: Any) -> Observation:
    messages = tuple(Message(0, c, {}, Update(c, "gradient", {}, examples, None)) for c in range(clients))
    loss = nn.functional.cross_entropy if info.num_classes else nn.functional.mse_loss
    return dataclasses.replace(
        Observation("f", ThreatModel(), info, nn.Identity(), loss, "gradient", (), messages), **rest
    )


def judged(finding: Finding, observation: Observation, truth: Truth) -> tuple[FindingResult, AttackSummary]:
    """Evaluate, and check what holds of every result: it is JSON that can be read again, and has a verdict."""
    result = evaluate(dataclasses.replace(finding, attack="a"), observation, truth, seed=0).result
    text = json.dumps(result.model_dump(), allow_nan=False)
    assert FindingResult.model_validate_json(text) == result
    if result.status == "done":
        FINDING_TYPES[finding.kind].verdict([result])
    (summary,) = summarise([result], resamples=100, seed=0)
    json.dumps(summary.model_dump(), allow_nan=False)
    assert summary.verdict != "not applicable" or summary.verdict_text
    return result, summary


def metric(result: FindingResult, name: str) -> float:
    return next(m.value for m in result.metrics if m.name == name)


# Rows -----------------------------------------------------------------------------------------------------------------


def table(n: int = 300, seed: int = 1, d: int = 8) -> Tensor:
    return torch.randn((n, d), generator=generator(seed, "table"), dtype=torch.float64)


def constant(value: float) -> Callable[[Tensor], Tensor]:
    def made(rows: Tensor) -> Tensor:
        return torch.cat([rows[:, :-1], torch.full((len(rows), 1), value, dtype=rows.dtype)], dim=1)

    return made


def nearly_constant(rows: Tensor) -> Tensor:
    rows = constant(2.0)(rows)
    rows[-1, -1] = 3.0
    return rows


def of_scales(rows: Tensor) -> Tensor:
    return rows * torch.logspace(-12, 12, rows.shape[1], dtype=rows.dtype)


TABLES: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": constant(3.7),
    "a year": constant(2024.0),
    "zeros": constant(0.0),
    "tiny constant": constant(1e-6),
    "huge constant": constant(1e9),
    "one row of all differs": nearly_constant,
    "rounding": lambda rows: torch.cat([rows[:, :-1], 5 + 1e-7 * rows[:, -1:]], dim=1),
    "a date": lambda rows: torch.cat([rows[:, :-1], 1.7e9 + 1e5 * rows[:, -1:]], dim=1),
    "tiny": lambda rows: 1e-12 * constant(3.7)(rows),
    "huge": lambda rows: 1e12 * constant(3.7)(rows),
    "of all scales": of_scales,
    "whole numbers": lambda rows: (2 * constant(3.7)(rows)).round(),
    "all columns but one": lambda rows: torch.cat([rows[:, :1], torch.full_like(rows[:, 1:], 4.0)], dim=1),
}


def rows_of(true: Tensor, found: Tensor, candidates: Tensor, **known: Any) -> tuple[FindingResult, AttackSummary]:
    true, candidates = true.float(), candidates.float()
    n = len(true)
    truth = Truth({(0, 0): true}, {(0, 0): torch.zeros(n).long()}, candidates, torch.zeros(len(candidates)).long(), {})
    labels = torch.zeros(len(found)).long()
    made = RowFinding(rows=found.float(), labels=labels, label_source="given", certified=torch.ones(len(found)).bool())
    return judged(made, sees(task("table", (true.shape[1],), **known), n), truth)


@pytest.mark.parametrize("rounding", [0.0, 5e-6])
@pytest.mark.parametrize("name", some(TABLES, "constant", "zeros", "of all scales"))
def test_rows_that_are_right_but_for_rounding_are_recovered_and_their_certificates_hold(
    name: str, rounding: float
) -> None:
    candidates = TABLES[name](table())
    true = candidates[:4]
    off = rounding * torch.randn(true.shape, generator=generator(0, "off"), dtype=true.dtype)
    result, summary = rows_of(true, true * (1 + off), candidates)
    assert "WRONG" not in summary.verdict_text
    assert metric(result, "exact_rows") == 1, result.rows[0]
    assert metric(result, "cell_accuracy") == 1
    assert summary.verdict == ("recovered" if name != "all columns but one" else summary.verdict)


@pytest.mark.parametrize("name", some(TABLES, "constant", "zeros", "a year"))
def test_rows_that_are_wrong_in_one_column_alone_are_not_exact_and_their_certificates_are_wrong(name: str) -> None:
    candidates = TABLES[name](table())
    true, found = candidates[:4], candidates[:4].clone()
    column = true[:, -1]
    found[:, -1] += (3 * candidates[:, -1].std() + 0.5 * column.abs().max()).clamp(min=0.5 * (column == 0).any())
    result, summary = rows_of(true, found, candidates)
    if name != "tiny constant":  # half a millionth beside units: within what differences of weights leave
        assert metric(result, "exact_rows") == 0
        assert "4 CERTIFIED ROWS ARE WRONG" in summary.verdict_text


def test_a_column_that_everybody_knows_is_no_evidence() -> None:
    candidates = torch.cat([table(d=2), torch.full((300, 20), 5.0, dtype=torch.float64)], dim=1)
    true, found = candidates[:8], candidates[:8].clone()
    found[:, :2] = table(8, seed=7, d=2)  # noise in all that differs
    result, summary = rows_of(true, found, candidates)
    accuracy = result.metrics[0]
    assert accuracy.value >= 20 / 22
    assert (accuracy.baseline or 0) >= 20 / 22
    assert not result.is_leak
    assert summary.verdict not in LEAKS


# Images, signals, volumes, examples of several inputs -----------------------------------------------------------------


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=generator(seed, "noise"), dtype=torch.float64)


def channel(which: int, value: float, scale: float = 1.0) -> Callable[[Tensor], Tensor]:
    """One channel is constant, the others are of a scale."""

    def made(examples: Tensor) -> Tensor:
        examples = scale * examples
        examples[:, which] = value
        return examples

    return made


def a_constant_pixel(examples: Tensor) -> Tensor:
    examples[..., 0] = 0.25
    return examples


def one_is_empty(examples: Tensor) -> Tensor:
    examples[0] = 0
    return examples


KINDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "image": ("image", (2, 12, 12)),
    "volume": ("volume", (1, 4, 8, 8)),
    "signal": ("signal", (3, 40)),
    "packed": ("packed", (9,)),
}
EXAMPLES: dict[str, tuple[tuple[str, ...], Callable[[Tensor], Tensor]]] = {
    "as they are": (tuple(KINDS), lambda x: x),
    "a constant pixel": (("image", "volume", "signal"), a_constant_pixel),
    "a constant channel": (("image", "signal", "packed"), channel(1, 0.7)),
    "a channel of zeros": (("image", "signal", "packed"), channel(1, 0.0)),
    "one is empty": (tuple(KINDS), one_is_empty),
    "black and white": (("image", "volume"), lambda x: (x > 0.5).double()),
    "a huge constant channel": (("signal", "packed"), channel(1, 1e7)),
    "tiny": (("signal", "packed"), channel(1, 3.7e-12, 1e-12)),
    "huge": (("signal", "packed"), channel(1, 3.7e12, 1e12)),
    "whole numbers": (("signal", "packed"), lambda x: (1000 * x).round()),
    "a channel of rounding": (("signal", "packed"), lambda x: torch.cat([x[:, :1], 1e-8 * x[:, 1:2] + 5, x[:, 2:]], 1)),
}
CASES = some(
    ((kind, name) for name, (kinds, _) in EXAMPLES.items() for kind in kinds),
    *(("image", "a constant pixel"), ("signal", "one is empty"), ("signal", "huge"), ("packed", "a constant channel")),
)


def images_of(
    kind: str, true: Tensor, found: Tensor, candidates: Tensor, labels: Tensor | None = None, **rest: Any
) -> tuple[FindingResult, AttackSummary]:
    """Judge images all of which are certified, of inputs that models see standardised where they have no range."""
    name, shape = KINDS[kind]
    known: dict[str, Any] = {}
    if kind == "packed":
        known["packed_inputs"] = Packing((Part("0", (shape[0] - 2,)), Part("1", (2,))))
    if kind == "signal":
        values = candidates.double().transpose(0, 1).flatten(1)
        spread = values.std(dim=1, correction=0)
        spread = torch.where(spread > 1e-9 * values.abs().amax(dim=1), spread, 1.0)
        known |= {"mean": tuple(values.mean(dim=1).tolist()), "std": tuple(spread.clamp(min=1e-12).tolist())}
    info = task(name, shape, **known)
    labels = torch.arange(len(true)) % 2 if labels is None else labels
    classes = torch.arange(len(candidates)) % 2
    truth = Truth({(0, 0): true.float()}, {(0, 0): labels}, candidates.float(), classes, {})
    sure = torch.ones(len(found)).bool()
    made = ImageFinding(images=found.float(), labels=labels, label_source="given", certified=sure, **rest)
    return judged(made, sees(info, len(true)), truth)


@pytest.mark.parametrize("rounding", [0.0, 5e-6])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_images_that_are_right_but_for_rounding_are_recovered_and_their_certificates_hold(
    kind: str, name: str, rounding: float
) -> None:
    candidates = EXAMPLES[name][1](noise(60, *KINDS[kind][1]))
    true = candidates[:4]
    off = rounding * (2 * noise(*true.shape, seed=1) - 1)
    result, summary = images_of(kind, true, true * (1 + off), candidates)
    assert result.certified == 4
    assert result.certified_wrong == 0, summary.verdict_text
    assert summary.verdict == "recovered"
    assert "4 of 4" in summary.verdict_text.split(" came out")[0]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_images_that_are_wrong_have_wrong_certificates_and_are_not_recovered(kind: str, name: str) -> None:
    candidates = EXAMPLES[name][1](noise(60, *KINDS[kind][1]))
    found = EXAMPLES[name][1](noise(4, *KINDS[kind][1], seed=5))
    found = found[torch.tensor([1, 1, 2, 3])]  # the first may be empty as the true one is
    result, summary = images_of(kind, candidates[:4], found, candidates)
    assert result.certified_wrong == 4
    assert "WRONG" in summary.verdict_text
    assert summary.verdict not in LEAKS


@pytest.mark.parametrize("kind", KINDS)
def test_equal_and_single_candidates_are_no_evidence_and_no_failure(kind: str) -> None:
    one = noise(1, *KINDS[kind][1])
    for candidates in (one, one.expand(20, *one.shape[1:])):
        result, summary = images_of(kind, one, one, candidates)
        assert result.certified_wrong == 0
        assert summary.verdict in ("recovered", "inconclusive")
        assert images_of(kind, one, noise(1, *KINDS[kind][1], seed=3), candidates)[1].verdict not in LEAKS


def test_signals_of_one_point_are_evaluated() -> None:
    true = noise(30, 3, 1)
    KINDS["points"] = ("signal", (3, 1))
    try:
        assert images_of("points", true[:4], true[:4], true)[0].certified_wrong == 0
    finally:
        del KINDS["points"]


# Labels, words, records, clients, models ------------------------------------------------------------------------------


def texts(rows: list[list[int]], vocabulary: int = 12) -> tuple[Observation, Tensor]:
    tokens = TokenInfo(vocabulary, padding=0)
    made = torch.tensor(rows)
    return sees(task("tokens", (made.shape[1],), tokens=tokens), len(rows)), made


def text_truth(own: Tensor, candidates: Tensor) -> Truth:
    nothing = torch.zeros(len(own)).long(), torch.zeros(len(candidates)).long()
    return Truth({(0, 0): own}, {(0, 0): nothing[0]}, candidates, nothing[1], {})


SOME = [[1, 2, 3, 4], [5, 6, 7, 8]]
TEXTS: dict[str, tuple[list[list[int]], list[list[int]]]] = {  # a client's, and other people's
    "all alike": ([[3, 3, 3, 3]] * 2, [[3, 3, 3, 3]] * 9),
    "empty ones": ([[0, 0, 0, 0]] * 2, SOME * 5),
    "one is empty": ([[0, 0, 0, 0], [9, 10, 11, 1]], SOME * 5),
    "nobody else": (SOME, []),
    "one word": ([[4, 0, 0, 0]], SOME * 5),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_nothing_or_all_alike(name: str) -> None:
    own, others = TEXTS[name]
    observation, true = texts(own)
    truth = text_truth(true, torch.cat([true, torch.tensor(others)]) if others else true)
    result, summary = judged(SequenceFinding(sequences=true), observation, truth)
    everybodys = name in ("all alike", "empty ones")  # what others have word for word counts for nothing
    assert metric(result, "exact_sequences") == (0 if everybodys else 1)
    assert metric(result, "rouge1") == 1
    if name == "all alike":
        assert summary.verdict not in LEAKS
    judged(SequenceFinding(sequences=true[:0]), observation, truth)
    named = true.unique()
    for found in (named, named[:0]):
        result, summary = judged(TokenFinding(tokens=found, vocabulary=12), observation, truth)
        if len(found) and result.status == "done":
            assert metric(result, "words_found") == 1
        if name in ("all alike", "nobody else"):
            assert summary.verdict not in LEAKS


@pytest.mark.parametrize("true", [[1] * 8, [0], [0, 1] * 4, [2] * 7 + [0]])
def test_labels_of_one_class(true: list[int]) -> None:
    labels, everybody = torch.tensor(true), torch.tensor([0, 1, 2] * 20)
    inputs = torch.arange(float(len(true))).view(-1, 1, 1, 1)
    observation = sees(task("image", (1, 1, 1), 3), len(true))
    for candidates in (everybody, labels):
        truth = Truth({(0, 0): inputs}, {(0, 0): labels}, torch.zeros(len(candidates), 1, 1, 1), candidates, {})
        result, summary = judged(LabelFinding(labels=labels, method="m", num_classes=3), observation, truth)
        assert metric(result, "label_accuracy") == 1
        assert metric(result, "count_accuracy") == 1
        if len(true) == 8 and candidates is labels:  # whoever holds other examples knows the label
            assert summary.verdict not in LEAKS
        wrong = (labels + 1) % 3
        assert not judged(LabelFinding(labels=wrong, method="m", num_classes=3), observation, truth)[0].is_leak


@pytest.mark.parametrize("rows", [[[0.0, 0, 0]] * 4, [[1.0, 1, 1]] * 4, [[0.0, 1, 0]]])
def test_label_sets_that_are_empty_full_or_all_alike(rows: list[list[float]]) -> None:
    true = torch.tensor(rows)
    inputs = torch.arange(float(len(true))).view(-1, 1, 1, 1)
    observation = sees(task("image", (1, 1, 1), None, task="multi-label", num_targets=3), len(true))
    truth = Truth({(0, 0): inputs}, {(0, 0): true}, torch.zeros(9, 1, 1, 1), true[:1].expand(9, -1), {})
    made = LabelSetFinding(labels=true, counts=true.sum(dim=0).double(), method="span", num_classes=3)
    result, summary = judged(made, observation, truth)
    assert metric(result, "label_average_precision") == 1
    assert metric(result, "whole_label_sets") == 1
    assert summary.verdict not in LEAKS  # all others have the same
    judged(dataclasses.replace(made, labels=1 - true), observation, truth)


RECITED = {
    "all alike": torch.full((24, 4), 3),
    "empty": torch.zeros(24, 4).long(),
    "one word each": torch.arange(1, 25)[:, None] * torch.tensor([1, 0, 0, 0]),
    "all different": 1 + torch.randperm(96, generator=generator(0, "words")).view(24, 4),
}


@pytest.mark.parametrize("said", ["right", "nothing", "not a number"])
@pytest.mark.parametrize("name", RECITED)
def test_texts_recited_that_are_empty_or_all_alike(name: str, said: str) -> None:
    texts, k = RECITED[name], 12
    tokens = TokenInfo(100, padding=0, causal=True)
    held = QuerySet(texts, tokens.following(texts), texts[:0], texts[:0])
    observation = sees(task("tokens", (4,), 100, tokens=tokens), k, records=held)
    order, nobody = torch.arange(k), torch.full((k,), NOBODY)
    owners, matched = torch.cat([order * 0, nobody]), torch.cat([order + k, order])
    truth = Truth(
        {(0, 0): texts[:k]}, {(0, 0): held.labels[:k]}, texts, held.labels, {}, owners=owners, matched=matched
    )
    long = name in ("all alike", "all different")
    begins = torch.full((24,), 2 * long)
    continued = torch.where((owners >= 0)[:, None], texts, 98)[:, None]
    continued = torch.cat([texts[:, None, :2], continued[:, :, 2:]], dim=2) if long else torch.full((24, 1, 4), -100)
    logs = {"right": torch.where(owners >= 0, 0.0, -9.0), "nothing": torch.full((24,), -torch.inf)}
    given = logs.get(said, torch.full((24,), torch.nan)).double()[None]
    made = ExtractionFinding(
        begins=begins, continued=continued, logs=given, greedy=(given == 0), rounds=torch.zeros(1).long()
    )
    result, summary = judged(made, observation, truth)
    if said == "not a number" or not long:
        assert result.status == "not applicable"
        return
    different = name == "all different"
    assert metric(result, "extracted") == different
    assert metric(result, "extracted_in_1000") == (different and said == "right")
    assert (summary.verdict == "recovered") == different, summary.verdict_text


def records(inputs: Tensor, labels: Tensor, clients: int = 1) -> tuple[Observation, Truth]:
    """2k records, the first k clients' own."""
    k = len(inputs) // 2
    held = QuerySet(inputs, labels, inputs[:0], labels[:0])
    observation = sees(task("table", (inputs.shape[1],)), k, clients, records=held)
    nobody, order = torch.full((k,), NOBODY), torch.arange(k)
    truth = Truth(
        {}, {}, inputs, labels, {}, owners=torch.cat([order % clients, nobody]), matched=torch.cat([order + k, order]),
        values=torch.zeros(2 * k).long(),
    )  # fmt: skip
    return observation, truth


INPUTS = {
    "constant": torch.full((40, 3), 2.0),
    "empty": torch.zeros(40, 3),
    "huge": 1e12 * table(40, d=3).float(),
    "tiny": 1e-12 * table(40, d=3).float(),
    "one column": torch.cat([table(40, d=1).float(), torch.ones(40, 2)], dim=1),
}


@pytest.mark.parametrize("name", some(INPUTS, "constant", "huge"))
def test_records_all_alike_or_of_any_scale(name: str) -> None:
    for labels in (torch.zeros(40).long(), torch.arange(40) % 20):
        observation, truth = records(INPUTS[name], labels)
        member = truth.owners != NOBODY
        for scores in (member.double(), torch.zeros(40).double(), torch.full((40,), -torch.inf).double()):
            made = MembershipFinding(scores=scores, members=scores > 0.5)
            result, summary = judged(made, observation, truth)
            perfect = scores.equal(member.double())
            assert metric(result, "membership_auc") == (1 if perfect else 0.5)
            assert summary.verdict == ("inferred" if perfect else "not demonstrated")
        several, truth = records(INPUTS[name], labels, clients=2)
        scores = torch.nn.functional.one_hot(torch.arange(40) % 2).double()
        for given in (scores, torch.zeros_like(scores)):
            told = SourceFinding(clients=torch.arange(2), scores=given, sources=given.argmax(dim=1))
            result, _ = judged(told, several, truth)
            assert metric(result, "source_accuracy") == (1 if given is scores else 0.5)
        values = AttributeFinding(values=torch.zeros(40).long(), scores=torch.zeros(40, 1))
        result, summary = judged(values, observation, truth)
        assert metric(result, "attribute_accuracy") == 1
        assert summary.verdict not in LEAKS  # the value that all have


@pytest.mark.parametrize("labels", [[0] * 5, [0, 1, 0, 1, 0]])
@pytest.mark.parametrize("scale", [0.0, 1e-300, 1.0, 1e300])
def test_properties_of_clients_with_scores_all_alike_or_of_any_scale(labels: list[int], scale: float) -> None:
    k = 16
    observation = sees(task("table", (2,)), 5, k)
    own = {(0, c): torch.tensor(labels) for c in range(k)}
    has = torch.arange(k) % 2
    truth = Truth({}, own, torch.zeros(1, 2), torch.zeros(1).long(), {}, shares=has.double())
    made = PropertyFinding(clients=torch.arange(k), scores=scale * (2.0 * has.double() - 1))
    _, summary = judged(made, observation, truth)
    assert summary.verdict == ("inferred" if scale else "not demonstrated")
    alike = dataclasses.replace(truth, shares=torch.ones(k).double())
    assert judged(made, observation, alike)[1].verdict == "not applicable"


@pytest.mark.parametrize("found", ["right", "nothing", "endless"])
def test_canaries_whose_readings_are_all_alike(found: str) -> None:
    coins = torch.arange(40) % 2 == 0
    scores = {"right": coins.double(), "nothing": torch.zeros(40).double(), "endless": coins.double() * torch.inf}
    canaries = Canaries(
        "client", "add-remove", {"models": torch.zeros(1, 40).double()}, covered=("models",), claimed=1.0
    )
    observation = sees(task("table", (2,)), 5, canaries=canaries)
    truth = Truth({}, {}, torch.zeros(1, 2), torch.zeros(1).long(), {}, coins=coins)
    made = EpsilonFinding(observers=("models",), scores=scores[found].nan_to_num()[None], confidence=0.95)
    result, _ = judged(made, observation, truth)
    assert bool(result.is_leak) == (found != "nothing")


@pytest.mark.parametrize("true", [[1] * 12, [0] * 11 + [1], [0, 1] * 6, [0]])
def test_labels_of_a_vertical_federation_that_are_all_alike(true: list[int]) -> None:
    n, labels = len(true), torch.tensor(true)
    truth = Truth({}, {(i, 0): labels[i : i + 1] for i in range(n)}, torch.zeros(1, 1), torch.zeros(1).long(), {})
    observation = sees(task("table", (2,)), n)
    told = ExampleLabelFinding(examples=torch.arange(n), labels=labels, num_classes=2)
    for made in (told, dataclasses.replace(told, without=labels, again=torch.stack([labels, labels])[None])):
        result, summary = judged(made, observation, truth)
        assert metric(result, "example_label_accuracy") == 1
        assert (summary.verdict == "inferred") == (true == [0, 1] * 6 and made is told)
    for scores in (labels.double(), torch.zeros(n).double()):
        result, summary = judged(LabelScoreFinding(examples=torch.arange(n), scores=scores), observation, truth)
        assert result.status == "done"
        assert (summary.verdict == "inferred") == (true == [0, 1] * 6 and bool(scores.any()))


LOSSES = {"classes": nn.functional.cross_entropy, "numbers": nn.functional.mse_loss}
MODELS: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": lambda x: torch.full_like(x, 2.0),
    "empty": torch.zeros_like,
    "huge": lambda x: 1e6 * x,
    "tiny": lambda x: 1e-9 * x,
    "one example": lambda x: x[:1],
    "one column": lambda x: x * torch.tensor([1.0, 0, 0]),
}


@pytest.mark.parametrize("what", LOSSES)
@pytest.mark.parametrize("name", some(MODELS, "one example", "huge"))
def test_own_models_of_degenerate_clients(name: str, what: str) -> None:
    inputs, module = MODELS[name](table(10, d=3).float()), nn.Linear(3, 2 if what == "classes" else 1)
    n = len(inputs)
    for alike in (True, False):
        own = torch.zeros(n) if alike else (torch.arange(n) % 2).float()
        labels = own.long() if what == "classes" else own[:, None]
        others = torch.arange(30) % 2 if what == "classes" else torch.randn(30, 1, generator=generator(0, "y"))
        sent = {key: torch.zeros_like(p) for key, p in module.named_parameters()}
        message = Message(0, 0, sent, Update(0, "weights", {key: p + 0.01 for key, p in sent.items()}, n, None))
        known = sees(task("table", (3,), 2 if what == "classes" else None), n)
        observation = dataclasses.replace(known, module=module, update_kind="weights", messages=(message,))
        truth = Truth({(0, 0): inputs}, {(0, 0): labels}, table(30, seed=4, d=3).float(), others, {})
        for state in (sent, {key: torch.full_like(p, torch.nan) for key, p in sent.items()}):
            made = LocalModelFinding(state=state, rounds_used=1)
            assert judged(made, observation, truth)[1].verdict not in LEAKS


@pytest.mark.parametrize("name", ["constant", "empty", "one of the class", "no numbers"])
def test_drawings_of_degenerate_classes(name: str) -> None:
    inputs, labels = noise(40, 1, 8, 8).float(), torch.arange(40) % 2
    if name in ("constant", "empty"):
        inputs = torch.full_like(inputs, 0.5 if name == "constant" else 0.0)
    if name == "one of the class":
        labels = (torch.arange(40) == 3).long()
    images = inputs[labels == 1][:1].expand(2, 6, 1, 8, 8)
    images = images * torch.nan if name == "no numbers" else images
    made = ClassImagesFinding(images=images, rounds=(0, 1), target=1)
    observation = sees(task("image", (1, 8, 8)), 6)
    summary = judged(made, observation, Truth({}, {}, inputs, labels, {}))[1]
    assert (summary.verdict in LEAKS) == (name == "one of the class")  # it was drawn; of equal images nothing tells


# Whole audits ---------------------------------------------------------------------------------------------------------


def network(d: int, outputs: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(d, 24), nn.ReLU(), nn.Linear(24, outputs))


def audited(data: tuple[Tensor, Tensor], attacks: list[Any], outputs: int = 2, **rest: Any) -> dict[str, AttackSummary]:
    kind = rest.pop("kind", None)
    federation = {"name": "f", "clients": 3, "examples": 3, "batch_size": 1, **rest}
    done = fedaudit.audit(
        {"evaluation": {"controls": False}}, model=network(data[0][0].numel(), outputs), data=data, kind=kind,
        federations=[federation], attacks=attacks, progress=False,
    )  # fmt: skip
    json.dumps(done.result.model_dump(), allow_nan=False)
    assert not any("WRONG" in s.verdict_text for s in done.result.summaries)
    return {s.attack: s for s in done.result.summaries}


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 3.7, 2024.0, 1e9])
def test_a_constant_column_costs_no_row_of_a_simulation(value: float) -> None:
    rows = constant(value)(table(120))
    tableak = {"name": "tableak", "iterations": 150, "restarts": 2}
    found = audited((rows, (rows[:, 0] > 0).long()), [tableak, "exact-linear-rows", "spear-rows"])
    for summary in found.values():
        assert summary.verdict == "recovered"
        assert "3 of 3 rows exact" in summary.verdict_text
    assert "3 of 3 certified" in found["exact-linear-rows"].verdict_text
    assert "3 of 3 certified" in found["spear-rows"].verdict_text


@pytest.mark.parametrize("scale", some((1e-13, 1e13), 1e-13))
def test_tables_of_any_scale_are_standardised(scale: float) -> None:
    rows = scale * constant(3.7)(table(120))
    found = audited((rows, (rows[:, 0] > 0).long()), ["exact-linear-rows"])["exact-linear-rows"]
    assert "3 of 3 rows exact, 3 of 3 certified" in found.verdict_text


@pytest.mark.slow
@pytest.mark.parametrize("what", ["alike", "empty", "equal targets", "all labels"])
def test_data_of_which_nothing_can_be_told_end_in_an_answer(what: str) -> None:
    rows, targets = table(60).float(), torch.arange(60) % 2
    data = {
        "alike": (torch.full_like(rows, 3.0), targets),
        "empty": (torch.zeros_like(rows), targets),
        "equal targets": (rows, torch.full((60,), 2.5)),
        "all labels": (rows, torch.ones(60, 2)),
    }[what]
    attacks = [{"name": "tableak", "iterations": 20, "restarts": 2}, "exact-linear-rows", "labels"]
    found = audited(data, attacks, 1 if what == "equal targets" else 2)
    assert what not in ("alike", "empty") or not {s.verdict for s in found.values()} & set(LEAKS)


@pytest.mark.parametrize("algorithm", [{}, {"algorithm": "fedavg", "local_steps": 1, "learning_rate": 0.01}])
def test_certificates_of_signals_hold_in_any_unit(algorithm: dict[str, Any]) -> None:
    signals = 1e5 * noise(60, 3, 12) + 1e6
    signals[:, 1] = 2e7
    signals[::2, 0] = 0
    found = audited((signals, torch.arange(60) % 3), ["exact-linear"], 3, kind="signal", **algorithm)["exact-linear"]
    assert found.verdict == "recovered"
    assert "3 of 3 certified as exact" in found.verdict_text


def test_a_constant_channel_of_a_recording_is_scaled_as_the_others_are(tmp_path: Path) -> None:
    """What the model saw of pictures without any green: -0.42 throughout."""
    pictures = (noise(8, 3, 6, 6).float() - 0.5) / 0.25
    pictures[:, 1] = -0.42
    model, labels = network(108, 2), torch.arange(8) % 2
    recorder = fedaudit.Recorder(tmp_path / "r")
    with recorder.round(model.state_dict()):
        local = copy.deepcopy(model)
        with recorder.capture() as seen:
            optimiser = torch.optim.SGD(local.parameters(), lr=0.1)
            nn.functional.cross_entropy(local(pictures), labels).backward()
            optimiser.step()
        recorder.update(0, local.state_dict(), seen, num_examples=8)
    recorder.close()
    info = Transcript.load(tmp_path / "r", model).task_info
    assert info.std == pytest.approx((0.25, 0.25, 0.25), abs=0.02)
    green = info.denormalise(pictures)[:, 1]
    assert float(green.abs().max()) < 1e-6


def recorded(rows: Tensor, folder: Path, rate: float, clients: int = 4) -> AttackSummary:
    """Audit a recording of one step of SGD a client, of one row each, as the model saw it."""
    model, labels = network(rows.shape[1], 2), (rows[:, 0] > rows[:, 0].mean()).long()
    recorder = fedaudit.Recorder(folder)
    with recorder.round(model.state_dict()):
        for client in range(clients):
            local = copy.deepcopy(model)
            with recorder.capture() as seen:
                own = slice(client, client + 1)
                optimiser = torch.optim.SGD(local.parameters(), lr=rate)
                nn.functional.cross_entropy(local(rows[own]), labels[own]).backward()
                optimiser.step()
            recorder.update(client, local.state_dict(), seen, num_examples=1)
    recorder.candidates(rows[60:], labels[60:])
    recorder.close()
    done = fedaudit.audit_transcript(folder, ["exact-linear-rows"], module=model, controls=False, progress=False)
    return done.result.summaries[0]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.1, 1e-4])
@pytest.mark.parametrize("name", [*TABLES, "beside a tiny one"])
def test_a_recordings_certificates_hold_whatever_the_columns(tmp_path: Path, name: str, rate: float) -> None:
    made = {**TABLES, "beside a tiny one": lambda rows: torch.cat([rows[:, :-1], 1e-9 * rows[:, -1:]], dim=1)}[name]
    rows = made(table(120)).float()
    summary = recorded(rows, tmp_path / "r", rate)
    assert "WRONG" not in summary.verdict_text
    if rate == 0.1 and name in ("constant", "zeros", "tiny constant", "one row of all differs", "whole numbers"):
        assert summary.verdict == "recovered"
        assert "4 of 4 rows exact, 4 of 4 certified" in summary.verdict_text
    if name == "tiny":  # all of it was lost between the weights' last digits
        assert "certified" not in summary.verdict_text


def test_every_kind_is_here() -> None:
    """The kinds of findings that are evaluated, each by a test of this module."""
    named = {k for k, v in globals().items() if isinstance(v, type) and issubclass(v, Finding)}
    assert {globals()[name].kind for name in named if name != "Finding"} == set(FINDING_TYPES)


@pytest.mark.parametrize("n", range(1, 5))
def test_tied_ranks_of_few_are_counted_through(n: int) -> None:
    rng = generator(n, "ranks")
    for m in range(1, 6):
        own, others = (torch.randint(3, (size,), generator=rng).double() for size in (n, m))
        both = torch.cat([own, others])
        ranks = stats.rankdata(both)
        sums = [sum(ranks[list(rows)]) for rows in itertools.combinations(range(n + m), n)]
        p = sum(total >= sum(ranks[:n]) - 1e-9 for total in sums) / len(sums)
        if len(both.unique()) < len(both):
            assert rank_test(own, others)[1] == pytest.approx(p)
