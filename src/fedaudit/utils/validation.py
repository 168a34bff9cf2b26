"""What may be given: numbers, names and amounts of memory; and pydantic's errors as one line for the user."""

from __future__ import annotations

import os
import re
import reprlib
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fedaudit.utils import renamed
from fedaudit.utils.bounds import PATH
from fedaudit.utils.errors import BadInput, did_you_mean, unknown_name

SMALLEST, LARGEST = 1e-30, 1e30  # of numbers that aren't 0, without their sign


class Spec(BaseModel):
    """A part of a scenario: immutable, and unknown keys are refused, in Python by a BadInput."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def part(cls, name: str) -> Any:
        """Return the type of what is under a key; None: nothing may be."""
        return cls.model_fields[name].annotation if name in cls.model_fields else None

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise BadInput(explain(error, type(self))) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # so parts of a whole are told of by the whole

    @model_validator(mode="before")
    @classmethod
    def _by_names_of_today(cls, values: Any) -> Any:
        return renamed.of_part(cls.__name__, values)


class NamedSpec(BaseModel):
    """Something by its registered name; every other key is a setting of it, checked against the thing itself."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(description="which one, by its registered name")

    def settings(self) -> dict[str, Any]:
        """Return the settings that were given."""
        return dict(self.model_extra or {})


def from_name(value: Any) -> Any:
    """Return a :class:`NamedSpec`'s keys where ``value`` is a plain name."""
    return {"name": value} if isinstance(value, str) else value


def no_boolean(value: Any) -> Any:
    """Return ``value`` unless it is true or false, which Python takes for 1 and 0.

    Raises:
        ValueError: it is.
    """
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a number")
    return value


def of_use(value: float) -> float:
    """Return ``value``; ValueError where single precision, in which models are trained, can't compute with it."""
    if abs(value) > LARGEST:
        raise ValueError(f"{value:g} is too large to compute with: {LARGEST:g} is the most")
    return value


def not_tiny(value: float) -> float:
    """Return ``value``; ValueError where it is so near 0, or so far from it, that single precision can't tell."""
    of_use(value)  # of several such validators on one field pydantic 2.9 keeps the last
    if 0 < value < SMALLEST:
        raise ValueError(f"{value:g} is too near 0 to compute with: {SMALLEST:g} is the least above it")
    return value


# A whole number from 1, a whole number from 0, and a finite number.
Count = Annotated[int, BeforeValidator(no_boolean), Field(ge=1, le=10**9)]
Whole = Annotated[int, BeforeValidator(no_boolean), Field(ge=0, le=2**63 - 1)]
Number = Annotated[float, BeforeValidator(no_boolean), Field(allow_inf_nan=False), AfterValidator(of_use)]
Positive = Annotated[Number, Field(gt=0), AfterValidator(not_tiny)]
NonNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
Share = Annotated[Number, Field(ge=0, le=1)]


def safe_name(name: str) -> str:
    """Return ``name`` if it can be part of a file's name everywhere; else ValueError."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
        shown = reprlib.repr(name)
        raise ValueError(
            f"the name {shown} can't be used: 1 to 64 letters a-z, digits, - and _, and no - or _ in front"
        )
    return name


def printable(text: str) -> str:
    """Return ``text`` if it is one line of 1 to 200 characters that can be shown; else ValueError."""
    if not 1 <= len(text) <= 200 or not text.isprintable():
        raise ValueError("give 1 to 200 characters on one line, without control characters")
    return text


def path_of(path: Path) -> Path:
    """Return ``path`` if a file may have it; else ValueError."""
    text = str(path)
    if len(text) > PATH or not text.isprintable() or any(len(part.encode()) > 255 for part in path.parts):
        raise ValueError(f"{reprlib.repr(text)} can't be the path of a file")
    return path


File = Annotated[Path, AfterValidator(path_of)]
Name = Annotated[str, AfterValidator(safe_name)]
Title = Annotated[str, AfterValidator(printable)]


def check_memory(needed: float, what: str) -> None:
    """Refuse, before it is tried, ``what`` needs more bytes of memory than this machine has."""
    if not hasattr(os, "sysconf"):
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise BadInput(f"{what} needs {needed / 1e9:,.0f} GB of memory, this machine has {memory / 1e9:,.0f}; ask less")


def explain(error: ValidationError, model: type[BaseModel] | None = None, known: list[str] | None = None) -> str:
    """Return a pydantic error as one line: the key, what is wrong, what is allowed; for a typo the nearest name."""
    details = error.errors()
    detail = details[0]
    parts = [str(part)[:80] for part in detail["loc"] if "[" not in str(part)]  # without the branches of a union
    where = ".".join(parts)
    at = f"{where}: " if where else ""
    given = reprlib.repr(detail.get("input"))
    message = detail["msg"].removeprefix("Value error, ")
    match detail["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            names = known if known is not None else _fields_at(model, detail["loc"][:-1])
            key = str(detail["loc"][-1])[:80]
            around = parts[:-1] if "[" not in key else parts
            inside = f"{'.'.join(around)}: " if around else ""
            text = inside + (unknown_name("key", key, names) if names else f"unknown key '{key}'")
        case "missing":
            text = f"'{where}' is missing"
        case "model_type" | "model_attributes_type":
            text = f"{at}{given} isn't allowed; it should be a mapping of keys to values"
        case "path_type":
            text = f"{at}{given} isn't allowed; it should be a path"
        case "unexpected_positional_argument":
            text = f"settings are given by their names, and {given} has none"
        case "literal_error" | "enum":
            near = did_you_mean(detail.get("input"), re.findall(r"'([^']*)'", message))
            text = f"{at}{given} isn't allowed; {near}it should be {message.removeprefix('Input should be ')}"
        case "too_short":
            text = f"{at}at least one is needed"
        case "int_parsing_size":
            text = f"{at}that number is too large"
        case _ if message.startswith("Input should be "):
            text = f"{at}{given} isn't allowed; it should be {message.removeprefix('Input should be ')}"
        case _:
            text = f"{at}{message}"
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return text + more


def _fields_at(model: type[BaseModel] | None, location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that are valid at ``location`` in ``model``."""
    for part in location:
        if model is None or isinstance(part, int):
            continue
        info = model.model_fields.get(part)
        inside = model.part(part) if issubclass(model, Spec) else info and info.annotation
        model = _model_in(inside)
    return list(model.model_fields) if model else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if found := _model_in(inner):
            return found
    return None
