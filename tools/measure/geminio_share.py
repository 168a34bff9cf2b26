"""How much of the gradient of a batch of 8 images is the matching one's, by geminio, and what inversion reads of it.

    python -m tools.measure.geminio_share DATA [PICTURE.png]

prints, of digits and of CIFAR-10, for an honest server, ``geminio`` and ``geminio`` with bounded losses, of each draw

- the share that the image of the class has of the sum of all single gradients' norms, and the cosine between its
  gradient and the batch's;
- what ``agic-plus`` with 400 iterations finds: of the batch, the PSNR of the image of the class and of the others on
  average; where it takes the update for that of one image of the class, which is what such a server would do; and of
  the image's own gradient, of which no other is a part.

The picture has, a row each, the true batch, what was found of it, and the two single images. Six minutes of one core.
The truth serves the measurement alone.

    python -m tools.measure.geminio_share DATA shares

prints, of the servers and federations of :mod:`tools.measure.received_checks`, the mean share and cosine over all
batches of a matching example of clients' and seven others, drawn at random; ten minutes.
"""

from __future__ import annotations

import dataclasses
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate

from fedaudit.attacks import ImageFinding
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.simulator import simulate
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.observation import Observation, observe
from fedaudit.utils.machine import one_thread
from tests.attacks.server_cases import best_psnr, examples, own_gradients
from tools.measure.received_checks import SERVERS as CHECKED
from tools.measure.received_checks import federation_of, manipulated

# data, model, public examples, the server's passes over them
Case = tuple[dict[str, Any], dict[str, Any], int, int]
SEEDS = 3
TARGET = 3
CASES: tuple[Case, ...] = (
    ({"name": "digits", "split": "test"}, {"name": "convnet-small", "width": 8}, 900, 20),
    ({"name": "cifar10", "split": "test"}, {"name": "convnet-small"}, 2000, 8),
)
SERVERS: dict[str, dict[str, Any] | None] = {
    "honest": None,
    "geminio": {"name": "geminio", "target": TARGET},
    "losses up to 5": {"name": "geminio", "target": TARGET, "most": 5.0},
}
ONE = TrainingConfig(1.0, 1, (1,))
ATTACK: dict[str, Any] = {"name": "agic-plus", "iterations": 400}


def scenario(case: Case, server: dict[str, Any] | None, seed: int) -> Scenario:
    """Return a federation of one client with a batch of eight, an image of each of eight classes."""
    data, model, public, epochs = case
    threat: dict[str, Any] = {"adversary": "server", "knows_labels": True}
    federation: dict[str, Any] = {"name": "f", "algorithm": "fedsgd", "clients": 1, "examples": 8, "batch_size": 8}
    if server is not None:
        threat |= {"adversary": "malicious-server", "knows_public_data": True, "public_examples": public}
        federation["server"] = {**server, "epochs": epochs}
    parts = {"data": data, "model": model, "federations": [federation], "threat": threat, "attacks": [ATTACK]}
    return scenario_from({"seed": seed, **parts})


def alone(seen: Observation, summed: Tensor) -> Observation:
    """Return the observation of an update over one example of the class, whose gradient is ``summed``."""
    message = seen.single()
    sizes = {name: p.shape for name, p in seen.module.named_parameters()}
    parts = summed.float().split([size.numel() for size in sizes.values()])
    tensors = {name: part.view(size) for (name, size), part in zip(sizes.items(), parts, strict=True)}
    labels = torch.tensor([TARGET])
    update = dataclasses.replace(message.update, tensors=tensors, num_examples=1, labels=labels, training=ONE)
    return dataclasses.replace(seen, messages=(dataclasses.replace(message, update=update),))


def found(made: Scenario, seen: Observation) -> Tensor:
    """Return (n, ...) the images that the attack finds."""
    finding = made.attacks[0](seen, generator=torch.Generator().manual_seed(0))
    assert isinstance(finding, ImageFinding)
    return finding.images


def isolation(model: str, server: dict[str, Any], seed: int, data: Path) -> str:
    """Return the mean share and cosine of a matching example in a batch with seven others, in words."""
    federation = federation_of(model, "even", seed, data)
    state = {name: tensor.clone() for name, tensor in federation.model.state_dict().items()}
    sent, module = manipulated(federation, server, state, 0)
    module.load_state_dict(sent)
    inputs = torch.cat([federation.task_info.normalise(held.inputs) for held in federation.client_data])
    labels = torch.cat([held.targets for held in federation.client_data])
    own = []
    for x, y in zip(inputs, labels, strict=True):
        grads = torch.autograd.grad(federation.loss(module(x[None]), y[None]), list(module.parameters()))
        own.append(torch.cat([g.flatten() for g in grads]).double())
    gradients, brightness = torch.stack(own), inputs.flatten(1).mean(dim=1)
    matching = brightness >= brightness.quantile(7 / 8) if "chosen" in server else labels == TARGET
    others = torch.nonzero(~matching)[:, 0]
    draws, found = torch.Generator().manual_seed(0), []
    for one in gradients[matching]:
        rest = gradients[others[torch.randperm(len(others), generator=draws)[:7]]]
        cosine = nn.functional.cosine_similarity(one, one + rest.sum(dim=0), dim=0)
        found.append(torch.stack([one.norm() / (one.norm() + rest.norm(dim=1).sum()), cosine]))
    share, cosine = torch.stack(found).mean(dim=0)
    return f"share {share:.2f}, cosine {cosine:.2f}"


def main() -> None:
    """Print a line a server and draw, and draw the picture."""
    if sys.argv[2:] == ["shares"]:
        asked = [name for name in CHECKED if name.startswith("geminio")]
        for model, seed, name in product(("mlp", "convnet-small", "resnet20"), range(2), asked):
            with one_thread():
                told = isolation(model, CHECKED[name], seed, Path(sys.argv[1]))
            print(f"{model}, {name}, seed {seed}: {told}", flush=True)
        return
    rows = []
    for case, seed in product(CASES, range(SEEDS)):
        for name, server in SERVERS.items():
            made = scenario(case, server, seed)
            (federation,) = resolve(made, data_dir=Path(sys.argv[1])).federations
            with one_thread():
                recording = simulate(federation)
                (seen,) = observe(recording.transcript, made.threat).split()
                inputs, labels = examples(recording)
                matching = labels == TARGET
                own = own_gradients(recording)
                images = [found(made, of) for of in (seen, alone(seen, own.sum(0)), alone(seen, own[matching][0]))]
            norms = own.norm(dim=1)
            cosine = nn.functional.cosine_similarity(own[matching].sum(dim=0), own.sum(dim=0), dim=0)
            psnr, *single = (best_psnr(inputs, one) for one in images)
            as_one, by_itself = (float(one[matching].mean()) for one in single)
            where = f"{case[0]['name']}, draw {seed}, {name}"
            print(
                f"{where}: share {float(norms[matching].sum() / norms.sum()):.3f}, cosine {cosine:.3f}; of "
                f"the batch {float(psnr[matching].mean()):.1f} dB, others {float(psnr[~matching].mean()):.1f}; taken "
                f"for one {as_one:.1f}; of its own gradient {by_itself:.1f}",
                flush=True,
            )
            order = torch.argsort(matching.int(), descending=True, stable=True)
            nearest = images[0][torch.cdist(inputs.flatten(1), images[0].flatten(1)).argmin(dim=1)]
            singles = torch.cat([*images[1:], torch.zeros_like(inputs[2:])])
            tiles = (torch.cat(list(row), dim=2) for row in (inputs[order], nearest[order], singles))
            rows += [interpolate(row.expand(3, -1, -1)[None], (32, 256))[0] for row in tiles]
    for path in sys.argv[2:]:
        pixels = (torch.cat(rows, dim=1).permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
        drawn = Image.fromarray(pixels)
        drawn.resize((drawn.width * 2, drawn.height * 2), Image.Resampling.NEAREST).save(path)


if __name__ == "__main__":
    main()
