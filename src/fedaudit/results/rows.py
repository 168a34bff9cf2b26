"""What was found of rows of tables, of sequences of tokens, and of texts that a model recites."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import TypeVar

from pydantic import Field

from fedaudit.results.record import GroupWorst, Record, optional


class RowResult(Record):
    """One true row of a table against the recovered one that is paired with it, cell by cell."""

    cells: int = Field(description="how many there are")
    right: int = Field(description="of them, how many were recovered: numbers within 0.319 standard deviations")
    found: bool = Field(default=True, description="false: the attack returned fewer rows, and none is left for this")
    certified: bool | None = optional("whether the attack proved, without the truth, that it is a training example")
    true_label: float | None = Field(description="the row's label, or its target; null where it has several")
    label: float | None = optional("that the attack used for the recovered row")
    true: list[str] = Field(default=[], description="its cells in words; none where the report doesn't draw them")
    recovered: list[str] = Field(default=[], description="likewise")
    wrong: list[int] = Field(default=[], description="positions of the cells that were not recovered, where drawn")
    confidence: list[float] = Field(default=[], description="of the attack in each cell, 0 to 1, where drawn")
    uses: int = Field(default=1, description="how often the update used this example (local epochs)")
    chance_level: float = Field(
        default=1.0,
        description="probability that one of as many candidates, drawn at random as were recovered, has all its cells",
    )
    victim: str = Field(default="", description="equal for equal rows, in whatever round or update they are")

    @property
    def exact(self) -> bool:
        """Whether every cell was recovered."""
        return self.found and self.right == self.cells


class RowDetail(Record):
    """Of one run of an attack on tables."""

    columns: list[str] = Field(default=[], description="of the rows, by name")
    rows: list[RowResult] = Field(default=[], description="of an attack on tables, one a training example")
    row_groups: list[GroupWorst] = Field(
        default=[], description="of each category of each column, the highest and the mean share of a row's cells"
    )


AGREES, OTHER, NOT_SAID = -1, -2, -3  # in place of a token whose text is masked


class SequenceResult(Record):
    """One training sequence against what was recovered of it; padding and the token that ends it are left out."""

    true: list[int] = Field(
        description="its tokens; what they stand for is in data.words. Where texts are masked, here and below: -1 is a "
        "token that was found, -2 one that wasn't, -3 a wrong one"
    )
    found: list[int] = Field(description="the recovered sequence that is paired with it; empty: none")
    rouge1: float = Field(description="words that both share (F1)")
    rouge2: float = Field(description="pairs of neighbouring words that both share (F1)")
    label: int | None = optional("its class; null where the task is to predict the next token")


class SequenceDetail(Record):
    """Of one run of an attack on texts."""

    sequences: list[SequenceResult] = Field(default=[], description="of an attack on text: the first 64 of an update")


class RecitedText(Record):
    """One text that was trained on, and that the model recites where it is given how the text begins."""

    record: int = Field(description="its position among the records that the adversary holds, from 0")
    client: int = Field(description="who trained on it")
    begin: list[int] = Field(description="the tokens that the model is given; what they stand for is in data.words")
    true: list[int] = Field(description="the tokens that follow in the text")
    found: list[int] = Field(description="what the model says: of its continuations the one nearest to the text")
    edits: int = Field(description="tokens to be changed, left out or put in until both are the same")
    rouge_l: float = Field(description="the longest common subsequence of both (F1)")
    draws: float | None = Field(
        description="until the rest comes out word for word with a probability of 90 %; null: above 10¹², or never"
    )
    round: int | None = optional(
        "after which the rest is likelier than before by the largest factor; null: the models around it aren't known"
    )


class ExtractionDetail(Record):
    """Of one run of an attack that asks what a model of text recites."""

    recited: list[RecitedText] = Field(
        default=[],
        description="the texts that came out, the surest first, as many as evaluation.most_exposed says",
    )


def agreeing(true: Sequence[int], found: Sequence[int]) -> tuple[list[bool], list[bool]]:
    """Return which tokens of both stand in the other, in the same order; of masked texts as they were."""
    if any(token < 0 for token in (*true, *found)):
        return [token == AGREES for token in true], [token == AGREES for token in found]
    sides = ([False] * len(true), [False] * len(found))
    for a, b, size in SequenceMatcher(None, true, found, autojunk=False).get_matching_blocks():
        sides[0][a : a + size] = sides[1][b : b + size] = [True] * size
    return sides


_Text = TypeVar("_Text", SequenceResult, RecitedText)


def masked(text: _Text) -> _Text:
    """Return a text without its words: what is left is which of them were found."""
    true, found = agreeing(text.true, text.found)
    hidden = {
        "true": [AGREES if right else OTHER for right in true],
        "found": [AGREES if right else NOT_SAID for right in found],
    }
    if isinstance(text, RecitedText):
        hidden["begin"] = [AGREES] * len(text.begin)
    return text.model_copy(update=hidden)
