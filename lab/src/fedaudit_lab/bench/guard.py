"""What a site's guard takes of the time that the site trains."""

from __future__ import annotations

import copy
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.capture import Capture
from fedaudit.guard import OutgoingUpdate, SiteGuard
from fedaudit.models import build_model
from fedaudit.utils import Display, Quiet, one_thread

_SHAPE, _BATCH, _CLASSES = (3, 32, 32), 32, 10
_FEW = 8  # examples of a single step, which all attacks can be played on
_SHARE = 0.05


def measure(*, quick: bool, display: Display | None = None) -> dict[str, Any]:
    """Time rounds of a site that trains by SGD, and what its guard, with its own settings, takes of them, all in all.

    The site gives held-out examples. ``quick``: ``convnet-small`` without ``resnet20``, three rounds of 4 batches
    instead of twenty of 16.
    """
    rounds, steps = (3, 4) if quick else (20, 16)
    models = ("convnet-small",) if quick else ("convnet-small", "resnet20")
    report = (display or Quiet()).stage("guarded rounds", 2 * len(models) * rounds)
    own, held_out = _examples(_BATCH * steps, 0), _examples(500, 1)
    rows: list[dict[str, Any]] = []
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        for name in models:
            for many in (steps, 1):
                guard = SiteGuard(held_out=held_out, share=_SHARE, out=Path(folder) / f"{name}-{many}")
                net = build_model(name, input_shape=_SHAPE, outputs=_CLASSES)
                row: dict[str, Any] = {"model": name, "steps": many, "training": [], "watching": [], "shares": []}
                for index in range(rounds):
                    seen = _round(net, *(own if many > 1 else (part[:_FEW] for part in own)))
                    passing = OutgoingUpdate(
                        seen.start, copy.deepcopy(net.state_dict()), seen, "weights", "site", "report", follows=True
                    )
                    began = time.perf_counter()
                    guard.decide(("job", "site"), "site", index, partial(copy.copy, passing))
                    row["training"].append(seen.seconds)
                    row["watching"].append(time.perf_counter() - began)
                    row["shares"].append(row["watching"][-1] / seen.seconds)
                    report(rounds * len(rows) + len(row["shares"]))
                row["later"] = sum(row["watching"][1:]) / sum(row["training"][1:])
                row["played"] = guard.played(("job", "site"))
                rows.append(row)
    return {"examples": len(own[0]), "batch": _BATCH, "few": _FEW, "rounds": rounds, "share": _SHARE, "rows": rows}


def _examples(many: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(many, *_SHAPE, generator=generator), torch.arange(many) % _CLASSES


def _round(net: nn.Module, images: Tensor, labels: Tensor) -> Capture:
    with Capture(net) as seen:
        optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        for x, y in zip(images.split(_BATCH), labels.split(_BATCH), strict=True):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimiser.step()
    return seen
