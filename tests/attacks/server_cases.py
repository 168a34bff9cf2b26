"""What the tests of malicious servers share: a federation that is played, and how well its images came out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import Scenario
from fedaudit.simulation.simulator import Recording, simulate
from fedaudit.transcript.observation import Observation, observe


def played(made: Scenario) -> Recording:
    """Return what the scenario's one federation leaves."""
    (federation,) = resolve(made).federations
    return simulate(federation)


def seen_in(made: Scenario, recording: Recording) -> list[Observation]:
    """Return what the server sees, an observation an update."""
    return observe(recording.transcript, made.threat).split()


def examples(recording: Recording) -> tuple[Tensor, Tensor]:
    """Return the examples of all updates, and their labels."""
    inputs, labels = recording.truth.inputs.values(), recording.truth.labels.values()
    return torch.cat(list(inputs)), torch.cat(list(labels))


def own_gradients(recording: Recording) -> Tensor:
    """Return (n, numbers) each example's gradient of the model that was sent: the definition."""
    transcript = recording.transcript
    module = transcript.module.eval()
    names = [name for name, _ in module.named_parameters()]
    state = {n: t.clone().requires_grad_(n in names) for n, t in transcript.rounds[0].weights.items()}
    inputs, labels = examples(recording)
    found = []
    for x, y in zip(transcript.task_info.normalise(inputs), labels, strict=True):
        value = transcript.loss(functional_call(module, state, (x[None],)), y[None])
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, [state[n] for n in names])]))
    return torch.stack(found).double()


def best_psnr(true: Tensor, found: Tensor) -> Tensor:
    """Return (n,) the PSNR, in dB up to 120, of each true image's nearest of those found."""
    errors = torch.cdist(true.flatten(1).double(), found.flatten(1).double()).square() / true[0].numel()
    return -10 * errors.min(dim=1).values.clamp(min=1e-12).log10()
