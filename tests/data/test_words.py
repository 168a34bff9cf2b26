"""What tokens stand for, as people keep it, and texts that nobody is to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedaudit
from fedaudit.data.words import words_of
from fedaudit.results import RecitedText, SequenceResult
from fedaudit.results.rows import agreeing, masked
from fedaudit.utils.errors import BadInput
from tests.build import Scenarios
from tests.conftest import Command, refused

WORDS = ["<pad>", "the", "ward"]


class Tokenizer:
    """As those of transformers."""

    def get_vocab(self) -> dict[str, int]:
        return {"ward": 2, "<pad>": 0, "Ġthe": 1}


FILES: dict[str, str] = {
    "words.txt": "<pad>\nthe\nward\n",
    "vocab.json": json.dumps({"ward": 2, "▁the": 1, "<pad>": 0}),
    "tokenizer.json": json.dumps(
        {"model": {"vocab": {"Ġthe": 1, "ward": 2}}, "added_tokens": [{"id": 0, "content": "<pad>"}]}
    ),
    "unigram.json": json.dumps({"model": {"vocab": [["<pad>", 0.0], ["▁the", -1.5], ["ward", -2]]}}),
    "list.json": json.dumps(WORDS),
}


@pytest.mark.parametrize("name", FILES)
def test_words_are_read_from_what_people_have(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name], encoding="utf-8")
    assert words_of(tmp_path / name) == words_of(str(tmp_path / name)) == WORDS


def test_words_of_a_tokenizer_and_numbers_that_nobody_tells() -> None:
    assert words_of(Tokenizer()) == WORDS
    assert words_of({"a": 2}) == ["", "", "a"]


BAD: dict[str, Any] = {
    "number": 3,
    "nothing": [],
    "numbers": [1, 2],
    "a number too large": {"a": 10**9},
    "negative": {"a": -1},
    "no file": "nowhere/words.txt",
}


@pytest.mark.parametrize("name", BAD)
def test_what_holds_no_words_is_refused_in_a_line(name: str) -> None:
    with pytest.raises(BadInput, match="words") as told:
        words_of(BAD[name])
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("text", ["{", '{"model": {"vocab": 3}}', '{"model": {"vocab": {"a": "b"}}}', "3", "\xff"])
def test_a_file_of_something_else_is_refused_by_the_command(text: str, tmp_path: Path, command: Command) -> None:
    path = tmp_path / ("words.json" if text != "\xff" else "words.txt")
    path.write_bytes(text.encode("latin-1"))
    refused(command("attack", tmp_path, "--words", path), "words")


TRUE, FOUND = [5, 6, 7, 8], [5, 9, 7]


def test_a_masked_text_says_which_words_were_found_and_nothing_else() -> None:
    text = SequenceResult(true=TRUE, found=FOUND, rouge1=0.5, rouge2=0)
    hidden = masked(text)
    assert (hidden.true, hidden.found) == ([-1, -2, -1, -2], [-1, -3, -1])
    assert agreeing(hidden.true, hidden.found) == agreeing(TRUE, FOUND)
    assert masked(hidden) == hidden
    said = RecitedText(record=1, client=0, begin=[3], true=TRUE, found=FOUND, edits=2, rouge_l=0.5, draws=None)
    assert masked(said).begin == [-1]


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


@pytest.mark.slow
def test_a_scenario_may_mask_its_texts_and_sharing_leaves_them_out(tmp_path: Path) -> None:
    from fedaudit.report.share import share

    plain = fedaudit.audit(NOTES(evaluation={"controls": False}), out=tmp_path / "plain", progress=False).result
    hidden = fedaudit.audit(
        NOTES(evaluation={"controls": False, "mask_texts": True}), out=tmp_path / "hidden", progress=False
    ).result
    (shown,), (covered,) = ([f.recited for f in result.findings] for result in (plain, hidden))
    assert shown
    assert [masked(text) for text in shown] == covered
    assert hidden.data.words is None
    assert plain.data.words is not None
    said = " ".join(plain.data.words[token] for token in shown[0].true)
    assert said in (tmp_path / "plain" / "report.html").read_text()
    for name in ("plain", "hidden"):
        share(tmp_path / name, tmp_path / f"{name}-shared")
        for file in (tmp_path / f"{name}-shared").iterdir():
            assert said not in file.read_text()
    assert said not in (tmp_path / "hidden" / "report.html").read_text()
    marks = {f.victims for f in hidden.findings if f.victims}
    assert not marks & {f.victims for f in plain.findings}  # digests, by which a guess could be checked
    scenario = NOTES(evaluation={"controls": False, "mask_texts": True})
    named = scenario.model_copy(update={"name": "sudden hives of otto"})
    fedaudit.audit(named, out=tmp_path / "named", progress=False)
    with pytest.raises(BadInput, match="a name that may be a text"):  # nothing is left to hold it against
        share(tmp_path / "named", tmp_path / "named-shared")
