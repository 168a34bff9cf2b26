"""R-GAP: the image by solving linear equations, from the last layer back to the first; no optimiser."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from scipy.optimize import brentq
from torch import Tensor, nn

from fedaudit.attacks import (
    ClosedForm,
    ImageFinding,
    Message,
    Observation,
    Progress,
    as_trained,
    need_signal,
    need_training,
    one_batch_gradient,
    register,
)
from fedaudit.task import Loss, class_logits
from fedaudit.utils import NotApplicable
from fedaudit_catalogue.attacks.chain import Block, chain, identity, refuse
from fedaudit_catalogue.attacks.constraints import adjoint, check_size, gradient_constraints, solve, weight_constraints

_TIE = 1e-4  # relative; below, two candidates for the last layer's derivative can't be told apart by themselves
_SUSPECT = 1e-2  # relative gradient mismatch from which the user is warned
_TWIN = 1e-4  # relative gradient mismatch by which two images can't be told apart
_SCALES = 400  # points of the grid on which roots are looked for


@register
class RGap(ClosedForm):
    """R-GAP (Zhu & Blaschko, ICLR 2021, Section 3 and Algorithm 1): closed form, layer by layer, for one example.

    With k_i = ∂L/∂z_i known, the input of layer i solves its gradient constraints (linear in the input) together with
    its weight constraints A_i·x = z_i − c_i, by least squares; the activation is undone for z_{i−1}, and
    k_{i−1} = σ'(z_{i−1}) ⊙ A_iᵀk_i.

    Departures. The paper begins with a logistic loss of one output. Here, with cross-entropy over several classes:

    - a last layer with a bias gives k = ∂L/∂b at once (for any loss);
    - without a bias ∂L/∂W = k·hᵀ has rank one, so k = a·u and h = (s/a)·v with one unknown scale a, which solves
      softmax(W·h + b) − e_y = a·u. The label y is the entry of u whose sign no other has. Where several a (or, of two
      classes, both labels) fit, the recursion is run for each and the one whose image has the nearest gradient is kept.
      Of two classes without biases two images can have the same gradient (the paper's "twin data"); then the one with
      pixels nearest to the valid range is kept, and the finding says so.

    The paper's equations are stacked as they are; here each kind is scaled to values of size one. The padding of a
    convolution is left out of the unknowns instead of set to zero by further equations. Several affine steps between
    two activations (average pooling, BatchNorm in evaluation mode, another convolution) are solved for as one. Where
    the equations are fewer than the unknowns the solution of least norm is taken, as in the paper, and the finding says
    so. All in float64 on the CPU.
    """

    name = "r-gap"
    summary = "closed form, from the last layer back to the first"
    paper = "Zhu & Blaschko 2021 (R-GAP)"
    on_sums = "refused: its equations are one example's"
    needs = (
        "images and a classifier",
        "one example in one gradient (or one local step)",
        "a chain of convolutions and linear layers with invertible activations ('fedaudit rank' tells)",
    )
    uses = ("r-gap",)

    def _prepare(self, observation: Observation) -> tuple[nn.Module, list[Block], dict[str, Tensor]]:
        message = observation.single()
        task_info = observation.task_info
        need_training(self.name, observation)
        gradient = _exact_gradient(message)
        module = as_trained(observation.module, task_info, message.weights)
        blocks = chain(module, task_info.input_shape)
        for block in blocks:
            check_size(block)
        last = _last_layer(blocks)
        if f"{last[0]}.weight" not in gradient:
            raise NotApplicable(f"the update lacks the last layer's gradient ('{last[0]}.weight'), where r-gap begins")
        training = message.update.training
        if training is not None and training.clip_norm is not None and f"{last[0]}.bias" not in gradient:
            raise NotApplicable(
                "r-gap needs a bias in the last layer where clients clip their gradients, because the length of a "
                "gradient isn't known then; run an attack that optimises (invg, agic)"
            )
        _candidates(last, gradient, observation.loss, message.update.labels)
        return module, blocks, gradient

    def _run(self, observation: Observation, _generator: object, _device: str, progress: Progress) -> ImageFinding:
        module, blocks, gradient = self._prepare(observation)
        message, task_info = observation.single(), observation.task_info
        granted = message.update.labels
        candidates = _candidates(_last_layer(blocks), gradient, observation.loss, granted)
        low, high = (edge.double() for edge in task_info.pixel_range(torch.zeros((1, *task_info.input_shape))))
        runs = []
        for i, k in enumerate(candidates):
            image, notes = _backwards(blocks, k, gradient, progress, (i, len(candidates)))
            label = granted if granted is not None else class_logits(k[None]).argmin(dim=1)
            distance = mismatch(module, observation.loss, image, label, gradient)
            runs.append((distance, float((image - image.clamp(low, high)).norm()), image, label, notes))
        least = min(run[0] for run in runs)
        matched = [run for run in runs if run[0] <= least + _TWIN]
        distance, _, image, label, notes = min(matched or runs, key=lambda run: run[1])
        if len(matched) > 1:
            notes.append(
                f"{len(matched)} images have this gradient (they differ by a factor); the one with pixels nearest to "
                "the valid range was taken"
            )
        if not distance <= _SUSPECT:  # also where it isn't a number
            notes.append(
                f"the recovered image's gradient differs from the observed one by {distance:.2g} of its length: "
                "the image isn't the client's, or not nearly"
            )
        if not bool(torch.isfinite(image).all()):
            raise NotApplicable("the recursion overflowed; run an attack that optimises (invg, agic)")
        pixels = task_info.denormalise(image.float()).clamp(0, 1)
        return ImageFinding(
            images=pixels,
            labels=label.cpu(),
            label_source=self.name if granted is None else "given",
            objective=distance,
            notes=tuple(notes),
        )


def _exact_gradient(message: Message) -> dict[str, Tensor]:
    """Return the gradient of one example in float64.

    After one local step of SGD it is −ΔW/μ − λW, λ being the weight decay; momentum and FedProx's term are zero there.
    A clipped gradient is the gradient times a number.
    """
    update, training = message.update, message.update.training
    remedy = "run an attack that optimises (invg, agic), or audit batch_size: 1"
    if update.num_examples != 1:
        raise NotApplicable(
            f"r-gap works for one example, the update has {update.num_examples}: its equations are for one input; "
            f"{remedy} and local_steps: 1"
        )
    tensors = {name: t.double().cpu() for name, t in update.tensors.items()}
    weights = {name: message.weights[name].double().cpu() for name in tensors}
    need_signal(update)
    if training is not None and not training.plain_sgd:
        return one_batch_gradient(dataclasses.replace(update, tensors=tensors), weights=weights)
    if update.kind == "weights":
        assert training is not None  # one example is one step
        decay = training.weight_decay
        return {name: -t / training.learning_rate - decay * weights[name] for name, t in tensors.items()}
    return tensors


# The last layer ------------------------------------------------------------------------------------------------------


def _last_layer(blocks: list[Block]) -> tuple[str, nn.Linear]:
    """Return the name and the module of the fully connected layer with which the model must end."""
    step = blocks[-1].steps[-1] if blocks and blocks[-1].steps else None
    if step is None or not isinstance(step.module, nn.Linear) or len(blocks[-1].output_shape) != 1:
        refuse("the model doesn't end in a fully connected layer", "where r-gap begins")
    if blocks[-1].activation is not identity:
        refuse("an activation follows the last layer", "where r-gap expects logits")
    return step.name, step.module


def _candidates(
    last: tuple[str, nn.Linear], gradient: dict[str, Tensor], loss: Loss, granted: Tensor | None
) -> list[Tensor]:
    """Return the possible k = ∂L/∂logits, (classes,) each; NotApplicable where it can't be known."""
    name, module = last
    if f"{name}.bias" in gradient:
        k = gradient[f"{name}.bias"]
        if not k.any():
            raise NotApplicable("the last layer's gradient is zero: it carries nothing to invert")
        return [k]
    if loss is not nn.functional.cross_entropy:
        raise NotApplicable(
            "r-gap needs a bias in the last layer where the loss isn't cross-entropy, to know the loss's derivative"
        )
    u, s, vh = torch.linalg.svd(gradient[f"{name}.weight"], full_matrices=False)
    if not s[0] > 0:
        raise NotApplicable("the last layer's gradient is zero: it carries nothing to invert")
    bias = torch.zeros(module.out_features, dtype=torch.float64) if module.bias is None else module.bias.detach()
    found: list[tuple[float, Tensor]] = []
    for sign in (1.0, -1.0):
        direction = sign * u[:, 0]
        label = int(direction.argmin())
        if granted is not None and label != int(granted):
            continue
        wrong = direction.clamp(max=0).sum() - direction[label]  # other entries below zero
        if -wrong > _TIE * -direction[label]:
            continue
        logits = module.weight.detach() @ (sign * s[0] * vh[0])
        found += _scales(direction, label, logits, bias)
    if not found:
        raise NotApplicable(
            "no label and scale explain the last layer's gradient: it isn't one example's cross-entropy gradient "
            "(was it changed by a defence?); run an attack that optimises (invg, agic)"
        )
    found.sort(key=lambda f: f[0])
    return [k for error, k in found if error <= found[0][0] + _TIE]


def _scales(direction: Tensor, label: int, logits: Tensor, bias: Tensor) -> list[tuple[float, Tensor]]:
    """Return every k = a·``direction`` with 1 − softmax(``logits``/a + bias)[label] = −k[label], and how well it fits.

    The other classes' equations hold best at the right root. ``direction`` (classes,) is of length one and negative at
    ``label`` alone; ``logits`` are W·v·s, the logits times a.
    """
    own = -float(direction[label])

    def derivative(a: float) -> Tensor:
        k = torch.softmax(logits / a + bias, dim=0)
        k[label] = -(k.sum() - k[label])  # −(1 − p), without its cancellation
        return k

    def gap(a: float) -> float:
        return a * own + float(derivative(a)[label])

    grid = torch.logspace(-10, 0, _SCALES, dtype=torch.float64) / own  # −k[label] = 1 − p lies between 0 and 1
    values = [gap(float(a)) for a in grid]
    roots = []
    for i in range(len(values) - 1):
        if values[i] == 0:
            roots.append(float(grid[i]))
        elif values[i] * values[i + 1] < 0:
            root = brentq(gap, float(grid[i]), float(grid[i + 1]), xtol=1e-300, rtol=1e-14)
            roots.append(cast(float, root))
    return [(float((derivative(a) / a - direction).norm()), a * direction) for a in roots]


# The recursion -------------------------------------------------------------------------------------------------------


def _backwards(
    blocks: list[Block], k: Tensor, gradient: dict[str, Tensor], progress: Progress, run: tuple[int, int]
) -> tuple[Tensor, list[str]]:
    """Return the input (1, *shape) that explains ``gradient``, and what the user should know; k is ∂L/∂logits."""
    notes = []
    before: Tensor | None = None  # what the current block's activation sees
    inputs = torch.zeros(0)
    for i in reversed(range(len(blocks))):
        block = blocks[i]
        equations = gradient_constraints(block, k, gradient)
        if before is not None:
            equations.append(weight_constraints(block, before))
        if not equations:
            raise NotApplicable(f"the update lacks the gradient of '{block.name}', and nothing else tells its input")
        solution, is_open = solve(equations)
        inputs = solution.view(block.input_shape)
        if is_open:
            notes.append(
                f"the equations of layer '{block.name}' leave some of its {block.unknowns} inputs open "
                "('fedaudit rank' counts them); the solution of least norm was taken"
            )
        if i:
            before = blocks[i - 1].inverse(inputs[None])[0]
            k = blocks[i - 1].slope(before[None])[0] * adjoint(block, k)
        progress(run[0] * len(blocks) + len(blocks) - i, run[1] * len(blocks))
    return inputs[None], notes


def mismatch(module: nn.Module, loss: Loss, image: Tensor, label: Tensor, gradient: dict[str, Tensor]) -> float:
    """Return ‖∇L(image) − gradient‖ / ‖gradient‖: the attack's own measure of its success."""
    parameters: dict[str, Any] = {name: p for name, p in module.named_parameters() if name in gradient}
    with torch.enable_grad():
        value = loss(module(image), label.cpu())
        grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True, materialize_grads=True)
    difference = sum(float((g - gradient[name]).square().sum()) for name, g in zip(parameters, grads, strict=True))
    return float((difference / sum(float(gradient[name].square().sum()) for name in parameters)) ** 0.5)
