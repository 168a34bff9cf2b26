"""Training sequences and what was read of them, or what a model recites of them, word by word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedaudit.evaluation.scores import grouped
from fedaudit.report.panels import PANELS, Panel
from fedaudit.report.wording import named, place_of
from fedaudit.results import AuditResult, FindingResult, RecitedText, SequenceResult
from fedaudit.results.rows import agreeing

_MASK = "■"
SHOWN = 24  # sequences that are shown, an attack on a federation


@dataclass(frozen=True)
class Word:
    """A word as it is shown: whether it stands at the same place in both sequences."""

    text: str
    right: bool


@dataclass(frozen=True)
class Sentence:
    """One training sequence, what was recovered of it, and where it came from."""

    number: int
    where: str
    true: list[Word]
    found: list[Word]
    scores: SequenceResult

    @property
    def exact(self) -> bool:
        """Whether it came out word for word."""
        return self.scores.true == self.scores.found


@dataclass(frozen=True)
class Sentences:
    """What one attack read in a federation: of all the nearest."""

    federation: str
    attack: str
    shown: list[Sentence]
    hidden: int


def sentences(result: AuditResult) -> list[Sentences]:
    """Return what each attack read of each federation's sequences; none where no attack is on sequences."""
    read = []
    for (federation, attack), findings in grouped([f for f in result.findings if f.sequences]).items():
        own = sorted(((f, s) for f in findings for s in f.sequences), key=lambda one: -one[1].rouge1)
        shown = [
            _sentence(i, result.data.words, place_of(f, result), s) for i, (f, s) in enumerate(own[:SHOWN], start=1)
        ]
        read.append(Sentences(federation, attack, shown, max(0, len(own) - SHOWN)))
    return read


def _sentence(number: int, words: list[str] | None, where: str, scores: SequenceResult) -> Sentence:
    return Sentence(number, where, *_marked(scores, words), scores)


def _marked(both: SequenceResult | RecitedText, words: list[str] | None) -> tuple[list[Word], list[Word]]:
    """Return the true words and the found ones, in which those are right that stand in both."""
    true, found = agreeing(both.true, both.found)
    return _words(both.true, true, words), _words(both.found, found, words)


def _words(tokens: Sequence[int], right: Sequence[bool], words: list[str] | None) -> list[Word]:
    words = words or []
    return [
        Word(_MASK if token < 0 else (words[token : token + 1] or [""])[0] or str(token), fits)
        for token, fits in zip(tokens, right, strict=True)
    ]


class Recited(NamedTuple):
    """A text that a model recites: whose it is, how it begins, how it goes on, and what the model says."""

    text: RecitedText
    whose: str
    begin: list[Word]
    true: list[Word]
    found: list[Word]


def recited(result: AuditResult) -> list[tuple[FindingResult, list[Recited]]]:
    """Return the findings of texts that a model recites, with those texts; none where there is none."""
    words = result.data.words
    found = []
    for f in (f for f in result.findings if f.recited):
        begins = [_words(t.begin, [True] * len(t.begin), words) for t in f.recited]
        whose = [named(t.client, f.federation, result) for t in f.recited]
        told = zip(f.recited, whose, begins, strict=True)
        found.append((f, [Recited(t, who, begin, *_marked(t, words)) for t, who, begin in told]))
    return found


PANELS["extraction"] = Panel("Recited texts", "parts/recited.html.j2", lambda result, images: recited(result))  # noqa: ARG005
PANELS["sequences"] = Panel("Sentences", "parts/sentences.html.j2", lambda result, images: sentences(result))  # noqa: ARG005
