"""docs/reference/attacks-and-defences.md: what each does, its paper, equation, departures and evidence."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import fedaudit_lab.studies as studies_package
from fedaudit.attacks import ATTACKS
from fedaudit.defences import AGGREGATORS, SANITISERS
from fedaudit.simulation.behaviour import BEHAVIOURS
from fedaudit.simulation.server_behaviour import SERVER_BEHAVIOURS
from fedaudit.utils.distributions import OURS
from fedaudit.utils.registry import Entry, Plugin, Registry
from fedaudit_lab.studies.spec import builtin_studies
from tests.docs.api import docstring
from tests.docs.pages import DOCS
from tests.docs.settings import MADE, cell, head, markdown, row, settings

_STUDIES = Path(studies_package.__file__).parent / "builtin"
_HEAD = f"""\
# Attacks and defences

{MADE}

What each does, from which paper and equation, and where it departs from it: the docstring of its class. Settings:
[scenario](scenario.md#attacks). How the attacks work together, and what was measured: [methods](methods.md) and
[defences](defences.md). *Evidence* are the published studies in which it takes part.
"""


def page() -> str:
    """Return the page."""
    evidence = studies()
    lines = [_HEAD]
    parts: list[tuple[str, str, Registry[Any]]] = [
        ("Attacks", "", ATTACKS),
        ("Aggregators", "The server's rules: `defences.aggregator`.", AGGREGATORS),
        ("Sanitisers", "What clients do to their updates: `defences.sanitiser`.", SANITISERS),
        ("Malicious clients", "`federations.malicious`.", BEHAVIOURS),
        ("Malicious servers", "`federations.server`.", SERVER_BEHAVIOURS),
    ]
    for label, says, registry in parts:
        lines += [f"## {label}", "", *([says, ""] if says else []), *head("name", "what it does", "paper")]
        for entry in registry:
            lines.append(
                row(f"[`{entry.name}`](#{_anchor(registry, entry)})", cell(entry.summary), cell(_paper(entry)))
            )
        lines.append("")
        for entry in registry:
            lines += [
                f"### {_heading(registry, entry)}",
                "",
                *_section(registry, entry, [] if "no defence" in entry.summary else evidence.get(entry.name, [])),
                "",
            ]
    return "\n".join(lines).rstrip() + "\n"


def studies() -> dict[str, list[str]]:
    """Return links to the published studies, by every name that a study's file has."""
    found: dict[str, list[str]] = {}
    for study in builtin_studies():
        name = study.removeprefix("fedaudit/").replace("/", "-")
        result = DOCS / "results" / name / "result.md"
        if result.is_file():
            words = set(_words(yaml.safe_load((_STUDIES / f"{study}.yaml").read_text(encoding="utf-8"))))
            link = f"[{study}](../results/{name}/result.md)"
            for word in words:
                found.setdefault(word, []).append(link)
    return found


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _words(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _words(inner)
    elif isinstance(value, str):
        yield value


def _section(registry: Registry[Any], entry: Entry[type[Plugin]], evidence: list[str]) -> Iterator[str]:
    text = inspect.cleandoc(entry.value.__doc__ or "")
    text = re.sub(r"^Args:\n(    .*\n?|\n)*", "", text, flags=re.MULTILINE).rstrip()
    yield from docstring(text)
    facts = [f"Paper: {_paper(entry)}."] if _paper(entry) else []
    if registry is ATTACKS:
        facts.append(f"Who: {entry.info['threat_model']}. Needs: {'; '.join(entry.info['needs']) or 'nothing more'}.")
        facts.append(f"On the sum of several clients' updates: {entry.info['on_sums']}.")
    if settings(entry.value) and not hasattr(entry.value, "method"):
        facts.append(f"Settings: {', '.join(f'`{name}`' for name in settings(entry.value))}.")
    if registry.distribution(entry) != OURS:
        facts.append(f"Package: `{registry.distribution(entry)}`.")
    if evidence:
        facts.append(f"Evidence: {'; '.join(evidence)}.")
    for fact in facts:
        yield from ("", markdown(fact))


def _paper(entry: Entry[Any]) -> str:
    return str(entry.info.get("paper", "")).strip("-")


def _heading(registry: Registry[Any], entry: Entry[Any]) -> str:
    """Return a heading that no other section has: some names are both an attack's and a malicious party's."""
    who = {id(BEHAVIOURS): "client", id(SERVER_BEHAVIOURS): "server"}.get(id(registry))
    return f"{entry.name} ({who})" if who and entry.name in ATTACKS else entry.name


def _anchor(registry: Registry[Any], entry: Entry[Any]) -> str:
    return re.sub(r"[()]", "", _heading(registry, entry)).replace(" ", "-")
