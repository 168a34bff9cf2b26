"""Sanitisers that send some layers only: Fragmented Federated Learning, and the same with layers taken at random."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Literal

import torch
from torch import Tensor

from fedaudit.defences.compressing import Ratio, share
from fedaudit.defences.sanitising import ClientContext, Sanitiser
from fedaudit.update import SanitiserInfo, Update
from fedaudit.utils.registry import register


@register(frozen=False)
class Fragmented(Sanitiser):
    """Sends the ⌈r·L⌉ layers of highest cosine to the estimated global gradient (Na et al. 2022, Algorithm 1).

    Not the other "Fragmented Federated Learning" of that year. The global gradient is estimated by θᵏ − θᵏ⁻¹, the
    difference of the last two models that this client received.

    Algorithm 1 takes the cosine of that difference with ∇L, highest first, and flips no sign. As a gradient ascends and
    the model descends, this sends what corrects the last move: ``direction: literal``. The default, ``aligned``, is a
    departure: it flips the sign, so that layers which go on as before are sent. That feeds back on itself and trains
    badly; what it gives says nothing about the paper's rule. Another departure: a layer is a module with
    parameters of its own, whose weight, bias and statistics travel together, where the elements that the paper sends
    (its Table 2) fit single tensors.

    In a client's first round there is no θᵏ⁻¹, which the paper leaves open: random layers are sent, as well as where
    the model has not moved. (If nothing was sent, the model would never begin to move.)

    Args:
        ratio: r, the share of layers.
        direction: ``literal``, as published, or ``aligned``, with the sign flipped.
    """

    name = "ffl"
    summary = "sends the layers chosen by cosine to the global model's last move"
    paper = "Na et al. 2022 (FFL)"

    ratio: Ratio = 0.6
    direction: Literal["aligned", "literal"] = "aligned"

    previous: dict[str, Tensor] | None = field(default=None, init=False)  # the model received last

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:
        """Return the chosen layers."""
        previous, self.previous = self.previous, context.weights
        layers = [layer for layer in context.layers if any(name in update.tensors for name in layer)]
        if previous is not None:
            moved = {name: context.weights[name] - previous[name] for name in update.tensors}
            if any(bool(tensor.any()) for tensor in moved.values()):
                pseudo_gradient = 1.0 if update.kind == "weights" else -1.0
                sign = pseudo_gradient if self.direction == "aligned" else -pseudo_gradient
                scores = [sign * _cosine(layer, update.tensors, moved) for layer in layers]
                return _only(update, _best(layers, scores, self.ratio), "ffl")
        return _only(update, _random(layers, self.ratio, generator), "ffl")


@register
class FragmentedAtRandom(Sanitiser):
    """Sends ⌈r·L⌉ random layers (Na et al. 2022, Section 5).

    Args:
        ratio: r, the share of layers.
    """

    name = "ffl-random"
    summary = "sends random layers: the baseline of FFL"
    paper = "Na et al. 2022 (FFL), Section 5"

    ratio: Ratio = 0.6

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:
        """Return the chosen layers."""
        layers = [layer for layer in context.layers if any(name in update.tensors for name in layer)]
        return _only(update, _random(layers, self.ratio, generator), "ffl-random")


Layers = list[tuple[str, ...]]


def _cosine(layer: tuple[str, ...], tensors: dict[str, Tensor], moved: dict[str, Tensor]) -> float:
    own: Tensor = torch.cat([tensors[name].double().reshape(-1) for name in layer if name in tensors])
    other = torch.cat([moved[name].double().reshape(-1) for name in layer if name in tensors])
    lengths = float(own.norm() * other.norm())
    return float(own @ other) / lengths if lengths else 0.0


def _best(layers: Layers, scores: list[float], ratio: float) -> Layers:
    order = sorted(range(len(layers)), key=lambda i: -scores[i])
    return [layers[i] for i in order[: share(ratio, len(layers))]]


def _random(layers: Layers, ratio: float, generator: torch.Generator) -> Layers:
    order = torch.randperm(len(layers), generator=generator).tolist()
    return [layers[i] for i in order[: share(ratio, len(layers))]]


def _only(update: Update, layers: Layers, name: str) -> Update:
    """Return ``update`` with the tensors and statistics of ``layers`` alone."""
    chosen = {parameter for layer in layers for parameter in layer}
    return replace(
        update,
        tensors={n: t for n, t in update.tensors.items() if n in chosen},
        buffers={n: t for n, t in update.buffers.items() if n in chosen},
        sanitised=SanitiserInfo(name),
    )
