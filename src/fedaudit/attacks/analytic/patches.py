"""A ViT's patches, from the gradients of its patch embedding and of its position embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, lsmr
from torch import Tensor, nn

from fedaudit.attacks.analytic.first_layer import Recovered
from fedaudit.attacks.local_training import treatments
from fedaudit.attacks.text.layers import Receiver, inputs_of, receivers
from fedaudit.simulation.local_training import local_randomness
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import NotApplicable

CERTIFIED = 1 / 255 / 8  # estimated error of a certified image's numbers, as a share of the pixels' range
LEFT_OVER = 1e-3  # of the gradient, the most that an exact answer may leave unexplained
SAME = 1e-9  # relative difference of gradients that are the same


@dataclass(frozen=True)
class PatchEmbedding:
    """A convolution that cuts the image into patches, and the position embedding that is added to them.

    ``first`` is its row for the first patch.
    """

    weight: str
    module: nn.Conv2d
    position: str
    first: int


def patch_embedding(model: nn.Module, task_info: TaskInfo) -> PatchEmbedding | None:
    """Return the patch embedding of a model in float64, found by its gradients on probes; None where there is none.

    The gradient of a position embedding that is added to the patches alone is that of the patches.
    """
    if len(task_info.input_shape) != 3:
        return None
    convolutions = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    if not convolutions or not _cuts(convolutions[0][1], task_info.input_shape):
        return None
    name, convolution = convolutions[0]
    kept: list[tuple[Tensor, Tensor]] = []
    handle = convolution.register_forward_hook(lambda _module, inputs, output: kept.append((inputs[0], output)))
    shape = (1, *task_info.input_shape)
    candidates: set[tuple[str, int]] | None = None
    parameters = {n: p for n, p in model.named_parameters() if p.ndim >= 2 and p.requires_grad}
    try:
        with local_randomness(0), torch.enable_grad():
            for seed in (0, 1):
                kept.clear()
                probe = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
                outputs = model(probe)
                if len(kept) != 1 or not torch.equal(kept[0][0], probe):
                    return None
                weights = torch.randn(outputs.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
                flow, *grads = torch.autograd.grad(
                    (outputs * weights).sum(), [kept[0][1], *parameters.values()], allow_unused=True
                )
                patches = flow.flatten(2)[0].T
                found = {
                    (n, first)
                    for n, g in zip(parameters, grads, strict=True)
                    if g is not None and g.shape[-1] == patches.shape[1]
                    for first in range(len(g.flatten(0, -2)) - len(patches) + 1)
                    if equal(g.flatten(0, -2)[first : first + len(patches)], patches)
                }
                candidates = found if candidates is None else candidates & found
    except (RuntimeError, ValueError, TypeError):  # a model that takes no single example has no patches for us
        return None
    finally:
        handle.remove()
    if not candidates:
        return None
    position, first = sorted(candidates)[0]
    return PatchEmbedding(f"{name}.weight", convolution, position, first)


def _cuts(convolution: nn.Conv2d, shape: tuple[int, ...]) -> bool:
    """Return whether the convolution takes every pixel in one patch only."""
    return (
        convolution.kernel_size == convolution.stride
        and not isinstance(convolution.padding, str)
        and not any(convolution.padding)
        and set(convolution.dilation) == {1}
        and convolution.groups == 1
        and convolution.in_channels == shape[0]
        and not any(n % k for n, k in zip(shape[1:], convolution.kernel_size, strict=True))
    )


def equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same but for rounding, and not zero."""
    return float((one - other).norm()) <= SAME * float(other.norm()) and bool(other.any())


def patches_of(module: nn.Module, observation: Observation, attack: str) -> Recovered:
    """Return the one image behind the gradients of a patch embedding and of a position embedding."""
    message, task_info = observation.single(), observation.task_info
    update = message.update
    embedding = patch_embedding(module, task_info)
    assert embedding is not None  # whoever calls has asked
    if update.num_examples > 1:
        raise NotApplicable(
            f"{attack} takes one image at a time before a ViT's patch embedding, the update has {update.num_examples}: "
            "their patches' gradients are summed; run an attack that optimises (invg, agic), or audit batch_size: 1"
        )
    gradients = gradients_of(message, [embedding.weight, embedding.position], attack)
    high, wide = embedding.module.kernel_size
    count = math.prod(task_info.input_shape[1:]) // (high * wide)
    product = gradients[0].flatten(1)
    flows = gradients[1].flatten(0, -2)[embedding.first : embedding.first + count]
    if count >= len(product):
        raise NotApplicable(
            f"{attack} needs fewer patches than the embedding has channels: {count} of {len(product)}; run an attack "
            "that optimises (invg, agic)"
        )
    inverse = torch.linalg.pinv(flows.T)
    patches = inverse @ product
    rest = product - flows.T @ patches
    left_over = float(rest.norm() / product.norm().clamp(min=1e-300))
    spread = rest.norm() / ((len(product) - count) * product.shape[1]) ** 0.5
    error = float(spread * inverse.norm(dim=1).max()) * max(task_info.std)
    image = nn.functional.fold(
        patches.T[None], task_info.input_shape[1:], kernel_size=(high, wide), stride=(high, wide)
    )
    sure = left_over <= LEFT_OVER and error <= CERTIFIED and bool(torch.isfinite(image).all())
    label = label_of(module, observation, image)
    notes = [f"{count} patches explain the embedding's gradient up to {left_over:.1g} of it"]
    if not sure:
        notes.append("not certified: noise or a defence is in the update, or the patches' gradients are too alike")
    return Recovered(image.flatten(1), label, torch.tensor([sure]), tuple(notes))


def gradients_of(message: Message, names: Sequence[str], attack: str) -> list[Tensor]:
    """Return the gradients of some parameters in float64, or sums over steps of them, all times the same number."""
    update, training = message.update, message.update.training
    missing = [name for name in names if name not in update.tensors]
    if missing:
        raise NotApplicable(f"the update lacks '{missing[0]}', which {attack} needs for a ViT's patches")
    if update.sanitised is not None and update.sanitised.signs:
        raise NotApplicable(f"{attack} needs the sizes of an update's numbers, and only their signs were sent")
    gradients = [update.tensors[name].double().cpu() for name in names]
    if update.kind == "weights" and training is not None:
        for i, (name, group) in enumerate(zip(names, treatments(training, names), strict=True)):
            own = group.learning_rate * training.learning_rate
            if not own:
                raise NotApplicable(f"'{name}' isn't trained, so the update says nothing to {attack}")
            gradients[i] = -gradients[i] / own - group.weight_decay * message.weights[name].double().cpu()
    return gradients


def label_of(module: nn.Module, observation: Observation, image: Tensor) -> Tensor:
    """Return (1,) the label with which the image's gradient is nearest to the observed one, in direction."""
    classes = observation.task_info.num_classes
    assert classes is not None
    parameters = {n: p for n, p in module.named_parameters() if n in observation.single().update.tensors}
    seen = torch.cat([observation.single().update.tensors[n].double().flatten() for n in parameters])
    sign = 1.0 if observation.update_kind == "gradient" else -1.0
    likeness = []
    with local_randomness(0), torch.enable_grad():
        for label in range(classes):
            value = observation.loss(module(image), torch.tensor([label]))
            grads = torch.autograd.grad(value, list(parameters.values()))
            own = torch.cat([g.flatten() for g in grads])
            likeness.append(float(nn.functional.cosine_similarity(own, sign * seen, dim=0)))
    return torch.tensor([max(range(classes), key=lambda c: likeness[c])])


_ITERATIONS = 5000  # of least squares through the embedding
_SOLVED = 1e-6  # relative error with which an image must come back through its embedding
_ELSE = "run an attack that optimises (invg, agic)"


@dataclass(frozen=True)
class FirstAttention:
    """An attention that alone receives the embedded image and its positions.

    Attributes:
        receiver: its query, key and value.
        position: name of the position embedding, whose gradient is ∂L/∂z of every token; ``first`` is the first's row.
        tokens: how many the attention receives.
    """

    receiver: Receiver
    position: str
    first: int
    tokens: int


def attends(model: nn.Module, task_info: TaskInfo) -> bool:
    """Return whether a model of images has an attention."""
    return len(task_info.input_shape) == 3 and _attention(model, task_info) is not None


def _attention(model: nn.Module, task_info: TaskInfo) -> Receiver | None:
    probes = torch.randn((2, *task_info.input_shape), generator=torch.Generator().manual_seed(0)).double()
    try:
        with local_randomness(0):
            return next((receiver for receiver in receivers(model, probes) if receiver.attention), None)
    except (RuntimeError, ValueError, TypeError):
        return None


def first_attention(model: nn.Module, task_info: TaskInfo, attack: str) -> FirstAttention:
    """Return the attention that alone gets embedding and positions, in a model in float64, by gradients on probes."""
    receiver = _attention(model, task_info)
    assert receiver is not None  # whoever calls has asked
    parameters = {n: p for n, p in model.named_parameters() if p.ndim >= 2 and p.requires_grad}
    candidates: set[tuple[str, int]] | None = None
    tokens, alone = 0, True
    for seed in (0, 1):
        probe = torch.randn((1, *task_info.input_shape), generator=torch.Generator().manual_seed(seed)).double()
        kept: list[Tensor] = []
        handle = model.get_submodule(receiver.name).register_forward_pre_hook(
            lambda _module, args, kwargs, kept=kept: kept.append(args[0] if args else next(iter(kwargs.values()))),
            with_kwargs=True,
        )
        try:
            with local_randomness(0), torch.enable_grad():
                outputs = model(probe)
                weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(9)).double()
                flow, *grads = torch.autograd.grad(
                    (outputs * weights).sum(), [kept[0], *parameters.values()], allow_unused=True
                )
        finally:
            handle.remove()
        gradient = {n: g for n, g in zip(parameters, grads, strict=True) if g is not None}
        flows, tokens = flow[0], flow.shape[1]
        matrices = [gradient[name] for name in receiver.weights if name in gradient]
        alone &= len(matrices) == len(receiver.weights) and equal(
            _summed(model, receiver, matrices), flows.T @ kept[0][0].detach()
        )
        found = {
            (n, first)
            for n, g in gradient.items()
            if g.shape[-1] == flows.shape[1]
            for first in range(len(g.flatten(0, -2)) - tokens + 1)
            if equal(g.flatten(0, -2)[first : first + tokens], flows)
        }
        candidates = found if candidates is None else candidates & found
    if not candidates or not alone:
        raise NotApplicable(
            f"{attack} needs a learnable position embedding whose sum with the patches goes into the first attention, "
            f"and nowhere else (no LayerNorm before it, no shortcut around it); {_ELSE}"
        )
    position, first = sorted(candidates)[0]
    return FirstAttention(receiver, position, first, tokens)


def _summed(model: nn.Module, receiver: Receiver, gradients: list[Tensor]) -> Tensor:
    """Return (width, width) Wᵀ·∂L/∂W, summed over query, key and value: Σ_t ∂L/∂z_t · z_tᵀ."""
    total = torch.zeros((receiver.width, receiver.width), dtype=torch.float64)
    for name, gradient in zip(receiver.weights, gradients, strict=True):
        weight = model.get_parameter(name).detach()
        total += weight @ gradient.T if name in receiver.transposed else weight.T @ gradient
    return total


def attended(module: nn.Module, observation: Observation, attack: str) -> Callable[[], Recovered]:
    """Return what solves for the image that an attention received, from the gradients of query, key and value.

    With Q = W_q·z and so on, ∂L/∂z = W_qᵀ·∂L/∂Q + W_kᵀ·∂L/∂K + W_vᵀ·∂L/∂V, and ∂L/∂W_q is the sum of ∂L/∂Q·zᵀ over the
    tokens. So W_qᵀ·∂L/∂W_q + W_kᵀ·∂L/∂W_k + W_vᵀ·∂L/∂W_v = Σ_t ∂L/∂z_t·z_tᵀ, where the position embedding's gradient is
    ∂L/∂z_t, and least squares gives the tokens z_t (Lu et al. 2022, Theorem 1). The image behind them follows by least
    squares through the linear embedding that leads there.
    """
    message, task_info = observation.single(), observation.task_info
    update = message.update
    attention = first_attention(module, task_info, attack)
    if update.kind == "weights" and (update.training is None or update.training.local_steps > 1):
        raise NotApplicable(
            f"{attack} takes one known local step before an attention, because the weights in its equations move; "
            f"{_ELSE}, or audit local_steps: 1"
        )
    if update.num_examples > 1:
        raise NotApplicable(
            f"{attack} takes one image at a time before an attention, the update has {update.num_examples}: their "
            f"tokens' gradients are summed; {_ELSE}, or audit batch_size: 1"
        )
    if attention.tokens >= attention.receiver.width:
        raise NotApplicable(
            f"{attack} needs fewer tokens than the attention is wide: {attention.tokens} of {attention.receiver.width}"
            f"; {_ELSE}"
        )
    positions, *matrices = gradients_of(message, [attention.position, *attention.receiver.weights], attack)
    flows = positions.flatten(0, -2)[attention.first : attention.first + attention.tokens]
    product = _summed(module, attention.receiver, matrices)
    embedding = _Embedding(module, attention.receiver, task_info.input_shape)
    embedding.check(attack)

    def solved() -> Recovered:
        inverse = torch.linalg.pinv(flows.T)
        tokens = inverse @ product
        rest = product - flows.T @ tokens
        left_over = float(rest.norm() / product.norm().clamp(min=1e-300))
        spread = rest.norm() / ((len(product) - attention.tokens) * len(product)) ** 0.5
        image = embedding.solve(tokens - embedding.blank)
        noise = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0)).double()
        turned = embedding.solve(spread * inverse.norm(dim=1)[:, None] * noise)
        error = float(turned.abs().max()) * max(task_info.std)
        sure = left_over <= LEFT_OVER and error <= CERTIFIED and bool(torch.isfinite(image).all())
        notes = [f"{attention.tokens} tokens explain the attention's gradients up to {left_over:.1g} of them"]
        if not sure:
            notes.append("not certified: noise or a defence is in the update, or the tokens' gradients are too alike")
        label = label_of(module, observation, image)
        return Recovered(image.flatten(1), label, torch.tensor([sure]), tuple(notes))

    return solved


class _Embedding:
    """What leads from an image to the first attention, as a linear map and a constant."""

    def __init__(self, module: nn.Module, receiver: Receiver, shape: tuple[int, ...]) -> None:
        self._module, self._receiver, self._shape = module, receiver, (1, *shape)
        self.blank = self._reached(torch.zeros(self._shape, dtype=torch.float64))

    def _reached(self, image: Tensor, *, differentiable: bool = False) -> Tensor:
        with local_randomness(0):
            return inputs_of(self._module, self._receiver, image, differentiable=differentiable)[0]

    def _forward(self, image: np.ndarray) -> np.ndarray:
        reached = self._reached(torch.from_numpy(image).view(self._shape)) - self.blank
        return np.asarray(reached.flatten())

    def _backward(self, tokens: np.ndarray) -> np.ndarray:
        image = torch.zeros(self._shape, dtype=torch.float64, requires_grad=True)
        reached = self._reached(image, differentiable=True)
        (back,) = torch.autograd.grad((reached * torch.from_numpy(tokens).view(reached.shape)).sum(), image)
        return np.asarray(back.flatten())

    def solve(self, tokens: Tensor) -> Tensor:
        """Return (1, C, H, W) the image whose tokens are nearest to (tokens, width), without the constant."""
        size = int(np.prod(self._shape))
        operator = LinearOperator(
            (tokens.numel(), size), matvec=self._forward, rmatvec=self._backward, dtype=np.float64
        )
        found = lsmr(operator, np.asarray(tokens.flatten()), atol=1e-15, btol=1e-15, conlim=0, maxiter=_ITERATIONS)[0]
        return torch.from_numpy(found).view(self._shape)

    def check(self, attack: str) -> None:
        """Raise NotApplicable unless the map is linear and an image comes back through it."""
        rng = torch.Generator().manual_seed(1)
        one, other = (torch.randn(self._shape, generator=rng).double() for _ in range(2))
        whole = self._reached(one + other) + self.blank
        if not equal(self._reached(one) + self._reached(other), whole):
            raise NotApplicable(f"{attack} needs an embedding before the attention that is linear; {_ELSE}")
        back = self.solve(self._reached(one) - self.blank)
        if float((back - one).norm()) > _SOLVED * float(one.norm()):
            raise NotApplicable(
                f"{attack} needs an embedding that keeps all pixels: here a patch has more numbers than channels, or "
                f"some of them are left out; {_ELSE}"
            )
