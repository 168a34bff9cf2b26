"""Local model reconstruction: from one client's messages to the model that it would have trained alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.lazy import lazy

if TYPE_CHECKING:
    from fedaudit.attacks.local_model.affine import zero_of_affine_map
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "zero_of_affine_map",
]
