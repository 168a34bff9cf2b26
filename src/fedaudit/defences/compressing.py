"""Client-side defences that send less: the largest elements, signs, or some layers only."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import field, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedaudit.defences.aggregation import Aggregator
from fedaudit.defences.client_defences import ClientContext, ClientDefence, changed, flat, norm, unflat
from fedaudit.task.training import LocalPlan
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import register
from fedaudit.utils.validation import Fraction, Number, Positive, Whole

Ratio = Annotated[Number, Field(gt=0, le=1)]


def share(ratio: float, whole: int) -> int:
    """Return ⌈ratio·whole⌉, without what floating point adds: of 0.1 · 30 it is 3."""
    return math.ceil(round(ratio * whole, 6))


def largest(vector: Tensor, ratio: float) -> Tensor:
    """Return the (d,) mask of the ⌈ratio·d⌉ elements of ``vector`` that are largest in magnitude."""
    mask = torch.zeros_like(vector, dtype=torch.bool)
    mask[vector.abs().topk(share(ratio, len(vector))).indices] = True
    return mask


@register(frozen=False)
class TopK(ClientDefence):
    """Sends the largest elements of the whole update by magnitude (Aji & Heafield 2017, Section 3).

    What isn't sent is added to the client's next update, as in the paper (``memory``). The threshold is exact; the
    paper estimates it from a sample.

    Args:
        ratio: share of the elements that is sent.
        memory: keep what isn't sent for the next round.
    """

    name = "top-k"
    summary = "sends the largest elements only, and keeps the rest for later"
    paper = "Aji & Heafield 2017"
    unsent = 1.0

    ratio: Ratio = 0.1
    memory: bool = True

    kept: Tensor | None = field(default=None, init=False)  # (d,) what wasn't sent

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:  # noqa: ARG002
        """Return the update with zeros in place of what isn't sent."""
        vector = flat(update.tensors)
        if self.kept is not None:
            vector += self.kept
        mask = largest(vector, self.ratio)
        self.kept = vector.masked_fill(mask, 0) if self.memory else None
        return changed(update, unflat(vector.where(mask, 0), update.tensors), ClientDefenceInfo("top-k", sparse=True))


@register
class Sign(ClientDefence):
    """Sends the signs (Bernstein et al. 2018, Algorithm 1); zero counts as positive.

    Args:
        scale: ``mean``: every tensor's signs are multiplied by the mean magnitude of its elements (one number more to
            send), so that the server's step keeps its length (Karimireddy et al. 2019); ``one``: signs alone, as in the
            paper, for which the learning rate has to be chosen. The mean of signs is one way to aggregate them; the
            other, the majority, is the aggregator ``median``.
    """

    name = "sign"
    summary = "sends one bit a number: its sign"
    paper = "Bernstein et al. 2018 (signSGD)"

    scale: Literal["mean", "one"] = "mean"

    def check(self, plan: LocalPlan, aggregator: Aggregator) -> None:  # noqa: ARG002
        """Refuse signs alone where no learning rate shortens them."""
        if self.scale == "one" and not plan.sends_gradient:
            raise BadInput(
                "sign with scale: one is for fedsgd, whose learning rate shortens it; where clients send weights the "
                "server would add 1 or -1 to every weight: use scale: mean"
            )

    def check_alone(self, given: Collection[str], clients: int | None) -> int | None:  # noqa: ARG002
        """Refuse signs alone, which nothing shortens there.

        Raises:
            BadInput: they are asked for.
        """
        if self.scale == "one":
            raise BadInput("sign with scale: one would add 1 or -1 to every weight; use scale: mean")
        return None

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:  # noqa: ARG002
        """Return ±1, or ± the mean magnitude, in place of every number."""
        tensors = {}
        for name, tensor in update.tensors.items():
            size = tensor.abs().mean() if self.scale == "mean" else tensor.new_ones(())
            tensors[name] = torch.where(tensor >= 0, size, -size)
        return changed(update, tensors, ClientDefenceInfo("sign", signs=True))


@register(frozen=False)
class DeepGradientCompression(ClientDefence):
    """Sends the largest elements of each tensor of what has accumulated (Lin et al. 2018, Algorithm 4).

    Momentum correction: u ← m·u + g, v ← v + u, and v is what is chosen from. Momentum factor masking: what is sent is
    deleted from u and v. Local clipping: g is scaled down to ``clip``/√N, N being the clients of a round. Warm-up: the
    share sent falls exponentially, r^((t+1)/(w+1)) in a client's t-th of w first rounds.

    For FedAvg g is the ΔW of the local training, which the paper doesn't treat. The choice is exact; the paper samples.

    Args:
        ratio: r, the share of each tensor's elements that is sent after the warm-up.
        momentum: m, of the momentum correction.
        clip: the norm to which the sum of all clients' updates is held; None doesn't clip.
        warmup: w, in rounds of the client.
    """

    name = "dgc"
    summary = "deep gradient compression: sparse updates with momentum correction"
    paper = "Lin et al. 2018 (DGC), Algorithm 4"
    unsent = 0.3  # an element waits for more rounds

    ratio: Ratio = 0.1
    momentum: Fraction = 0.9
    clip: Positive | None = None
    warmup: Whole = 4

    rounds: int = field(default=0, init=False)  # of this client
    velocity: dict[str, Tensor] = field(default_factory=dict, init=False)  # u
    accumulated: dict[str, Tensor] = field(default_factory=dict, init=False)  # v

    def check_alone(self, given: Collection[str], clients: int | None) -> int | None:  # noqa: ARG002
        """Refuse a clip where the number of clients that share it isn't known.

        Raises:
            BadInput: it isn't.
        """
        if self.clip is not None and clients is None:
            raise BadInput("dgc's clip is shared by the clients of a round: give clients=, their number")
        return None

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:  # noqa: ARG002
        """Return the update with zeros in place of what isn't sent."""
        length, limit = norm(update.tensors.values()), math.inf
        if self.clip is not None:
            limit = self.clip / math.sqrt(context.clients)
        shrink = min(1.0, limit / length) if length else 1.0
        ratio = self.ratio ** (min(self.rounds + 1, self.warmup + 1) / (self.warmup + 1))
        self.rounds += 1
        sent = {}
        for name, tensor in update.tensors.items():
            zero = torch.zeros_like(tensor)
            velocity = self.momentum * self.velocity.get(name, zero) + shrink * tensor
            accumulated = self.accumulated.get(name, zero) + velocity
            mask = largest(accumulated.reshape(-1), ratio).view_as(tensor)
            sent[name] = accumulated.where(mask, zero)
            self.velocity[name] = velocity.masked_fill(mask, 0)
            self.accumulated[name] = accumulated.masked_fill(mask, 0)
        return changed(update, sent, ClientDefenceInfo("dgc", sparse=True))


Layer = tuple[str, ...]
Meaning = Literal["tensors", "modules"]


@register(frozen=False)
class Fragmented(ClientDefence):
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
class FragmentedAtRandom(ClientDefence):
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
    return replace(update, tensors=tensors, sanitised=ClientDefenceInfo(name))
