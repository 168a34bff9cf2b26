"""CENSOR: in place of the gradient, the random vector orthogonal to it that lowers the client's loss most."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from fedaudit.defences.client_defences import ClientContext, ClientDefence, OwnExamples, changed
from fedaudit.defences.privacy import gaussian
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.registry import register
from fedaudit.utils.validation import Count, Positive


@register
class Censor(ClientDefence):
    """Sends the best of some random vectors that are orthogonal to the update (Zhang et al. 2025, CENSOR).

    For each of ``trials`` draws and every tensor g: v ~ N(0, 1), u = v − (⟨v, g⟩/‖g‖²)·g, u·‖g‖/‖u‖ is as long as g
    and orthogonal to it. The draw is kept that lowers the client's loss on its own examples most after a step of
    ``probe`` against it; where none lowers it, the best of them all the same. A tensor of one number has nothing
    orthogonal: zero is sent. One of two numbers is given away up to its sign.

    Departures. The published code divides ⟨v, g⟩ by ‖g‖ once, which leaves u orthogonal only where ‖g‖ = 1; here it is
    as the paper says. It takes the loss in evaluation mode, and so does this. The trial of a client of several steps is
    on all of its batches, and under FedAvg u is orthogonal to ΔW. In few dimensions of use (a step along a random
    direction of d dimensions lowers the loss by 1/√d of what the gradient does) it hardly trains: measure its price.

    Args:
        trials: draws, of which the best is sent.
        probe: learning rate at which they are compared.
    """

    name = "censor"
    summary = "CENSOR: the best of some random vectors orthogonal to the update, tensor by tensor"
    paper = "Zhang et al. 2025 (CENSOR, NDSS)"
    secret = True
    needs_examples = True

    trials: Count = 20
    probe: Positive = 1e-4

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator | None) -> Update:
        """Return the update with other tensors, as long and orthogonal; BadInput without the client's examples."""
        own = context.examples(self.name)
        own.model.eval()
        sign = 1.0 if update.kind == "gradient" else -1.0  # ΔW descends
        best: tuple[float, dict[str, Tensor]] | None = None
        for _ in range(self.trials):
            drawn = {
                name: orthogonal_to(tensor, gaussian(tensor, generator)) for name, tensor in update.tensors.items()
            }
            loss = self._loss(own, {name: context.weights[name] - sign * self.probe * u for name, u in drawn.items()})
            if best is None or loss < best[0]:
                best = loss, drawn
        assert best is not None  # trials is 1 or more
        return changed(update, best[1], ClientDefenceInfo(self.name, orthogonal=True))

    def _loss(self, own: OwnExamples, weights: dict[str, Tensor]) -> float:
        state = {name: tensor.to(own.batches[0][0].device) for name, tensor in weights.items()}
        with torch.no_grad():
            values = [float(own.loss(functional_call(own.model, state, (x,)), y)) for x, y in own.batches]
        return sum(values) / len(values)


def orthogonal_to(tensor: Tensor, drawn: Tensor) -> Tensor:
    """Return what of ``drawn`` is orthogonal to ``tensor``, of its shape, as long as that; zero where nothing is."""
    g, v = tensor.double().reshape(-1), drawn.double().reshape(-1)
    square = torch.dot(g, g)
    if len(g) < 2 or not square:
        return torch.zeros_like(tensor)
    u = v - torch.dot(v, g) / square * g
    u = u - torch.dot(u, g) / square * g  # of what rounding left
    found: Tensor = u * (square.sqrt() / u.norm())
    return found.to(tensor).view_as(tensor)
