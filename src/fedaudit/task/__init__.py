"""What everybody in a federation knows: the task, and how clients train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.lazy import lazy

if TYPE_CHECKING:
    from fedaudit.task.info import TaskInfo
    from fedaudit.task.training import TrainingConfig, loss_function
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "TaskInfo",
    "TrainingConfig",
    "loss_function",
]
