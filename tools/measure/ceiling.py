"""Whether attacks that know what the ceiling assumes follow it: the best estimate, started at the truth and elsewhere.

Updates get even noise of known size; the attack minimises ‖y − F(x)‖²/σ² + (x − μ)ᵀC⁻¹(x − μ), the logarithm of the
posterior, by L-BFGS. Its error is held against the ceiling's, image by image, in eight conditions of digits.

    python -m tools.measure.ceiling
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

import fedaudit
from fedaudit.ceiling import Ceiling, ceiling_of, message_of, prior_of
from fedaudit.transcript.observation import observe

SIDES = {
    "untrained": {"training": {"epochs": 0}},
    "trained": {"training": {"epochs": 10}},
}
UPDATES = {
    "one image": {"algorithm": "fedsgd", "batch_size": 1},
    "batches of 4": {"algorithm": "fedsgd", "batch_size": 4},
    "two steps of 2": {"algorithm": "fedavg", "batch_size": 2, "local_steps": 2, "learning_rate": 0.05},
    "two epochs of 4": {
        "algorithm": "fedavg",
        "batch_size": 4,
        "local_epochs": 2,
        "examples": 32,
        "learning_rate": 0.05,
    },
}
NOISES = (1e-4, 1e-3, 1e-2)  # lengths beside the update's
ENDS = ("ceiling", "from_truth", "from_mean")
IMAGES = 8  # a condition, at least
STEPS = 400


@dataclass(frozen=True)
class Row:
    """One image at one noise: mean squared errors."""

    condition: str
    noise: float
    ceiling: float
    from_truth: float
    from_mean: float


def rows(state: str, update: str, seed: int) -> list[Row]:
    """Return what came out of a condition's updates."""
    federation: dict[str, Any] = {"name": "a", "clients": IMAGES, **UPDATES[update]}
    made = fedaudit.simulate(
        {
            "seed": seed,
            "data": {"name": "digits"},
            "model": {"name": "lenet", **SIDES[state]},
            "federations": [federation],
            "attacks": ["invg"],
        },
        progress=False,
    )
    found: list[Row] = []
    for observation in observe(made, fedaudit.ThreatModel()).split():
        if len(found) >= IMAGES * len(NOISES):
            break
        key = observation.single().round, observation.single().client
        inputs, labels = made.truth.inputs[key], made.truth.labels[key]
        message = message_of(observation, inputs, labels)
        prior = prior_of(observation.task_info.example_kind, made.truth.candidates, inputs)
        ceiling = ceiling_of(message, prior)
        for noise in NOISES:
            factor = noise / message.relative
            told = ceiling.spectrum.each(factor).view_as(message.examples).flatten(1).mean(dim=1)
            draws = torch.Generator().manual_seed(seed)
            ends = [estimated(ceiling, factor, start, draws) for start in ("truth", "mean")]
            errors = [(end - message.examples).square().flatten(1).mean(dim=1) for end in ends]
            for i in range(len(message.examples)):
                own = (float(error[i]) for error in errors)
                found.append(Row(f"{state}, {update}", noise, float(told[i]), *own))
    return found


def estimated(ceiling: Ceiling, factor: float, start: str, draws: torch.Generator) -> Tensor:
    """Return the estimate from one update with noise of ``factor`` times the message's."""
    message, prior = ceiling.message, ceiling.prior
    sigma = message.noise * factor
    truth = torch.cat([part.flatten() for part in message.sent(message.examples)]).detach()
    sent = truth + sigma * torch.randn(truth.shape, generator=draws, dtype=truth.dtype)
    mean = prior.mean.view_as(message.examples[0])
    # in coordinates in which the prior is white, x = μ + C^½z
    root = prior.root(torch.eye(len(prior.mean), dtype=torch.float64))
    inverse = torch.linalg.inv(root)
    z = (
        (message.examples - mean).flatten(1) @ inverse
        if start == "truth"
        else torch.zeros(len(message.examples), len(root))
    )
    z = z.double().clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [z], max_iter=STEPS, history_size=50, line_search_fn="strong_wolfe", tolerance_grad=0, tolerance_change=0
    )

    def value() -> Tensor:
        optimiser.zero_grad()
        examples = mean + (z @ root).view_as(message.examples)
        made = torch.cat([part.flatten() for part in message.sent(examples)])
        loss = ((made - sent) / sigma).square().sum() + z.square().sum()
        (z.grad,) = torch.autograd.grad(loss, z)
        return loss.detach()

    optimiser.step(value)
    return mean + (z.detach() @ root).view_as(message.examples)


def decibels(error: Tensor | float) -> float:
    """Return a mean squared error as a PSNR."""
    return -10 * math.log10(max(float(error), 1e-12))


def main() -> None:
    """Measure, and print a line a condition and noise, and what all show together."""
    every: list[Row] = []
    print("condition | noise | images | ceiling, dB | from the truth | from the mean")
    for state, update in itertools.product(SIDES, UPDATES):
        own = rows(state, update, 0)
        every += own
        for noise in NOISES:
            at = [row for row in own if row.noise == noise]
            told = " | ".join(f"{mean([getattr(r, name) for r in at]):.1f}" for name in ENDS)
            print(f"{state}, {update} | {noise:g} | {len(at)} | {told}", flush=True)
    for name in ENDS[1:]:
        rank = spearmanr([r.ceiling for r in every], [getattr(r, name) for r in every]).statistic
        print(f"{name}: rank correlation {rank:.3f} over {len(every)} images and noises")


def mean(errors: Sequence[float]) -> float:
    """Return the PSNR of a mean squared error."""
    return decibels(sum(errors) / len(errors))


if __name__ == "__main__":
    main()
