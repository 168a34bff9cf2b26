"""NVFlare: filters that record and guard a site, and canaries. ``pip install 'fedaudit[nvflare]'``.

>>> from fedaudit.adapters.nvflare import GuardFilter, RecorderFilter, watch  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from fedaudit.utils.errors import BadInput

if TYPE_CHECKING:
    from fedaudit.adapters.nvflare.canaries import CanaryExecutor, CanaryRecorder
    from fedaudit.adapters.nvflare.guard import GuardFilter
    from fedaudit.adapters.nvflare.recorder import RecorderFilter
    from fedaudit.adapters.nvflare.site import watch

__all__ = ["CanaryExecutor", "CanaryRecorder", "GuardFilter", "RecorderFilter", "watch"]

_MODULES = {
    "CanaryExecutor": "canaries",
    "CanaryRecorder": "canaries",
    "GuardFilter": "guard",
    "RecorderFilter": "recorder",
    "watch": "site",
}


def __getattr__(name: str) -> Any:
    """Take a public name from its module when it is first used, so that NVFlare is imported only then.

    Raises:
        BadInput: NVFlare isn't installed.
    """
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    if importlib.util.find_spec("nvflare") is None:
        raise BadInput("NVFlare isn't installed: pip install 'fedaudit[nvflare]'")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
