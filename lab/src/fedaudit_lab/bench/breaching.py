"""The peer ``breaching`` on our victims: its own objective, loop and settings (Geiping et al.'s successor package)."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit_lab.bench import import_peer
from fedaudit_lab.bench.cases import SHAPE, Prepared, Tool


def attacker(
    ready: Prepared, mean: Tensor, std: Tensor, total_variation: float | None
) -> tuple[Any, list[dict[str, Any]]]:
    """Return breaching's ``invertinggradients``, ready to iterate, and its data; ``mean`` and ``std`` (1, C, 1, 1)."""
    (breaching,) = import_peer("breaching", "breaching")
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # it prints what it loads
        warnings.simplefilter("ignore")
        settings = breaching.get_attack_config("invertinggradients")
    if total_variation is not None:
        settings.regularization.total_variation.scale = total_variation
    cpu = {"device": torch.device("cpu"), "dtype": torch.float}
    peer = breaching.attacks.prepare_attack(ready.victim.module, nn.CrossEntropyLoss(), settings, cpu)
    peer.data_shape, peer.dm, peer.ds = ready.start.shape[1:], mean, std
    training = ready.training
    local = None
    target = ready.target
    if training.learning_rate != 1:
        steps = ready.labels.split(list(training.batch_sizes))
        local = {
            "lr": training.learning_rate,
            "steps": training.local_steps,
            "data_per_step": training.batch_sizes[0],
            "labels": steps,
        }
        target = [-t for t in target]  # it matches W_T − W
    metadata = {"num_data_points": len(ready.labels), "labels": ready.labels, "local_hyperparams": local}
    shared = [{"gradients": target, "buffers": None, "metadata": metadata}]
    for regulariser in peer.regularizers:
        regulariser.initialize([ready.victim.module], shared, ready.labels)
    peer.objective.initialize(peer.loss_fn, peer.cfg.impl, local)
    return peer, shared


def peer_tool(ready: Prepared, total_variation: float) -> Tool:
    """Return breaching's iteration, as its ``_run_trial`` takes it, on ``ready``."""
    std = torch.full((1, SHAPE[0], 1, 1), 0.25)
    mean = torch.full_like(std, 0.5)
    peer, shared = attacker(ready, mean, std, total_variation)
    candidate = ready.start.clone().requires_grad_()
    iterate = iteration(peer, shared, ready, candidate)

    def engine(images: Tensor) -> tuple[Tensor, Tensor]:
        leaf = images.detach().clone().requires_grad_()
        value, _ = peer.objective(ready.victim.module, shared[0]["gradients"], leaf * 1, ready.labels)
        (grad,) = torch.autograd.grad(value.sum(), leaf)
        return value.detach().squeeze(), grad

    return Tool(iterate, engine)


def iteration(peer: Any, shared: list[dict[str, Any]], ready: Prepared, candidate: Tensor) -> Any:
    """Return a function that does what one iteration of breaching's loop does, progress messages apart."""
    optimiser, scheduler = peer._init_optimizer([candidate])
    module = ready.victim.module
    step = 0

    def iterate() -> float:
        nonlocal step
        closure = peer._compute_objective(candidate, ready.labels, [module], optimiser, shared, step)
        value = optimiser.step(closure)
        scheduler.step()
        with torch.no_grad():
            candidate.data = torch.max(torch.min(candidate, (1 - peer.dm) / peer.ds), -peer.dm / peer.ds)
        step += 1
        return float(value.item())

    return iterate
