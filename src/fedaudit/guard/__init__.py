"""A site's guard: checks what comes in, attacks what is about to leave, lets it go or not, and writes it down.

Flower's and NVFlare's guards (``fedaudit.adapters``) are a ``SiteGuard`` each, and so is any other framework's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.lazy import lazy

if TYPE_CHECKING:
    from fedaudit.guard.members import MemberWatch
    from fedaudit.guard.outgoing import OutgoingUpdate
    from fedaudit.guard.site_guard import SiteGuard
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["MemberWatch", "OutgoingUpdate", "SiteGuard"]
