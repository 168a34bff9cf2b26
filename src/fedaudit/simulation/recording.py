"""What a simulation leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

from fedaudit.simulation.history import History
from fedaudit.transcript.transcript import Transcript
from fedaudit.transcript.truth import Truth


@dataclass(frozen=True)
class Recording:
    """What a simulation leaves behind.

    Attributes:
        transcript: what travelled.
        truth: what the clients trained on, apart from it.
        history: how it went; None where the transcript was read from disk.
    """

    transcript: Transcript
    truth: Truth
    history: History | None = None

    def __repr__(self) -> str:
        return f"Recording({self.transcript!r}, {self.truth!r})"
