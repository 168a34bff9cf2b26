"""What a client does with the model that it received: one gradient, or local training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedaudit.models import set_training_mode
from fedaudit.task.training import Loss
from fedaudit.utils.errors import BadInput
from fedaudit.utils.finite import all_finite

if TYPE_CHECKING:
    from collections.abc import Iterator

# What a user's own model or loss raises on examples that it can't take.
FAILURES = (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError, AttributeError)


@contextmanager
def local_randomness(seed: int) -> Iterator[None]:
    """Let dropout and its kin draw from ``seed``; the global RNG is as it was afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes a millisecond: it writes down the stack
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
        yield


def on_device(loss: Loss, device: str) -> Loss:
    """Return a loss whose own tensors, if it is a module with some, are where training computes."""
    return copy.deepcopy(loss).to(device) if isinstance(loss, nn.Module) and device != "cpu" else loss


def draws_at_random(model: nn.Module, inputs: Tensor) -> bool:
    """Return whether training mode draws masks: dropout, functional or inside of other layers, or its kin.

    A model that fails in training mode draws none: its training says why it fails. Two passes are compared, and the
    model's modes and buffers stay as they are.
    """
    if any(isinstance(part, _DropoutNd) and part.p > 0 for part in model.modules()):
        return True
    tried = copy.deepcopy(model)
    set_training_mode(tried, "eval")
    state = {name: value.clone() for name, value in tried.state_dict().items()}
    seen = []
    with torch.no_grad():
        for seed in range(2):
            tried.load_state_dict(state)
            try:
                with local_randomness(seed):
                    seen.append(tried(inputs))
            except FAILURES:
                return False
    return all(isinstance(outputs, Tensor) for outputs in seen) and not torch.equal(*seen)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that training changes, by name; BadInput where there are none."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise BadInput("the model has no trainable parameter; nothing would travel in this federation")
    return found


def gradient(
    model: nn.Module, loss: Loss, batch: tuple[Tensor, Tensor], gradients: Callable[..., list[Tensor]] | None = None
) -> dict[str, Tensor]:
    """Return the gradient of the mean loss over ``batch`` for every trainable parameter.

    ``gradients`` takes its place where a defence changes the training itself: of (model, loss, batch) one tensor a
    parameter.
    """
    parameters = trainable(model)
    grads: Sequence[Tensor | None]
    if gradients is None:
        value = batch_loss(model, loss, batch)
        grads = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    else:
        grads = gradients(model, loss, batch)
    result = {}
    for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
        grad = torch.zeros_like(parameter) if grad is None else grad
        if not all_finite([grad]):
            raise BadInput(f"the gradient of '{name}' is not finite: check the data, the loss and the learning rate")
        result[name] = grad.detach()
    return result


def train(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    learning_rate: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    proximal_mu: float = 0.0,
    gradients: Callable[..., list[Tensor]] | None = None,
    limit: float | None = None,
) -> list[float]:
    """Train ``model`` in place by SGD, one step a batch; return each step's loss before the step.

    FedProx (Li et al. 2020, Eq. 2) adds μ/2·‖w − w_global‖² to the loss, w_global being the weights at the start. With
    ``limit`` every parameter is brought back to within that distance of its start after each step.

    Raises:
        BadInput: training diverged, or the loss isn't one number.
    """
    parameters = list(trainable(model).values())
    anchor = [p.detach().clone() for p in parameters] if proximal_mu or limit is not None else []
    step = _sgd(learning_rate, momentum, weight_decay)
    losses: list[Tensor] = []
    for batch in batches:
        for parameter in parameters:
            parameter.grad = None
        value = batch_loss(model, loss, batch)
        if gradients is None:
            value.backward()
        else:
            for parameter, own in zip(parameters, gradients(model, loss, batch), strict=True):
                parameter.grad = own
        for parameter, start in zip(parameters, anchor if proximal_mu else [], strict=False):
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - start, alpha=proximal_mu)
        step([p for p in parameters if p.grad is not None])
        if limit is not None:
            with torch.no_grad():
                for parameter, start in zip(parameters, anchor, strict=True):
                    torch.clamp(parameter, start - limit, start + limit, out=parameter)
        losses.append(value.detach())
    if not all_finite(parameters):
        raise BadInput(f"local training diverged at learning rate {learning_rate:g}; lower it")
    return torch.stack(losses).cpu().tolist() if losses else []


def _sgd(learning_rate: float, momentum: float, weight_decay: float) -> Callable[[list[Tensor]], None]:
    """Return a step of SGD on parameters that have gradients: the bits of ``torch.optim.SGD``, without its bookkeeping.

    On small networks the bookkeeping takes as long as the arithmetic.
    """
    velocities: dict[Tensor, Tensor] = {}

    def moved(parameters: list[Tensor], change: list[Tensor]) -> list[Tensor]:
        try:
            before = [velocities[p] for p in parameters]
        except KeyError:  # some parameter's first gradient, which is its velocity
            for p, c in zip(parameters, change, strict=True):
                velocities[p] = velocities[p].mul_(momentum).add_(c) if p in velocities else c
            return [velocities[p] for p in parameters]
        torch._foreach_mul_(before, momentum)
        torch._foreach_add_(before, change)
        return before

    def step(parameters: list[Tensor]) -> None:
        if not parameters:
            return
        with torch.no_grad():
            change = [cast("Tensor", p.grad) for p in parameters]
            if weight_decay:
                change = list(torch._foreach_add(change, parameters, alpha=weight_decay))
            if momentum:
                change = moved(parameters, change)
            torch._foreach_add_(parameters, change, alpha=-learning_rate)

    return step


def batch_loss(model: Callable[[Tensor], object], loss: Loss, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of a model on a batch, one number; BadInput where model or loss can't take it."""
    inputs, targets = batch
    try:
        value = loss(model(inputs), targets)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        if "Expected more than 1 value per channel" not in str(error):
            given = f"inputs of shape {tuple(inputs.shape)} and targets of shape {tuple(targets.shape)}"
            raise BadInput(f"the model or the loss can't take {given}: {type(error).__name__}: {error}") from error
        raise BadInput(
            "BatchNorm in training mode can't normalise a single value per channel: "
            "use a larger batch_size or larger images, or model.batch_norm: eval"
        ) from None
    if not isinstance(value, Tensor) or value.ndim:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise BadInput(f"the loss must return one number, the mean over the batch, not {got}")
    if torch.is_grad_enabled() and not value.requires_grad:
        raise BadInput(
            "no gradient reaches the model's trainable parameters: look for detach(), no_grad() or numpy in it"
        )
    return value
