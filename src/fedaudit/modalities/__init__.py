"""Kinds of examples, each a module: how they are normalised, bounded, compared, drawn and written."""

from fedaudit.modalities import image, table, tokens  # noqa: F401  (they fill the registry, in the order in which arrays are tried)
from fedaudit.modalities.base import EXAMPLE_KINDS, ExampleKind, example_kind, fitting_kind, kind_of, register, save_png
from fedaudit.modalities.columns import Column
from fedaudit.modalities.tokens import NOTHING, TokenInfo

__all__ = [
    "EXAMPLE_KINDS",
    "NOTHING",
    "Column",
    "ExampleKind",
    "TokenInfo",
    "example_kind",
    "fitting_kind",
    "kind_of",
    "register",
    "save_png",
]
