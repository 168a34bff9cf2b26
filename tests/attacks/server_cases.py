"""What the tests of malicious servers share: a federation for each server, and how well its images came out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fedaudit.simulation.simulator import Recording
from tests.build import Scenarios

PUBLIC: dict[str, Any] = {"knows_public_data": True, "public_examples": 200}


def _under(server: dict[str, Any] | str, size: int, model: dict[str, Any], attack: str = "", **parts: Any) -> Scenarios:
    """Return scenarios of a client that sends a gradient of so many examples to a malicious server."""
    name = server if isinstance(server, str) else server["name"]
    return Scenarios(
        model=model,
        federation={"clients": 1, "examples": size, "batch_size": size, "server": server},
        attacks=attack or name,
        **{**parts, "threat": {"adversary": "malicious-server", **parts.get("threat", {})}},
    )


_MANY = {"knows_public_data": True, "public_examples": 900}
SERVERS: dict[str, Scenarios] = {
    "imprint": _under({"name": "imprint", "units": 96, "spread": 0.15}, 48, {"name": "convnet-small", "width": 4}),
    "loki": _under({"name": "loki", "units": 64, "spread": 0.15}, 48, {"name": "convnet-small", "width": 4}).but(
        federation={"clients": 4, "batch_size": 12}, threat={"sees": "sum"}
    ),
    "trap-weights": _under("trap-weights", 16, {"name": "mlp", "width": 400}, data="photos"),
    "fishing": _under("fishing", 12, {"name": "convnet-small", "width": 8}),
    "decepticons": _under("decepticons", 4, {"name": "encoder", "width": 64}, data="notes"),
    "peftleak": _under("peftleak", 1, {"name": "vit-adapters", "width": 64}),
    "geminio": _under(
        "geminio",
        120,
        {"name": "mlp", "width": 32},
        "invg",
        data={"split": "test"},
        threat={**_MANY, "public_examples": 600},
    ),
    "seer": _under("seer", 8, {"name": "mlp", "width": 64}, data={"split": "test"}, threat=_MANY),
}


def examples(recording: Recording) -> tuple[Tensor, Tensor]:
    """Return the examples of all updates, and their labels."""
    inputs, labels = recording.truth.inputs.values(), recording.truth.labels.values()
    return torch.cat(list(inputs)), torch.cat(list(labels))


def each_gradient(recording: Recording) -> list[dict[str, Tensor]]:
    """Return each example's gradient of the model that was sent: the definition."""
    transcript = recording.transcript
    module = transcript.module.eval()
    names = [name for name, _ in module.named_parameters()]
    state = {n: t.clone().requires_grad_(n in names) for n, t in transcript.rounds[0].weights.items()}
    inputs, labels = examples(recording)
    found = []
    for x, y in zip(transcript.task_info.normalise(inputs), labels, strict=True):
        value = transcript.loss(functional_call(module, state, (x[None],)), y[None])
        found.append(dict(zip(names, torch.autograd.grad(value, [state[n] for n in names]), strict=True)))
    return found


def own_gradients(recording: Recording) -> Tensor:
    """Return (n, numbers) the same as a matrix."""
    return torch.stack([torch.cat([g.flatten() for g in own.values()]) for own in each_gradient(recording)]).double()


def best_psnr(true: Tensor, found: Tensor) -> Tensor:
    """Return (n,) the PSNR, in dB up to 120, of each true image's nearest of those found."""
    errors = torch.cdist(true.flatten(1).double(), found.flatten(1).double()).square() / true[0].numel()
    return -10 * errors.min(dim=1).values.clamp(min=1e-12).log10()
