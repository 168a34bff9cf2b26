"""Recordings of real federations on text and on tables with columns: replayed to the same bits, and attacked."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedaudit
from fedaudit import Recorder, Transcript
from fedaudit.data import load_dataset
from fedaudit.modalities import TokenInfo
from fedaudit.models import build_model
from fedaudit.transcript.truth import load_truth
from fedaudit.utils.errors import BadInput

TEXT = TokenInfo(30, padding=0, end=1, causal=True)


def sentences(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(2, 30, (4, 6), generator=torch.Generator().manual_seed(seed))
    tokens[:, 5], tokens[0, 4:] = 1, torch.tensor([1, 0])
    return tokens, TEXT.following(tokens)


def writer() -> nn.Module:
    torch.manual_seed(0)
    return build_model("decoder", input_shape=(6,), outputs=30, width=64, tokens=TEXT)


def loop(folder: Path, model: nn.Module, data: list[tuple[Tensor, Tensor]], loss: Any, **options: Any) -> None:
    """Run one round as a user would: two clients, each of one step on its data."""
    start = copy.deepcopy(model.state_dict())
    with Recorder(folder, **options) as recorder, recorder.round(start):
        for number, (x, y) in enumerate(data):
            model.load_state_dict(start)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
            with recorder.capture() as seen:
                optimiser.zero_grad()
                loss(model(x), y).backward()
                optimiser.step()
            recorder.update(f"client-{number}", model.state_dict(), seen)


def padded(outputs: Tensor, targets: Tensor) -> Tensor:
    """The usual loss, which leaves out padding by its own number."""
    return nn.functional.cross_entropy(outputs, targets.where(targets >= 0, 0), ignore_index=0)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, padded])
def test_text_is_recorded_replayed_and_read(loss: Any, tmp_path: Path) -> None:
    data = [sentences(0), sentences(1)]
    loop(tmp_path / "r", writer(), data, loss, tokens=TEXT)
    transcript = Transcript.load(tmp_path / "r", writer())
    assert transcript.task_info.tokens == TEXT
    finished = fedaudit.audit_transcript(tmp_path / "r", module=writer(), out=tmp_path / "out", progress=False)
    (record,) = finished.result.federations
    assert record.recording is not None
    assert [r.error for r in record.recording.replays] == [0.0, 0.0]
    assert {s.attack: s.verdict for s in finished.result.summaries} == {
        "dager": "recovered",
        "token-presence": "inferred",
    }
    found = [s for f in finished.result.findings for s in f.sequences if f.attack == "dager"]
    true = [TEXT.words_of(row) for x, _ in data for row in x]
    assert sorted(s.found for s in found) == sorted(true)


def test_without_a_word_the_vocabulary_is_the_embedding_s(tmp_path: Path) -> None:
    loop(tmp_path / "r", writer(), [sentences(0)], nn.functional.cross_entropy)
    transcript = Transcript.load(tmp_path / "r", writer())
    assert transcript.task_info.tokens == TokenInfo(30, causal=True)
    assert any("the embedding's 30 tokens" in note for note in transcript.notes)
    told = Transcript.load(tmp_path / "r", writer(), task={"tokens": {"vocabulary": 30, "padding": 0, "causal": True}})
    assert told.task_info.tokens == TokenInfo(30, padding=0, causal=True)


def test_whole_numbers_without_an_embedding_are_not_text(tmp_path: Path) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.float())  # type: ignore[no-any-return]

    loop(tmp_path / "r", Sums(), [(sentences(0)[0], torch.tensor([0, 1, 0, 1]))], nn.functional.cross_entropy)
    transcript = Transcript.load(tmp_path / "r", Sums(), task={"input_shape": (6,)})
    assert any("the model has no embedding" in note for note in transcript.notes)


def table(count: int) -> tuple[list[tuple[Tensor, Tensor]], Any]:
    data = load_dataset("diabetes")
    rows = [slice(0, count), slice(count, 2 * count)]
    return [(data.train.inputs[r], data.train.targets[r]) for r in rows], data.columns


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(table(1)[0][0][0].shape[1], 50), nn.ReLU(), nn.Linear(50, 1))


@pytest.mark.slow
def test_columns_that_are_declared_reach_tableak(tmp_path: Path) -> None:
    data, columns = table(2)
    assert any(column.kind == "categorical" for column in columns)
    loop(tmp_path / "r", net(), data, nn.functional.mse_loss, columns=columns)
    assert Transcript.load(tmp_path / "r", net()).task_info.columns == columns
    attack = {"name": "tableak", "restarts": 3, "iterations": 60}
    finished = fedaudit.audit_transcript(tmp_path / "r", [attack], module=net(), progress=False, controls=False)
    row = finished.result.findings[0].rows[0]
    assert len(row.true) == len(columns)
    record = finished.result.federations[0].recording
    assert record is not None
    assert [r.error for r in record.replays] == [0.0, 0.0]


def test_columns_are_told_later_by_a_file(tmp_path: Path) -> None:
    data, columns = table(2)
    loop(tmp_path / "r", net(), data, nn.functional.mse_loss)
    plain = Transcript.load(tmp_path / "r", net())
    assert plain.task_info.columns == ()
    told = Transcript.load(tmp_path / "r", net(), task={"columns": [vars(column) for column in columns]})
    assert told.task_info.columns == columns
    for wrong, why in (
        ({"columns": [{"name": "a", "kind": "numeric", "positions": [0]}]}, "each of 0 to"),
        ({"columns": [{"name": "a", "kind": "odd", "positions": [0]}]}, "columns"),
        ({"tokens": {"vocabulary": 1}}, "vocabulary is 1"),
        ({"tokens": {"vocabulary": 9}}, "a vocabulary belongs to tokens"),
    ):
        with pytest.raises(BadInput, match=why):
            Transcript.load(tmp_path / "r", net(), task=wrong)


class Mean(nn.Module):
    """A classifier of texts of any length, blind to padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.drop, self.last = nn.Embedding(30, 8, padding_idx=0), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        real = (x != 0).unsqueeze(2)
        inner = (self.drop(self.words(x)) * real).sum(1) / real.sum(1).clamp(min=1)
        return self.last(inner)  # type: ignore[no-any-return]


def of_lengths(*lengths: int) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(2)
    return [(torch.randint(1, 30, (3, n), generator=source), torch.tensor([0, 1, 2])) for n in lengths]


@pytest.mark.parametrize("lengths", [(4, 7), (7, 4), (5, 5)])
def test_texts_are_as_long_as_the_longest_and_replayed_as_they_were(lengths: tuple[int, int], tmp_path: Path) -> None:
    """Dropout draws by the length, so only the same length gives the same bits."""
    data = of_lengths(*lengths)
    loop(tmp_path / "r", Mean(), data, nn.functional.cross_entropy, tokens={"vocabulary": 30, "padding": 0})
    done = fedaudit.audit_transcript(
        tmp_path / "r", ["token-presence"], module=Mean(), controls=False, progress=False
    ).result
    (record,) = done.federations
    assert record.recording is not None
    assert [r.error for r in record.recording.replays] == [0.0, 0.0]
    transcript = Transcript.load(tmp_path / "r", Mean())
    assert transcript.task_info.input_shape == (max(lengths),)
    truth = load_truth(tmp_path / "r" / "truth", transcript)
    for client, (x, _) in enumerate(data):
        assert torch.equal(truth.inputs[0, client][:, : x.shape[1]], x)
        assert not truth.inputs[0, client][:, x.shape[1] :].any(), "what fills up"


def test_texts_of_other_lengths_need_a_token_that_fills_up(tmp_path: Path) -> None:
    loop(tmp_path / "r", Mean(), of_lengths(4, 7), nn.functional.cross_entropy, tokens={"vocabulary": 30})
    notes = Transcript.load(tmp_path / "r", Mean()).notes
    assert any("4 to 7 tokens" in note for note in notes)
