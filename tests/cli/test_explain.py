"""Every word that a report or a table of results shows is explained, by one glossary that says what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fedaudit import report
from fedaudit.evaluation.finding_types import FINDING_TYPES
from fedaudit.evaluation.limits import limitable
from fedaudit.report import terminal
from fedaudit.results import VERDICTS
from fedaudit.results.glossary import MOST, explained, terms
from tests.conftest import Command, refused
from tools.docs.pages import RESULTS

PARTS = Path(report.__file__).parent / "templates"


def headings() -> set[str]:
    """Return the columns' headings of the report's tables, as they are read: without small print and placeholders."""
    found = set()
    for template in PARTS.rglob("*.j2"):
        for cell in re.findall(r'<th scope="col"[^>]*>(.*?)</th>', template.read_text(encoding="utf-8"), re.DOTALL):
            text = re.sub(r"<small>.*?</small>|{{.*?}}|{%.*?%}|<[^>]+>|\[95 %\]", "", cell, flags=re.DOTALL)
            found.add(" ".join(text.split()))
    return found - {""}


def columns() -> set[str]:
    """Return the columns' headings of the tables that end up on the terminal."""
    calls = [node for node in ast.walk(ast.parse(Path(terminal.__file__).read_text())) if isinstance(node, ast.Call)]
    tables = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "_table"]
    texts = {n.value for t in tables for a in t.args[1:] for n in ast.walk(a) if isinstance(n, ast.Constant)}
    return {re.sub(r"( dB)? \[95 %\]$|: $", "", text) for text in texts if isinstance(text, str)} - {""}


def test_the_headings_are_found():
    assert {"Verdict", "PSNR", "Identified", "Same class", "Accuracy lost", "Guarantee"} <= headings()
    assert {"attack", "PSNR"} <= columns()


def test_every_heading_of_the_report_and_of_the_terminal_is_explained():
    missing = [heading for heading in sorted(headings() | columns()) if explained(heading) is None]
    assert not missing


def test_every_heading_of_the_claims_of_published_results_is_explained():
    pages = [page.read_text(encoding="utf-8") for page in RESULTS.glob("*/result.md")]
    heads = {line for page in pages for line in page.splitlines() if line.startswith("| claim |")}
    assert heads
    for head in heads:
        for heading in head.strip("| ").split(" | "):
            assert explained(heading), heading


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_verdict_means_what_the_code_says(verdict, command: Command):
    found = explained(verdict)
    assert found is not None
    assert found.text == VERDICTS[verdict]
    told = command("explain", *verdict.split())
    assert " ".join(told.out.split()) == f"{verdict.capitalize()} {VERDICTS[verdict]}"


def test_the_glossary_is_short_and_no_word_stands_for_two_things():
    assert len(terms()) <= MOST
    words = [" ".join(w.lower().replace("-", " ").split()) for t in terms() for w in (t.term, *t.words)]
    assert len(set(words)) == len(words), sorted({w for w in words if words.count(w) > 1})


ASKED = ["psnr", "dB", "SSIM", "epsilon", "ε", "n", "control", "inconclusive", "recovered"]
ASKED += ["trees", "cover", "cut", "known_labels", "precode", "same_client"]


@pytest.mark.parametrize("word", ASKED)
def test_the_words_that_people_ask_for_are_explained(word, command: Command):
    told = command("explain", word)
    assert told.code in (0, None)
    assert len(told.out.splitlines()) >= 2


def test_every_metric_that_can_be_limited_or_measured_is_explained(command: Command):
    names = {*limitable(), *(m.name for kind in FINDING_TYPES.values() for m in kind.metrics)}
    for name in sorted(names):
        assert command("explain", name).code in (0, None), name


def test_attacks_and_defences_are_explained_by_their_line_in_the_list(command: Command):
    assert "layer-weighted cosine" in command("explain", "agic").out
    assert "nearest to its neighbours" in command("explain", "krum").out


def test_without_a_word_all_are_listed(command: Command):
    listed = command("explain").out
    assert all(term.term in listed for term in terms())


def test_a_word_that_no_report_has_is_refused_with_the_nearest(command: Command):
    refused(command("explain", "psrn"), "'psrn' isn't a word of the reports; did you mean 'psnr'?")
