"""One client's messages as vectors: the weights that it was sent, and by how much it moved them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import NotApplicable


@dataclass(frozen=True)
class Exchanged:
    """What travelled between one client and the server, one row a round.

    Attributes:
        names: of the parameters, in the order of the vectors.
        shapes: of the parameters.
        sent: (n, p) float64: θ, the weights that the server sent.
        moved: (n, p) float64: Δθ = θ − θ_c; for gradient updates the gradient, which vanishes where Δθ does.
        noise: standard deviation of what is known to be noise in ``moved``: rounding, or a defence's.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    sent: Tensor
    moved: Tensor
    noise: float

    @property
    def returned(self) -> Tensor:
        """(p,) the last model that the client returned, θ_c; of a gradient update, the weights that it was sent."""
        return self.sent[-1] - self.moved[-1]

    def state(self, vector: Tensor) -> dict[str, Tensor]:
        """Return (p,) ``vector`` as parameters by name, in float32."""
        pieces = vector.split([math.prod(shape) for shape in self.shapes])
        return {n: v.view(s).float() for n, v, s in zip(self.names, pieces, self.shapes, strict=True)}


def exchanged(observation: Observation) -> Exchanged:
    """Return the messages of ``observation`` as vectors: of the rounds in which the client sent every parameter.

    Raises:
        NotApplicable: there is none, they are of several clients, or a number in them is not finite.
    """
    observation.need_messages()
    messages = observation.messages
    if len({m.client for m in messages}) > 1:
        raise NotApplicable("a local model is one client's, and these are messages of several; use Observation.split()")
    names = tuple(name for name, p in observation.module.named_parameters() if p.requires_grad)
    messages = tuple(m for m in messages if all(name in m.update.tensors for name in names))
    if not messages:
        raise NotApplicable(
            "the client never sends all of its parameters (a defence holds some back), and a local model is "
            "reconstructed from whole updates"
        )
    sent = torch.stack([torch.cat([m.weights[n].flatten().double() for n in names]) for m in messages])
    moved = torch.stack([torch.cat([m.update.tensors[n].flatten().double() for n in names]) for m in messages])
    if not (torch.isfinite(sent).all() and torch.isfinite(moved).all()):
        raise NotApplicable("the messages hold values that are not finite")
    moved = moved if observation.update_kind == "gradient" else -moved
    eps = torch.finfo(messages[0].update.tensors[names[0]].dtype).eps
    largest = moved if observation.update_kind == "gradient" else sent
    return Exchanged(
        names=names,
        shapes=tuple(messages[0].update.tensors[n].shape for n in names),
        sent=sent,
        moved=moved,
        noise=max(eps * float(largest.square().mean().sqrt()), *(_noise(m) for m in messages)),
    )


def _noise(message: Message) -> float:
    known = message.update.sanitised
    return known.noise if known else 0.0


def is_linear(module: nn.Module, state: dict[str, Tensor], input_shape: tuple[int, ...]) -> bool:
    """Return whether the outputs of ``module`` are a linear function of its parameters, by trying it on one input."""
    start = torch.Generator().manual_seed(0)
    inputs = torch.randn((2, *input_shape), generator=start).double()
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    fixed = {n: t.double() if t.is_floating_point() else t for n, t in state.items()}
    random = [{n: torch.randn(fixed[n].shape, generator=start, dtype=torch.float64) for n in names} for _ in range(2)]
    mixed = {n: 3 * random[0][n] - 2 * random[1][n] for n in names}
    with torch.no_grad():
        one, two, both = (torch.func.functional_call(module, {**fixed, **d}, (inputs,)) for d in (*random, mixed))
    return bool(torch.allclose(both, 3 * one - 2 * two, rtol=1e-8, atol=1e-8))
