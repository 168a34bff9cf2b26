"""A small network that tells pictures apart, taught on pictures of which none is attacked, to name a reconstruction by.

It is taught that a picture and a shifted, blurred, noisy one of the same, or of the same person, belong together
(InfoNCE, van den Oord et al. 2018).
"""

from __future__ import annotations

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
_COSTLY = 1000  # iterations of an attack from which on teaching one takes little beside it
_SIDES = {1: 128, 2: 32, 3: 16}  # by the number of axes
_STEPS, _BATCH, _TEMPERATURE = 300, 64, 0.1
_KEPT = 4  # networks, for the attacks on a federation share theirs
_taught: dict[tuple[bytes, bytes, int], nn.Module] = {}
_asked: ContextVar[bool | None] = ContextVar("embedding", default=False)


@contextmanager
def embedding(setting: bool | None) -> Iterator[None]:
    """Let evaluations of images teach a network (true), or not; None: of attacks of many iterations only."""
    token = _asked.set(setting)
    try:
        yield
    finally:
        _asked.reset(token)


def worth_teaching(iterations: int) -> bool:
    """Return whether a network is taught to judge what an attack of so many iterations found."""
    asked = _asked.get()
    return iterations >= _COSTLY if asked is None else asked


def shrunk(pictures: Tensor) -> Tensor:
    """Return (n, C, ...) pictures with sides of 32 pixels at most, of volumes 16, of signals 128, by means."""
    axes = pictures.ndim - 2
    pool = getattr(functional, f"adaptive_avg_pool{axes}d")
    small: Tensor = pool(pictures.float(), [min(_SIDES[axes], side) for side in pictures.shape[2:]])
    return small


def embedded(network: nn.Module, pictures: Tensor) -> Tensor:
    """Return (n, 64) of length 1 of (n, C, ...) pictures, whatever their contrast and brightness."""
    small = shrunk(pictures)
    plain = small - small.mean(dim=tuple(range(2, small.ndim)), keepdim=True)
    even = plain.square().flatten(1).mean(dim=1).sqrt().clamp_min(1e-4)
    return functional.normalize(network(plain / even.view(-1, *(1,) * (small.ndim - 1))), dim=1)


def taught(pictures: Tensor, who: Tensor, seed: int) -> nn.Module:
    """Return a network for :func:`embedded`, taught on (n, C, ...) pictures, (n,) of whom; equal ones are equal."""
    key = tensor_digest(pictures), tensor_digest(who), seed
    if key not in _taught:
        if len(_taught) == _KEPT:
            _taught.pop(next(iter(_taught)))
        with one_thread(), torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(derive_seed(seed, "embedding"))
            _taught[key] = _teach(shrunk(pictures), who, generator(seed, "embedding views"))
    return _taught[key]


def _teach(pictures: Tensor, who: Tensor, draws: torch.Generator) -> nn.Module:
    axes, conv = pictures.ndim - 2, getattr(nn, f"Conv{pictures.ndim - 2}d")
    layers: list[nn.Module] = []
    for before, after in ((pictures.shape[1], 32), (32, 64), (64, 64)):
        layers += [conv(before, after, 3, stride=2, padding=1), nn.ReLU()]
    seen = nn.Sequential(*layers, nn.Flatten())
    network = nn.Sequential(seen, nn.Linear(seen(pictures[:1]).shape[1], 64))
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, _STEPS)
    all_of = who.unique()
    far = [max(1, side // 16) for side in pictures.shape[2:]]
    for _ in range(_STEPS):
        shown = all_of[torch.randperm(len(all_of), generator=draws)[:_BATCH]]
        views = []
        for _ in range(2):
            lots = torch.rand(len(who), generator=draws) + (who == shown[:, None])
            shifts = [int(torch.randint(-most, most + 1, (1,), generator=draws)) for most in far]
            views.append(pictures[lots.argmax(dim=1)].roll(shifts, tuple(range(2, 2 + axes))))
        alike = embedded(network, views[0]) @ embedded(network, _spoilt(views[1], draws)).T / _TEMPERATURE
        pairs = torch.arange(len(shown))
        loss = functional.cross_entropy(alike, pairs) + functional.cross_entropy(alike.T, pairs)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return network.requires_grad_(requires_grad=False)


def _spoilt(pictures: Tensor, draws: torch.Generator) -> Tensor:
    """Return pictures as attacks may return them: blurred, with others shining through, noisy."""
    shares = torch.rand((3, len(pictures), *(1,) * (pictures.ndim - 1)), generator=draws)
    pool = getattr(functional, f"avg_pool{pictures.ndim - 2}d")
    sides = [3 if side > 2 else 1 for side in pictures.shape[2:]]
    blurred = pool(pictures, sides, stride=1, padding=[side // 2 for side in sides], count_include_pad=False)
    soft = torch.lerp(pictures, blurred, shares[0])
    mixed = torch.lerp(soft, soft[torch.randperm(len(soft), generator=draws)], 0.5 * shares[1])
    spread = pictures.std(dim=tuple(range(1, pictures.ndim)), correction=0, keepdim=True)
    return mixed + 1.5 * shares[2] * spread * torch.randn(pictures.shape, generator=draws)
