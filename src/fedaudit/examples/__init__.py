"""Kinds of examples, each a module: how they are normalised, bounded, compared, drawn and written."""

from fedaudit.examples import image, table  # noqa: F401  (they fill the registry, in the order in which arrays are tried)
from fedaudit.examples.base import EXAMPLE_KINDS, ExampleKind, example_kind, fitting_kind, kind_of, register, save_png

__all__ = [
    "EXAMPLE_KINDS",
    "ExampleKind",
    "example_kind",
    "fitting_kind",
    "kind_of",
    "register",
    "save_png",
]
