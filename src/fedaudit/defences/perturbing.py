"""What papers on gradient inversion compare themselves with: noise of a chosen size, a clip, noise where it leaks."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedaudit.defences.client_defences import ClientContext, ClientDefence, changed, flat, norm
from fedaudit.defences.compressing import largest, share
from fedaudit.defences.privacy import gaussian, secret_uniform
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.registry import register
from fedaudit.utils.validation import NonNegative, Number, Positive


@register
class GradientNoise(ClientDefence):
    """Adds noise of a chosen variance to every number (Zhu et al. 2019, Section 5.1: 1e-4 to 1e-1).

    Nothing is clipped, so no differential privacy is promised, whatever the noise is drawn from: for that use ``dp``.
    Under FedAvg the noise is in ΔW.

    Args:
        variance: of the noise in each number.
        distribution: ``gaussian``, or ``laplace``, which has the scale √(variance/2).
    """

    name = "gradient-noise"
    summary = "noise of a chosen variance in every number; promises no ε"
    paper = "Zhu et al. 2019 (DLG), Section 5.1"
    secret = True

    variance: Positive = 1e-2
    distribution: Literal["gaussian", "laplace"] = "gaussian"

    def adds_noise(self) -> bool:
        """Return True."""
        return True

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator | None) -> Update:  # noqa: ARG002
        """Return the update with noise."""
        scale, draw = math.sqrt(self.variance), gaussian if self.distribution == "gaussian" else _laplace
        tensors = {name: tensor + scale * draw(tensor, generator) for name, tensor in update.tensors.items()}
        return changed(update, tensors, ClientDefenceInfo(self.name, noise=scale, unclipped=True))


@register
class GradientClipping(ClientDefence):
    """Scales the whole update down to the norm ``bound`` where it is longer: min(1, S/‖g‖)·g, and nothing else.

    Papers on gradient inversion take it for a defence by itself (Li et al. 2022, S = 4). It leaves the direction, so
    whoever compares directions loses nothing. Without noise no differential privacy is promised.

    Args:
        bound: S.
    """

    name = "gradient-clipping"
    summary = "the whole update is scaled down to a norm, without noise; promises no ε"
    paper = "Geyer et al. 2017, without the noise; as in Li et al. 2022 (GGL)"

    bound: Positive = 4.0

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:  # noqa: ARG002
        """Return the update, clipped."""
        length = norm(update.tensors.values())
        shrink = min(1.0, self.bound / length) if length else 1.0
        tensors = {name: shrink * tensor for name, tensor in update.tensors.items()}
        return changed(update, tensors, ClientDefenceInfo(self.name, clip=self.bound))


@register(frozen=False)
class Outpost(ClientDefence):
    """Prunes small elements and adds noise where an update leaks, ever more rarely (Wang et al. 2023, OUTPOST).

    In the t-th of a client's rounds, from 0, it acts with probability 1/(1 + β·t); else the update leaves as it is.
    Where it acts:

    1. the risk of tensor l is r[l] = min(Var(W[l]), 1), of the weights that the client received;
    2. the ⌊``prune``·d[l]⌋ smallest elements of each tensor become zero;
    3. noise N(0, (``scale``·r[l])²) is added to the ``share`` of all elements with the largest empirical Fisher
       information, the gradient's square, averaged over the outputs of a layer (a tensor's first axis).

    The paper does so in every local step and t counts these; here it is done once a round, to the gradient or ΔW, and t
    counts the client's rounds. The variance of a tensor of one element is 0.

    Args:
        beta: β, of the decay.
        prune: share of each tensor's elements that isn't sent.
        scale: λ, of the noise.
        share: φ, of the elements that may get noise.
    """

    name = "outpost"
    summary = "OUTPOST: prunes small elements, noise by each layer's risk, ever more rarely; promises no ε"
    paper = "Wang et al. 2023 (OUTPOST, INFOCOM)"
    secret = True
    unsent = 1.0

    beta: NonNegative = 0.1
    prune: Annotated[Number, Field(ge=0, lt=1)] = 0.8
    scale: Positive = 0.8
    share: Annotated[Number, Field(gt=0, le=1)] = 0.4

    rounds: int = field(default=0, init=False)  # of this client

    def adds_noise(self) -> bool:
        """Return True."""
        return True

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator | None) -> Update:
        """Return the update, perturbed or as it is."""
        uniform = secret_uniform(1) if generator is None else torch.rand(1, generator=generator, dtype=torch.float64)
        acts = float(uniform) < 1 / (1 + self.beta * self.rounds)
        self.rounds += 1
        if not acts:
            return update
        noisy = self._noisy(update.tensors)
        tensors, noises = {}, []
        for name, tensor in update.tensors.items():
            weights = context.weights[name]
            risk = min(float(weights.var()) if weights.numel() > 1 else 0.0, 1.0)
            kept = largest(tensor.reshape(-1), 1 - self.prune).view_as(tensor)
            noise = self.scale * risk * gaussian(tensor, generator)
            tensors[name] = tensor.where(kept, 0) + noise.where(noisy[name], 0)
            noises.append((name, self.scale * risk * math.sqrt(self.share)))
        sizes = [tensor.numel() for tensor in tensors.values()]
        whole = math.sqrt(sum(n * noise**2 for n, (_, noise) in zip(sizes, noises, strict=True)) / sum(sizes))
        how = ClientDefenceInfo(self.name, sparse=True, noise=whole, noises=tuple(noises), unclipped=True)
        return changed(update, tensors, how)

    def _noisy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return where noise is added."""
        fisher = {name: (t.square().mean(0) if t.ndim > 1 else t.square()).expand_as(t) for name, t in tensors.items()}
        whole = flat(fisher)
        limit = whole.topk(share(self.share, len(whole))).values[-1]
        return {name: own >= limit for name, own in fisher.items()}


def _laplace(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return Laplace numbers of variance 1, as many as ``like`` has; without a generator from the operating system."""
    if generator is None:
        uniform = secret_uniform(like.numel())
    else:
        uniform = torch.rand(like.numel(), generator=generator, dtype=torch.float64)
    centred = uniform - 0.5
    made = -centred.sign() * torch.log1p(-2 * centred.abs().clamp(max=0.5 - 2**-54)) / math.sqrt(2)
    return made.view(like.shape).to(like)
