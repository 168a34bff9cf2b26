"""What photographs look like, by a small network that removes noise: regularisation by denoising.

The network has seen no photograph: it was trained on drawn discs and rectangles that hide each other ("dead leaves"),
which have the edges and the scales of natural images (Achddou et al. 2021). So it can't know what an attack looks for.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedaudit.attacks.inversion.objectives import Objective

WEIGHTS = Path(__file__).with_name("denoiser.safetensors")  # written by: python -m tests.measure.train_denoiser
CHANNELS = (1, 3)  # of images that it can judge: grey ones as three channels that are alike
NOISE = (0.08, 0.02)  # standard deviation that is taken away, of pixels in [0, 1]: at first, and in the end
FADING = 0.1  # what the prior weighs in the end, of its weight at first


class Denoiser(nn.Module):
    """Estimates the noise of an image (DnCNN, Zhang et al. 2017), whose strength is given as a channel (FFDNet, 2018).

    Much smaller than theirs: six layers of 32 channels, 39,000 weights.

    Args:
        width: channels of the inner layers.
        depth: layers.
    """

    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(4, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth - 2):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        self.noise = nn.Sequential(*layers, nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, images: Tensor, strength: Tensor) -> Tensor:
        """Return the images without their noise.

        Args:
            images: (n, 3, H, W) in [0, 1], and the noise.
            strength: (n,) or (1,), its standard deviation.
        """
        given = strength.view(-1, 1, 1, 1).expand(len(images), 1, *images.shape[-2:])
        noise: Tensor = self.noise(torch.cat([images, given], dim=1))
        return images - noise


@cache
def trained_denoiser(device: str = "cpu") -> Denoiser:
    """Return the denoiser that comes with fedaudit, on ``device``."""
    network = Denoiser()
    network.load_state_dict({name: tensor.float() for name, tensor in load_file(WEIGHTS).items()})
    network.eval().requires_grad_(False).to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return network


def looks_like_photographs(pixel_range: tuple[Tensor, Tensor], evaluations: int) -> Objective:
    """Return the pull towards the denoised images: x − D(x), over the number of pixels.

    The gradient of regularisation by denoising (RED: Romano, Elad and Milanfar 2017). Departures: its value is left
    out, and zero returned, so that what is compared by the objective is compared by the match alone; D takes away less
    and less noise (``NOISE``, geometrically), and its pull fades (``FADING``), as the images get better.

    Args:
        pixel_range: normalised black and white, (1, C, H, W) each; C is 3, or 1 for grey, which D sees as three
            channels that are alike.
        evaluations: how often the prior will be asked, after which it stays as it is.
    """
    black, white = pixel_range
    asked = 0

    def prior(images: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal asked
        done = min(1.0, asked / evaluations)
        asked += 1
        pixels = (images - black) / (white - black)
        colour = pixels.expand(-1, 3, -1, -1).float()
        strength = colour.new_tensor([NOISE[0] * (NOISE[1] / NOISE[0]) ** done])
        with torch.no_grad():
            clean = trained_denoiser(str(images.device))(colour, strength)
        if pixels.shape[1] == 1:
            clean = clean.mean(dim=1, keepdim=True)
        pull = (pixels - clean.to(pixels.dtype)) / (white - black)
        return images.new_zeros(()), pull * (FADING**done / pixels.numel())

    return prior
