"""What a target is, and what a finding is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedaudit.utils.errors import FedAuditError
from tools.fuzz.strategies import Draw


class Finding(Exception):
    """Something was taken, or ended, as nothing should."""


@dataclass(frozen=True)
class Target:
    """Inputs, and what is done with one; FedAuditError is a refusal."""

    inputs: Draw
    run: Callable[[Any], Any]
    refusals: tuple[type[BaseException], ...] = (FedAuditError,)
