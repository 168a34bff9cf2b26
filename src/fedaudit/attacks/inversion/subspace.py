"""The subspace that a layer's inputs span, which its gradient gives away whatever the loss and the layers above.

The gradient of a convolution's filters is a sum over images and positions, G = Σ δ·pᵀ: of the patch p that the filters
see there, times the gradient δ on their output. So G's rows are sums of patches; and where there are no more patches
than filters, the patches are sums of G's rows, too. A linear layer's inputs are its patches. Of a first layer this
takes batches of rows apart (Kariyappa et al. 2023, Cocktail Party; Dimitrov et al. 2024, SPEAR), and of a transformer's
tokens (Petrov et al. 2024, DAGER). Here, and this is our own, it is a prior on images for all layers of a network at
once, with positions in the part of examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from fedaudit.attacks.analytic.sparse_columns import low_rank
from fedaudit.attacks.inversion.objectives import Objective
from fedaudit.attacks.victim import Victim
from fedaudit.models import Layer
from fedaudit.utils.seeds import generator

_MOST_PATCHES = 1024  # of a layer: each is compared with every other
_SHARE = 0.5  # of the numbers of a patch, the most patches whose span still says much
_FLOAT32 = 1e-6  # relative size of a singular value that may be rounding
_FOREIGN = 1e-3  # share of G's energy, the most that may lie outside as many directions as there are patches
_WEAK = 0.03  # what the prior counts where it doesn't find images by itself
_RIDGE = 1e-4  # of a patch's mean square: keeps patches that are nearly alike from being told apart by rounding


@dataclass(frozen=True)
class Subspace:
    """What one layer's gradient G says of its patches.

    Attributes:
        module: the layer.
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

    A layer is left out if its patches are more than half as many as they have numbers, and if its gradient is no
    product of so many patches: with noise, sparse, or from local steps between which the model moved.

    Args:
        victim: the model.
        layers: of it.
        gradient: the observed one, by parameter name.
        images: (n, C, H, W), as many as were used for it, of any values.
        defended: whether the update was changed before it was sent: layers whose rank can't tell, because they have
            no more filters than patches, are left out, too.
    """
    modules = {layer.name: victim.module.get_submodule(layer.name) for layer in layers}
    modules = {name: part for name, part in modules.items() if f"{name}.weight" in gradient and _is_plain(part)}
    with torch.no_grad(), _patches(modules) as seen:
        victim.outputs(images)
    found = {}
    for name in seen:
        own, count = gradient[f"{name}.weight"].flatten(1), len(_joined(seen[name]))
        one = None if defended and count >= len(own) else _subspace(modules[name], own, count)
        if one is not None:
            found[name] = one
    return found


def telling(known: Mapping[str, Subspace], count: int) -> tuple[dict[str, Subspace], float]:
    """Return the layers to go by, and how much they count beside a cosine of gradients.

    Of a single image, where the gradients of at least half of the layers span all of their patches, these layers, with
    weight 1: they find it by themselves. Else all, with 0.03: more leads astray, and in batches patches of different
    images change places (docs/results/agic-plus).

    Args:
        known: what :func:`subspaces` found.
        count: images in the batch.
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

    Args:
        victim: the model.
        known: of its layers, by name; at least one.
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
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return isinstance(module, nn.Linear)


@contextmanager
def _patches(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Note the (N, d) patches that each module sees whenever it is called."""
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        own = inputs[0]
        if isinstance(module, nn.Conv2d):
            assert not isinstance(module.padding, str)  # see _is_plain
            own = unfold(own, module.kernel_size, module.dilation, module.padding, module.stride).transpose(1, 2)
        seen.setdefault(name, []).append(own.reshape(-1, own.shape[-1]))

    with ExitStack() as stack:
        for name, module in modules.items():
            handle = module.register_forward_pre_hook(lambda part, inputs, name=name: note(name, part, inputs))
            stack.callback(handle.remove)
        yield seen


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
