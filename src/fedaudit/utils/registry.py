"""Open registries: a name, one line about it, and the thing itself; filled by decorator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fedaudit.utils.errors import BadInput, unknown_name

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered thing: its name, a one-line summary, the thing, and whatever else its kind declares."""

    name: str
    summary: str
    value: T
    info: dict[str, Any] = field(default_factory=dict)


class Registry(Generic[T]):
    """Names of one kind. ``register`` is a decorator; an unknown name is answered with the nearest one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[T]] = {}

    def register(self, name: str, summary: str, **info: Any) -> Callable[[U], U]:
        """Return a decorator that adds what it decorates under ``name``.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._entries:
            raise ValueError(f"{self.kind} '{name}' is registered twice")

        def add(value: U) -> U:
            self._entries[name] = Entry(name, summary, value, info)  # type: ignore[arg-type]
            return value

        return add

    def __getitem__(self, name: str) -> Entry[T]:
        try:
            return self._entries[name]
        except KeyError:
            raise BadInput(unknown_name(self.kind, name, self._entries)) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries.values())

    def names(self) -> list[str]:
        """Return the registered names, in the order in which they were added."""
        return list(self._entries)
