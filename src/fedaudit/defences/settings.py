"""A defence's settings: its keyword-only parameters, checked as a scenario's keys are."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import Entry, Registry
from fedaudit.utils.validation import explain


def check_settings(registry: Registry[Any], name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting of the defence ``name``: the given ones, checked, and the defaults of the others.

    A parameter that ends in an underscore, because Python keeps the word for itself (``lambda_``), is written without.

    Raises:
        BadInput: no such defence or setting, or a value that isn't allowed.
    """
    entry = registry[name]
    model = _model(entry.value)
    try:
        return model.model_validate(dict(settings)).model_dump(by_alias=True, mode="json")
    except ValidationError as error:
        known = [_word(parameter) for parameter in model.model_fields]
        if not known:
            raise BadInput(f"{registry.kind} '{name}' has no settings; leave '{next(iter(settings))}' out") from None
        raise BadInput(f"{registry.kind} '{name}': {explain(error, known=known)}") from None


def arguments(entry: Entry[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return checked ``settings`` as keyword arguments of the function or class of ``entry``."""
    return dict(_model(entry.value).model_validate(dict(settings)))


@cache
def _model(called: Callable[..., Any]) -> type[BaseModel]:
    function = called.__init__ if inspect.isclass(called) else called
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {
        name: (hints[name], Field(default=parameter.default, alias=_word(name)))
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    return create_model("Settings", __config__=ConfigDict(extra="forbid", frozen=True), **fields)


def _word(parameter: str) -> str:
    return parameter.removesuffix("_")
