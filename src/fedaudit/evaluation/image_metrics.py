"""How like an image is to another: MSE, PSNR, SSIM, LPIPS, on pixels in [0, 1]; volumes likewise; and signals."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedaudit.utils.errors import BadInput
from fedaudit.utils.machine import import_torchvision

PSNR_CAP = 100.0  # dB; equal images would be infinitely many, which JSON can't hold
_LPIPS_TRUNK = "alexnet-owt-7be5be79.pth"
_SSIM_WINDOW, _SSIM_SIGMA = 11, 1.5
_EVEN = 1e-4  # of a range of 1: what varies less is even
_C1, _C2 = 0.01**2, 0.03**2  # of a range of 1


def mse(a: Tensor, b: Tensor) -> Tensor:
    """Return the (n,) mean squared errors of (n, ...) ``a`` and ``b``."""
    return (a - b).double().square().flatten(1).mean(dim=1)


def psnr(a: Tensor | np.ndarray[Any, Any], b: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """Return the peak signal-to-noise ratio in dB of two images on [0, 1] of any one shape, a scalar, at most 100.

    Raises:
        BadInput: their shapes differ.
    """
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    if a.shape != b.shape:
        raise BadInput(f"psnr compares two images of one shape; these are {tuple(a.shape)} and {tuple(b.shape)}")
    return psnr_from_mse(mse(a[None], b[None])[0])


def psnr_from_mse(error: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB of mean squared errors on [0, 1]: −10·log10(MSE), at most 100."""
    return (-10 * torch.log10(error.clamp_min(10 ** (-PSNR_CAP / 10)))).clamp_max(PSNR_CAP)


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return the (n,) structural similarities (Wang et al. 2004, equation 13) of (n, C, H, W) images.

    As in the authors' code, means, variances and the covariance are over an 11×11 Gaussian window, σ = 1.5, wherever it
    fits into the image: no pixel is made up beyond the border. For smaller images it is the largest odd uniform window
    that fits. For volumes (n, C, D, H, W) it has three axes of the same length.
    """
    side = min(a.shape[2:])
    if side >= _SSIM_WINDOW:
        distance = torch.arange(-(_SSIM_WINDOW // 2), _SSIM_WINDOW // 2 + 1, dtype=a.dtype)
        weights = torch.exp(-torch.pow(distance / _SSIM_SIGMA, 2) / 2)
        weights = weights / weights.sum()
    else:
        width = side - (1 - side % 2)
        weights = torch.ones(width, dtype=a.dtype) / width
    moments = torch.cat((a, b, a * a, b * b, a * b))
    mean_a, mean_b, square_a, square_b, product = _window_means(moments, weights).split(len(a))
    spread = (square_a - mean_a**2).clamp_min(0) + (square_b - mean_b**2).clamp_min(0)
    covariance = product - mean_a * mean_b
    likeness = (2 * mean_a * mean_b + _C1) * (2 * covariance + _C2)
    values: Tensor = likeness / ((mean_a**2 + mean_b**2 + _C1) * (spread + _C2))
    return values.flatten(1).mean(dim=1).double()


def _window_means(x: Tensor, weights: Tensor) -> Tensor:
    """Return the means of (n, C, H, W) or (n, C, D, H, W) over a window, the product of ``weights`` along each axis."""
    channels = x.shape[1]
    if x.ndim == 4:
        uniform = bool((weights == weights[0]).all())
        window = torch.ones(len(weights), len(weights), dtype=x.dtype) / len(weights) ** 2
        window = window if uniform else weights[None].T @ weights[None]
        return torch.nn.functional.conv2d(x, window.expand(channels, 1, *window.shape), groups=channels)
    for axis in range(2, 5):  # one after the other: a window of 11³ would cost forty times as much
        shape = [len(weights) if i == axis else 1 for i in range(2, 5)]
        x = torch.nn.functional.conv3d(x, weights.view(1, 1, *shape).expand(channels, 1, *shape), groups=channels)
    return x


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Return the (n,) Pearson correlations of signals (n, C, T), less each channel's mean, all channels as one.

    A signal that varies by less than a ten-thousandth of its channels' range correlates with others like it alone: 1
    with these, and 0 with all else.
    """
    own, other = ((x.double() - x.double().mean(dim=-1, keepdim=True)).flatten(1) for x in (a, b))
    even = [x.square().mean(dim=1) <= _EVEN**2 for x in (own, other)]
    found = torch.nn.functional.cosine_similarity(own, other, dim=1, eps=1e-12)
    return torch.where(even[0] | even[1], (even[0] & even[1]).double(), found)


def likeness(images: Tensor, true: Tensor, usual: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
    """Return the (n,) SSIM of images or volumes, and the correlation of signals; None for what they aren't.

    Examples of several inputs (n, p) have the correlation of what differs from the ``usual`` one (p,).
    """
    if true.ndim == 2:
        assert usual is not None
        away, apart = (images - usual).double(), (true - usual).double()
        return None, torch.nn.functional.cosine_similarity(away, apart, dim=1, eps=1e-12)
    return (None, correlation(images, true)) if true.ndim == 3 else (ssim(images, true), None)


def lpips_missing() -> str | None:
    """Return why LPIPS can't be computed here and what to do, or None. Nothing is ever downloaded."""
    if find_spec("torchvision") is None:
        return "LPIPS needs torchvision (its AlexNet trunk): pip install torchvision"
    path = Path(torch.hub.get_dir()) / "checkpoints" / _LPIPS_TRUNK
    if not path.is_file():
        return f"LPIPS needs AlexNet's weights at {path}; put torchvision's {_LPIPS_TRUNK} there"
    try:
        import_torchvision()
    except Exception as error:  # a build that doesn't fit torch raises what it likes
        return f"LPIPS needs torchvision, which can't be imported: {error}; install the build that fits your torch"
    return None


def lpips(a: Tensor, b: Tensor) -> Tensor | None:
    """Return the (n,) LPIPS distances (Zhang et al. 2018, AlexNet) of (n, C, H, W) images, grey or colour; else None.

    None, too, where the package is missing. Grey images are compared as colour images with equal channels; sides below
    64 pixels are enlarged to 64, because AlexNet's pooling needs it.
    """
    if lpips_missing() is not None or a.ndim != 4 or a.shape[1] not in (1, 3):
        return None
    a, b = (_for_alexnet(x) for x in (a, b))
    with torch.no_grad():
        values: Tensor = _lpips_network()(a * 2 - 1, b * 2 - 1).reshape(-1).double()
    return values


def _for_alexnet(images: Tensor) -> Tensor:
    images = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images
    size = [max(64, side) for side in images.shape[-2:]]
    return torch.nn.functional.interpolate(images, size=size, mode="bilinear", antialias=False)


@cache
def _lpips_network() -> Any:
    from torchmetrics.image.lpip import _NoTrainLpips  # type: ignore[attr-defined]  # the network behind the metric: values per image

    return _NoTrainLpips(net="alex").eval()
