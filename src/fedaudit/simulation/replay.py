"""Train again from the recorded facts, on the recorded examples: what comes out tells whether the facts are true."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedaudit.defences.privacy import add_clipped
from fedaudit.models import set_training_mode
from fedaudit.simulation.local_training import batch_loss, local_randomness
from fedaudit.task.training import UNMODELLED, Loss, TrainingConfig
from fedaudit.transcript.update import PrivateSteps
from fedaudit.utils.errors import BadInput

_IMPOSSIBLE = ("several-inputs",)  # what can't even be tried


def replay(
    module: nn.Module,
    loss: Loss,
    start: Mapping[str, Tensor],
    passes: Sequence[tuple[Tensor, Tensor]],
    training: TrainingConfig,
    *,
    batch_norm: Literal["eval", "train"] | None = "train",
    dropout: bool = True,
    randomness: Sequence[Tensor] = (),
    private: PrivateSteps | None = None,
    seed: int = 0,
    points: list[dict[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """Return the whole state after training as ``training`` says, by torch's own optimisers on the CPU.

    The state isn't finite where training diverged.

    Args:
        module: of which a copy is trained.
        loss: of (outputs, targets), the mean over the pass.
        training: a step has the passes that it lists, or one.
        passes: inputs (n, ...) as the model sees them and targets (n, ...) of each forward and backward pass, in order.
        batch_norm, dropout: the mode of training, as of :func:`~fedaudit.models.set_training_mode`; None: the model has
            no BatchNorm.
        randomness: the state of torch's CPU generator before each pass, and each step without any example; empty: any.
            The global one stays as it was.
        private: how each step's gradient was clipped example by example, and given noise, which Opacus draws so.
        seed: of what is drawn where there is no ``randomness``.
        points: takes the parameters after each step.

    Raises:
        BadInput: nobody can repeat such training here; state, passes or targets don't fit; the loss isn't one number.
    """
    if training.optimiser == "other":
        raise BadInput(f"training can't be repeated: {UNMODELLED['optimiser']}")
    for name in _IMPOSSIBLE:
        if name in training.unmodelled:
            raise BadInput(f"training can't be repeated: {UNMODELLED[name]}")
    steps = (private or PrivateSteps(1.0, 0.0, 1.0, training.local_steps)).in_order(training)
    told, given = [p.examples for _, step in steps for p in step], [len(x) for x, _ in passes]
    if told != given:
        raise BadInput(f"training tells of passes of {told} examples, but there are {given}")
    drawing = len(passes) + (len(private.empty) if private else 0)
    if randomness and len(randomness) != drawing:
        raise BadInput(f"there are {drawing} passes, but {len(randomness)} states of the random generator")
    model, kind = _model(module, start, training), getattr(torch, training.weights)
    passes = [(x.to(kind) if x.is_floating_point() else x, y) for x, y in passes]
    set_training_mode(model, batch_norm or "train", dropout=dropout)
    optimiser, multiples = _optimiser(model, training)
    trained = [p for group in optimiser.param_groups for p in group["params"]]
    anchor = [p.detach().clone() for p in trained] if training.proximal_mu else []
    batches, states = iter(passes), iter(randomness)
    with local_randomness(seed):
        for rate, step in steps:
            optimiser.zero_grad(set_to_none=True)
            total = [torch.zeros_like(p) for p in trained] if private else []
            for one in step or (None,):
                if randomness:
                    torch.set_rng_state(next(states))
                if one is None:
                    continue
                batch = next(batches)
                with _autocast(training):
                    if private:
                        weight = one.weight * sum(p.examples for p in step) / one.examples
                        for grads in _of_examples(model, loss, batch, trained, weight):
                            add_clipped(total, grads, private.clip, private.layers)
                        continue
                    value = batch_loss(model, loss, batch)
                (value if one.weight == 1 else value * one.weight).backward()
            for parameter, summed in zip(trained, total, strict=False):
                assert private is not None
                if private.noise:
                    summed += torch.normal(0.0, private.noise * private.clip, summed.shape, dtype=summed.dtype)
                parameter.grad = summed / private.divisor
            for parameter, origin in zip(trained, anchor, strict=False):
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach() - origin, alpha=training.proximal_mu)
            if training.clip_norm is not None:
                nn.utils.clip_grad_norm_(trained, training.clip_norm)
            if training.clip_value is not None:
                nn.utils.clip_grad_value_(trained, training.clip_value)
            for group, multiple in zip(optimiser.param_groups, multiples, strict=True):
                group["lr"] = multiple * rate
            optimiser.step()
            if points is not None:
                points.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _of_examples(
    model: nn.Module, loss: Loss, batch: tuple[Tensor, Tensor], parameters: Sequence[Tensor], weight: float
) -> Iterator[Sequence[Tensor]]:
    """Yield each example's gradient: n times its part of that of the batch's mean loss, so that class weights count.

    Where the model draws masks, those of the batch's pass count, and each example goes back through all of it.
    """
    inputs, before = batch[0], torch.get_rng_state()
    outputs = model(inputs)
    drew = not torch.equal(before, torch.get_rng_state())
    (slopes,) = torch.autograd.grad(batch_loss(lambda _: outputs, loss, batch), outputs)
    for i in range(len(inputs)):
        own = outputs[i : i + 1] if drew else model(inputs[i : i + 1])
        into = weight * len(inputs) * slopes[i : i + 1]
        yield torch.autograd.grad(own, parameters, into, retain_graph=drew, allow_unused=True, materialize_grads=True)


def relative_error(sent: Mapping[str, Tensor], replayed: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """Return ‖replayed − sent‖ / ‖sent − start‖ over what was sent; 0 where they are equal.

    Infinity where anything isn't finite, or only what was sent is the start. BadInput: something was sent that the
    others don't have, or in another shape.
    """
    apart, moved = 0.0, 0.0
    for name, value in sent.items():
        for other in (replayed, start):
            if name not in other or other[name].shape != value.shape:
                raise BadInput(f"'{name}' was sent in the shape {tuple(value.shape)}, which the model doesn't have")
        own = value.detach().double().cpu()
        apart += float((replayed[name].detach().double().cpu() - own).square().sum())
        moved += float((own - start[name].detach().double().cpu()).square().sum())
    if not (math.isfinite(apart) and math.isfinite(moved)):
        return math.inf
    return 0.0 if apart == 0 else math.inf if moved == 0 else math.sqrt(apart / moved)


def _model(module: nn.Module, start: Mapping[str, Tensor], training: TrainingConfig) -> nn.Module:
    model = copy.deepcopy(module).cpu()
    if training.weights != "float32":
        model = model.to(getattr(torch, training.weights))
    try:
        model.load_state_dict(dict(start))
    except RuntimeError as error:
        raise BadInput(f"the recorded state isn't this model's: {error}") from error
    for parameter in model.parameters():
        parameter.grad = None
    return model


def _optimiser(model: nn.Module, training: TrainingConfig) -> tuple[torch.optim.Optimizer, list[float]]:
    """Return the optimiser, and each of its groups' rate as a multiple of the step's."""
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = []
    multiples = []
    for group in training.groups:
        if unknown := [name for name in group.parameters if name not in named]:
            raise BadInput(f"training tells of a parameter '{unknown[0]}', which the model doesn't have")
        own = [named.pop(name) for name in group.parameters]
        for parameter in own:
            parameter.requires_grad_(parameter.requires_grad and group.learning_rate > 0)
        if group.learning_rate > 0:
            own_momentum = {"momentum": group.momentum} if training.optimiser == "sgd" else {}
            groups.append({"params": own, "weight_decay": group.weight_decay, **own_momentum})
            multiples.append(group.learning_rate)
    if rest := [p for p in named.values() if p.requires_grad]:
        groups.insert(0, {"params": rest})
        multiples.insert(0, 1.0)
    if not groups:
        raise BadInput("training tells of no parameter that is trained")
    rate, decay = training.learning_rate, training.weight_decay
    if training.optimiser == "sgd":
        made: torch.optim.Optimizer = torch.optim.SGD(
            groups, lr=rate, momentum=training.momentum, dampening=training.dampening, weight_decay=decay
        )
        for settings in made.param_groups:  # torch refuses it as a default where one group has no momentum
            settings["nesterov"] = training.nesterov
    else:
        kind = torch.optim.Adam if training.optimiser == "adam" else torch.optim.AdamW
        made = kind(
            groups,
            lr=rate,
            betas=training.betas,
            eps=training.epsilon,
            amsgrad=training.amsgrad,
            weight_decay=decay,
        )
    return made, multiples


def _autocast(training: TrainingConfig) -> contextlib.AbstractContextManager[Any]:
    if training.precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16 if training.precision == "bfloat16" else torch.float16)
