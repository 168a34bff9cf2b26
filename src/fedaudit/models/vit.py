"""Small vision transformers (ViT): images in patches, learned positions, a class token."""

from __future__ import annotations

from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from fedaudit.models.families import MODELS
from fedaudit.models.transformer import Block, SelfAttention

_WIDTH = 128
_DEPTH = 2
_ALONG = 8  # patches along a side, at most


def _patch(side: int) -> int:
    """Return a patch's side: the least from 2 on that divides the image's and gives at most eight patches along it."""
    return next((k for k in range(2, side) if side % k == 0 and k * _ALONG >= side), side)


class PlainBlock(nn.Module):
    """Attention, LayerNorm, and a network of one hidden layer with GELU, one after the other without shortcuts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = SelfAttention(width)
        self.norm = nn.LayerNorm(width)
        self.hidden, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Return (n, length, width) for (n, length, width)."""
        x = self.norm(self.attention(x, seen))
        return torch.as_tensor(self.out(nn.functional.gelu(self.hidden(x))))


class ViT(nn.Module):
    """Images (n, channels, height, width) to logits (n, outputs), read at the class token.

    With ``plain`` blocks the first attention receives the embedded patches and their positions as they are, and the
    patches are cut out first, then embedded by a fully connected layer without a bias.
    """

    def __init__(self, shape: tuple[int, ...], outputs: int, width: int, *, plain: bool) -> None:
        super().__init__()
        sides = (_patch(shape[1]), _patch(shape[2]))
        self.cut = nn.Unfold(sides, stride=sides) if plain else nn.Conv2d(shape[0], width, sides, stride=sides)
        self.embed = nn.Linear(shape[0] * prod(sides), width, bias=False) if plain else nn.Identity()
        self.token = nn.Embedding(1, width)
        count = prod(side // patch for side, patch in zip(shape[1:], sides, strict=True))
        self.position = nn.Embedding(count + 1, width)
        self.blocks = nn.ModuleList(PlainBlock(width) if plain else Block(width, 0.0, 0) for _ in range(_DEPTH))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images."""
        x = self.embed(self.cut(images).flatten(2).transpose(1, 2))
        x = torch.cat([self.token.weight.expand(len(x), 1, -1), x], dim=1) + self.position.weight
        seen = torch.ones((1, 1, 1), dtype=torch.bool, device=x.device)
        for block in self.blocks:
            x = block(x, seen)
        return torch.as_tensor(self.fc(self.norm(x)[:, 0]))


for _name, _summary, _paper in (
    (
        "vit",
        "a two-layer vision transformer with a class token, LayerNorm before attention",
        "after Dosovitskiy et al. 2021, An image is worth 16x16 words (ICLR)",
    ),
    (
        "vit-plain",
        "the same without shortcuts, LayerNorm behind attention, patches without bias",
        "after Lu et al. 2022, APRIL (CVPR), Figure 1 (A)",
    ),
):
    MODELS.register(_name, _summary, input="image", min_size=2, width=_WIDTH, paper=_paper)(
        partial(ViT, plain=_name == "vit-plain")
    )
