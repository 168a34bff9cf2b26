"""Numbers of things, in words."""

from __future__ import annotations

from collections.abc import Sequence


def many(number: int | None, thing: str) -> str:
    """Return a number of things: ``1 round``, ``2 rounds``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def one_of(numbers: Sequence[int], of: str) -> str:
    """Return which numbers of things there are: ``3 or 4 examples``."""
    return " or ".join(map(str, numbers)) + f" {of}" + "s" * (list(numbers) != [1])
