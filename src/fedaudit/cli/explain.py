"""``fedaudit explain``: what a word in a report or a table of results means."""

from __future__ import annotations

import difflib
import textwrap
from typing import Annotated

import typer

from fedaudit.utils.bounds import shown
from fedaudit.utils.errors import BadInput

_WIDTH = 88


def explain(
    word: Annotated[
        list[str] | None,
        typer.Argument(help="A word in a report: psnr, inconclusive, control, dB, ...; default: list all."),
    ] = None,
) -> None:
    """Explain a word in a report: a verdict, a heading, a metric, an attack."""
    from fedaudit.results.glossary import explained, terms

    if not word:
        for term in terms():
            print(": ".join(filter(None, [term.term, ", ".join(term.words)])))
        print("'fedaudit explain WORD' explains one of them")
        return
    asked = " ".join(word)
    if found := explained(asked):
        print(found.term)
        print(textwrap.indent(textwrap.fill(found.text, _WIDTH), "  "))
    else:
        print(_by_name(asked))


def _by_name(asked: str) -> str:
    """Return what the metric, attack, defence, model or data set of that name is, in two lines."""
    from fedaudit.cli.catalogue import catalogue
    from fedaudit.evaluation.finding_types import metric
    from fedaudit.results.glossary import terms

    name = "_".join(asked.lower().split())
    if (found := metric(name)) is not None:
        return f"{name}\n  metric: {found.summary}"
    for kind, entries in catalogue(["attacks", "defences", "behaviours", "models", "datasets"]).items():
        for entry in entries:
            if entry["name"] == asked.lower():
                return f"{asked.lower()}\n  one of the {kind}: {entry['summary']}"
    known = [word for term in terms() for word in (term.term.lower(), *term.words)]
    near = difflib.get_close_matches(asked.lower(), known, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise BadInput(f"'{shown(asked)}' isn't a word of the reports; {hint}'fedaudit explain' lists them all")
