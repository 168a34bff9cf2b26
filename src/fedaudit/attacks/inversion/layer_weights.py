"""Layer weights of AGIC (Xu et al. 2022, Eq. 6-8 and Table I)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from fedaudit.models import Layer


def shape_values(shape: str, end: float, count: int) -> list[float]:
    """Return l_1 … l_count through (1, 1) and (count, ``end``).

    ``linear`` is Eq. 7; ``logarithmic`` a·log x + b and ``exponential`` a·eˣ + b are the other shapes of Table I,
    whose decreasing rows are ``end`` = 0.5. With a single layer there is one point only: (1, 1).

    Args:
        shape: of the curve.
        end: β, the last value.
        count: number of convolutions.
    """
    if count == 1:
        return [1.0]
    curves = {
        "linear": lambda i: (i - 1) / (count - 1),
        "logarithmic": lambda i: math.log(i) / math.log(count),
        # a·eˣ + b, with both exponentials divided by e^count so that deep networks don't overflow
        "exponential": lambda i: (math.exp(i - count) - math.exp(1 - count)) / (1 - math.exp(1 - count)),
    }
    return [1 + (end - 1) * curves[shape](i) for i in range(1, count + 1)]


def zero_modifier(gradient: Tensor) -> float:
    """Return 1/(1 − p), p being the share of exact zeros (Eq. 8); 1 for a gradient that is zero throughout."""
    share = float((gradient == 0).double().mean())
    return 1 / (1 - share) if share < 1 else 1.0


def layer_weights(
    layers: Sequence[Layer],
    gradient: Mapping[str, Tensor],
    *,
    end: float,
    shape: str = "linear",
    relu_modifier: bool = True,
    others: str = "preceding",
) -> dict[str, float]:
    """Return the weight α of every tensor of ``gradient``, by name.

    A convolution's weight is α_i = l_i / (1 − p_i) where a ReLU follows it (else l_i); a fully connected layer's is
    the mean of the l_i (Eq. 8). The paper doesn't mention biases and normalisation: a bias shares its layer's weight
    and a normalisation that of the layer before it (``others="preceding"``), or both get 1 or 0.

    Args:
        layers: in forward order.
        gradient: the observed gradient, by parameter name.
        end: β; 1 with ``relu_modifier=False`` means equal weights.
        shape: of the curve through (1, 1) and (N_conv, β).
        relu_modifier: whether to apply 1/(1 − p_i).
        others: what biases and normalisations weigh.
    """
    convolutions = [layer for layer in layers if layer.kind == "conv"]
    values = shape_values(shape, end, len(convolutions)) if convolutions else []
    mean = sum(values) / len(values) if values else 1.0
    position = {layer.name: i for i, layer in enumerate(convolutions)}
    fixed = {"one": 1.0, "zero": 0.0}
    weights: dict[str, float] = {}
    current = 1.0
    for layer in layers:
        own = [name for name in layer.parameters if name in gradient]
        main = [name for name in own if gradient[name].ndim > 1]
        if layer.kind == "conv":
            current = values[position[layer.name]]
            if relu_modifier and layer.relu_follows and main:
                current *= zero_modifier(gradient[main[0]])
        elif layer.kind != "norm":
            current = mean
        for name in own:
            is_main = name in main and layer.kind != "norm"
            weights[name] = current if is_main or others == "preceding" else fixed[others]
    return {name: weights.get(name, mean) for name in gradient}
