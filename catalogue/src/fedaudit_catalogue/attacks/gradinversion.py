"""GradInversion: several dummy batches side by side, each pulled towards what they agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedaudit.attacks import register
from fedaudit.attacks.inversion import (
    GradientInversion,
    LabelMethod,
    Objective,
    Prepared,
    Schedule,
    Victim,
)
from fedaudit.utils import Count, NonNegative


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
    inverts = False  # several seeds, which are to differ

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


def image_l2(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean Euclidean norm of an image (Yin et al. 2021, Eq. 6) and its gradient."""
    norms = images.flatten(1).norm(dim=1).clamp_min(1e-12)
    return norms.mean(), images / (norms.view(-1, *[1] * (images.ndim - 1)) * len(images))


def batch_norm_statistics(victim: Victim) -> Objective:
    """Return how far the inputs of BatchNorm layers are from its running statistics (Yin et al. 2021, Eq. 7).

    Σ over layers of ‖mean − running mean‖₂ + ‖variance − running variance‖₂ over the channels.
    """
    layers = {
        name: part
        for name, part in victim.module.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.track_running_stats
    }

    def value(images: Tensor) -> Tensor:
        seen: dict[str, Tensor] = {}
        handles = [
            part.register_forward_pre_hook(lambda _, inputs, name=name: seen.__setitem__(name, inputs[0]))
            for name, part in layers.items()
        ]
        try:
            victim.outputs(images)
        finally:
            for handle in handles:
                handle.remove()
        total = images.new_zeros(())
        for name, inputs in seen.items():
            channels = inputs.transpose(0, 1).flatten(1)
            mean = victim.constants[f"{name}.running_mean" if name else "running_mean"]
            variance = victim.constants[f"{name}.running_var" if name else "running_var"]
            total = total + (channels.mean(dim=1) - mean).norm() + (channels.var(dim=1, correction=0) - variance).norm()
        return total

    return differentiated(value)


def has_running_statistics(victim: Victim) -> bool:
    """Whether BatchNorm's running statistics say anything: there are some, and training has moved them."""
    means = [t for name, t in victim.constants.items() if name.endswith("running_mean")]
    return any(bool(t.any()) for t in means)


def differentiated(value: Callable[[Tensor], Tensor]) -> Objective:
    """Return ``value`` with its gradient by autograd."""

    def prior(images: Tensor) -> tuple[Tensor, Tensor]:
        leaf = images.detach().requires_grad_()
        with torch.enable_grad():
            result = value(leaf)
        (gradient,) = torch.autograd.grad(result, leaf)
        return result.detach(), gradient

    return prior


def registered_mean(group: Tensor, how: str) -> Tensor:
    """Return the mean (C, H, W) of a group (G, C, H, W) of images of the same thing, each aligned to its plain mean.

    Yin et al. 2021 (Section 3.3) align by a pretrained RANSAC-flow network. Here scikit-image does: ``translation`` by
    phase correlation, ``flow`` by dense TV-L1 optical flow, ``none`` not at all.
    """
    mean = group.mean(dim=0)
    if how == "none" or len(group) < 2:
        return mean
    target = mean.mean(dim=0).double().cpu().numpy()
    return torch.stack([_aligned(image, target, how) for image in group]).mean(dim=0)


def _aligned(image: Tensor, target: np.ndarray[tuple[int, int], np.dtype[np.float64]], how: str) -> Tensor:
    from skimage.registration import optical_flow_tvl1, phase_cross_correlation  # imports much

    grey = image.mean(dim=0).double().cpu().numpy()
    if how == "translation":
        shift, _, _ = phase_cross_correlation(target, grey, normalization=None)
        field = [np.full(grey.shape, -s) for s in shift]
    else:
        field = list(optical_flow_tvl1(target, grey, dtype=np.float64))
    return _warped(image, np.stack(field))


def _warped(image: Tensor, field: np.ndarray[tuple[int, int, int], np.dtype[np.float64]]) -> Tensor:
    """Return ``image`` (C, H, W) read at every pixel's place plus ``field`` (rows, columns); edges are repeated."""
    height, width = image.shape[1:]
    rows, columns = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    y = 2 * (rows + field[0]) / max(height - 1, 1) - 1
    x = 2 * (columns + field[1]) / max(width - 1, 1) - 1
    grid = torch.from_numpy(np.stack([x, y], axis=-1)).to(image)
    return nn.functional.grid_sample(image[None], grid[None], padding_mode="border", align_corners=True)[0]
