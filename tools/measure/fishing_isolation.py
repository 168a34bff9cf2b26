"""How much of the gradient of 100 examples is one's, where a server fishes for it (Wen et al. 2022), on ResNet-18.

    python -m tools.measure.fishing_isolation DATA [MODEL]

prints, of each way of fishing and each draw of examples, the cosine between the batch's gradient and the own one of the
example that has most of it, and its share of all examples' norms, over all layers before the last; and both where the
server is honest.

By class: 100 examples of CIFAR-100, the class one that a single example has. By a feature: 100 of one class of
CIFAR-10, the feature and its cut from 1,000 public examples. The truth serves the measurement alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.simulator import Recording, simulate

N = 100
SEEDS = 3


def played(data: Path, model: str, seed: int, server: dict[str, Any] | None, *, alone: bool) -> Recording:
    """Return one round of one client.

    Args:
        data: where CIFAR lies.
        model: of the federation.
        seed: of the scenario.
        server: what the server does; None: it is honest.
        alone: the examples are of one class of CIFAR-10, and the server has public examples.
    """
    spec: dict[str, Any] = {"name": "f", "clients": 1, "examples": N, "batch_size": N}
    threat: dict[str, Any] = {"adversary": "server"}
    if alone:  # ten clients with a class each, of whom the first round takes one
        partition = {"scheme": "classes-per-client", "k": 1}
        spec |= {"clients": 10, "examples": 10 * N, "partition": partition, "clients_per_round": 1}
    if server is not None:
        spec["server"] = server
        threat = {"adversary": "malicious-server"}
        if alone:
            threat |= {"knows_public_data": True, "public_examples": 1000}
    made = scenario_from(
        {
            "seed": seed,
            "data": {"name": "cifar10" if alone else "cifar100", "split": "test", "limit": 3000},
            "model": {"name": model},
            "federations": [spec],
            "threat": threat,
            "attacks": ["labels"],
        }
    )
    (federation,) = resolve(made, data_dir=data).federations
    return simulate(federation)


def isolation(recording: Recording, position: int | None = None) -> str:
    """Return, of the example of the largest gradient, or of that at ``position``, its cosine and share, in words."""
    transcript = recording.transcript
    (record,) = transcript.rounds
    (update,) = record.updates
    module = transcript.module.eval()
    names = [name for name, _ in module.named_parameters()][:-2]
    state = {n: t.clone().requires_grad_(n in names) for n, t in record.sent_to(update.client).items()}
    sent = torch.cat([update.tensors[name].flatten() for name in names]).double()
    (inputs,), (labels,) = recording.truth.inputs.values(), recording.truth.labels.values()
    found, sizes = [], []
    for x, y in zip(transcript.task_info.normalise(inputs), labels, strict=True):
        value = transcript.loss(functional_call(module, state, (x[None],)), y[None])
        own = torch.cat([g.flatten() for g in torch.autograd.grad(value, [state[n] for n in names])]).double()
        found.append(nn.functional.cosine_similarity(own, sent, dim=0, eps=1e-300))
        sizes.append(own.norm())
    norms = torch.stack(sizes)
    best = int(norms.argmax()) if position is None else position
    return f"cosine {float(found[best]):.6f}, share {float(norms[best] / norms.sum()):.4f}"


def main() -> None:
    """Print a line a case and draw."""
    data, model = Path(sys.argv[1]), (sys.argv[2:] or ["resnet18"])[0]
    for seed in range(SEEDS):
        honest = played(data, model, seed, None, alone=False)
        (labels,) = honest.truth.labels.values()
        counts = torch.bincount(labels, minlength=100)
        target = int(torch.nonzero(counts == 1)[0])
        position = int(torch.nonzero(labels == target)[0])
        fished = played(data, model, seed, {"name": "fishing", "target": target}, alone=False)
        of_honest = isolation(honest, position)
        print(f"{model}, by class, draw {seed}: {isolation(fished, position)}; honest server {of_honest}", flush=True)
    for seed in range(SEEDS):
        honest = played(data, model, seed, None, alone=True)
        (labels,) = honest.truth.labels.values()
        target = int(labels[0])
        assert bool((labels == target).all())
        fished = played(data, model, seed, {"name": "fishing", "target": target, "members": N}, alone=True)
        print(
            f"{model}, by a feature, {len(labels)} of one class, draw {seed}: {isolation(fished)}; honest server "
            f"{isolation(honest)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
