"""GradInversion: several dummy batches side by side, each pulled towards what they agree on."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fedaudit.attacks.base import register
from fedaudit.attacks.inversion.objectives import Objective
from fedaudit.attacks.inversion.priors import batch_norm_statistics, has_running_statistics, image_l2, registered_mean
from fedaudit.attacks.inversion.template import GradientInversion, Prepared, Schedule
from fedaudit.attacks.labels.inference import LabelMethod
from fedaudit.utils.validation import Count, NonNegative


@register
class GradInversion(GradientInversion):
    """See through Gradients (Yin et al. 2021): layer-wise L2, BatchNorm statistics, and a group that agrees.

    Every seed of the group is a batch of dummy images of its own. All are optimised side by side, and each image is
    pulled towards the registered mean of its place in the group (Eq. 10 and 11). Labels are distinct and sorted, so a
    place stands for the same example in every seed. Departures: scikit-image's registration instead of a pretrained
    RANSAC-flow; the distance has weight 1 and the other terms are scaled to it (the paper: 1e-3, with 1e-4 total
    variation, 1e-6 image norm, 0.1 BatchNorm, 0.01 group); the seed of least distance plus priors is kept. The
    BatchNorm term is left out, with a note, where the running statistics are those of an untrained network.

    Args:
        group: seeds.
        consistency: weight of the pull, times the squared distance per pixel to the registered mean.
        registration: how a group is aligned before its mean is taken: ``none``, ``translation`` or ``flow``.
        register_every: iterations from one registration to the next; the first comes after as many.
        image_norm: weight of the mean norm of an image.
        batch_norm: weight of the distance to BatchNorm's running statistics.
        noise: standard deviation of the noise added in every step, in learning rates.
    """

    name = "gradinversion"
    summary = "layer-wise distance, BatchNorm statistics, several seeds pulled to their registered mean"
    paper = "Yin et al. 2021 (See through Gradients)"
    needs = (
        "images and a classifier",
        "labels without duplicates: given, or inferable from the last fully connected layer",
        "a gradient, or a FedAvg update of a single local step",
        "BatchNorm's running statistics, for one of its terms",
    )
    distance = "layer-l2"
    fedavg = "single-step"
    only_by_labels = True

    schedule: Schedule = "cosine"
    total_variation: NonNegative = 0.1
    clamp: bool = True
    label_inference: LabelMethod = "yin"
    group: Count = 8
    consistency: NonNegative = 1e-2
    registration: Literal["none", "translation", "flow"] = "flow"
    register_every: Count = 100
    image_norm: NonNegative = 1e-3
    batch_norm: NonNegative = 1e-2
    noise: NonNegative = 0.2

    def priors(self, prepared: Prepared) -> list[tuple[float, Objective]]:
        """Add the image norm and, where they mean something, BatchNorm's statistics."""
        priors = [*super().priors(prepared), (self.image_norm, image_l2)]
        if self.batch_norm and has_running_statistics(prepared.victim):
            priors.append((self.batch_norm, batch_norm_statistics(prepared.victim)))
        return priors

    def notes(self, prepared: Prepared) -> list[str]:
        """Say so where BatchNorm has nothing to tell."""
        notes = super().notes(prepared)
        if self.batch_norm and not has_running_statistics(prepared.victim):
            notes.append("no running statistics of a trained BatchNorm: that term is left out")
        if self.registration != "none" and len(prepared.task_info.input_shape) != 3:
            kind = prepared.task_info.example_kind
            notes.append(f"registration is for images: the group of {kind.plural} is pulled to its plain mean")
        return notes

    def optimisation(self) -> dict[str, Any]:
        """Return Adam with noise."""
        return {**super().optimisation(), "noise": self.noise}

    def initial(self, prepared: Prepared, count: int, generator: torch.Generator) -> list[Tensor]:
        """Return (group·count, C, H, W) noise."""
        seeds = [super(GradInversion, self).initial(prepared, count, generator)[0] for _ in range(self.group)]
        return [torch.cat(seeds)]

    def side_by_side(self, objective: Objective, count: int) -> Objective:
        """Return the sum over the seeds, with the pull between them."""
        agreed: list[Tensor] = []
        calls = 0

        def of_group(images: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal calls
            seeds = images.split(count)
            parts = [objective(seed) for seed in seeds]
            value = torch.stack([part[0] for part in parts]).sum()
            gradient = torch.cat([part[1] for part in parts])
            calls += 1
            if self.group > 1 and self.consistency:
                if calls % self.register_every == 0:
                    agreed[:] = [_agreement(torch.stack(seeds), self.registration if images.ndim == 4 else "none")]
                if agreed:
                    away = images - torch.cat([agreed[0]] * self.group)
                    scale = self.consistency / images[0].numel()
                    value = value + scale * away.square().sum()
                    gradient = gradient.add(away, alpha=2 * scale)
            return value, gradient

        return of_group

    def choose(self, images: Tensor, objective: Objective, count: int) -> Tensor:
        """Return the seed of least distance plus priors."""
        values = torch.stack([objective(seed)[0] for seed in images.split(count)])
        return torch.arange(count) + count * int(values.argmin())


def _agreement(seeds: Tensor, registration: str) -> Tensor:
    """Return (n, C, H, W), the registered mean of every place over (group, n, C, H, W)."""
    return torch.stack([registered_mean(place, registration) for place in seeds.transpose(0, 1)])
