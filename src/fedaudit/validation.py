"""Pydantic's errors as one line for the user."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from fedaudit.errors import unknown_name


def explain(error: ValidationError, model: type[BaseModel] | None = None, known: list[str] | None = None) -> str:
    """Return a pydantic error as one line: the key, what is wrong, what is allowed; for a typo the nearest name."""
    details = error.errors()
    detail = details[0]
    where = ".".join(str(part) for part in detail["loc"]) or "scenario"
    given = detail.get("input")
    match detail["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            names = known if known is not None else _fields_at(model, detail["loc"][:-1])
            text = unknown_name("key", where, names)
        case "missing":
            text = f"'{where}' is missing"
        case _:
            message = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            allowed = message if message != detail["msg"].removeprefix("Value error, ") else None
            text = f"{where}: {given!r} isn't allowed; it should be {allowed}" if allowed else f"{where}: {message}"
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return text + more


def _fields_at(model: type[BaseModel] | None, location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that are valid at ``location`` in ``model``."""
    for part in location:
        if model is None or isinstance(part, int):
            continue
        info = model.model_fields.get(part)
        model = _model_in(info.annotation) if info else None
    return list(model.model_fields) if model else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if found := _model_in(inner):
            return found
    return None
