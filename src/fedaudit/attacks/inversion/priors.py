"""What an attacker believes of any natural image."""

from __future__ import annotations

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
