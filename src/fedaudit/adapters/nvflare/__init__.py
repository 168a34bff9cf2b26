"""NVFlare: filters that record and guard a site, and canaries. ``pip install 'PATH_OF_THE_CLONE[nvflare]'``.

>>> from fedaudit.adapters.nvflare import GuardFilter, RecorderFilter, watch  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.lazy import lazy

if TYPE_CHECKING:
    from fedaudit.adapters.nvflare.audit import audit_nvflare
    from fedaudit.adapters.nvflare.canaries import CanaryExecutor, CanaryRecorder
    from fedaudit.adapters.nvflare.guard import GuardFilter
    from fedaudit.adapters.nvflare.recorder import RecorderFilter
    from fedaudit.adapters.nvflare.site import watch
else:
    __getattr__, __dir__ = lazy(__name__, needs="nvflare", of="NVFlare")

__all__ = ["CanaryExecutor", "CanaryRecorder", "GuardFilter", "RecorderFilter", "audit_nvflare", "watch"]
