"""Sanitisers that compress: top-k sparsification, signs, deep gradient compression."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import field
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedaudit.defences.aggregation import Aggregator
from fedaudit.defences.sanitising import ClientContext, Sanitiser, changed, flat, norm, unflat
from fedaudit.task.training import LocalPlan
from fedaudit.transcript.update import SanitiserInfo, Update
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
class TopK(Sanitiser):
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
        return changed(update, unflat(vector.where(mask, 0), update.tensors), SanitiserInfo("top-k", sparse=True))


@register
class Sign(Sanitiser):
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
        """Refuse signs alone where no learning rate shortens them.

        Raises:
            BadInput: none does.
        """
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
        return changed(update, tensors, SanitiserInfo("sign", signs=True))


@register(frozen=False)
class DeepGradientCompression(Sanitiser):
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
        return changed(update, sent, SanitiserInfo("dgc", sparse=True))
