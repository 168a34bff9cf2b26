"""Layers that a malicious server puts before a network: what they compute; their weights are the attacks' own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import hardtanh, relu

from fedaudit.task.info import InsertedModule, TaskInfo
from fedaudit.utils.validation import check_memory


class InsertedLayers(nn.Module):
    """One fully connected layer, whose units are bins, and one back to the inputs, to which its outputs are added.

    With sets of kernels a convolution comes first (Zhao et al. 2024), in which each set has channels of its own.

    With sets of kernels a convolution comes before them (Zhao et al. 2024), of which each set has channels of its own.
    """

    def __init__(self, shape: tuple[int, ...], inserted: InsertedModule) -> None:
        super().__init__()
        numbers = math.prod(shape)
        self.limit = inserted.limit
        self.spread = nn.Conv2d(shape[0], inserted.sets * shape[0], 3, padding=1) if inserted.sets else nn.Identity()
        self.measure = nn.Linear(max(1, inserted.sets) * numbers, inserted.units)
        self.back = nn.Linear(inserted.units, numbers, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, ...) inputs of the network behind, near to the (n, ...) examples."""
        units = self.measure(torch.as_tensor(self.spread(x)).flatten(1))
        units = relu(units) if self.limit is None else hardtanh(units, 0.0, self.limit)
        return x + torch.as_tensor(self.back(units)).view_as(x)


class WithInsertedModule(nn.Module):
    """The agreed network, ``body``, behind an inserted module, ``front``."""

    def __init__(self, front: InsertedLayers, body: nn.Module) -> None:
        super().__init__()
        self.front = front
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's outputs."""
        return torch.as_tensor(self.body(self.front(x)))


def with_inserted_module(module: nn.Module, task_info: TaskInfo) -> nn.Module:
    """Return ``module`` behind what ``task_info`` has inserted, all zeros; itself where that is nothing or there."""
    inserted = task_info.inserted
    if inserted is None or isinstance(module, WithInsertedModule):
        return module
    numbers = math.prod(task_info.input_shape)
    check_memory(
        4 * inserted.units * numbers * (max(1, inserted.sets) + 1), f"an inserted module of {inserted.units:,} units"
    )
    layers = InsertedLayers(task_info.input_shape, inserted)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.zero_()
    return WithInsertedModule(layers, module).train(module.training)
