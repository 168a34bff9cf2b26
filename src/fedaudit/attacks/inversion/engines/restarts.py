"""All restarts of an attack in one batch: the same step for each of them, computed together.

A restart on a table's batch is little work, so one after another they spend most of the time in function calls. Side by
side the restarts share the model's weights, and every product of matrices is one of R·n rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vmap

from fedaudit.attacks.inversion.engines.reference import SOFTNESS, unrolled
from fedaudit.attacks.inversion.objectives import Distance, Objective, flatten
from fedaudit.attacks.victim import Victim
from fedaudit.task.training import TrainingConfig

_MOST = 16_000_000  # numbers of gradients that are held side by side; restarts beyond that come in further groups

# Variables (…, n, v) -> examples (…, n, d), as the model sees them, and their labels (n,) or targets (…, n, 1).
Decode = Callable[[Tensor], tuple[Tensor, Tensor]]


def one_by_one(victim: Victim, training: TrainingConfig, distance: Distance, decode: Decode) -> Objective:
    """Return R restarts' step, one by one by double backward: (R, n, v) variables to summed distances and gradient."""
    start = {name: p.detach().requires_grad_() for name, p in victim.parameters.items()}
    sizes = list(training.batch_sizes)

    def step(variables: Tensor) -> tuple[Tensor, Tensor]:
        values, gradients = [], []
        for one in variables:
            leaf = one.detach().requires_grad_()
            x, y = decode(leaf)
            pseudo = unrolled(victim, start, x.split(sizes), y.split(sizes), training, SOFTNESS)
            value = distance.value(flatten(pseudo))
            gradients.append(torch.autograd.grad(value, leaf)[0])
            values.append(value.detach())
        return torch.stack(values).sum(), torch.stack(gradients)

    return step


def side_by_side(victim: Victim, training: TrainingConfig, distance: Distance, decode: Decode) -> Objective:
    """Return :func:`one_by_one`'s step with all restarts in one batch (``torch.func.vmap`` over double backward).

    Its first step raises RuntimeError for a model that can't run so.
    """
    start = {name: p.detach() for name, p in victim.parameters.items()}
    sizes = list(training.batch_sizes)
    width = sum(p.numel() for p in start.values())

    def gradient(victim: Victim, weights: dict[str, Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        return list(grad(victim.value)(weights, x, y).values())

    def objective(one: Tensor) -> Tensor:
        x, y = decode(one)
        return distance.value(
            flatten(unrolled(victim, start, x.split(sizes), y.split(sizes), training, SOFTNESS, gradient))
        )

    together = vmap(grad_and_value(objective), chunk_size=max(1, _MOST // width))

    def step(variables: Tensor) -> tuple[Tensor, Tensor]:
        gradients, values = together(variables.detach())
        return values.detach().sum(), gradients.detach()

    return step


def restarts(
    victim: Victim,
    training: TrainingConfig,
    distance: Distance,
    decode: Decode,
    first: Tensor,
    notes: list[str],
    faster: Objective | None = None,
) -> Objective:
    """Return the fastest step that works, tried on the ``first`` variables; notes say why restarts run in turn."""
    exact = one_by_one(victim, training, distance, decode)
    reason = ""
    for fast in (faster, side_by_side(victim, training, distance, decode)):
        if fast is None:
            continue
        try:
            if _agree(fast, exact, first[:2]):
                return fast
            reason = "it doesn't do the same to all at once"
        except (RuntimeError, NotImplementedError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    notes.append(f"restarts one after another, because this model can't be run on all at once: {reason}")
    return exact


def _agree(fast: Objective, exact: Objective, variables: Tensor) -> bool:
    """Return whether both steps give the same; the model may mix up the restarts, or count on a batch's axes."""
    (_, own), (_, wanted) = fast(variables), exact(variables)
    return bool(torch.allclose(own, wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max() + 1e-12)))


_TINY = 1e-30


@dataclass(frozen=True)
class _Layer:
    """A fully connected layer, and what the observed gradient, of length one over all layers, is in it."""

    weight: Tensor
    bias: Tensor | None
    wanted: Tensor
    wanted_bias: Tensor | None
    relu: bool

    def few(self, n: int) -> bool:
        """Whether n examples are so few that matrices of n·n cost less than one of the weights' size."""
        out, width = self.weight.shape
        return 2 * n * (out + width) < 3 * out * width


def dense(victim: Victim, training: TrainingConfig, distance: Distance, decode: Decode) -> Objective | None:
    """Return the step of R restarts, as of :func:`one_by_one`, in closed form; None where it isn't for such a model.

    The cosine to the observed gradient t needs ⟨g, t⟩ and ‖g‖ only. Of a layer whose inputs are h (n, i) and whose
    outputs' gradients are δ (n, o), the weights' gradient is g = δᵀh, so ⟨g, t⟩ = Σ (δ·t)∘h and ‖g‖² = Σ (δδᵀ)∘(hhᵀ):
    for few examples matrices of n·n in place of i·o. What is left is the chain rule by hand, with the activation
    pattern held fixed, as it is almost everywhere (as in :mod:`.first_order`). Every product with the model's weights,
    or with t, is one for all restarts. It is for fully connected layers with or without ReLU alone, one step, and the
    plain cosine.
    """
    single = training.local_steps == 1 and training.clip_norm is None and training.clip_value is None
    plain = training.plain_sgd and not training.passes and training.weight_decay == 0
    layers = _layers(victim, distance)
    if not (single and plain and layers):
        return None

    def step(variables: Tensor) -> tuple[Tensor, Tensor]:
        leaf = variables.detach().requires_grad_()
        x, y = decode(leaf)
        if y.requires_grad:
            raise NotImplementedError("targets are optimised, too")
        with torch.no_grad():
            value, slope = _cosine(victim, layers, x.detach(), y)
        (gradient,) = torch.autograd.grad(x, leaf, slope)
        return value, gradient

    return step


def _layers(victim: Victim, distance: Distance) -> list[_Layer]:
    if distance.direction is None or not isinstance(victim.module, nn.Sequential):
        return []
    names = list(victim.parameters)
    shapes = [victim.parameters[name].shape for name in names]
    parts = distance.direction.split([shape.numel() for shape in shapes])
    wanted = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
    layers: list[_Layer] = []
    for name, part in victim.module.named_children():
        if isinstance(part, nn.ReLU) and layers and not layers[-1].relu:
            last = layers.pop()
            layers.append(_Layer(last.weight, last.bias, last.wanted, last.wanted_bias, relu=True))
        elif type(part) is nn.Linear and f"{name}.weight" in wanted:
            bias = None if part.bias is None else f"{name}.bias"
            if bias is not None and bias not in wanted:
                return []
            weight = f"{name}.weight"
            own = (None, None) if bias is None else (victim.parameters[bias], wanted[bias])
            layers.append(_Layer(victim.parameters[weight], own[0], wanted[weight], own[1], relu=False))
        elif not isinstance(part, nn.Flatten | nn.Identity | nn.Dropout) or part.training:
            return []
    count = sum(1 + (layer.bias is not None) for layer in layers)
    return layers if count == len(names) and not victim.dropout else []


def _cosine(victim: Victim, layers: list[_Layer], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the restarts' distances, and its gradient on examples (R, n, d)."""
    n = x.shape[1]
    inputs, patterns = [x], []
    for layer in layers:
        out = nn.functional.linear(inputs[-1], layer.weight, layer.bias)
        patterns.append(out > 0)
        inputs.append(out.relu_() if layer.relu else out)
    with torch.enable_grad():
        outputs = inputs[-1].detach().requires_grad_()
        # the mean over all restarts' examples, which have the same labels, is the mean of the restarts' means
        mean = victim.loss(outputs.flatten(0, 1), y.repeat(len(x), *[1] * (y.ndim - 1)))
        (top,) = torch.autograd.grad(len(x) * mean, outputs, create_graph=True)
    deltas = [top.detach()]
    if layers[-1].relu:
        deltas[0] = deltas[0] * patterns[-1]
    for layer, pattern, before in zip(layers[:0:-1], patterns[-2::-1], layers[-2::-1], strict=True):
        back = deltas[0] @ layer.weight
        deltas.insert(0, back.mul_(pattern) if before.relu else back)
    # how far the dummy gradients go into the observed one's direction, and how long they are
    dot = x.new_zeros(len(x))
    square = x.new_zeros(len(x))
    along: list[Tensor | None] = []
    own: list[tuple[Tensor, Tensor]] = []
    sums: list[Tensor] = []
    for layer, h, delta in zip(layers, inputs[:-1], deltas, strict=True):
        if layer.few(n):
            towards = delta @ layer.wanted
            dot += (towards * h).sum(dim=(1, 2))
            pairs = torch.bmm(delta, delta.mT), torch.bmm(h, h.mT)
            square += (pairs[0] * pairs[1]).sum(dim=(1, 2))
            along.append(towards)
            own.append(pairs)
        else:
            gradient = torch.bmm(delta.mT, h)
            dot += gradient.flatten(1) @ layer.wanted.flatten()
            square += gradient.flatten(1).square().sum(dim=1)
            along.append(None)
            own.append((gradient, gradient))
        total = delta.sum(dim=1)
        sums.append(total)
        if layer.wanted_bias is not None:
            dot += total @ layer.wanted_bias
            square += total.square().sum(dim=1)
    norm = (square + _TINY).sqrt()
    first, second = (-1 / norm)[:, None, None], (dot / norm**3)[:, None, None]
    # the distance's derivative is first·t + second·g, in each layer: on δ, and on h
    rise: list[Tensor] = []
    fall: list[Tensor] = []
    for layer, h, delta, towards, pair, total in zip(layers, inputs[:-1], deltas, along, own, sums, strict=True):
        if towards is not None:
            on_delta = torch.baddbmm(first * (h @ layer.wanted.T), pair[1], delta * second)
            on_h = torch.baddbmm(first * towards, pair[0], h * second)
        else:
            slope = torch.addcmul(first * layer.wanted, pair[0], second)
            on_delta, on_h = torch.bmm(h, slope.mT), torch.bmm(delta, slope)
        if layer.wanted_bias is not None:
            on_delta += first * layer.wanted_bias + second * total[:, None]
        rise.append(on_delta)
        fall.append(on_h)
    # back through δ, from the first layer up, and then through h, from the last layer down
    for i in range(1, len(layers)):
        below = rise[i - 1].mul_(patterns[i - 1]) if layers[i - 1].relu else rise[i - 1]
        rise[i] += below @ layers[i].weight.T
    last = rise[-1] * patterns[-1] if layers[-1].relu else rise[-1]
    (back,) = torch.autograd.grad(top, outputs, last)
    for i in range(len(layers) - 1, -1, -1):
        if layers[i].relu:
            back = back * patterns[i]
        back = fall[i].add_(back @ layers[i].weight)
    return (1 - dot / norm).sum(), back
