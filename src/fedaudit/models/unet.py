"""The U-Net: a class for each pixel or voxel (Ronneberger et al. 2015; of volumes: Çiçek et al. 2016)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedaudit.models.convnet import BATCH_NORM_OF, CONV_OF
from fedaudit.models.families import MODELS

_POOL = {2: nn.MaxPool2d, 3: nn.MaxPool3d}
_UP = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_LEVELS = 4  # of pooling


def _double(dims: int, inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions of 3, each with BatchNorm and ReLU, that keep the resolution."""
    layers = nn.Sequential()
    for i, channels in enumerate((inputs, outputs), start=1):
        layers.add_module(f"conv{i}", CONV_OF[dims](channels, outputs, 3, padding=1))
        layers.add_module(f"bn{i}", BATCH_NORM_OF[dims](outputs))
        layers.add_module(f"relu{i}", nn.ReLU())
    return layers


class UNet(nn.Module):
    """Four levels down by max-pooling, four up by transposed convolutions, each joined to its counterpart on the way.

    Args:
        dims: axes beside the channels: 2 or 3.
        width: channels of the first level; every level below has twice as many.
    """

    def __init__(self, dims: int, channels: int, outputs: int, width: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(_LEVELS + 1)]
        self.down = nn.ModuleList(_double(dims, a, b) for a, b in zip([channels, *widths[:-1]], widths, strict=True))
        self.pool = _POOL[dims](2)
        self.raise_ = nn.ModuleList(_UP[dims](2 * w, w, 2, stride=2) for w in widths[-2::-1])
        self.up = nn.ModuleList(_double(dims, 2 * w, w) for w in widths[-2::-1])
        self.head = CONV_OF[dims](width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, *spatial) -> logits (N, outputs, *spatial)."""
        passed: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            passed.append(x)
        passed.pop()
        for widen, block in zip(self.raise_, self.up, strict=True):
            across = passed.pop()
            x = block(torch.cat([across, widen(x, output_size=across.shape[2:])], dim=1))
        logits: Tensor = self.head(x)
        return logits


@MODELS.register(
    "unet",
    "U-Net with BatchNorm: a class for each pixel or voxel, four levels of 32 to 512 channels",
    input=("image", "volume"),
    min_size=16,
    width=32,
    paper="Ronneberger et al. 2015, U-Net (MICCAI); of volumes: Çiçek et al. 2016, 3D U-Net (MICCAI)",
)
def unet(input_shape: tuple[int, ...], outputs: int, w: int) -> nn.Module:
    """Return the U-Net of as many axes as an example has: w to 16w channels, a map of the example's own size.

    Departures: convolutions are padded, so that the map is as large as the example; w is 32 by default, half of the
    paper's. Of volumes it has the levels and channels of the 2-D network, whereas Çiçek et al. have one level less and
    double the channels before they pool.
    """
    return UNet(len(input_shape) - 1, input_shape[0], outputs, w)
