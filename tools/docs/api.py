"""docs/reference/python.md: what ``fedaudit`` exports, with signatures and docstrings, and what its packages export."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from types import ModuleType
from typing import Any

from pydantic import BaseModel

import fedaudit
import fedaudit.epsilon
from fedaudit.utils import errors
from tools.docs.settings import MADE, head, markdown, row

_HEAD = f"""\
# Python

{MADE}

```python
import fedaudit
```

These are the public names, and those of the [packages](#packages); what isn't here may change at any time. Results
are pydantic models: [their fields](results.md#fields).
"""
# Beside ``fedaudit`` itself; what their ``__all__`` lists may be relied on.
PACKAGES = (
    "fedaudit.adapters.flower",
    "fedaudit.adapters.nvflare",
    "fedaudit.attacks",
    "fedaudit.attacks.inversion",
    "fedaudit.attacks.local_model",
    "fedaudit.capture",
    "fedaudit.cli",
    "fedaudit.data",
    "fedaudit.defences",
    "fedaudit.epsilon",
    "fedaudit.evaluation",
    "fedaudit.guard",
    "fedaudit.modalities",
    "fedaudit.models",
    "fedaudit.pipeline",
    "fedaudit.report",
    "fedaudit.results",
    "fedaudit.scenario",
    "fedaudit.simulation",
    "fedaudit.simulation.protocols",
    "fedaudit.task",
    "fedaudit.transcript",
    "fedaudit.utils",
)
_FUNCTIONS_FIRST = (
    "audit",
    "simulate",
    "attack",
    "evaluate",
    "audit_transcript",
    "verify",
    "load_scenario",
    "load_dataset",
)


def page() -> str:
    """Return the page."""
    names = [name for name in fedaudit.__all__ if not name.startswith("_")]
    functions = sorted((n for n in names if inspect.isfunction(getattr(fedaudit, n))), key=_place)
    classes = [name for name in names if inspect.isclass(getattr(fedaudit, name)) and name not in _errors()]
    lines = [_HEAD, *head("name", "what it is")]
    for name in (*functions, *classes):
        anchor = f"fedaudit{name.lower()}" if name in functions else f"class-fedaudit{name.lower()}"
        lines.append(row(f"[`{name}`](#{anchor})", _summary(getattr(fedaudit, name))))
    for name in functions:
        lines += ["", f"## fedaudit.{name}", "", *_function(name, getattr(fedaudit, name))]
    for name in classes:
        lines += ["", f"## class fedaudit.{name}", "", *_class(name, getattr(fedaudit, name))]
    for name in fedaudit.epsilon.__all__:
        thing = getattr(fedaudit.epsilon, name)
        if inspect.isfunction(thing):
            lines += ["", f"## fedaudit.epsilon.{name}", "", *_function(name, thing)]
        elif inspect.isclass(thing) and not issubclass(thing, BaseModel):  # results.md has the others
            lines += ["", f"## class fedaudit.epsilon.{name}", "", *_class(name, thing)]
    lines += ["", "## Errors", "", "The command line shows their text in one line.", "", *head("error", "when")]
    lines += [row(f"`{name}`", _summary(getattr(fedaudit, name))) for name in _errors()]
    lines += ["", "## Packages", "", "What they export besides, for whoever extends fedaudit or measures it."]
    for package in PACKAGES:
        lines += ["", f"### {package}", "", *_package(importlib.import_module(package))]
    return "\n".join(lines) + "\n"


def _errors() -> list[str]:
    return [name for name in fedaudit.__all__ if getattr(getattr(fedaudit, name), "__module__", "") == errors.__name__]


def _package(module: ModuleType) -> Iterator[str]:
    """Yield what a package exports beside the names that ``fedaudit`` has."""
    names = sorted({*module.__all__} - {*fedaudit.__all__}, key=lambda name: (name.lower(), name))
    yield from (_summary(module), "")
    if module.__name__.startswith("fedaudit.adapters."):  # whose frameworks may be missing
        yield ", ".join(f"`{name}`" for name in names) + "."
        return
    yield from head("name", "what it is")
    for name in names:
        found = getattr(module, name)
        told = inspect.isclass(found) or inspect.isfunction(found)
        yield row(f"`{name}`", _summary(found) if told else f"a {type(found).__name__}")


def _place(name: str) -> tuple[int, str]:
    return (_FUNCTIONS_FIRST.index(name) if name in _FUNCTIONS_FIRST else len(_FUNCTIONS_FIRST), name)


def _summary(thing: Any) -> str:
    return " ".join(markdown(inspect.cleandoc(thing.__doc__ or "")).split("\n\n")[0].split()).replace("|", "\\|")


def _function(name: str, function: Callable[..., Any]) -> Iterator[str]:
    yield from ("```python excerpt", *_signature(name, function), "```", "")
    yield from docstring(function.__doc__ or "")


def _class(name: str, kind: type) -> Iterator[str]:
    yield from docstring(kind.__doc__ or "")
    for method, found in vars(kind).items():
        whole = getattr(found, "__func__", found)
        if method.startswith("_") or not (isinstance(found, property | cached_property) or inspect.isfunction(whole)):
            continue
        if not whole.__doc__:
            continue
        yield from ("", f"### {name}.{method}", "")
        if inspect.isfunction(whole):
            yield from ("```python excerpt", *_signature(method, whole), "```", "", *docstring(whole.__doc__))
        else:
            yield "*A property.* " + _summary(whole)


def _signature(name: str, function: Callable[..., Any]) -> list[str]:
    """Return a function's signature: in one line where it is short, else a parameter a line."""
    signature = inspect.signature(function)
    parts, starred = [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        starred |= parameter.kind is parameter.VAR_POSITIONAL
        parts.append(_parameter(parameter))
    returns = "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    line = f"def {name}({', '.join(parts)}){returns}: ..."
    return [line] if len(line) <= 100 else [f"def {name}(", *(f"    {part}," for part in parts), f"){returns}: ..."]


def _parameter(parameter: inspect.Parameter) -> str:
    stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (parameter.kind is parameter.VAR_KEYWORD)
    kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
    default = "" if parameter.default is parameter.empty else f"{' = ' if kind else '='}{parameter.default!r}"
    return f"{stars}{parameter.name}{kind}{default}".replace("'", '"')


def docstring(text: str) -> Iterator[str]:
    """Yield a Google-style docstring as Markdown: its sections as lists."""
    section = False
    for line in markdown(inspect.cleandoc(text)).splitlines():
        if re.fullmatch(r"(Args|Returns|Raises|Yields|Attributes|Class attributes|Example):", line):
            section = True
            yield from (f"**{line[:-1].replace('Args', 'Arguments')}**", "")
        elif section and (item := re.match(r"    ([\w*][\w.*, ]*): (.*)", line)):
            yield f"- `{item[1]}`: {item[2]}"
        elif section and line.startswith("    "):
            yield "  " + line.strip() if line.startswith("        ") else line.strip()
        else:
            section = section and not line
            yield line
