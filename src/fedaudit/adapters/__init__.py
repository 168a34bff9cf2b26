"""Federations of other frameworks, audited: a package a framework, the only one that imports it; imported when used.

What the guards of all frameworks share is here: ``SiteGuard``, for a framework that isn't among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.errors import FedAuditError
from fedaudit.utils.lazy import lazy

if TYPE_CHECKING:
    from fedaudit.adapters.attacked import Passing
    from fedaudit.adapters.guard import SiteGuard
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["Passing", "SiteGuard"]


def in_words(error: Exception) -> str:
    """Return an error as one line."""
    return str(error) if isinstance(error, FedAuditError) else f"{type(error).__name__}: {error}"
