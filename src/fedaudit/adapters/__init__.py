"""Federations of other frameworks, audited: a package a framework, the only one that imports it; imported when used."""

from __future__ import annotations

from fedaudit.utils.errors import FedAuditError


def in_words(error: Exception) -> str:
    """Return an error as one line."""
    return str(error) if isinstance(error, FedAuditError) else f"{type(error).__name__}: {error}"
