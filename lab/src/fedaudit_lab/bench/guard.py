"""What a site's guard takes of a round to watch whether its own examples can be told."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.capture import Capture
from fedaudit.models import build_model
from fedaudit.pipeline import MemberWatch
from fedaudit.utils import Display, Quiet, one_thread

_SHAPE, _BATCH, _CLASSES = (3, 32, 32), 32, 10
_FEW = 8  # examples of a single step, which the span attack can tell
_SHARE = 0.05


def measure(*, quick: bool, display: Display | None = None) -> dict[str, Any]:
    """Time rounds of a site that trains by SGD, and what watching its members takes of each.

    Args:
        quick: ``convnet-small`` alone and three rounds of 4 batches, instead of ``resnet20``, too, and ten of 16.
        display: shows progress.

    Returns:
        rows with the seconds of each round's training and watching, and what was tested.
    """
    rounds, steps = (3, 4) if quick else (10, 16)
    models = ("convnet-small",) if quick else ("convnet-small", "resnet20")
    report = (display or Quiet()).stage("guarded rounds", 2 * len(models) * rounds)
    own, held_out = _examples(_BATCH * steps, 0), _examples(500, 1)
    rows: list[dict[str, Any]] = []
    with one_thread():
        for name in models:
            for many in (steps, 1):
                watch = MemberWatch(held_out, _SHARE)
                net = build_model(name, input_shape=_SHAPE, outputs=_CLASSES)
                row: dict[str, Any] = {"model": name, "steps": many, "training": [], "watching": [], "shares": []}
                row |= {"records": {}, "unable": 0}
                for _ in range(rounds):
                    seen = _round(net, *(own if many > 1 else (part[:_FEW] for part in own)))
                    look = watch.look(copy.deepcopy(net.state_dict()), seen)
                    row["training"].append(seen.seconds)
                    row["watching"].append(look.seconds)
                    row["shares"].append(look.share)
                    row["records"] |= {told.by: told.members + told.others for told in look.told}
                    row["unable"] += look.unable is not None
                    report(rounds * len(rows) + len(row["shares"]))
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
