"""The fields of results.json, at the end of docs/reference/results.md; what stands above them is written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fedaudit.results import AuditResult
from tools.docs.pages import DOCS
from tools.docs.settings import cell, head, markdown, row

PAGE = DOCS / "reference" / "results.md"
_HERE = "<!-- What follows is made from the models by `python -m tools.docs`; change it there. -->"


def page() -> str:
    """Return the page: what it says above the mark, and the fields.

    Raises:
        ValueError: a field has no description.
    """
    above = PAGE.read_text(encoding="utf-8").partition(_HERE)[0]
    whole = AuditResult.model_json_schema()
    lines = [above.rstrip(), "", _HERE, "", "## Fields", ""]
    lines += ["The [schema](results.schema.json) has the same for programs. The file is an `AuditResult`.", ""]
    for name, model in (("AuditResult", whole), *sorted(whole["$defs"].items())):
        lines += [f"### {name}", "", markdown(" ".join(model["description"].split())), ""]
        lines += [*head("field", "what it is", "meaning"), *_fields(name, model), ""]
    return "\n".join(lines)


def schema() -> str:
    """Return the JSON Schema of results.json."""
    return json.dumps(AuditResult.model_json_schema(), indent=2) + "\n"


def _fields(name: str, model: dict[str, Any]) -> Iterator[str]:
    for field, schema in model["properties"].items():
        if "description" not in schema:
            raise ValueError(f"{name}.{field} has no description: give its Field one")
        yield row(f"`{field}`", _type(schema), cell(schema["description"]))


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        inner = schema["$ref"].rpartition("/")[2]
        return f"[{inner}](#{inner.lower()})"
    if "allOf" in schema:
        return _type(schema["allOf"][0])
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "array":
            return f"list of {_type(schema['items'])}"
        case "object":
            return "keys and values"
        case "integer":
            return "whole number"
        case "boolean":
            return "`true` or `false`"
        case "null":
            return "`null`"
        case "string":
            return "text"
        case other:
            return other or "any"
