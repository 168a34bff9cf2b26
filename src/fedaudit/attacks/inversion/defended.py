"""What an adversary that knows the defence makes of a defended update.

Layers that weren't sent are not in the update, and so are matched by no attack. The rest is here: which elements of a
sparse update were sent, how much of a noisy one is signal, what a sign says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedaudit.attacks.inversion.objectives import DISTANCES, Distance, flatten
from fedaudit.transcript.update import Update

# How much it counts that an element which wasn't sent should be zero. It is smaller than those that were, of DGC
# because it waits for more rounds; of a sparse update of unknown making it may be anything. Measured in
# docs/reference/defences.md.
_UNSENT = {"top-k": 1.0, "dgc": 0.3}


def distance_to(
    name: str, update: Update, names: Sequence[str], target: Mapping[str, Tensor], weights: Mapping[str, float]
) -> Distance:
    """Return the distance ``name`` to ``target``, as somebody measures it who knows how the update was sanitised.

    - Sparse: an element that wasn't sent counts as zero as much as the defence's choice makes that likely.
    - Noise of known size (dp): a tensor weighs as much as the share of its energy that isn't noise, 1 − σ²d/‖t‖²
      (as in Wiener's filter); where no tensor has any, all weigh what they did.
    - Signs: how far the signs agree, tanh(g/a) in place of the sign of g, a being the magnitude that was sent.

    Args:
        name: of the distance in ``DISTANCES``.
        update: with what is known of its defence.
        names: of the tensors to be matched, in order.
        target: the observed gradient, or pseudo-gradient; the update times a number.
        weights: of each tensor.
    """
    known = update.sanitised
    targets = [target[n] for n in names]
    plain: list[float | Tensor] = [weights[n] for n in names]
    if known is None:
        return DISTANCES[name](targets, plain)
    if known.signs:
        return smooth_signs(targets)
    if known.sparse and (unsent := _UNSENT.get(known.name, 0.0)) != 1:
        plain = [w * torch.where(t != 0, 1, unsent) for w, t in zip(plain, targets, strict=True)]
    if known.noise:
        shares = [_signal(update.tensors[n], known.noise) for n in names]
        if any(shares):
            plain = [w * share for w, share in zip(plain, shares, strict=True)]
    return DISTANCES[name](targets, plain)


def _signal(tensor: Tensor, noise: float) -> float:
    energy = float(tensor.double().square().sum())
    return max(0.0, 1 - noise**2 * tensor.numel() / energy) if energy else 0.0


def smooth_signs(target: Sequence[Tensor]) -> Distance:
    """Return one minus the mean of sᵢ·tanh(gᵢ/aᵢ), where ±a = s·a is what was sent.

    Its derivative is −s·(1 − tanh²(g/a))/(a·d).

    Args:
        target: ± the magnitude, one tensor per parameter.
    """
    flat = flatten(target)
    sign = torch.where(flat >= 0, 1.0, -1.0) / len(flat)
    size = flat.abs().clamp(min=1e-12)

    def derivative(vector: Tensor) -> tuple[Tensor, Tensor]:
        curve = torch.tanh(vector / size)
        return 1 - torch.dot(sign, curve), -sign * (1 - curve.square()) / size

    return Distance(lambda vector: 1 - torch.dot(sign, torch.tanh(vector / size)), derivative)
