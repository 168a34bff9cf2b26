"""What an attacker believes of any natural image."""

from __future__ import annotations

import torch
from torch import Tensor


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
