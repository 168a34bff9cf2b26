"""What everybody in a federation knows: the task, and how clients train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.lazy import lazy

if TYPE_CHECKING:
    from fedaudit.task.base import Categorical, Task, register
    from fedaudit.task.info import TaskInfo
    from fedaudit.task.targets import TASKS
    from fedaudit.task.training import LOSSES, LocalPlan, Loss, TrainingConfig, class_logits, loss_function
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "LOSSES",
    "TASKS",
    "Categorical",
    "LocalPlan",
    "Loss",
    "Task",
    "TaskInfo",
    "TrainingConfig",
    "class_logits",
    "loss_function",
    "register",
]
