"""Kinds of examples, each a module: how they are normalised, bounded, compared, drawn and written."""

# They fill the registry, in the order in which arrays are tried.
from fedaudit.modalities import image, table, tokens, volume, signal, packed  # noqa: F401, I001
from fedaudit.modalities.base import EXAMPLE_KINDS, ExampleKind, example_kind, fitting_kind, kind_of, register, save_png
from fedaudit.modalities.columns import Column
from fedaudit.modalities.columns import numbers as number_columns
from fedaudit.modalities.packed import Packing, Part
from fedaudit.modalities.tokens import NOTHING, TokenInfo

__all__ = [
    "EXAMPLE_KINDS",
    "NOTHING",
    "Column",
    "ExampleKind",
    "Packing",
    "Part",
    "TokenInfo",
    "example_kind",
    "fitting_kind",
    "kind_of",
    "number_columns",
    "register",
    "save_png",
]
