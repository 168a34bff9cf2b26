"""How like an image is to another: MSE, PSNR, SSIM, LPIPS, on pixels in [0, 1]."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedaudit.utils.machine import import_torchvision
from fedaudit.utils.processes import run_tasks

PSNR_CAP = 100.0  # dB; equal images would be infinitely many, which JSON can't hold
_LPIPS_TRUNK = "alexnet-owt-7be5be79.pth"
_SSIM_WINDOW = 11


def mse(a: Tensor, b: Tensor) -> Tensor:
    """Return the (n,) mean squared errors of (n, ...) ``a`` and ``b``."""
    return (a - b).double().square().flatten(1).mean(dim=1)


def psnr(error: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB of mean squared errors on [0, 1]: −10·log10(MSE), at most 100."""
    return (-10 * torch.log10(error.clamp_min(10 ** (-PSNR_CAP / 10)))).clamp_max(PSNR_CAP)


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return the (n,) structural similarities (Wang et al. 2004; 11×11 Gaussian window) of (n, C, H, W) images.

    Images smaller than the window are compared with the largest odd window that fits them.
    """
    values: Tensor = _here_or_apart(_ssim, a, b)
    return values


def _ssim(a: Tensor, b: Tensor) -> Tensor:
    from torchmetrics.functional.image import structural_similarity_index_measure

    window = min(_SSIM_WINDOW, min(a.shape[-2:]) - (1 - min(a.shape[-2:]) % 2))
    values = structural_similarity_index_measure(
        a, b, gaussian_kernel=window == _SSIM_WINDOW, kernel_size=window, data_range=1.0, reduction="none"
    )
    assert isinstance(values, Tensor)
    return values.reshape(-1).double()


def lpips_missing() -> str | None:
    """Return why LPIPS can't be computed here and what to do, or None. Nothing is ever downloaded."""
    if find_spec("torchvision") is None:
        return "LPIPS needs torchvision (its AlexNet trunk): pip install torchvision"
    path = Path(torch.hub.get_dir()) / "checkpoints" / _LPIPS_TRUNK
    if not path.is_file():
        return f"LPIPS needs AlexNet's weights at {path}; put torchvision's {_LPIPS_TRUNK} there"
    reason: str | None = _here_or_apart(_import_error)
    return reason


def _import_error() -> str | None:
    try:
        import_torchvision()
    except Exception as error:  # a build that doesn't fit torch raises what it likes
        return f"LPIPS needs torchvision, which can't be imported: {error}; install the build that fits your torch"
    return None


def _here_or_apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function``, which imports torchmetrics, here; or in a worker, where torchvision doesn't fit torch.

    torchmetrics takes torchvision with it, and making that one importable is nothing to do to a user's process.
    """
    if _torchvision_fits():
        return function(*arguments)
    ((_, result),) = run_tasks(_call, [(function, arguments)], workers=1)
    if isinstance(result, BaseException):
        raise result
    return result


def _call(task: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
    function, arguments = task
    _torchvision_fits()
    return function(*arguments)


@cache
def _torchvision_fits() -> bool:
    try:
        import_torchvision()
    except ImportError:  # none, which torchmetrics bears
        return True
    except Exception:
        return False
    return True


def lpips(a: Tensor, b: Tensor) -> Tensor | None:
    """Return the (n,) LPIPS distances (Zhang et al. 2018, AlexNet) of (n, C, H, W) images; None where missing.

    Grey images are compared as colour images with equal channels; sides below 64 pixels are enlarged to 64, because
    AlexNet's pooling needs it.
    """
    if lpips_missing() is not None:
        return None
    values: Tensor = _here_or_apart(_lpips, a, b)
    return values


def _lpips(a: Tensor, b: Tensor) -> Tensor:
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
