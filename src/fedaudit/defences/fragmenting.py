"""Sanitisers that send some layers only: Fragmented Federated Learning, and the same with layers taken at random."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Literal

import torch
from torch import Tensor

from fedaudit.defences.compressing import Ratio, share
from fedaudit.defences.sanitising import ClientContext, Sanitiser
from fedaudit.transcript.update import SanitiserInfo, Update
from fedaudit.utils.registry import register

Layer = tuple[str, ...]
Meaning = Literal["tensors", "modules"]


@register(frozen=False)
class Fragmented(Sanitiser):
    """Sends the ⌈r·L⌉ layers of highest cosine to the estimated global gradient (Na et al. 2022, Algorithm 1).

    Not the other "Fragmented Federated Learning" of that year. The global gradient is estimated by θᵏ − θᵏ⁻¹ (Eq. 4),
    the difference of the last two models that this client received, and a layer l has the score

        s[l] = ⟨∇L[l], (θᵏ − θᵏ⁻¹)[l]⟩ / (‖∇L[l]‖ ‖(θᵏ − θᵏ⁻¹)[l]‖).

    The layers of greatest s are sent. ∇L is the client's gradient, or −ΔW after local training (the positive factor
    between them doesn't change a cosine). A gradient ascends and the model descends: so taken, Algorithm 1 sends what
    corrects the last move. Where either vector is zero, s is 0.

    ``direction: aligned`` is ours: it turns the sign, as if Eq. 4, which has no minus, meant the server's step. It
    sends what goes on as before.

    What the paper leaves open: a layer is a single parameter tensor, or with ``layers: modules`` a module with all of
    its parameters. In a client's first round, or where the model hasn't moved, there is no direction, and random
    layers are sent (if nothing was sent, the model would never begin to move). BatchNorm's statistics have no gradient
    and so are no layers: they travel with every update, whatever is held back, as in the recipe that the paper takes
    over (LG-FedAvg averages the whole state). They aren't protected.

    Args:
        ratio: r, the share of layers.
        direction: ``literal``, Algorithm 1 as it stands, or ``aligned``, ours, with the sign turned.
        layers: what a layer is: ``tensors``, a weight and its bias apart, or ``modules``.
    """

    name = "ffl"
    summary = "sends the layers chosen by cosine to the global model's last move"
    paper = "Na et al. 2022 (FFL), Algorithm 1"

    ratio: Ratio = 0.6
    direction: Literal["literal", "aligned"] = "literal"
    layers: Meaning = "tensors"

    previous: dict[str, Tensor] | None = field(default=None, init=False)  # the model received last

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:
        """Return the chosen layers, and all statistics."""
        previous, self.previous = self.previous, context.weights
        layers = layers_of(update, context, self.layers)
        if previous is not None:
            moved = {name: context.weights[name] - previous[name] for name in update.tensors}
            if any(bool(tensor.any()) for tensor in moved.values()):
                gradient = 1.0 if update.kind == "gradient" else -1.0  # ΔW descends
                sign = gradient if self.direction == "literal" else -gradient
                scores = [sign * _cosine(layer, update.tensors, moved) for layer in layers]
                return _only(update, _best(layers, scores, self.ratio), "ffl")
        return _only(update, _random(layers, self.ratio, generator), "ffl")


@register
class FragmentedAtRandom(Sanitiser):
    """Sends ⌈r·L⌉ random layers and all of BatchNorm's statistics (Na et al. 2022, Section 5.2).

    Args:
        ratio: r, the share of layers.
        layers: what a layer is: ``tensors``, a weight and its bias apart, or ``modules``.
    """

    name = "ffl-random"
    summary = "sends random layers: the baseline of FFL"
    paper = "Na et al. 2022 (FFL), Section 5.2"

    ratio: Ratio = 0.6
    layers: Meaning = "tensors"

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:
        """Return the chosen layers, and all statistics."""
        layers = layers_of(update, context, self.layers)
        return _only(update, _random(layers, self.ratio, generator), "ffl-random")


def layers_of(update: Update, context: ClientContext, meaning: Meaning) -> list[Layer]:
    """Return the names of the parameters of each layer of ``update``."""
    if meaning == "tensors":
        return [(name,) for name in update.tensors]
    modules = [tuple(name for name in module if name in update.tensors) for module in context.layers]
    return [module for module in modules if module]


def _cosine(layer: Layer, tensors: dict[str, Tensor], moved: dict[str, Tensor]) -> float:
    own: Tensor = torch.cat([tensors[name].double().reshape(-1) for name in layer])
    other = torch.cat([moved[name].double().reshape(-1) for name in layer])
    lengths = float(own.norm() * other.norm())
    return float(own @ other) / lengths if lengths else 0.0


def _best(layers: list[Layer], scores: list[float], ratio: float) -> list[Layer]:
    order = sorted(range(len(layers)), key=lambda i: -scores[i])
    return [layers[i] for i in order[: share(ratio, len(layers))]]


def _random(layers: list[Layer], ratio: float, generator: torch.Generator) -> list[Layer]:
    order = torch.randperm(len(layers), generator=generator).tolist()
    return [layers[i] for i in order[: share(ratio, len(layers))]]


def _only(update: Update, layers: list[Layer], name: str) -> Update:
    """Return ``update`` with the tensors of ``layers`` alone."""
    chosen = {parameter for layer in layers for parameter in layer}
    tensors = {n: t for n, t in update.tensors.items() if n in chosen}
    return replace(update, tensors=tensors, sanitised=SanitiserInfo(name))
