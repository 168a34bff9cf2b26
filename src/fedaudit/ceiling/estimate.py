"""The ceiling of one update: what the best local estimate of its examples could reach, over precisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedaudit.attacks.inversion.engines.reference import one_gradient, unrolled
from fedaudit.attacks.victim import load_victim
from fedaudit.ceiling.derivative import Derivative, Sent
from fedaudit.ceiling.prior import Prior
from fedaudit.ceiling.spectrum import Spectrum, by_probes, exact
from fedaudit.transcript.observation import Observation

_WHOLE = 1100  # numbers of the examples up to which J is taken column by column
PRECISIONS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # relative to the update's root mean square


@dataclass(frozen=True)
class Ceiling:
    """What an update determines of its examples, near the truth.

    Attributes:
        spectrum: of C^½JᵀJC^½.
        scale: the root mean square of what is sent, to which precisions are relative.
        unknowns: numbers of the examples.
        sent: numbers that are sent.
        prior: whose guess is the mean.
    """

    spectrum: Spectrum
    scale: float
    unknowns: int
    sent: int
    prior: Prior

    def db(self, precision: float) -> tuple[float, float]:
        """Return the ceiling in dB of pixels in [0, 1], and its standard error, at a relative precision."""
        error, spread = self.spectrum.error(precision * self.scale)
        return -10 * math.log10(max(error, 1e-12)), 10 / math.log(10) * spread / max(error, 1e-12)

    def curve(self, precisions: Sequence[float] = PRECISIONS) -> list[tuple[float, float]]:
        """Return (precision, dB)."""
        return [(precision, self.db(precision)[0]) for precision in precisions]

    @property
    def guess(self) -> float:
        """Return what who knows the prior's mean alone reaches, in dB."""
        return -10 * math.log10(max(self.prior.variance, 1e-12))

    @property
    def lost(self) -> float:
        """Return the least share of directions that are lost whatever the attack: more unknowns than equations."""
        return max(0.0, 1 - self.sent / self.unknowns)


def sent_by(observation: Observation, labels: Tensor) -> Sent:
    """Return what a client sends as a function of its examples (n, ...) in the order of use, by its labels (n, ...)."""
    message, info = observation.single(), observation.task_info
    victim, _ = load_victim(observation, message, "cpu")
    update = message.update
    training = one_gradient(update.num_examples)
    if update.kind == "weights" and update.training is not None:
        training = update.training
    start = {name: p.detach().clone().requires_grad_() for name, p in victim.parameters.items()}
    sizes = list(training.batch_sizes)

    def sent(examples: Tensor) -> list[Tensor]:
        given = info.normalise(examples)
        return unrolled(victim, start, given.split(sizes), labels.split(sizes), training)

    return sent


def ceiling_of(
    observation: Observation,
    examples: Tensor,
    labels: Tensor,
    prior: Prior,
    *,
    probes: int = 8,
    steps: int = 40,
    seed: int = 0,
) -> Ceiling:
    """Return the ceiling of one update, at the truth: examples (n, ...), in the order of use, and labels."""
    derivative = Derivative(sent_by(observation, labels), examples)
    n = len(examples)
    if examples.numel() <= _WHOLE:
        each = prior.root(torch.eye(examples[0].numel(), dtype=torch.float64))
        spectrum = exact(derivative.gram(), torch.block_diag(*[each] * n))
    else:
        spectrum = by_probes(
            derivative.normal,
            lambda v: prior.root(v.flatten(1)).view(v.shape),
            tuple(examples.shape),
            probes=probes,
            steps=steps,
            generator=torch.Generator().manual_seed(seed),
        )
    scale = float(derivative.value.detach().double().square().mean().sqrt())
    return Ceiling(spectrum, scale, examples.numel(), derivative.value.numel(), prior)
