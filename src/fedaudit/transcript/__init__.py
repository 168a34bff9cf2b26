"""What travelled in a federation, who sees what of it, and the truth apart; on disk, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.lazy import lazy

if TYPE_CHECKING:
    from fedaudit.transcript.observation import Message, Observation, observe
    from fedaudit.transcript.rounds import Round
    from fedaudit.transcript.sent import ProtocolSpec, Sent, SentEntry
    from fedaudit.transcript.transcript import Transcript
    from fedaudit.transcript.truth import Truth, save_recording
    from fedaudit.transcript.update import Update
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Message",
    "Observation",
    "ProtocolSpec",
    "Round",
    "Sent",
    "SentEntry",
    "Transcript",
    "Truth",
    "Update",
    "observe",
    "save_recording",
]
