"""Settings in words: types, bounds, defaults and meanings, from pydantic's fields and the docstrings of plug-ins."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_args, get_type_hints

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fedaudit.utils.registry import Plugin
from fedaudit.utils.validation import path_of, printable, safe_name
from fedaudit_catalogue.attacks import Epochs

MADE = "<!-- Made from the code by `python -m tools.docs`; change it there. -->"
_TEXTS = {safe_name: "name: letters, digits, `-`, `_`", printable: "one line of text", path_of: "path of a file"}
_MANY = 10**9  # the bound of counts; the page says it once


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def row(*cells: str) -> str:
    """Return a line of a table."""
    return "| " + " | ".join(cells) + " |"


def head(*names: str) -> list[str]:
    """Return the head of a table."""
    return [row(*names), row(*["---"] * len(names))]


def type_of(field: FieldInfo) -> str:
    """Return what a model's field takes, in words."""
    kind: Any = field.annotation
    return takes(Annotated[kind, *field.metadata] if field.metadata else kind)


def takes(kind: Any) -> str:
    """Return what a type with its bounds takes, in words."""
    for validator, words in _TEXTS.items():
        if validator in _validators(kind):
            return words + (" or `null`" if type(None) in get_args(kind) else "")
    return _words(TypeAdapter(kind).json_schema())


def default_of(field: FieldInfo) -> str:
    """Return a field's default as scenarios write it."""
    if field.default_factory is not None:
        factory: Any = field.default_factory
        return written(factory())
    return "required" if field.default in (PydanticUndefined, MISSING) else written(field.default)


def written(value: Any) -> str:
    """Return a value as scenarios write it."""
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower().replace('none', 'null')}`"
    if isinstance(value, dict) and [*value] == ["name"]:
        value = value["name"]
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def settings(plugin: type[Plugin]) -> dict[str, tuple[str, str, str]]:
    """Return a plug-in's settings by their names: what each takes, its default and its meaning.

    Raises:
        ValueError: no docstring of its classes explains one.
    """
    meanings, kinds = arguments(plugin), get_type_hints(plugin, include_extras=True)
    found = {}
    of_pydantic: dict[str, FieldInfo] = getattr(plugin, "__pydantic_fields__", {})
    for field in fields(plugin):  # type: ignore[arg-type]
        if field.init:
            if field.name not in meanings:
                raise ValueError(f"{plugin.__name__}: no docstring explains the setting '{field.name}' (Args:)")
            default = default_of(of_pydantic[field.name])
            found[field.name.removesuffix("_")] = takes(kinds[field.name]), default, meanings[field.name]
    return found


def arguments(plugin: type) -> dict[str, str]:
    """Return what a class's docstring and those above it say of their arguments, the nearest class first."""
    found: dict[str, str] = {}
    method = getattr(plugin, "method", None)  # of epochs, under a name of its own
    for cls in (*plugin.__mro__, *((*method.__mro__, Epochs) if isinstance(method, type) else ())):
        text = inspect.cleandoc(cls.__doc__ or "")
        if section := re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL):
            for name, meaning in re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", section[1], re.M | re.S):
                found.setdefault(name, _in_yaml(markdown(" ".join(meaning.split())).removesuffix(".")))
    return found


def markdown(text: str) -> str:
    """Return a docstring's text as Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def _in_yaml(text: str) -> str:
    for python, yaml in (("None", "null"), ("True", "true"), ("False", "false")):
        text = re.sub(rf"\b{python}\b", f"`{yaml}`", text)
    return text


def _validators(kind: Any) -> Iterator[Any]:
    for item in getattr(kind, "__metadata__", ()):
        yield getattr(item, "func", None)
    for inner in get_args(kind):
        yield from _validators(inner)


def _words(schema: dict[str, Any]) -> str:
    if "enum" in schema or "const" in schema:
        return ", ".join(written(value) for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        words = list(dict.fromkeys(_words(choice) for choice in schema["anyOf"]))
        return ", ".join(words[:-1]).replace(" or ", ", ") + " or " + words[-1]
    if "$ref" in schema or schema.get("type") == "object":
        return "keys and values"
    match schema.get("type"):
        case "array":
            items = schema.get("items") or {}
            return f"list of {_plural(_words(items))}" if items else "list"
        case "integer" | "number":
            return _bounded("whole number" if schema["type"] == "integer" else "number", schema)
        case "boolean":
            return "`true` or `false`"
        case "null":
            return "`null`"
        case "string":
            return "text"
        case _:
            return "any"


def _plural(words: str) -> str:
    return words.replace("whole number", "whole numbers").replace("text", "texts") if words[0] != "`" else words


def _bounded(noun: str, schema: dict[str, Any]) -> str:
    low, above = schema.get("minimum", schema.get("ge")), schema.get("exclusiveMinimum", schema.get("gt"))
    high, below = schema.get("maximum", schema.get("le")), schema.get("exclusiveMaximum", schema.get("lt"))
    if high is not None and high >= _MANY:
        high = None
    bounds = [
        f"≥ {low:,.10g}" if low is not None else f"> {above:,.10g}" if above is not None else "",
        f"≤ {high:,.10g}" if high is not None else f"< {below:,.10g}" if below is not None else "",
    ]
    return " ".join([noun, ", ".join(filter(None, bounds))]).strip()
