"""How far a dummy update is from the observed one: distances of flat vectors, with their derivatives in closed form.

Of plain updates, of Adam's, and of defended ones; and what the layers weigh (AGIC).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedaudit.attacks.local_training import Way, invert
from fedaudit.defences import CLIENT_DEFENCES
from fedaudit.models import Layer
from fedaudit.transcript.observation import Message
from fedaudit.transcript.update import Update

_TINY = 1e-30  # keeps a gradient of zero from dividing by zero; far below any float32 square that matters

# What is minimised, or a term of it: all variables, the (n, C, H, W) normalised dummy images first -> (value, its
# gradient on each of them). The distance is a term, and who computes it an engine; the others are priors.
Objective = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Distance:
    """How far a vector (d,) is from a fixed one: differentiable, and with its derivative, the caller's to change.

    ``direction``: (d,) of length one, where the distance is one minus the plain cosine to it.
    """

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], tuple[Tensor, Tensor]]
    direction: Tensor | None = None


def flatten(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Return all elements of ``tensors`` as one vector, channels last, the order in which convolutions are fastest."""
    return torch.cat([(t.permute(0, 2, 3, 1) if t.ndim == 4 else t).reshape(-1) for t in tensors], out=out)


def unflatten(vector: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return the views of ``vector`` as tensors of ``shapes``; the inverse of :func:`flatten`."""
    parts = vector.split([shape.numel() for shape in shapes])
    return [
        part.view(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2) if len(shape) == 4 else part.view(shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]


def squared_l2(target: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Distance:
    """Return Σ_i w_i ‖g_i − t_i‖² to ``target``, a weight a tensor or an element (DLG, Zhu et al. 2019).

    Its derivative is 2·w·(g − t).
    """
    flat, scale = flatten(target), _scaling(target, weights)

    def value(vector: Tensor) -> Tensor:
        difference = vector - flat
        return torch.dot(scale(difference), difference)

    def derivative(vector: Tensor) -> tuple[Tensor, Tensor]:
        difference = vector - flat
        scaled = scale(difference)
        return torch.dot(scaled, difference), 2 * scaled

    return Distance(value, derivative)


def layer_l2(target: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Distance:
    """Return Σ_i ‖w_i·(g_i − t_i)‖, the sum of the tensors' distances (Yin et al. 2021, Eq. 3), as :func:`squared_l2`.

    Its derivative is w²·(g − t)/‖w·(g − t)‖ by tensor.
    """
    flat, scale = flatten(target), _scaling(target, weights)
    sizes = [t.numel() for t in target]

    def norms(difference: Tensor) -> Tensor:
        return torch.stack([part.norm() for part in difference.split(sizes)])

    def derivative(vector: Tensor) -> tuple[Tensor, Tensor]:
        scaled = scale(vector - flat)
        lengths = norms(scaled)
        for part, length in zip(scaled.split(sizes), lengths, strict=True):
            part.div_(length + _TINY)
        return lengths.sum(), scale(scaled)

    return Distance(lambda vector: norms(scale(vector - flat)).sum(), derivative)


def weighted_cosine(target: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Distance:
    """Return one minus the layer-weighted cosine to ``target`` (AGIC, Xu et al. 2022, Eq. 6).

    The weight of a tensor enters the dot product and both norms. With equal weights this is the plain cosine over
    the whole gradient (InvG, Geiping et al. 2020, Eq. 4). Its derivative is (cos/‖g‖_w²)·w·g − direction/‖g‖_w,
    direction being w·t/‖t‖_w. Arguments as of :func:`squared_l2`.
    """
    flat, scale = flatten(target), _scaling(target, weights)
    scaled_target = scale(flat)
    norm_of_target = torch.dot(scaled_target.double(), flat.double()).sqrt().to(flat.dtype)
    direction = scaled_target / (norm_of_target + _TINY)
    del flat, scaled_target  # each as large as the model

    def value(vector: Tensor) -> Tensor:
        return 1 - torch.dot(direction, vector) / (torch.dot(scale(vector), vector) + _TINY).sqrt()

    def derivative(vector: Tensor) -> tuple[Tensor, Tensor]:
        scaled = scale(vector)
        square = torch.dot(scaled, vector) + _TINY
        norm = square.sqrt()
        dot = torch.dot(direction, vector)
        factor = dot / (square * norm)
        scaled = vector * factor if scaled is vector else scaled.mul_(factor)
        return 1 - dot / norm, scaled.addcmul_(direction, -1 / norm)

    return Distance(value, derivative, direction if all(_is_one(w) for w in weights) else None)


def _scaling(target: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Callable[[Tensor], Tensor]:
    """Return what multiplies a (d,) vector by each element's weight; the vector itself where all are one."""
    if all(_is_one(w) for w in weights):
        return lambda vector: vector
    whole = [w if isinstance(w, Tensor) else torch.full_like(t, w) for t, w in zip(target, weights, strict=True)]
    flat = flatten(whole)
    return lambda vector: flat * vector


def _is_one(weight: float | Tensor) -> bool:
    return not isinstance(weight, Tensor) and weight == 1


DISTANCES: dict[str, Callable[[Sequence[Tensor], Sequence[float | Tensor]], Distance]] = {
    "squared-l2": squared_l2,
    "layer-l2": layer_l2,
    "cosine": weighted_cosine,
}


def adaptive_distance(
    name: str,
    way: Way,
    message: Message,
    names: Sequence[str],
    target: Mapping[str, Tensor],
    weights: Mapping[str, float],
) -> Distance:
    """Return the distance to an update by Adam or AdamW, as an attack that optimises images uses it.

    - ``one step``: :func:`one_sided`, of the gradient that Adam was given.
    - ``one batch``: :func:`soft_signs`, of one batch's gradient; ``target`` has the mean steps.
    - ``simulation``: one minus the weighted cosine, of the replayed pseudo-gradient, ``target``.

    Elements that a sparse defence didn't send are left out. A method whose own distance is ``layer-l2`` weighs its
    priors against a sum of lengths: for it the cosine is times √d, the length of d softened elements.
    """
    update = message.update
    sparse = update.sanitised is not None and update.sanitised.sparse
    targets = [target[n] for n in names]
    scale: list[float | Tensor] = [
        weights[n] * torch.where(t != 0, 1, 0) if sparse else weights[n] for n, t in zip(names, targets, strict=True)
    ]
    if way == "one step":
        found = invert(update, message.weights)
        device = targets[0].device
        values = [found.values[n].to(device) for n in names]
        own = one_sided(values, [found.known[n].to(device) for n in names], scale)
    else:
        own = weighted_cosine(targets, scale) if way == "simulation" else soft_signs(targets, scale)
    return _times(sum(t.numel() for t in targets) ** 0.5, own) if name == "layer-l2" else own


def _times(factor: float, distance: Distance) -> Distance:
    def derivative(vector: Tensor) -> tuple[Tensor, Tensor]:
        value, slope = distance.derivative(vector)
        return factor * value, factor * slope

    return Distance(lambda vector: factor * distance.value(vector), derivative)


def one_sided(values: Sequence[Tensor], known: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Distance:
    """Return one minus the cosine of the softened dummy gradient to what one step of Adam tells of the observed one.

    Both are softened to g/(|g| + s), s being the mean size of the dummy gradient's tensor, so that few large elements
    don't outweigh the many that are known. The gradient is matched where it is ``known``; elsewhere ``values`` has its
    sign times a lower bound: the dummy's own element is matched where it is as large or larger and has that sign, else
    the bound. s and what is matched are held fixed when the derivative is taken.
    """
    flat, certain = flatten(values), flatten(known)
    sign, bound = flat.sign(), flat.abs()

    def target(vector: Tensor, spread: Tensor) -> Tensor:
        wanted = torch.where(certain, flat, sign * torch.maximum(bound, sign * vector))
        return wanted / (wanted.abs() + spread)

    return _softened(values, weights, target)


def soft_signs(values: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Distance:
    """Return one minus the cosine of the dummy gradient, softened as by :func:`one_sided`, to mean steps in [−1, 1]."""
    flat = flatten(values)
    return _softened(values, weights, lambda _vector, _spread: flat)


def _softened(
    values: Sequence[Tensor],
    weights: Sequence[float | Tensor],
    target: Callable[[Tensor, Tensor], Tensor],
) -> Distance:
    sizes, scale = [t.numel() for t in values], _scaling(values, weights)

    def fixed(vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return s and the weighted direction of the target, of length one."""
        means = [part.abs().mean().clamp(min=_TINY).expand(len(part)) for part in vector.split(sizes)]
        spread = torch.cat(means)
        wanted = target(vector, spread)
        return spread, scale(wanted) / (torch.dot(scale(wanted), wanted) + _TINY).sqrt()

    def value(vector: Tensor) -> Tensor:
        spread, direction = fixed(vector.detach())
        soft = vector / (vector.abs() + spread)
        return 1 - torch.dot(direction, soft) / (torch.dot(scale(soft), soft) + _TINY).sqrt()

    def derivative(vector: Tensor) -> tuple[Tensor, Tensor]:
        spread, direction = fixed(vector)
        size = vector.abs() + spread
        soft = vector / size
        scaled = scale(soft)
        square = torch.dot(scaled, soft) + _TINY
        norm, dot = square.sqrt(), torch.dot(direction, soft)
        slope = (scaled * (dot / square) - direction) / norm
        return 1 - dot / norm, slope * spread / size.square()

    return Distance(value, derivative)


def distance_to(
    name: str, update: Update, names: Sequence[str], target: Mapping[str, Tensor], weights: Mapping[str, float]
) -> Distance:
    """Return the distance ``name`` to ``target``, as whoever knows how the update was sanitised measures it.

    - Sparse: an element that wasn't sent counts as zero as much as the defence says (``unsent``).
    - Noise of known size (dp): a tensor weighs as much as the share of its energy that isn't noise, 1 − σ²d/‖t‖²
      (as in Wiener's filter); where no tensor has any, all weigh what they did.
    - Clipped as a whole, without noise: :func:`shortened`, the dummy clipped likewise.
    - Orthogonal to what it stands for: :func:`orthogonal`, which is all that is left.
    - Clipped element by element: :func:`bounded`, what the filter would send of the dummy.
    - Signs: how far the signs agree, tanh(g/a) in place of the sign of g, a being the magnitude that was sent.
    """
    known = update.sanitised
    targets = [target[n] for n in names]
    if known is not None and known.orthogonal:
        return orthogonal(targets, [weights[n] for n in names])
    plain: list[float | Tensor] = [weights[n] for n in names]
    if known is None:
        return DISTANCES[name](targets, plain)
    if known.signs:
        return smooth_signs(targets)
    unsent = CLIENT_DEFENCES[known.name].value.unsent if known.name in CLIENT_DEFENCES else 0.0
    if known.sparse and unsent != 1:
        plain = [w * torch.where(t != 0, 1, unsent) for w, t in zip(plain, targets, strict=True)]
    if known.noise:
        own = dict(known.noises)
        shares = [_signal(update.tensors[n], own.get(n, known.noise), known.sparse) for n in names]
        if any(shares):
            plain = [w * share for w, share in zip(plain, shares, strict=True)]
    distance = DISTANCES[name](targets, plain)
    sent = max(float(update.tensors[n].abs().max()) for n in names)
    if known.clip is not None and not known.noise and sent and name != "cosine":  # a cosine doesn't notice
        return shortened(distance, targets, known.clip * max(float(t.abs().max()) for t in targets) / sent)
    if known.bound is None or not sent:
        return distance
    scale = max(float(t.abs().max()) for t in targets) / sent
    return bounded(distance, targets, scale * known.bound)


def _signal(tensor: Tensor, noise: float, sparse: bool) -> float:
    energy = float(tensor.double().square().sum())
    noisy = int(tensor.count_nonzero()) if sparse else tensor.numel()
    return max(0.0, 1 - noise**2 * noisy / energy) if energy else 0.0


def bounded(distance: Distance, target: Sequence[Tensor], bound: float) -> Distance:
    """Return ``distance`` of a vector whose elements are clipped to ±``bound``, in the target's units.

    Its derivative is that at the clipped vector, passed on to the vector itself: clipping has none beyond the bound,
    and an element that is large and wrong would stay so. Only where the target is at the bound, and the element is
    there or beyond with the same sign, it is 0: nothing more can be known of that one.
    """
    flat = flatten(target)
    full, sign = flat.abs() >= bound * (1 - 1e-5), flat.sign()  # but for rounding

    def agrees(vector: Tensor) -> Tensor:
        return full & (vector * sign >= bound)

    def value(vector: Tensor) -> Tensor:
        clipped = vector.detach().clamp(-bound, bound)
        passed_on = torch.where(agrees(vector.detach()), 0.0, vector - vector.detach())
        return distance.value(clipped + passed_on)

    def derivative(vector: Tensor) -> tuple[Tensor, Tensor]:
        size, slope = distance.derivative(vector.clamp(-bound, bound))
        return size, slope.masked_fill(agrees(vector), 0)

    return Distance(value, derivative)


def shortened(distance: Distance, target: Sequence[Tensor], length: float) -> Distance:
    """Return ``distance`` of a vector scaled down to ``length``, in the target's units, where both are longer."""
    if float(flatten(target).norm()) < length * (1 - 1e-4):  # but for rounding: it wasn't clipped
        return distance

    def value(vector: Tensor) -> Tensor:
        return distance.value(vector * (length / (vector.norm() + _TINY)).clamp(max=1.0))

    def derivative(vector: Tensor) -> tuple[Tensor, Tensor]:
        norm = vector.norm() + _TINY
        factor = (length / norm).clamp(max=1.0)
        size, slope = distance.derivative(vector * factor)
        if float(factor) < 1:
            slope = slope - vector * (torch.dot(vector, slope) / norm.square())
        return size, slope * factor

    return Distance(value, derivative)


def orthogonal(target: Sequence[Tensor], weights: Sequence[float]) -> Distance:
    """Return how far a vector's tensors are from as long as the target's, and from orthogonal to them.

    Σ w·((‖g‖/‖t‖ − 1)² + cos²(g, t)) / Σ w over the tensors whose target isn't zero: two numbers a tensor, which are
    all that CENSOR leaves (Zhang et al. 2025).
    """
    sizes, flat = [t.numel() for t in target], flatten(target)
    lengths = [float(t.norm()) for t in target]
    own = [w if length else 0.0 for w, length in zip(weights, lengths, strict=True)]
    total = sum(own) or 1.0

    def value(vector: Tensor) -> Tensor:
        found = vector.new_zeros(())
        for g, t, length, w in zip(vector.split(sizes), flat.split(sizes), lengths, own, strict=True):
            if w:
                norm = (g.square().sum() + _TINY).sqrt()
                found = found + w / total * (
                    (norm / length - 1).square() + (torch.dot(g, t) / (norm * length)).square()
                )
        return found

    def derivative(vector: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = vector.detach().requires_grad_()
            found = value(leaf)
            (slope,) = torch.autograd.grad(found, leaf)
        return found.detach(), slope

    return Distance(value, derivative)


def smooth_signs(target: Sequence[Tensor]) -> Distance:
    """Return one minus the mean of sᵢ·tanh(gᵢ/aᵢ), ±a = s·a being sent; its derivative: −s·(1 − tanh²(g/a))/(a·d)."""
    flat = flatten(target)
    sign = torch.where(flat >= 0, 1.0, -1.0) / len(flat)
    size = flat.abs().clamp(min=1e-12)

    def derivative(vector: Tensor) -> tuple[Tensor, Tensor]:
        curve = torch.tanh(vector / size)
        return 1 - torch.dot(sign, curve), -sign * (1 - curve.square()) / size

    return Distance(lambda vector: 1 - torch.dot(sign, torch.tanh(vector / size)), derivative)


def shape_values(shape: str, end: float, count: int) -> list[float]:
    """Return l_1 … l_count through (1, 1) and (count, ``end``), or of a single layer (1, 1).

    ``linear`` is Eq. 7; ``logarithmic`` a·log x + b and ``exponential`` a·eˣ + b are the other shapes of Table I, whose
    decreasing rows are ``end`` = 0.5.
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
    """Return the weight α of every tensor of ``gradient``, by name; ``end`` is β.

    A convolution's weight is α_i = l_i / (1 − p_i) where a ReLU follows it (else l_i); a fully connected layer's is the
    mean of the l_i (Eq. 8). The paper doesn't mention biases and normalisation: a bias shares its layer's weight and a
    normalisation that of the layer before it (``others="preceding"``), or both get 1 or 0.
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
