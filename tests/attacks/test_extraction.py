"""What a model of text recites: how it is asked, what comes out by luck, what everybody has, who held it and when."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedaudit
from fedaudit.attacks import ExtractionFinding, make_attack
from fedaudit.data import Dataset
from fedaudit.evaluation import evaluate, extraction
from fedaudit.evaluation.extraction import draws_until, edits
from fedaudit.modalities import NOTHING, TokenInfo
from fedaudit.results import AuditResult, FindingResult
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.queries import NOBODY, QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import BadInput, NotApplicable
from tests.build import Scenarios, seen
from tests.conftest import Command, refused

NOTES = Scenarios(
    data={"name": "notes-causal", "split": "train"},
    model={"name": "decoder", "width": 64},
    federation={
        "algorithm": "fedavg",
        "clients": 3,
        "rounds": 8,
        "examples": 60,
        "batch_size": 10,
        "local_epochs": 10,
        "learning_rate": 1.0,
    },
    threat={"target_records": 60},
    attacks="extraction",
)


@cache
def notes() -> tuple[Observation, Truth]:
    """Return what is seen of a model that has learnt its clients' notes by heart."""
    return seen(NOTES())


def judged(found: Any, observed: Observation, truth: Truth) -> FindingResult:
    return evaluate(found, observed, truth, seed=0).result


def value(result: FindingResult, name: str) -> tuple[float, float | None]:
    return next((m.value, m.baseline) for m in result.metrics if m.name == name)


# --- how near two texts are -----------------------------------------------------------------------------------------


def levenshtein(one: list[int], other: list[int], swap: int) -> int:
    """Return the edits, by the textbook's recursion."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        last, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            last, row[j] = row[j], min(last + swap * (a != b), row[j] + 1, row[j - 1] + 1)
    return row[-1]


@pytest.mark.parametrize("swap", [1, 2])
def test_edits_are_levenshtein_s_and_of_a_stretch_the_least_of_all(swap: int) -> None:
    rng = torch.Generator().manual_seed(swap)
    for _ in range(20):
        wanted = torch.randint(4, (int(torch.randint(1, 7, (1,), generator=rng)),), generator=rng)
        texts = torch.randint(4, (5, 9), generator=rng)
        whole = [levenshtein(wanted.tolist(), t, swap) for t in texts.tolist()]
        assert edits(wanted, texts, swap=swap).tolist() == whole
        stretches = [
            min(levenshtein(wanted.tolist(), t[i:j], swap) for i in range(10) for j in range(i, 10))
            for t in texts.tolist()
        ]
        assert edits(wanted, texts, swap=swap, anywhere=True).tolist() == stretches


def test_draws_are_those_that_make_it_come_out_nine_times_in_ten() -> None:
    logs = torch.tensor([0.0, 0.5, 1e-3, 1e-12], dtype=torch.float64).log()
    found = draws_until(logs).tolist()
    assert found[0] == math.inf  # never
    assert found[1] == 4  # 1 - 1/2^4 is 0.94, and 1 - 1/2^3 is 0.875
    assert (1 - 1e-3) ** found[2] <= 0.1 < (1 - 1e-3) ** (found[2] - 1)
    assert found[3] == pytest.approx(math.log(10) * 1e12)
    assert draws_until(torch.zeros(1)).tolist() == [1]


# --- how the model is asked -----------------------------------------------------------------------------------------


class Bigrams(nn.Module):
    """Predicts each token from the one before it alone, by a table (vocabulary, vocabulary) of logits."""

    def __init__(self, words: int, seed: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words, words)
        self.table.weight.data = torch.randn(words, words, generator=torch.Generator().manual_seed(seed))

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.as_tensor(self.table(tokens).transpose(1, 2))


def bigrams(texts: Tensor, words: int, padding: int | None = None) -> Observation:
    """Return what is seen of two such models, and these texts as records."""
    info = TokenInfo(words, padding, causal=True)
    task = TaskInfo(
        "custom", None, "eval", "cross-entropy", "tokens", (texts.shape[1],), words, (0.0,), (1.0,), tokens=info
    )
    states = tuple({"table.weight": Bigrams(words, seed).table.weight.data} for seed in range(2))
    records = QuerySet(texts, info.following(texts), texts[:0], texts[:0])
    threat, loss = ThreatModel(target_records=2), nn.functional.cross_entropy
    return Observation("f", threat, task, Bigrams(words, 0), loss, "weights", states, (), {}, records)


def asked(observed: Observation, **settings: Any) -> ExtractionFinding:
    found = make_attack("extraction", settings)(observed)
    assert isinstance(found, ExtractionFinding)
    return found


def test_the_likeliest_tokens_are_those_of_the_last_model_from_half_of_each_text_on() -> None:
    texts = torch.tensor([[3, 1, 2, 3, 1, 2], [2, 2, 1, 0, 0, 0], [1, 3, 2, 1, 0, 0]])
    observed = bigrams(texts, 4, padding=0)
    found = asked(observed, draws=0)
    assert found.begins.tolist() == [3, 2, 2], "the first, and half of those that follow"
    table = observed.weights[-1]["table.weight"]
    for row, (begin, end) in enumerate(zip((3, 2, 2), (6, 3, 4), strict=True)):
        said = texts[row, :begin].tolist()
        while len(said) < end:
            said.append(int(table[said[-1]].argmax()))
        assert found.continued[row, 0].tolist() == said + [NOTHING] * (6 - end)
        likeliest = [
            int(t[texts[row, i]].argmax()) == texts[row, i + 1] for t in (table,) for i in range(begin - 1, end - 1)
        ]
        assert bool(found.greedy[-1, row]) == all(likeliest)


@pytest.mark.parametrize("settings", [{}, {"top_k": 2}, {"temperature": 0.5, "top_k": 3}])
def test_the_probabilities_of_all_that_could_follow_add_up_to_one(settings: dict[str, Any]) -> None:
    every = torch.tensor([[1, 2, *rest] for rest in itertools.product(range(4), repeat=3)])
    logs = asked(bigrams(every, 4), prefix=2, draws=0, **settings).logs
    assert logs.exp().sum(dim=1).tolist() == pytest.approx([1.0, 1.0])
    assert int((logs[1] > -math.inf).sum()) == settings.get("top_k", 4) ** 3


def test_draws_come_as_often_as_their_probability_says() -> None:
    every = torch.tensor([[1, 2, *rest] for rest in itertools.product(range(3), repeat=2)])
    found = asked(bigrams(every, 3), prefix=2, draws=1000, temperature=0.7)
    drawn = (found.continued[:, 1:] == every[:, None]).all(dim=2).double().mean(dim=1)
    chances = found.logs[1].exp()
    assert bool(((drawn - chances).abs() < 4 * (chances * (1 - chances) / 1000).sqrt() + 1e-9).all())


def test_of_an_answer_to_a_question_the_question_is_given() -> None:
    texts = torch.tensor([[3, 1, 2, 3, 1, 2]] * 2)
    observed = bigrams(texts, 4)
    labels = observed.records.labels.clone()  # type: ignore[union-attr]
    labels[:, :3] = NOTHING
    records = QuerySet(texts, labels, texts[:0], texts[:0])
    (begin, _) = asked(Observation(**{**vars(observed), "records": records}), draws=0).begins.tolist()
    assert begin == 5, "four of the question, and half of the answer's two"


def test_what_fills_up_on_the_left_is_given_besides() -> None:
    texts = torch.tensor([[0, 0, 3, 1, 2, 3], [3, 1, 2, 3, 0, 0]])
    observed = bigrams(texts, 4, padding=0)
    assert asked(observed, draws=0, prefix=2).begins.tolist() == [4, 2]
    found = asked(observed, draws=0, prefix=1)
    assert found.begins.tolist() == [3, 1]
    assert found.continued[0, 0, 2:].tolist() == found.continued[1, 0, :4].tolist()
    assert found.logs[:, 0].tolist() == found.logs[:, 1].tolist()


@pytest.mark.parametrize(
    ("change", "settings", "reason"),
    [({}, {"prefix": 40}, "no text is longer than its beginning"), ({"records": None}, {}, r"threat\.target_records")],
)
def test_it_says_in_one_line_why_not(change: dict[str, Any], settings: dict[str, Any], reason: str) -> None:
    observed = bigrams(torch.ones(2, 6, dtype=torch.int64), 4)
    with pytest.raises(NotApplicable, match=reason) as error:
        asked(Observation(**{**vars(observed), **change}), **settings)
    assert "\n" not in str(error.value)


def test_a_classifier_of_texts_recites_nothing() -> None:
    made = NOTES({"rounds": 1, "local_epochs": 1}, data="notes")
    with pytest.raises(NotApplicable, match="needs a model that predicts the next token; this one predicts classes"):
        make_attack("extraction")(seen(made)[0])


@pytest.mark.parametrize("settings", [{"draws": -1}, {"temperature": 0}, {"top_k": 0}, {"prefix": 0}])
def test_wrong_settings_are_refused_in_one_line(settings: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=next(iter(settings))) as error:
        make_attack("extraction", settings)
    assert "\n" not in str(error.value)


# --- what comes out -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_that_learnt_its_texts_by_heart_recites_them_and_no_others() -> None:
    observed, truth = notes()
    result = judged(asked(observed), observed, truth)
    assert result.is_leak
    for name in ("extracted", "extracted_verbatim", "extracted_in_1000"):
        share, of_others = value(result, name)
        assert share > 0.3, name
        assert of_others is not None
        assert of_others < 0.1, name
    assert len(result.recited) == round(value(result, "extracted")[0] * 30)
    for text in result.recited:
        assert truth.owners[text.record] == text.client
        assert text.edits <= len(text.true) / 10
        tokens = truth.inputs[0, text.client].tolist()
        own = [t for t in observed.records.inputs[text.record].tolist() if t not in (0, 1)]  # type: ignore[union-attr]
        assert text.begin + text.true == own
        assert any(row[: len(own)] == own for row in tokens), "the client that it names held it"
    draws = [text.draws for text in result.recited]
    assert draws == sorted(draws, key=lambda d: math.inf if d is None else d)


@pytest.mark.slow
def test_what_it_says_is_told_by_the_truth_that_the_attack_was_not_given() -> None:
    observed, truth = notes()
    found = asked(observed)
    owners = torch.where(truth.owners == NOBODY, truth.owners[truth.matched], NOBODY)
    lies = Truth(**{**vars(truth), "owners": owners})
    right, wrong = judged(found, observed, truth), judged(found, observed, lies)
    assert value(wrong, "extracted") == value(right, "extracted")[::-1]
    assert not wrong.is_leak
    assert not wrong.recited


@pytest.mark.slow
def test_a_model_that_never_saw_the_texts_recites_none() -> None:
    observed, truth = seen(NOTES({"rounds": 1}))
    result = judged(asked(observed), observed, truth)
    assert not result.is_leak
    assert value(result, "extracted") == (0, 0)


@pytest.mark.slow
def test_what_all_clients_have_and_what_was_recited_before_count_for_nothing() -> None:
    rng = torch.Generator().manual_seed(0)
    texts = torch.randint(2, 50, (400, 12), generator=rng)
    texts[:, 6:] = torch.arange(2, 8)  # the form that everybody fills in
    data = Dataset.from_tokens(texts[:200], vocabulary=50, test=texts[200:])
    own = {"rounds": 6, "local_epochs": 5, "learning_rate": 0.3}
    made = fedaudit.simulate(NOTES.values(own), data=data, progress=False)
    observed = observe(made.transcript, ThreatModel(target_records=60))
    result = judged(asked(observed), observed, made.truth)
    assert not result.is_leak
    assert value(result, "extracted") == (0, 0)
    assert value(result, "extracted_in_1000") == (0, 0)
    assert any("go on as others' do" in note for note in result.notes)


def by_hand(logs: list[list[float]], greedy: list[list[bool]], wrong_before: int | None = None) -> FindingResult:
    """Return the result where a model recites the members under models with these log-probabilities.

    ``wrong_before``: how many of the last tokens the first model gets wrong; None: what it says isn't known.
    """
    observed, truth = notes()
    n, own = len(truth.owners), truth.owners != NOBODY
    records = observed.records
    assert records is not None
    begins, length = torch.full((n,), 3), records.inputs.shape[1]
    said = torch.where(own[:, None, None], records.inputs[:, None], 2)
    said = torch.where(torch.arange(length) < 8, said, NOTHING)
    said[:, :, :3] = records.inputs[:, None, :3]
    spread = torch.where(own, torch.tensor(logs)[:, :1], -1e3).double(), torch.tensor(greedy)[:, :1].expand(-1, n) & own
    before = None
    if wrong_before is not None:
        before = records.inputs[:, None].clone()
        before[:, :, 8 - wrong_before :] = 0
        before = torch.where(torch.arange(length) < 8, before, NOTHING)
    rounds = torch.tensor([0, 3, 4])
    found = ExtractionFinding(
        begins=begins, continued=said, logs=spread[0], greedy=spread[1], rounds=rounds, before=before
    )
    return judged(found, observed, truth)


def test_the_round_is_told_in_which_it_was_learnt() -> None:
    result = by_hand([[-90.0], [-80.0], [-0.1]], [[False], [False], [True]])
    assert result.is_leak
    assert result.recited
    assert {text.round for text in result.recited} == {3}
    assert {text.draws for text in result.recited} == {1}
    early = by_hand([[-90.0], [-9.0], [-0.1]], [[False], [False], [True]]).recited
    assert early[0].round is None, "after round 0, 1 or 2"


def test_what_the_first_model_recited_was_not_learnt() -> None:
    result = by_hand([[-0.1], [-0.1], [-0.1]], [[True], [True], [True]])
    assert not result.is_leak
    assert not result.recited
    assert value(result, "extracted") == (0, 0)
    assert any("before any training" in note for note in result.notes)


def test_what_the_first_model_recited_but_for_a_tenth_was_not_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    logs, greedy = [[-90.0], [-80.0], [-0.1]], [[False], [False], [True]]
    assert by_hand(logs, greedy, wrong_before=1).is_leak, "one of five tokens is more than a tenth"
    for wrong, share in ((0, 0.1), (1, 0.2)):
        monkeypatch.setattr(extraction, "_NEAR", share)
        result = by_hand(logs, greedy, wrong_before=wrong)
        assert not result.is_leak
        assert value(result, "extracted") == (0, 0)
        assert any("before any training" in note for note in result.notes)


def test_the_first_model_s_continuations_are_asked_for_where_it_is_known() -> None:
    observed, _ = notes()
    found = asked(observed, draws=1)
    assert found.before is not None
    begins = torch.arange(found.continued.shape[2]) < found.begins[:, None]
    assert found.before[:, 0][begins].equal(found.continued[:, 0][begins])
    later = dataclasses.replace(observed, weights=observed.weights[:1])
    assert found.before[:, 0].equal(asked(later, draws=0).continued[:, 0])
    assert asked(later, draws=0).before is None, "it is the one that is asked"


@pytest.mark.slow
def test_a_client_s_own_model_is_asked_about_its_own_texts() -> None:
    observed, truth = notes()
    only = observed.split("client")[1]
    result = judged(asked(only, model="client"), only, truth)
    assert result.client == 1
    assert {text.client for text in result.recited} == {1}
    found = asked(only, model="client", draws=0)
    assert found.rounds.tolist() == [*range(8), 8]


# --- the audit ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_audit_says_recovered_shows_the_texts_and_shares_none(tmp_path: Path, command: Command) -> None:
    made = NOTES.values(attacks="extraction", evaluation={"most_exposed": 3})
    (tmp_path / "s.yaml").write_text(json.dumps(made))
    assert command("audit", str(tmp_path / "s.yaml"), "--out", str(tmp_path / "a")).code == 0
    result = AuditResult.load(tmp_path / "a/results.json")
    (finding,) = result.findings
    assert [s.verdict for s in result.summaries] == ["recovered"]
    assert "The model recites training sequences" in str(result.summaries[0].headline)
    assert len(finding.recited) == 3
    page = (tmp_path / "a/report.html").read_text()
    assert "Recited sequences" in page
    words = result.data.words
    assert words is not None
    text = " ".join(words[t] for t in finding.recited[0].true)
    assert text.split()[-2] in page
    assert command("share", str(tmp_path / "a"), "--out", str(tmp_path / "b")).code == 0
    shared = (tmp_path / "b/results.json").read_text()
    assert json.loads(shared)["findings"] == []
    assert '"recited"' not in shared
    assert text not in (tmp_path / "b/report.html").read_text()


def test_records_of_text_that_fit_no_text_are_refused(tmp_path: Path, command: Command) -> None:
    made = NOTES.values(attacks=[{"name": "extraction", "prefix": "many"}])
    (tmp_path / "s.yaml").write_text(json.dumps(made))
    refused(command("audit", str(tmp_path / "s.yaml")), "prefix")
