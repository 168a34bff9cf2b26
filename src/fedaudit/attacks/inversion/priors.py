"""What an attacker believes of images and of the group they belong to: each a value and its gradient on the images."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from fedaudit.attacks.inversion.objectives import Objective
from fedaudit.attacks.victim import Victim
from fedaudit.task.training import class_logits


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels, vertical plus horizontal.

    Rudin et al. 1992, in the anisotropic form that Geiping et al. 2020 use.

    Args:
        images: (n, C, H, W), H and W at least 2.
    """
    vertical = (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    horizontal = (images[..., 1:] - images[..., :-1]).abs().mean()
    return vertical + horizontal


def total_variation_gradient(images: Tensor) -> Tensor:
    """Return the gradient of :func:`total_variation` (zero where neighbours are equal, as autograd's), same shape.

    In closed form: this is in the hot loop.
    """
    vertical = (images[..., 1:, :] - images[..., :-1, :]).sign_()
    horizontal = (images[..., 1:] - images[..., :-1]).sign_()
    vertical /= vertical.numel()
    horizontal /= horizontal.numel()
    gradient = torch.zeros_like(images)
    gradient[..., 1:, :] += vertical
    gradient[..., :-1, :] -= vertical
    gradient[..., 1:] += horizontal
    gradient[..., :-1] -= horizontal
    return gradient


def smoothness(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return :func:`total_variation` and its gradient."""
    return total_variation(images), total_variation_gradient(images)


def image_l2(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean Euclidean norm of an image (Yin et al. 2021, Eq. 6) and its gradient."""
    norms = images.flatten(1).norm(dim=1).clamp_min(1e-12)
    return norms.mean(), images / (norms.view(-1, 1, 1, 1) * len(images))


def outside_range(pixel_range: tuple[Tensor, Tensor]) -> Objective:
    """Return the squared distance to the valid pixel range: clipping (Geng et al. 2021).

    Args:
        pixel_range: normalised black and white, (1, C, H, W) each.
    """

    def prior(images: Tensor) -> tuple[Tensor, Tensor]:
        beyond = images - images.clamp(*pixel_range)
        return beyond.square().sum(), 2 * beyond

    return prior


def off_scale(pixel_range: tuple[Tensor, Tensor]) -> Objective:
    """Return the squared distance of every image to itself scaled to fill the pixel range: scaling (Geng et al. 2021).

    The scaled image is taken as constant, so that the gradient pulls towards it.

    Args:
        pixel_range: normalised black and white, (1, C, H, W) each.
    """
    black, white = pixel_range

    def prior(images: Tensor) -> tuple[Tensor, Tensor]:
        pixels = (images - black) / (white - black)
        least, most = pixels.amin((1, 2, 3), keepdim=True), pixels.amax((1, 2, 3), keepdim=True)
        scaled = (pixels - least) / (most - least).clamp_min(1e-6)
        away = images - (black + scaled * (white - black))
        return away.square().sum(), 2 * away

    return prior


def label_regulariser(victim: Victim, labels: Tensor) -> Objective:
    """Return ‖softmax(F(x)) − y‖² over the batch: CPL's label term (Wei et al. 2020, Algorithm 1).

    Args:
        victim: the model.
        labels: (n,) that the images shall have.
    """

    def value(images: Tensor) -> Tensor:
        outputs = class_logits(victim.outputs(images)).softmax(dim=1)
        return (outputs - nn.functional.one_hot(labels, outputs.shape[1])).square().sum()

    return differentiated(value)


def batch_norm_statistics(victim: Victim) -> Objective:
    """Return how far the images' statistics are from BatchNorm's running ones (Yin et al. 2021, Eq. 7).

    Σ over BatchNorm layers of ‖mean − running mean‖₂ + ‖variance − running variance‖₂ over the channels of
    the layer's input.

    Args:
        victim: the model, with running statistics among its constants.
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
    """Return the mean of a group of images of the same thing, each aligned to the group's plain mean beforehand.

    Yin et al. 2021 (Section 3.3) align by a pretrained RANSAC-flow network. Here scikit-image does:
    ``translation`` by phase correlation, ``flow`` by dense TV-L1 optical flow, ``none`` not at all.

    Args:
        group: (G, C, H, W), G images of the same thing.
        how: none, translation or flow.

    Returns:
        (C, H, W).
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
