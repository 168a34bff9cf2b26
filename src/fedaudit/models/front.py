"""Layers that a malicious server puts before a network: what they compute; their weights are the attacks' own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import hardtanh, relu

from fedaudit.task.info import Front, TaskInfo
from fedaudit.utils.validation import check_memory


class FrontLayers(nn.Module):
    """One fully connected layer, whose units are bins, and one back to the inputs, to which its outputs are added.

    With sets of kernels a convolution comes before them (Zhao et al. 2024), of which each set has channels of its own.

    Args:
        shape: of one example.
        front: units, whether each is bounded above, and sets.
    """

    def __init__(self, shape: tuple[int, ...], front: Front) -> None:
        super().__init__()
        numbers = math.prod(shape)
        self.limit = front.limit
        self.spread = nn.Conv2d(shape[0], front.sets * shape[0], 3, padding=1) if front.sets else nn.Identity()
        self.measure = nn.Linear(max(1, front.sets) * numbers, front.units)
        self.back = nn.Linear(front.units, numbers, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, ...) inputs of the network behind, near to the (n, ...) examples."""
        units = self.measure(torch.as_tensor(self.spread(x)).flatten(1))
        units = relu(units) if self.limit is None else hardtanh(units, 0.0, self.limit)
        return x + torch.as_tensor(self.back(units)).view_as(x)


class Fronted(nn.Module):
    """A network behind a front.

    Args:
        front: that comes first.
        body: the agreed network.
    """

    def __init__(self, front: FrontLayers, body: nn.Module) -> None:
        super().__init__()
        self.front = front
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Return the network's outputs."""
        return torch.as_tensor(self.body(self.front(x)))


def with_front(module: nn.Module, task_info: TaskInfo) -> nn.Module:
    """Return ``module`` behind the front of ``task_info``, all zeros; itself where there is none, or it has one.

    Raises:
        BadInput: it doesn't fit into this machine's memory.
    """
    front = task_info.front
    if front is None or isinstance(module, Fronted):
        return module
    numbers = math.prod(task_info.input_shape)
    check_memory(4 * front.units * numbers * (max(1, front.sets) + 1), f"a front of {front.units:,} units")
    layers = FrontLayers(task_info.input_shape, front)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.zero_()
    return Fronted(layers, module).train(module.training)
