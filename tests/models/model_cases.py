"""What the tests on models share: a generator, an error's only line, and a module with all that is unusual."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedaudit.utils.errors import BadInput


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_line(error: pytest.ExceptionInfo[BadInput]) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


class Tokens(nn.Module):
    """A parameter of the model itself, attention that never calls its own projection, tied and unused weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids) + self.token
        x, _ = self.attention(x, x, x)
        return {"logits": self.out(x)}
