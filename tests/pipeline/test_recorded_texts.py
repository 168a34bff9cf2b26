"""Recordings of models that predict the next token: who was in, and what they recite."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedaudit
from fedaudit import BadInput, Recorder
from fedaudit.modalities import NOTHING, TokenInfo
from fedaudit.models import build_model
from fedaudit.results import AuditResult

WORDS, LENGTH, OWN = 60, 12, 12
TOKENS = TokenInfo(WORDS, padding=0, causal=True)
QUICK: Any = {"controls": False, "progress": False}
ATTACKS = ["extraction", "reference-loss", "min-k"]


def writer() -> nn.Module:
    torch.manual_seed(0)
    return build_model("decoder", input_shape=(LENGTH,), outputs=WORDS, width=48, tokens=TOKENS)


def texts(count: int, seed: int) -> Tensor:
    """Return texts that nothing explains, of different lengths."""
    rng = torch.Generator().manual_seed(seed)
    found = torch.randint(1, WORDS, (count, LENGTH), generator=rng)
    return found.masked_fill(torch.arange(LENGTH) >= torch.randint(8, LENGTH + 1, (count, 1), generator=rng), 0)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record three rounds of two clients that learn their texts by heart."""
    folder, model = tmp_path_factory.mktemp("texts") / "recording", writer()
    with Recorder(folder, tokens=TOKENS) as recorder:
        for _ in range(3):
            start, states = copy.deepcopy(model.state_dict()), []
            with recorder.round(start):
                for client in range(2):
                    model.load_state_dict(start)
                    own = texts(OWN, client)
                    optimiser = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
                    with recorder.capture() as seen:
                        for _ in range(40):
                            optimiser.zero_grad()
                            nn.functional.cross_entropy(model(own), TOKENS.following(own)).backward()
                            optimiser.step()
                    recorder.update(f"site-{client}", model.state_dict(), seen, num_examples=OWN)
                    states.append(copy.deepcopy(model.state_dict()))
            model.load_state_dict({k: torch.stack([s[k] for s in states]).mean(0) for k in start})
    return folder


def audited(folder: Path, records: Any, attacks: Any = ATTACKS, **more: Any) -> AuditResult:
    return fedaudit.audit_transcript(folder, attacks, module=writer(), records=records, **QUICK, **more).result


@pytest.mark.slow
def test_texts_that_a_recorded_model_learnt_come_out_with_the_client_that_held_them(recording: Path) -> None:
    others = texts(60, 9)
    result = audited(recording, (others, TOKENS.following(others)))
    assert {s.attack: s.verdict for s in result.summaries} == {
        "extraction": "recovered",
        "reference-loss": "inferred",
        "min-k": "inferred",
    }
    (finding,) = [f for f in result.findings if f.attack == "extraction"]
    assert len(finding.recited) == 10
    for text in finding.recited:
        whole = [t for t in (*text.begin, *text.true) if t]
        assert whole in [[t for t in row if t] for row in texts(OWN, text.client).tolist()]
        assert text.round is not None


def test_labels_may_be_the_texts_own_tokens_as_transformers_takes_them(recording: Path, tmp_path: Path) -> None:
    others = texts(60, 9)
    same = audited(recording, (others, others.masked_fill(others == 0, NOTHING)), ["reference-loss"])
    np.savez(tmp_path / "o.npz", inputs=others.numpy(), labels=TOKENS.following(others).numpy())
    by_file = audited(recording, tmp_path / "o.npz", ["reference-loss"])
    assert same.findings[0].metrics == by_file.findings[0].metrics


def test_persons_are_counted_where_the_records_say_of_whom_each_text_is(recording: Path, tmp_path: Path) -> None:
    """The file tells the persons of the clients' texts, too: those are members, by what they are."""
    told = torch.cat([texts(60, 9), texts(OWN, 0), texts(OWN, 1)])
    persons = torch.cat([torch.arange(60) // 3, 100 + torch.arange(OWN) // 3, 200 + torch.arange(OWN) // 3])
    file = tmp_path / "texts.npz"
    np.savez(file, inputs=told.numpy(), labels=TOKENS.following(told).numpy(), persons=persons.numpy())
    result = audited(recording, file, [{"name": "reference-loss"}])
    (finding,) = result.findings
    auc = next(m for m in finding.metrics if m.name == "membership_auc")
    each = len(persons[60:].unique())
    assert (auc.of, auc.n) == ("persons", 2 * each)
    assert auc.value > 0.9
    others = told[:60], TOKENS.following(told[:60]), persons[:60]
    with pytest.raises(BadInput, match="persons of none of the examples that clients used: put these in, too"):
        audited(recording, others, [{"name": "reference-loss"}])
    few = tuple(torch.as_tensor(part)[:63] for part in (told, TOKENS.following(told), persons))
    with pytest.raises(BadInput, match="in pairs of one class and of persons who are named, of"):
        audited(recording, few, [{"name": "reference-loss"}])


def test_others_may_be_shorter_and_not_longer(recording: Path) -> None:
    short = texts(60, 9)[:, :8]
    assert audited(recording, (short, TOKENS.following(short)), ["min-k"]).findings[0].status == "done"
    long = torch.ones(30, LENGTH + 1, dtype=torch.int64)
    with pytest.raises(BadInput, match="records of shape \\(13,\\): the model takes \\(12,\\)") as error:
        audited(recording, (long, long))
    assert "\n" not in str(error.value)


def test_a_writer_is_trained_where_it_does_better_than_the_most_frequent_word() -> None:
    made: dict[str, Any] = {
        "data": {"name": "notes-causal", "split": "train"},
        "model": {"name": "decoder", "width": 16},
        "federations": [{"name": "f", "algorithm": "fedavg", "clients": 2, "rounds": 3, "examples": 200,
                         "local_epochs": 1, "batch_size": 20, "learning_rate": 0.3}],
        "attacks": [{"name": "extraction", "draws": 0}],
        "threat": {"target_records": 40},
        "evaluation": {"controls": False, "accuracy_every": 3},
    }  # fmt: skip
    learnt = fedaudit.audit(made, progress=False).result
    assert learnt.federations[0].history is not None
    reached = learnt.federations[0].history.accuracy[-1]
    assert reached is not None
    assert 0.1 < reached < 0.5
    assert learnt.summaries[0].hardly_trained is None
    made["federations"][0] |= {"learning_rate": 1e-6}
    (summary,) = fedaudit.audit(made, progress=False).result.summaries
    assert summary.verdict == "inconclusive"
    assert summary.hardly_trained is not None
