"""Whether attacks that know what the ceiling assumes follow it: the best estimate, started at the truth and elsewhere.

Updates get even noise of known size; the attack minimises ‖y − F(x)‖²/σ² + (x − μ)ᵀC⁻¹(x − μ), the logarithm of the
posterior, by L-BFGS in coordinates in which it is round at the truth, for it is too steep else: an attacker who knows
more than there is to know. Its error is held against the ceiling's, image by image, all columns of J taken: of digits,
or of CIFAR-10's photographs, where priors are wrong ones, too. And where agic-plus' own objective ends from the truth,
in the conditions of the study ``ceiling/deployment``.

    python -m tools.measure.ceiling
    python -m tools.measure.ceiling DATA
    python -m tools.measure.ceiling DATA deployment
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import Any

import torch
from scipy.stats import spearmanr
from scipy.stats import t as student
from torch import Tensor

import fedaudit
from fedaudit.attacks import ImageFinding
from fedaudit.attacks.inversion.methods import AGICPlus
from fedaudit.ceiling import Ceiling, Message, Prior, message_of, prior_of
from fedaudit.ceiling.derivative import Derivative
from fedaudit.ceiling.spectrum import exact
from fedaudit.transcript.observation import Observation, observe
from fedaudit_lab.studies.spec import expand, load_study

DIGITS: dict[str, Any] = {"name": "digits"}
OF_DIGITS: dict[str, Any] = {
    "untrained": {"name": "lenet"},
    "trained": {"name": "lenet", "training": {"epochs": 10}},
}
PHOTOGRAPHS: dict[str, Any] = {"name": "cifar10", "split": "test", "image_size": 16}
OF_PHOTOGRAPHS: dict[str, Any] = {  # LeNet is smooth, and the other jumps where a ReLU switches
    "LeNet, trained": {"name": "lenet", "training": {"epochs": 8}},
    "convnet-small, trained": {
        "name": "convnet-small",
        "initialisation": "default",
        "batch_norm": "eval",
        "training": {"epochs": 8},
    },
}
STARTS = ("truth", "near", "mean")
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
IMAGES = 8  # a condition, at least
STEPS = {"truth": 100, "near": 100, "mean": 400}
OF_CLIENTS = 2  # of a victim of the study


@dataclass(frozen=True)
class Row:
    """One image at one noise: mean squared errors."""

    condition: str
    noise: float
    ceiling: float
    truth: float
    near: float
    mean: float


def updates(made: fedaudit.Recording) -> Iterator[tuple[Observation, Message, Prior]]:
    """Give a federation's updates, with the prior by held-out examples."""
    for observation in observe(made, fedaudit.ThreatModel(knows_labels=True)).split():
        key = observation.single().round, observation.single().client
        inputs, labels = made.truth.inputs[key], made.truth.labels[key]
        prior = prior_of(observation.task_info.example_kind, made.truth.candidates, inputs)
        yield observation, message_of(observation, inputs, labels), prior


class Best:
    """The best estimate of one update's examples near the truth."""

    def __init__(self, message: Message, prior: Prior, gram: Tensor | None = None) -> None:
        self.message, self.prior = message, prior
        examples = message.examples
        self.gram = Derivative(message.sent, examples, 1 / message.noise).gram() if gram is None else gram
        one = prior.root(torch.eye(examples[0].numel(), dtype=torch.float64))
        self.root = torch.block_diag(*[one] * len(examples))
        self.values, self.vectors = torch.linalg.eigh(self.root @ self.gram @ self.root)
        self.values = self.values.clamp(min=0)
        spectrum = exact(self.gram, self.root, torch.Generator())
        self.ceiling = Ceiling(message, prior, spectrum, exact=True)

    def told(self, noise: float) -> Tensor:
        """Return the ceiling's error of each example, (k,)."""
        each = self.ceiling.spectrum.each(noise / self.message.relative)
        return each.view_as(self.message.examples).flatten(1).mean(dim=1)

    def end(self, noise: float, start: str, seed: int) -> Tensor:
        """Return the error of each example, (k,), from an update with noise of that length beside its own.

        ``start``: the truth, a draw near it from what the ceiling leaves open, or the mean of other examples.
        """
        message, factor = self.message, noise / self.message.relative
        sigma, true = message.noise * factor, message.examples
        truth = torch.cat([part.flatten() for part in message.sent(true)]).detach()
        draws = torch.Generator().manual_seed(seed)
        sent = truth + sigma * torch.randn(truth.shape, generator=draws, dtype=truth.dtype)
        mean = self.prior.mean.view_as(true[0])
        narrow = (1 + self.values / factor**2).rsqrt()
        if start == "mean":  # far from the truth, what is round there leads astray
            narrow = torch.ones_like(narrow)
        w = torch.zeros(true.numel(), dtype=torch.float64)
        if start != "mean":
            w = self.vectors.T @ torch.linalg.solve(self.root, (true - mean).flatten()) / narrow
        if start == "near":
            w = w + torch.randn(w.shape, generator=draws, dtype=w.dtype)
        w.requires_grad_()
        optimiser = torch.optim.LBFGS(
            [w],
            max_iter=STEPS[start],
            history_size=50,
            line_search_fn="strong_wolfe",
            tolerance_grad=0,
            tolerance_change=0,
        )

        def examples() -> tuple[Tensor, Tensor]:
            own = narrow * w
            return own, mean + (self.root @ (self.vectors @ own)).view_as(true)

        def value() -> Tensor:
            optimiser.zero_grad()
            own, there = examples()
            made = torch.cat([part.flatten() for part in message.sent(there)])
            loss = ((made - sent) / sigma).square().sum() + own.square().sum()
            (w.grad,) = torch.autograd.grad(loss, w)
            return loss.detach()

        optimiser.step(value)
        return (examples()[1].detach() - true).square().flatten(1).mean(dim=1)


def rows(models: Mapping[str, Any], data: Path | None, state: str, update: str) -> list[Row]:
    """Return what came out of a condition's updates."""
    federation: dict[str, Any] = {"name": "a", "clients": IMAGES, **UPDATES[update]}
    scenario = {
        "seed": 0,
        "data": DIGITS if data is None else PHOTOGRAPHS,
        "model": models[state],
        "federations": [federation],
        "attacks": ["invg"],
    }
    made = fedaudit.simulate(scenario, data_dir=data, progress=False)
    found: list[Row] = []
    for _, message, prior in updates(made):
        if len(found) >= IMAGES * len(NOISES):
            break
        best = Best(message, prior)
        for noise in NOISES:
            columns = best.told(noise), *(best.end(noise, start, 0) for start in STARTS)
            found += [Row(f"{state}, {update}", noise, *map(float, own)) for own in zip(*columns, strict=True)]
        if data is not None and len(found) == len(message.examples) * len(NOISES):
            _tell_wrong_priors(best, made.truth.candidates, data, f"{state}, {update}")
    return found


def _tell_wrong_priors(best: Best, others: Tensor, data: Path, where: str) -> None:
    """Print what priors tell that aren't of such images: of street signs, of 20, of pixels alone, half as wide."""
    right = best.prior
    signs = fedaudit.load_dataset("gtsrb", data_dir=data, limit=1000, image_size=16).train.inputs
    priors = {
        "street signs": Prior.of(signs[:1000]),
        "20 images": Prior.of(others[:20]),
        "pixels by themselves": Prior.even(right.mean, right.variance**0.5, ""),
        "half as wide": Prior(right.mean, right.directions, right.deviations / 2, right.rest / 2),
    }
    for name, prior in priors.items():
        wrong = Best(best.message, prior, best.gram)
        for noise in NOISES:
            told = [wrong.told(noise), best.told(noise), wrong.end(noise, "near", 0), best.end(noise, "near", 0)]
            shown = " | ".join(f"{decibels(float(one.mean())):.1f}" for one in told)
            print(f"  prior of {name} | {where} | {noise:g} | {shown}", flush=True)


class FromTruth(AGICPlus):
    """agic-plus as one descent that begins at the truth, to see where it ends."""

    name = "from-truth"


def deployment(data: Path) -> None:
    """Print where agic-plus' objective ends from the truth, of one network of each victim of the study."""
    print("victim | update | from the truth, dB")
    for trial in expand(load_study("ceiling/deployment"), "cpu"):
        if trial.repetition:
            continue
        made = fedaudit.simulate(trial.scenario, data_dir=data, progress=False)
        for number, (observation, message, _) in enumerate(itertools.islice(updates(made), OF_CLIENTS)):
            info = observation.task_info
            seen = info.normalise(message.examples.float())[message.uses]
            attack = FromTruth(moving=0.0, calibrate=False, iterations=1000)
            object.__setattr__(attack, "initial", lambda *_, seen=seen: [seen.clone()])
            finding = attack(observation, seed=0)
            assert isinstance(finding, ImageFinding)
            images = finding.images
            error = (images[: len(seen)].double() - message.examples[message.uses][: len(images)]).square().mean()
            print(f"{trial.point['victim']} | {number} | {decibels(float(error)):.1f}", flush=True)


def decibels(error: float) -> float:
    """Return a mean squared error as a PSNR."""
    return -10 * math.log10(max(error, 1e-12))


def main() -> None:
    """Measure, and print a line a condition and noise, and what all show together."""
    data = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if data is not None and "deployment" in sys.argv:
        deployment(data)
        return
    every: list[Row] = []
    models = OF_DIGITS if data is None else OF_PHOTOGRAPHS
    print("condition | noise | images | ceiling, dB | from the truth | from near it | from the mean | above by")
    for state, update in itertools.product(models, UPDATES):
        own = rows(models, data, state, update)
        every += own
        for noise in NOISES:
            at = [row for row in own if row.noise == noise]
            told = [mean([getattr(r, name) for r in at]) for name in ("ceiling", *STARTS)]
            more = " | ".join(above(at, start) for start in STARTS)
            shown = " | ".join(f"{t:.1f}" for t in told)
            print(f"{state}, {update} | {noise:g} | {len(at)} | {shown} | {more}", flush=True)
    for name in STARTS:
        rank = spearmanr([r.ceiling for r in every], [getattr(r, name) for r in every]).statistic
        print(f"from {name}: rank correlation {rank:.3f} over {len(every)} images and noises")


def above(at: Sequence[Row], start: str) -> str:
    """Return by how many dB images are above their ceiling, on average, with Student's 95 % interval over images."""
    apart = [decibels(getattr(row, start)) - decibels(row.ceiling) for row in at]
    middle = sum(apart) / len(apart)
    reach = float(student.ppf(0.975, len(apart) - 1)) * stdev(apart) / len(apart) ** 0.5
    return f"{middle:+.1f} ± {reach:.1f}"


def mean(errors: Sequence[float]) -> float:
    """Return the PSNR of a mean squared error."""
    return decibels(sum(errors) / len(errors))


if __name__ == "__main__":
    main()
