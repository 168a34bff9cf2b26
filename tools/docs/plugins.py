"""docs/reference/attacks/, and a page for each other kind of plug-in: what each does, its paper, settings, evidence."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

import fedaudit_lab.studies as studies_package
from fedaudit.attacks import ATTACKS
from fedaudit.attacks.inversion.template import GradientInversion
from fedaudit.defences import AGGREGATORS, CLIENT_DEFENCES
from fedaudit.simulation.behaviour import BEHAVIOURS
from fedaudit.simulation.server_behaviour import SERVER_BEHAVIOURS
from fedaudit.utils.distributions import OURS
from fedaudit.utils.registry import Entry, Registry
from fedaudit_lab.studies.spec import builtin_studies
from tools.docs.api import docstring
from tools.docs.pages import DOCS, LAB, RESULTS, slug
from tools.docs.settings import MADE, cell, head, markdown, row, settings

REFERENCE = DOCS / "reference"
_STUDIES = Path(studies_package.__file__).parent / "builtin"
_BY_HAND = (
    (REFERENCE / "methods.md", "../methods.md", "Methods"),
    (LAB / "measured.md", "../../../lab/docs/measured.md", "Measured"),
)
_SHARED = "gradient-inversion"  # the page of the settings that all inversions share
_OTHERS: dict[str, tuple[str, str, str, Registry[Any]]] = {
    "aggregators": ("Aggregators", "The server's rules", "defences.aggregator", AGGREGATORS),
    "client-defences": ("Client-side defences", "What they do to updates", "defences.client_defence", CLIENT_DEFENCES),
    "malicious-clients": ("Malicious clients", "What they send", "federations.malicious", BEHAVIOURS),
    "malicious-servers": ("Malicious servers", "What they send", "federations.server", SERVER_BEHAVIOURS),
}
_ABOUT = """\
What each does, from which paper and equation, and where it departs from it: the docstring of its class. *Evidence* are
the published studies in which it takes part."""


def pages() -> dict[Path, Callable[[], str]]:
    """Return the pages: an index of the attacks and one for each, and one for each other kind of plug-in."""
    found: dict[Path, Callable[[], str]] = {REFERENCE / "attacks" / "index.md": _index}
    found[REFERENCE / "attacks" / f"{_SHARED}.md"] = _inversion
    for entry in ATTACKS:
        found[REFERENCE / "attacks" / f"{entry.name}.md"] = functools.partial(_attack, entry)
    for name, (title, says, key, registry) in _OTHERS.items():
        found[REFERENCE / f"{name}.md"] = functools.partial(
            _kind, title, f"{says}: `{key}` in a [scenario](scenario.md).", registry
        )
    return found


def _package(entry: Entry[Any]) -> tuple[bool, str]:
    """Return by what entries are sorted: ours first, others by package, whichever was imported first."""
    return entry.package != "fedaudit", entry.package


def _index() -> str:
    lines = [
        "# Attacks",
        "",
        MADE,
        "",
        "Each attack has a page: what it does, who can run it, its settings, its evidence.",
    ]
    lines += ["How they work together: [methods](../methods.md).", ""]
    lines += head("attack", "what it does", "paper")
    lines += [
        row(f"[`{e.name}`]({e.name}.md)", cell(e.summary), cell(_paper(e))) for e in sorted(ATTACKS, key=_package)
    ]
    return "\n".join(lines) + "\n"


def _inversion() -> str:
    lines = ["# Settings of gradient inversion", "", MADE, ""]
    inversions = [entry.value for entry in ATTACKS if issubclass(entry.value, GradientInversion)]
    shared, varied = _shared()
    every = [settings(attack) for attack in inversions]
    lines += [", ".join(f"[`{a.name}`]({a.name}.md)" for a in inversions) + " share these settings:", ""]
    lines += head("setting", "takes", "default", "meaning")
    for name in shared:
        takes, default, meaning = every[0][name]
        lines.append(row(f"`{name}`", takes, "below" if name in varied else default, cell(meaning)))
    lines += ["", "Defaults that differ from method to method:", "", *head("attack", *(f"`{name}`" for name in varied))]
    lines += [row(f"`{a.name}`", *(own[n][1] for n in varied)) for a, own in zip(inversions, every, strict=True)]
    return "\n".join(lines) + "\n"


@functools.cache
def _shared() -> tuple[list[str], list[str]]:
    """Return the settings that all inversions have, and those of them whose defaults differ."""
    every = [settings(entry.value) for entry in ATTACKS if issubclass(entry.value, GradientInversion)]
    shared = [name for name in every[0] if all(name in own for own in every)]
    return shared, [name for name in shared if len({own[name][1] for own in every}) > 1]


def _attack(entry: Entry[Any]) -> str:
    lines = [f"# {entry.name}", "", MADE, "", *_told(entry), ""]
    facts = [*_origin(ATTACKS, entry)]
    facts.append(f"**Who**: {entry.info['threat_model']}.")
    facts.append(f"**Needs**: {'; '.join(entry.info['needs']) or 'nothing more'}.")
    facts.append(f"**On the sum of several clients' updates**: {entry.info['on_sums']}.")
    facts += [*_more(entry.name), *_evidence(entry, "../../../lab/docs/results")]
    lines += [f"- {markdown(fact)}" for fact in facts]
    lines += ["", "## Settings", "", *_settings_of_attack(entry)]
    return "\n".join(lines).rstrip() + "\n"


def _settings_of_attack(entry: Entry[Any]) -> Iterator[str]:
    method: Any = getattr(entry.value, "method", None)
    own = settings(entry.value)
    if isinstance(method, type) and issubclass(method, GradientInversion):
        yield f"Those of [`{method.name}`]({method.name}.md) and of [`epochs`](epochs.md), side by side."
        return
    if issubclass(entry.value, GradientInversion):
        shared, varied = _shared()
        yield f"Those that all [gradient inversions]({_SHARED}.md) share; of these, with defaults of its own: " + (
            ", ".join(f"`{name}` {own[name][1]}" for name in varied) + "."
        )
        own = {name: setting for name, setting in own.items() if name not in shared}
        if own:
            yield from ("", "And its own:", "")
    elif not own:
        yield "None."
    yield from _table(own)


def _kind(title: str, says: str, registry: Registry[Any]) -> str:
    lines = [f"# {title}", "", MADE, "", says, _ABOUT, "", *head("name", "what it does", "paper")]
    lines += [row(f"[`{e.name}`](#{e.name})", cell(e.summary), cell(_paper(e))) for e in registry]
    for entry in registry:
        lines += ["", f"## {entry.name}", "", *_told(entry)]
        facts = [*_origin(registry, entry)]
        if "no defence" not in entry.summary:
            facts += _evidence(entry, "../../lab/docs/results")
        lines += ["", *(f"- {markdown(fact)}" for fact in facts)] if facts else []
        if own := settings(entry.value):
            lines += ["", *_table(own)]
    return "\n".join(lines).rstrip() + "\n"


def _table(own: dict[str, tuple[str, str, str]]) -> Iterator[str]:
    if own:
        yield from head("setting", "takes", "default", "meaning")
        for key, (takes, default, meaning) in own.items():
            yield row(f"`{key}`", takes, default, cell(meaning))


def _told(entry: Entry[Any]) -> Iterator[str]:
    """Yield the docstring of its class, without the settings."""
    text = inspect.cleandoc(entry.value.__doc__ or "")
    yield from docstring(re.sub(r"^Args:\n(    .*\n?|\n)*", "", text, flags=re.MULTILINE).rstrip())


def _more(attack: str) -> list[str]:
    """Return links to the sections of pages written by hand that name an attack in a line ``Attacks:``."""
    found: list[str] = []
    for page, to, label in _BY_HAND:
        text = page.read_text(encoding="utf-8")
        found += [f"[{label}: {title}]({to}#{place})" for title, place, named in _sections(text) if attack in named]
    return [f"**More**: {'; '.join(found)}."] if found else []


def _sections(text: str) -> Iterator[tuple[str, str, set[str]]]:
    for section in re.split(r"^(?=##+ )", text, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0].lstrip("# ")
        line = re.search(r"^Attacks: (.*?)\n\n", section, re.MULTILINE | re.DOTALL)
        yield title, slug(title), set(re.findall(r"attacks/([\w-]+)\.md", line[1])) if line else set()


def _evidence(entry: Entry[Any], results: str) -> list[str]:
    links = [f"[{study}]({results}/{folder}/result.md)" for study, folder in _studies().get(entry.name, [])]
    return [f"**Evidence**: {'; '.join(links)}."] if links else []


@functools.cache
def _studies() -> dict[str, list[tuple[str, str]]]:
    """Return the published studies, each with its folder, by every name that a study's file has."""
    found: dict[str, list[tuple[str, str]]] = {}
    for study in builtin_studies():
        folder = study.removeprefix("fedaudit/").replace("/", "-")
        if (RESULTS / folder / "result.md").is_file():
            for word in set(_words(yaml.safe_load((_STUDIES / f"{study}.yaml").read_text(encoding="utf-8")))):
                found.setdefault(word, []).append((study, folder))
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


def _origin(registry: Registry[Any], entry: Entry[Any]) -> Iterator[str]:
    """Yield its paper, and its package where that isn't the core."""
    if _paper(entry):
        yield f"**Paper**: {_paper(entry)}."
    if registry.distribution(entry) != OURS:
        yield f"**Package**: `{registry.distribution(entry)}`."


def _paper(entry: Entry[Any]) -> str:
    return str(entry.info.get("paper", "")).strip("-")
