"""What a recording doesn't say of the task, as far as the inputs' range and the module tell it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedaudit.modalities import TokenInfo, example_kind
from fedaudit.utils.errors import BadInput

Channels = tuple[float, ...]  # a value for each


def preprocessing(
    least: Channels | None, most: Channels | None, kind: str, channels: int, notes: list[str]
) -> tuple[Channels, Channels]:
    """Return mean and standard deviation: estimated from the range of what the model saw, where it has bounds.

    Of many images some pixel is black and some is white, in each channel: x = (p − mean) / std lies in
    [−mean / std, (1 − mean) / std].

    Args:
        least, most: of the inputs, per channel; None where it wasn't recorded.
        kind: of examples.
        channels: how many.
        notes: take what was assumed.
    """
    identity = (0.0,) * channels, (1.0,) * channels
    if example_kind(kind).bounds is None:
        return identity
    if least is None or most is None or len(least) != channels or len(most) != channels:
        notes.append("how inputs are normalised was not recorded: they are taken to lie in [0, 1]; give --mean, --std")
        return identity
    if min(least) >= 0 and max(most) <= 1:
        return identity
    std = tuple(1 / max(high - low, 1e-6) for low, high in zip(least, most, strict=True))
    mean = tuple(-low * s for low, s in zip(least, std, strict=True))
    words = ", ".join(f"{m:.3g} ± {s:.3g}" for m, s in zip(mean, std, strict=True))
    notes.append(f"how inputs are normalised was estimated from their range ({words}); give --mean and --std if known")
    return mean, std


def outputs_of(module: nn.Module, shape: tuple[int, ...], tokens: TokenInfo | None = None) -> int:
    """Return how many outputs ``module`` has for one input of ``shape``, of a causal task for one token.

    Raises:
        BadInput: it can't take such an input.
    """
    before = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        with torch.no_grad():
            found = module(torch.zeros(1, *shape, dtype=torch.int64 if tokens else torch.float32))
    except Exception as error:
        raise BadInput(f"the model can't take an input of shape {shape}: {type(error).__name__}: {error}") from None
    finally:
        for part, training in before:
            part.training = training
    if tokens and tokens.causal and isinstance(found, Tensor) and found.shape == (1, tokens.vocabulary, *shape):
        return tokens.vocabulary
    if not isinstance(found, Tensor) or found.ndim != 2:
        got = f"of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise BadInput(
            f"the model's output is {got}; fedaudit needs (n, classes) logits, or (n, 1); where each next "
            "token is predicted, (n, vocabulary, length)"
        )
    return int(found.shape[1])
