"""What an attacker believes of images: each a value and its gradient on the images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import pad, unfold

from fedaudit.attacks.analytic.sparse_columns import low_rank
from fedaudit.attacks.inversion.objectives import Objective
from fedaudit.attacks.victim import Victim
from fedaudit.models import Layer
from fedaudit.utils.seeds import generator


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring elements, summed over the axes but those of length 1.

    Rudin et al. 1992, in the anisotropic form that Geiping et al. 2020 use.
    """
    return sum((difference.abs().mean() for _, difference in _differences(images)), images.new_zeros(()))


def _differences(images: Tensor) -> list[tuple[int, Tensor]]:
    """Return, for each axis beside examples and channels that is longer than 1, the differences of neighbours."""
    lengths = [(axis, images.shape[axis] - 1) for axis in range(2, images.ndim)]
    return [(axis, images.narrow(axis, 1, n) - images.narrow(axis, 0, n)) for axis, n in lengths if n]


def total_variation_gradient(images: Tensor) -> Tensor:
    """Return :func:`total_variation`'s gradient in closed form, for the hot loop; zero where neighbours are equal."""
    gradient = torch.zeros_like(images)
    for axis, difference in _differences(images):
        slope = difference.sign_() / difference.numel()
        gradient.narrow(axis, 1, slope.shape[axis]).add_(slope)
        gradient.narrow(axis, 0, slope.shape[axis]).sub_(slope)
    return gradient


def smoothness(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return :func:`total_variation` and its gradient."""
    return total_variation(images), total_variation_gradient(images)


def fading_smoothness(evaluations: int) -> Objective:
    """Return :func:`smoothness` whose pull fades to a tenth (``FADING``), and a tenth of its value: strong early.

    A trained network needs much of it to get away from noise, and in the end it costs the edges. The value doesn't
    fade, so that one measure compares objectives all the way.
    """
    asked = 0

    def prior(images: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal asked
        share = FADING ** min(1.0, asked / evaluations)
        asked += 1
        value, gradient = smoothness(images)
        return FADING * value, share * gradient

    return prior


WEIGHTS = Path(__file__).with_name("denoiser.safetensors")  # written by: python -m tools.measure.train_denoiser
CHANNELS = (1, 3)  # of images that it can judge: grey ones as three channels that are alike
NOISE = (0.08, 0.02)  # standard deviation that is taken away, of pixels in [0, 1]: at first, and in the end
FADING = 0.1  # what a prior that fades weighs in the end, of its weight at first


class Denoiser(nn.Module):
    """Estimates the noise of an image (DnCNN, Zhang et al. 2017), whose strength is given as a channel (FFDNet, 2018).

    Much smaller than theirs: six layers of 32 channels, 39,000 weights. It has seen no photograph, so it can't know
    what an attack looks for: it was trained on drawn discs and rectangles that hide each other ("dead leaves"), which
    have the edges and the scales of natural images (Achddou et al. 2021).
    """

    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(4, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth - 2):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        self.noise = nn.Sequential(*layers, nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, images: Tensor, strength: Tensor) -> Tensor:
        """Return (n, 3, H, W) images in [0, 1] without their noise, of standard deviation ``strength`` (n,) or (1,)."""
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

    The gradient of regularisation by denoising (RED: Romano, Elad and Milanfar 2017). Departures: it returns zero for
    its value, so that the match alone decides where objectives are compared; D takes away less and less noise
    (``NOISE``, geometrically), and its pull fades (``FADING``), as the images get better.

    D is of two dimensions and 3 channels: it sees a volume's (H, W) slices as images, and grey as 3 channels alike.
    """
    black, white = pixel_range
    asked = 0

    def prior(images: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal asked
        done = min(1.0, asked / evaluations)
        asked += 1
        pixels = (images - black) / (white - black)
        slices = pixels.transpose(1, 2).flatten(0, 1) if pixels.ndim == 5 else pixels
        colour = slices.expand(-1, 3, -1, -1).float()
        strength = colour.new_tensor([NOISE[0] * (NOISE[1] / NOISE[0]) ** done])
        with torch.no_grad():
            clean = trained_denoiser(str(images.device))(colour, strength)
        if pixels.shape[1] == 1:
            clean = clean.mean(dim=1, keepdim=True)
        if pixels.ndim == 5:
            clean = clean.unflatten(0, (len(pixels), -1)).transpose(1, 2)
        pull = (pixels - clean.to(pixels.dtype)) / (white - black)
        return images.new_zeros(()), pull * (FADING**done / pixels.numel())

    return prior


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MOST_PATCHES = 1024  # of a layer: each is compared with every other
_SHARE = 0.5  # of the numbers of a patch, the most patches whose span still says much
_FLOAT32 = 1e-6  # relative size of a singular value that may be rounding
_FOREIGN = 1e-3  # share of G's energy, the most that may lie outside as many directions as there are patches
_WEAK = 0.03  # what the prior counts where it doesn't find images by itself
_RIDGE = 1e-4  # of a patch's mean square: keeps patches that are nearly alike from being told apart by rounding


@dataclass(frozen=True)
class Subspace:
    """What one layer's gradient G says of its patches, whatever the loss and the layers above.

    The gradient of a convolution's filters is a sum over images and positions, G = Σ δ·pᵀ: of the patch p that the
    filters see there, times the gradient δ on their output. So G's rows are sums of patches; and where there are no
    more patches than filters, the patches are sums of G's rows, too. A linear layer's inputs are its patches. Of a
    first layer this takes batches of rows apart (Kariyappa et al. 2023, Cocktail Party; Dimitrov et al. 2024, SPEAR),
    and of a transformer's tokens (Petrov et al. 2024, DAGER). Here, and this is our own, it is a prior on images for
    all layers of a network at once, with positions in the part of examples.

    Attributes:
        rows: (r, d) G's right singular vectors, each as long as the root of its singular value; together of length one.
        basis: (r, d) the same vectors of length one where every patch lies in their span, else None.
    """

    module: nn.Module
    rows: Tensor
    basis: Tensor | None


def subspaces(
    victim: Victim, layers: Sequence[Layer], gradient: Mapping[str, Tensor], images: Tensor, *, defended: bool = False
) -> dict[str, Subspace]:
    """Return what the gradient of every layer says of its patches, by the layer's name, where it says something.

    A layer is left out if its patches are more than half as many as they have numbers, or if its gradient is no product
    of so many: with noise, sparse, or from local steps between which the model moved. If the update was ``defended``,
    so are layers with no more filters than patches: their rank can't tell.
    """
    modules = {layer.name: victim.module.get_submodule(layer.name) for layer in layers}
    modules = {name: part for name, part in modules.items() if f"{name}.weight" in gradient and _is_plain(part)}
    with torch.no_grad(), _positions(modules) as seen:
        victim.outputs(images)
    found = {}
    for name, count in seen.items():
        own = gradient[f"{name}.weight"].flatten(1)
        one = None if defended and count >= len(own) else _subspace(modules[name], own, count)
        if one is not None:
            found[name] = one
    return found


def telling(known: Mapping[str, Subspace], count: int) -> tuple[dict[str, Subspace], float]:
    """Return the layers to go by, and how much they count beside a cosine of gradients.

    For a single image, where the gradients of at least half of the layers span all of their patches, these layers, with
    weight 1: they find it by themselves. Else all, with 0.03: more leads astray, and in batches patches of different
    images change places (lab/docs/results/agic-plus).
    """
    based = {name: one for name, one in known.items() if one.basis is not None}
    return (based, 1.0) if count == 1 and 2 * len(based) >= len(known) else (dict(known), _WEAK)


def in_subspaces(victim: Victim, known: Mapping[str, Subspace]) -> Objective:
    """Return how far the images' patches and the gradients' rows are from each other's span, the mean over layers.

    With A the (N, d) patches of a layer, R its ``rows`` and V its ``basis``, this is

        (1 − tr(R Aᵀ(AAᵀ + ε)⁻¹A Rᵀ)) + (1 − ‖AVᵀ‖²/‖A‖²),

    the first term being what of the gradient no sum of patches explains, whatever the gradients δ on the outputs; the
    second, where there is a basis, what of the patches lies outside of it. Both are between 0 and 1, and for the true
    images 0, but for the ridge ε = 1e-4·‖A‖²/N.
    """
    modules = {name: one.module for name, one in known.items()}

    def prior(images: Tensor) -> tuple[Tensor, Tensor]:
        leaf = images.detach().requires_grad_()
        with torch.enable_grad(), _patches(modules) as seen:
            victim.outputs(leaf)
        total = images.new_zeros(())
        slopes: list[Tensor] = []
        with torch.no_grad():
            for name, calls in seen.items():
                value, slope = _distance(known[name], _joined(calls))
                total = total + value
                slopes += slope.split([len(one) for one in calls])
        patches = [one for calls in seen.values() for one in calls]
        (gradient,) = torch.autograd.grad(patches, leaf, slopes)
        return total / len(known), gradient / len(known)

    return prior


def _distance(known: Subspace, patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's part of :func:`in_subspaces`, of its (N, d) patches A, and the gradient on them.

    With Z = (AAᵀ + ε)⁻¹ARᵀ the gradient of the first term is −2·(ZR − ZZᵀA − 1e-4/N·‖Z‖²·A). Patches that have no such
    inverse, all zero or no numbers, explain nothing and give no gradient.
    """
    count = len(patches)
    products = patches @ patches.T
    energy = products.diagonal().sum() + torch.finfo(products.dtype).tiny
    ridge = _RIDGE / count
    products.diagonal().add_(ridge * energy)
    found = patches @ known.rows.T
    factor, failed = torch.linalg.cholesky_ex(products)
    if bool(failed):
        return patches.new_tensor(1.0 if known.basis is None else 2.0), torch.zeros_like(patches)
    solved = torch.cholesky_solve(found, factor)
    value = 1 - (found * solved).sum()
    slope = solved @ (solved.T @ patches - known.rows) + ridge * solved.square().sum() * patches
    if known.basis is not None:
        inside = patches @ known.basis.T
        share = inside.square().sum() / energy
        value = value + 1 - share
        slope = slope + (share * patches - inside @ known.basis) / energy
    return value, 2 * slope


def _is_plain(module: nn.Module) -> bool:
    """Whether a layer is one whose patches are known here."""
    if isinstance(module, _CONVOLUTIONS):
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return isinstance(module, nn.Linear)


@contextmanager
def _positions(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, int]]:
    """Count the patches that each module sees in all of its calls, in the order of the first: its outputs' places."""
    seen: dict[str, int] = {}

    def note(name: str, module: nn.Module, output: Tensor) -> None:
        axis = 1 if isinstance(module, _CONVOLUTIONS) else -1
        seen[name] = seen.get(name, 0) + output.numel() // output.shape[axis]

    with ExitStack() as stack:
        for name, module in modules.items():
            handle = module.register_forward_hook(lambda part, _, output, name=name: note(name, part, output))
            stack.callback(handle.remove)
        yield seen


@contextmanager
def _patches(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Note the (N, d) patches that each module sees whenever it is called."""
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        own = patches_seen(module, inputs[0]) if isinstance(module, _CONVOLUTIONS) else inputs[0]
        seen.setdefault(name, []).append(own.reshape(-1, own.shape[-1]))

    with ExitStack() as stack:
        for name, module in modules.items():
            handle = module.register_forward_pre_hook(lambda part, inputs, name=name: note(name, part, inputs))
            stack.callback(handle.remove)
        yield seen


def patches_seen(convolution: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """Return (n, positions, C·kernel): patches of ``x`` that filters see, in their order; zero padding, no groups."""
    size, padding = convolution.kernel_size, convolution.padding
    assert not isinstance(padding, str)  # see _is_plain
    if isinstance(convolution, nn.Conv2d):
        return unfold(x, size, convolution.dilation, padding, convolution.stride).transpose(1, 2)
    x = pad(x, [n for n in reversed(padding) for _ in range(2)])
    for axis, (n, step, apart) in enumerate(zip(size, convolution.stride, convolution.dilation, strict=True), start=2):
        x = x.unfold(axis, apart * (n - 1) + 1, step)[..., ::apart]
    axes = len(size)
    patches = x.permute(0, *range(2, 2 + axes), 1, *range(2 + axes, 2 + 2 * axes))
    return patches.reshape(len(x), -1, x.shape[1] * prod(size))


def _joined(calls: list[Tensor]) -> Tensor:
    return calls[0] if len(calls) == 1 else torch.cat(calls)


def _subspace(module: nn.Module, gradient: Tensor, count: int) -> Subspace | None:
    """Return what the (filters, d) gradient says of ``count`` patches, None if it says little or is no such product."""
    if count > min(_SHARE * gradient.shape[1], _MOST_PATCHES) or not gradient.any():
        return None
    parts = low_rank(gradient.double().cpu(), count, generator(0, "subspace"))
    energy = float(gradient.double().square().sum())
    if 1 - float(parts.singular.square().sum()) / energy > _FOREIGN:
        return None
    kept = parts.singular > _FLOAT32 * parts.singular[0]
    singular, right = parts.singular[kept], parts.right[kept]
    rows = (singular.sqrt()[:, None] * right / singular.sum().sqrt()).to(gradient)
    return Subspace(module, rows, right.to(gradient) if len(right) == count else None)
