"""Small vision transformers (ViT): images in patches, learned positions, a class token."""

from __future__ import annotations

from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from fedaudit.models.families import MODELS
from fedaudit.models.transformer import Block, SelfAttention, ZeroLinear

_WIDTH = 128
_DEPTH = 2
_ALONG = 8  # patches along a side, at most
_ADAPTED_WIDTH, _ADAPTED_ALONG = 256, 4  # the same of a network with adapters


def _patch(side: int, along: int) -> int:
    """Return a patch's side: the least from 2 on that divides the image's and gives at most so many along it."""
    return next((k for k in range(2, side) if side % k == 0 and k * along >= side), side)


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


class Adapter(nn.Module):
    """A bottleneck beside the identity, h + U·ReLU(D·h + a) + b; U and b start at zero (Houlsby et al. 2019)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank), ZeroLinear(rank, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return (…, width) for (…, width)."""
        return torch.add(x, self.up(torch.relu(self.down(x))))


class AdaptedBlock(Block):
    """A block with an adapter behind its fully connected layers, before what came in is added."""

    def __init__(self, width: int, reduced: int) -> None:
        super().__init__(width, 0.0, 0)
        self.adapter = Adapter(width, max(1, width // reduced))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Return (n, length, width) for (n, length, width)."""
        x = x + self.attention(self.norm1(x), seen)
        return torch.add(x, self.adapter(self.out(nn.functional.gelu(self.hidden(self.norm2(x))))))


class ViT(nn.Module):
    """Images (n, channels, height, width) to logits (n, outputs), read at the class token.

    With ``plain`` blocks the first attention receives the embedded patches and their positions as they are, and patches
    are cut out, then embedded by a linear layer without a bias. Adapters are ``reduced`` times narrower than embeddings
    (0: there are none); where there are some, they and the last layer alone are trained.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        outputs: int,
        width: int,
        *,
        depth: int = _DEPTH,
        plain: bool = False,
        reduced: int = 0,
    ) -> None:
        super().__init__()
        along = _ADAPTED_ALONG if reduced else _ALONG
        sides = (_patch(shape[1], along), _patch(shape[2], along))
        self.cut = nn.Unfold(sides, stride=sides) if plain else nn.Conv2d(shape[0], width, sides, stride=sides)
        self.embed = nn.Linear(shape[0] * prod(sides), width, bias=False) if plain else nn.Identity()
        self.token = nn.Embedding(1, width)
        count = prod(side // patch for side, patch in zip(shape[1:], sides, strict=True))
        self.position = nn.Embedding(count + 1, width)
        plainer = PlainBlock if plain else partial(Block, dropout=0.0, rank=0)
        made = partial(AdaptedBlock, reduced=reduced) if reduced else plainer
        self.blocks = nn.ModuleList(made(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, outputs)
        if reduced:
            trained = [self.fc, *(part for part in self.modules() if isinstance(part, Adapter))]
            self.requires_grad_(requires_grad=False)
            for part in trained:
                part.requires_grad_()

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images."""
        x = self.embed(self.cut(images).flatten(2).transpose(1, 2))
        x = torch.cat([self.token.weight.expand(len(x), 1, -1), x], dim=1) + self.position.weight
        seen = torch.ones((1, 1, 1), dtype=torch.bool, device=x.device)
        for block in self.blocks:
            x = block(x, seen)
        return torch.as_tensor(self.fc(self.norm(x)[:, 0]))


_HOULSBY = (
    "after Houlsby et al. 2019, Parameter-efficient transfer learning (ICML), one adapter a block as in "
    "Pfeiffer et al. 2021, AdapterFusion (EACL)"
)
for _name, _summary, _paper, _width, _more in (
    (
        "vit",
        "a two-layer vision transformer with a class token, LayerNorm before attention",
        "after Dosovitskiy et al. 2021, An image is worth 16x16 words (ICLR)",
        _WIDTH,
        {},
    ),
    (
        "vit-plain",
        "the same without shortcuts, LayerNorm behind attention, patches without bias",
        "after Lu et al. 2022, APRIL (CVPR), Figure 1 (A)",
        _WIDTH,
        {"plain": True},
    ),
    (
        "vit-adapters",
        "four layers, of which an adapter each and the last layer are trained",
        _HOULSBY,
        _ADAPTED_WIDTH,
        {"depth": 4, "reduced": 2},
    ),
    (
        "vit-adapters-12",
        "the same with twelve layers and adapters half as wide, 64 units",
        _HOULSBY,
        _ADAPTED_WIDTH,
        {"depth": 12, "reduced": 4},
    ),
):
    MODELS.register(_name, _summary, input="image", min_size=2, width=_width, paper=_paper)(partial(ViT, **_more))
