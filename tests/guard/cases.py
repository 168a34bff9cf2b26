"""A local training that was watched, and the update of it that is about to leave."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.capture.capture import Capture
from fedaudit.guard import OutgoingUpdate


def trained(
    net: nn.Module, inputs: Tensor, labels: Tensor, steps: int = 1, rate: float = 0.1, seen: Capture | None = None
) -> tuple[dict[str, Tensor], Capture]:
    """Train, and return the state and what was seen of it."""
    with seen or Capture(net) as seen:
        optimiser = torch.optim.SGD(net.parameters(), lr=rate)
        for _ in range(steps):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(inputs), labels).backward()
            optimiser.step()
    return copy.deepcopy(net.state_dict()), seen


def outgoing(state: dict[str, Tensor], seen: Capture, **more: Any) -> OutgoingUpdate:
    """Return the update that leaves as it was trained."""
    return replace(OutgoingUpdate(seen.start, state, seen, "weights", "site", "f", follows=True), **more)
