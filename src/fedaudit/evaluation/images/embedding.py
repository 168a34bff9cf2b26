"""A small network that tells pictures apart, taught on pictures of which none is attacked, to name a reconstruction by.

It is taught that two views of one picture, or two pictures of one person, belong together (InfoNCE, van den Oord et al.
2018): a shifted one, and a noisy, blurred, overlaid one as reconstructions are. So it needs no labels, no downloads and
no attack.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.machine import one_thread
from fedaudit.utils.seeds import derive_seed, generator

FEWEST = 64  # pictures from which a network can be taught
COSTLY = 1000  # iterations of an attack from which on teaching one takes little beside it
_SIDES = {1: 128, 2: 32, 3: 16}  # by the number of axes, the side that larger pictures are shrunk to
_LENGTH = 64  # of an embedding
_STEPS = 300
_BATCH = 64
_TEMPERATURE = 0.1
_KEPT = 4  # networks, for the attacks on a federation share theirs
_taught: OrderedDict[tuple[bytes, bytes, int], nn.Module] = OrderedDict()
_asked: ContextVar[bool | None] = ContextVar("embedding", default=None)


@contextmanager
def embedding(setting: bool | None) -> Iterator[None]:
    """Let evaluations of images teach a network (true), or not; None: beside attacks of many iterations only."""
    token = _asked.set(setting)
    try:
        yield
    finally:
        _asked.reset(token)


def worth_teaching(iterations: int) -> bool:
    """Return whether a network is taught to judge what an attack of so many iterations found."""
    asked = _asked.get()
    return iterations >= COSTLY if asked is None else asked


def shrunk(pictures: Tensor, sides: dict[int, int]) -> Tensor:
    """Return (n, C, ...) pictures with sides of at most so many pixels, by means."""
    axes = pictures.ndim - 2
    size = [min(sides[axes], side) for side in pictures.shape[2:]]
    pooled: Tensor = getattr(functional, f"adaptive_avg_pool{axes}d")(pictures.float(), size)
    return pooled


def taught(pictures: Tensor, who: Tensor, seed: int) -> nn.Module:
    """Return a network from (n, C, ...) pictures to (n, 64) of length 1: near where they show the same.

    Args:
        pictures: that it is taught on, (n, C, ...).
        who: (n,) of whom each is, or a number of its own.
        seed: of weights and draws; the same gives the same bits.
    """
    key = tensor_digest(pictures), tensor_digest(who), seed
    if key not in _taught:
        with one_thread(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(derive_seed(seed, "embedding"))
            _taught[key] = _teach(pictures, who.unique(return_inverse=True)[1], generator(seed, "embedding views"))
    _taught.move_to_end(key)
    while len(_taught) > _KEPT:
        _taught.popitem(last=False)
    return _taught[key]


class _Network(nn.Module):
    """Three convolutions of stride 2 and a linear layer, behind which contrast and brightness are gone."""

    def __init__(self, channels: int, sides: tuple[int, ...]) -> None:
        super().__init__()
        conv = getattr(nn, f"Conv{len(sides)}d")
        widths = [channels, 32, 64, 64]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [conv(before, after, 3, stride=2, padding=1), nn.ReLU()]
        seen = nn.Sequential(*layers, nn.Flatten())
        self.layers = nn.Sequential(seen, nn.Linear(seen(torch.zeros(1, channels, *sides)).shape[1], _LENGTH))

    def forward(self, pictures: Tensor) -> Tensor:
        small = shrunk(pictures, _SIDES)
        axes = tuple(range(2, small.ndim))
        plain = small - small.mean(dim=axes, keepdim=True)
        even = plain.square().mean(dim=(1, *axes), keepdim=True).sqrt().clamp_min(1e-4)
        return functional.normalize(self.layers(plain / even), dim=1)


def _teach(pictures: Tensor, who: Tensor, draws: torch.Generator) -> nn.Module:
    small = shrunk(pictures, _SIDES)
    network = _Network(small.shape[1], tuple(small.shape[2:]))
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, _STEPS)
    count = int(who.max()) + 1
    for _ in range(_STEPS):
        shown = torch.randperm(count, generator=draws)[:_BATCH]
        lots = torch.rand((2, len(who)), generator=draws)
        first, second = (torch.stack([(lot + (who == one)).argmax() for one in shown]) for lot in lots)
        own, other = network(_moved(small[first], draws)), network(_spoilt(_moved(small[second], draws), draws))
        alike, pairs = own @ other.T / _TEMPERATURE, torch.arange(len(shown))
        loss = functional.cross_entropy(alike, pairs) + functional.cross_entropy(alike.T, pairs)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return network.eval().requires_grad_(requires_grad=False)


def _moved(pictures: Tensor, draws: torch.Generator) -> Tensor:
    """Return pictures shifted by up to a sixteenth of the side, one pixel at least."""
    axes = range(2, pictures.ndim)
    far = [max(1, pictures.shape[axis] // 16) for axis in axes]
    shifts = [int(torch.randint(-most, most + 1, (1,), generator=draws)) for most in far]
    return pictures.roll(shifts, tuple(axes))


def _spoilt(pictures: Tensor, draws: torch.Generator) -> Tensor:
    """Return pictures as attacks may return them: blurred, with others shining through, with fine and coarse noise."""
    axes = pictures.ndim - 2
    each = (len(pictures), *(1,) * (axes + 1))
    blur, through, fine, coarse = torch.rand((4, len(pictures)), generator=draws).unsqueeze(-1).unbind()
    blur, through, fine, coarse = (share.view(each) for share in (blur, through, fine, coarse))
    pool = getattr(functional, f"avg_pool{axes}d")
    spread = pictures.std(dim=tuple(range(1, pictures.ndim)), keepdim=True)
    soft = torch.lerp(pictures, pool(pictures, 3, stride=1, padding=1, count_include_pad=False), blur)
    mixed = torch.lerp(soft, soft[torch.randperm(len(soft), generator=draws)], 0.5 * through)
    noise = torch.randn(pictures.shape, generator=draws)
    clouds = functional.interpolate(
        torch.randn((*pictures.shape[:2], *(max(1, s // 4) for s in pictures.shape[2:])), generator=draws),
        pictures.shape[2:],
    )
    return mixed + spread * (1.5 * fine * noise + 0.75 * coarse * clouds)
