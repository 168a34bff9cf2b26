"""The denoiser of agic-plus: what it removes, and how it pulls."""

from __future__ import annotations

import pytest
import torch

from fedaudit.attacks.inversion.priors import FADING, NOISE, looks_like_photographs, trained_denoiser
from fedaudit.data import load_dataset


def _psnr(images: torch.Tensor, true: torch.Tensor) -> float:
    return float(-10 * (images - true).square().flatten(1).mean(1).log10().mean())


@pytest.fixture(scope="module")
def photographs() -> torch.Tensor:
    return load_dataset("photos").test.inputs[::5][:48]


@pytest.mark.parametrize(("strength", "gain"), [(0.03, 1.5), (0.05, 3.0), (0.1, 5.0), (0.2, 7.0)])
def test_removes_noise_from_photographs_that_it_never_saw(
    photographs: torch.Tensor, strength: float, gain: float
) -> None:
    noisy = photographs + strength * torch.randn(photographs.shape, generator=torch.Generator().manual_seed(0))
    clean = trained_denoiser()(noisy, torch.tensor([strength]))
    assert _psnr(clean, photographs) > _psnr(noisy, photographs) + gain


def test_pulls_towards_the_denoised_image_ever_less(photographs: torch.Tensor) -> None:
    """By as much as the denoised image is away, over the number of pixels, whatever the normalisation."""
    mean, std = torch.tensor([0.4, 0.5, 0.3]).view(1, 3, 1, 1), torch.tensor([0.2, 0.3, 0.25]).view(1, 3, 1, 1)
    pixels = photographs[:2] + 0.1 * torch.randn(photographs[:2].shape, generator=torch.Generator().manual_seed(0))
    images, pixel_range = (pixels - mean) / std, ((0 - mean) / std, (1 - mean) / std)
    prior = looks_like_photographs(pixel_range, evaluations=3)
    for done in (0, 1 / 3, 2 / 3, 1, 1):
        value, gradient = prior(images)
        strength = torch.tensor([NOISE[0] ** (1 - done) * NOISE[1] ** done])
        wanted = (pixels - trained_denoiser()(pixels, strength)) * FADING**done / pixels.numel()
        assert value == 0
        torch.testing.assert_close(gradient / std, wanted, rtol=1e-3, atol=1e-9)


def test_grey_images_are_pulled_as_grey_photographs() -> None:
    grey = load_dataset("digits").test.inputs[:4]
    pixel_range = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    noisy = grey + 0.15 * torch.randn(grey.shape, generator=torch.Generator().manual_seed(0))
    _, gradient = looks_like_photographs(pixel_range, evaluations=10)(noisy)
    assert gradient.shape == grey.shape
    assert _psnr(noisy - gradient * gradient.numel(), grey) > _psnr(noisy, grey)
