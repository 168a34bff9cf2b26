"""The words that reports and tables of results show, and what each means: one file, and the verdicts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedaudit.results import VERDICTS
from fedaudit.utils import plain_yaml

FILE = Path(__file__).parent / "glossary.yaml"
MOST = 32  # a glossary that is longer isn't read


@dataclass(frozen=True, kw_only=True)
class Term:
    """A term, what it means, and the other words that stand for it."""

    term: str
    text: str
    words: tuple[str, ...] = ()


@cache
def terms() -> tuple[Term, ...]:
    """Return all terms: those of the file in its order, and after "Verdict" the verdicts, from the worst down."""
    found: list[Term] = []
    for entry in plain_yaml.read(FILE, "the glossary"):
        found.append(Term(term=entry["term"], text=entry["text"], words=tuple(entry["words"])))
        if entry["term"] == "Verdict":
            found += [Term(term=verdict.capitalize(), text=text) for verdict, text in VERDICTS.items()]
    return tuple(found)


def explained(word: str) -> Term | None:
    """Return the term that ``word`` is or stands for, in whatever case and with or without hyphens; None: none."""
    wanted = _plain(word)
    return next((t for t in terms() if wanted in map(_plain, (t.term, *t.words))), None)


def _plain(word: str) -> str:
    return " ".join(re.sub(r"[-_]", " ", word.lower()).split())
