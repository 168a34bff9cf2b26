"""What observers read of canaries, in a transcript's folder: readings as tensors, the rest in the index."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedaudit.epsilon.canaries import OBSERVERS, Canaries
from fedaudit.results.epsilon import Adjacency, Unit
from fedaudit.utils.errors import CorruptTranscript

CANARIES = "canaries.safetensors"

_Noise = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=0, le=1)]


class CanariesEntry(BaseModel):
    """All of :class:`~fedaudit.epsilon.canaries.Canaries` but its readings."""

    model_config = ConfigDict(extra="forbid", strict=True)
    unit: Unit
    adjacency: Adjacency
    noise: dict[str, _Noise]
    rates: dict[str, _Share]
    steps: Annotated[int, Field(ge=1)]
    covered: list[str]
    claimed: Annotated[float, Field(ge=0)] | None
    delta: Annotated[float, Field(gt=0, lt=1)]
    joint: bool = False

    @classmethod
    def of(cls, canaries: Canaries) -> CanariesEntry:
        """Return the entry of ``canaries``."""
        known = {name: getattr(canaries, name) for name in cls.model_fields}
        return cls(**{**known, "covered": list(canaries.covered)})

    def canaries(self, readings: dict[str, Tensor], path: Path) -> Canaries:
        """Return the canaries with ``readings``, read from ``path``.

        Raises:
            CorruptTranscript: these are no readings, or differ in how many canaries there are.
        """
        for name, values in readings.items():
            whole = values.ndim == 2 and values.dtype == torch.float64 and not bool(values.isinf().any())
            if name not in OBSERVERS or not whole or not values.numel():
                raise CorruptTranscript(f"{path}: '{name[:40]}' are no readings of canaries")
        if len({values.shape[1] for values in readings.values()}) != 1:
            raise CorruptTranscript(f"{path}: the readings aren't of the same canaries")
        if not {*self.noise, *self.rates, *self.covered} <= OBSERVERS.keys():
            raise CorruptTranscript(f"{path}: an observer of the canaries isn't known")
        return Canaries(readings=readings, **{**dict(self), "covered": tuple(self.covered)})
