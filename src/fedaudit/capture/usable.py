"""Whether what a client trained on is of a form that can be recorded and attacked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from fedaudit.task.training import TrainingConfig

if TYPE_CHECKING:
    from fedaudit.capture.capture import Capture


def unusable(captured: Capture, config: TrainingConfig | None) -> str | None:
    """Return why what a client trained on can't be recorded, if so."""
    inputs, targets = captured.inputs, captured.targets
    if config is None or not inputs:
        return "no training step was seen"
    if "several-inputs" in config.unmodelled:
        return "the model takes several inputs"
    if len(targets) != len(inputs):
        return f"{len(inputs)} passes have {len(targets)} targets"
    whole = not inputs[0].is_floating_point()
    if inputs[0].ndim not in ((2,) if whole else (2, 4)):
        shape = tuple(inputs[0].shape)
        return (
            f"the inputs have the shape {shape}; attacks are on images (n, C, H, W), tables (n, d), tokens (n, length)"
        )
    if whole and (inputs[0].dtype == torch.bool or vocabulary_of(captured.module) is None):
        return "the inputs are whole numbers, but the model has no embedding; attacks are on images, tables and tokens"
    if len({tuple(x.shape[1:]) for x in inputs}) > 1:
        return "the inputs differ in shape from batch to batch"
    if len({(y.ndim, y.dtype) for y in targets}) > 1:
        return "the targets differ in form from batch to batch"
    if sum(map(len, inputs)) != sum(config.batch_sizes):
        return f"{sum(map(len, inputs))} inputs were seen, of batches with {sum(config.batch_sizes)}"
    return None


def vocabulary_of(module: nn.Module | None) -> int | None:
    """Return how many tokens a model's embeddings have, the largest of them; None where it has none."""
    parts = module.modules() if module is not None else []
    return max((part.num_embeddings for part in parts if isinstance(part, nn.Embedding)), default=None)
