"""The heuristic's two optimisations: learn how a client moves what it is sent, and seek where it would not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear, relu

Mapping = Literal["network", "linear"]

_REPORT_EVERY = 50


@dataclass(frozen=True)
class Learned:
    """A fitted mapping network G, on coordinates of the weights sent: their own, or whitened ones.

    Attributes:
        parameters: of the two layers: (h, k), (h,), (p, h), (p,).
        mean: (p,) where the coordinates are zero: at the mean of the weights sent where they are whitened.
        basis: (p, k): the identity; whitened, the directions in which they spread, as long as the standard deviation.
        error: Σ‖G(θ) − Δθ‖² relative to Σ‖Δθ − mean‖² over the rounds: 0 is a perfect fit, 1 no better than the mean.
    """

    parameters: tuple[Tensor, ...]
    mean: Tensor
    basis: Tensor
    error: float

    def coordinates(self, weights: Tensor) -> Tensor:
        """Return the (n, k) coordinates of (n, p) ``weights``."""
        return (weights - self.mean) @ self.basis / self.basis.square().sum(dim=0)


def fit_mapping(
    sent: Tensor,
    moved: Tensor,
    *,
    hidden: int,
    whitened: bool,
    span: float,
    iterations: int,
    learning_rate: float,
    generator: torch.Generator,
    progress: Callable[[int], None] | None = None,
) -> Learned:
    """Minimise Σ‖G(w, θ) − Δθ‖² over w by Adam (Xu & Neglia 2021, Eq. 6).

    Args:
        sent: (n, p) θ.
        moved: (n, p) Δθ.
        hidden: units of the hidden layer.
        whitened: G takes the principal coordinates of the weights sent, each of standard deviation 1; else θ as it is.
        span: where whitened, leave out directions in which they spread less than this, relative to the widest.
        iterations: of Adam, on all rounds at once.
        learning_rate: of Adam.
        generator: of the initial weights (PyTorch's default scheme).
        progress: called with the iterations done.
    """
    p = sent.shape[1]
    mean, basis = _whitening(sent, span) if whitened else (sent.new_zeros(p), torch.eye(p).to(sent))
    inputs, k = (sent - mean) @ basis / basis.square().sum(dim=0), basis.shape[1]
    scale = moved.square().mean().sqrt()
    targets = moved / scale
    shapes = [((hidden, k), k), ((hidden,), k), ((p, hidden), hidden), ((p,), hidden)]
    weights = [
        ((2 * torch.rand(shape, generator=generator) - 1) * fan_in**-0.5).to(sent.device).requires_grad_()
        for shape, fan_in in shapes
    ]
    optimiser = torch.optim.Adam(weights, lr=learning_rate)
    for iteration in range(iterations):
        optimiser.zero_grad(set_to_none=True)
        (_apply(weights, inputs) - targets).square().sum(dim=1).mean().backward()
        optimiser.step()
        if progress and (iteration + 1) % _REPORT_EVERY == 0:
            progress(iteration + 1)
    parameters = tuple(w.detach() for w in weights)
    left = (_apply(parameters, inputs) - targets).square().sum()
    whole = (targets - targets.mean(dim=0)).square().sum().clamp_min(1e-30)
    return Learned(parameters, mean, basis, float(left / whole))


def _whitening(sent: Tensor, span: float) -> tuple[Tensor, Tensor]:
    mean = sent.mean(dim=0)
    _, spread, directions = torch.linalg.svd(sent - mean, full_matrices=False)
    k = max(1, int((spread > max(span, torch.finfo(sent.dtype).eps) * spread[0]).sum()))
    return mean, directions[:k].T * spread[:k] / len(sent) ** 0.5


def seek_zero(
    learned: Learned,
    start: Tensor,
    *,
    iterations: int,
    learning_rate: float,
    progress: Callable[[int], None] | None = None,
) -> tuple[Tensor, float]:
    """Minimise ‖G(ŵ, θ)‖² over θ by Adam from ``start`` (Xu & Neglia 2021, Eq. 7).

    Args:
        learned: G.
        start: (p,) weights.
        iterations: of Adam.
        learning_rate: of Adam, in the coordinates' units.
        progress: called with the iterations done.

    Returns:
        The (p,) iterate of least ‖G‖², and that, relative to the mean of ‖Δθ‖² over the rounds.
    """
    point = learned.coordinates(start[None]).requires_grad_()
    best, least = point.detach().clone(), float("inf")
    optimiser = torch.optim.Adam([point], lr=learning_rate)
    for iteration in range(iterations + 1):
        optimiser.zero_grad(set_to_none=True)
        objective = _apply(learned.parameters, point).square().sum()
        value = float(objective.detach())
        if value < least:
            best, least = point.detach().clone(), value
        if iteration == iterations:
            break
        objective.backward()
        optimiser.step()
        if progress and (iteration + 1) % _REPORT_EVERY == 0:
            progress(iteration + 1)
    return learned.basis @ best[0] + learned.mean, least / len(start)


def _apply(parameters: tuple[Tensor, ...] | list[Tensor], inputs: Tensor) -> Tensor:
    first, first_bias, second, second_bias = parameters
    return linear(relu(linear(inputs, first, first_bias)), second, second_bias)
