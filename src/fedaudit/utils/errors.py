"""Errors that are meant for the user: one line that says what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

OWN_MODEL = (
    "your own module is audited from Python, fedaudit.audit(model=…, data=…), or on a recording of your federation, "
    "fedaudit attack RECORDING --model MODULE:NAME: docs/how-to/own-model.md"
)


class FedAuditError(Exception):
    """Base of every error that the command line turns into one line and exit code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class BadInput(FedAuditError):
    """A scenario, flag, file or argument cannot be used as given."""


class MissingData(BadInput):
    """A data set (or a package that reads it) is not where it was looked for."""


class CorruptTranscript(BadInput):
    """A transcript, finding or store cannot be trusted: something is missing, misshapen, not finite or was changed."""


class NotApplicable(FedAuditError):
    """An attack cannot be run against this observation; the message gives the reason and the remedy."""


class OutOfTime(NotApplicable):
    """The time that was given is spent: what was stopped says nothing, and isn't kept."""

    def __init__(self, message: str = "the time that was given is spent") -> None:
        super().__init__(message)


def in_words(error: Exception) -> str:
    """Return an error as one line."""
    return str(error) if isinstance(error, FedAuditError) else f"{type(error).__name__}: {error}"


def unknown_name(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the one-line message for a name that is not among ``known``, with the nearest valid one."""
    names = list(known)
    given = str(name) if len(str(name)) <= 100 else f"{str(name)[:100]}…"
    return f"unknown {kind} '{given}'; {did_you_mean(given, names)}known: {', '.join(names)}"


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return the question whether the nearest of ``known`` was meant, with a space behind it; empty: none is near."""
    near = difflib.get_close_matches(str(given)[:100], list(known), n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'? " if near else ""
