"""Soteria: the features are held back of which images can be told best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from fedaudit.defences.client_defences import ClientContext, ClientDefence, OwnExamples, changed
from fedaudit.defences.compressing import share
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import register
from fedaudit.utils.validation import Number

_AT_ONCE = 64  # features whose derivatives are taken in one pass


@register
class Soteria(ClientDefence):
    """Prunes the features of greatest |rᵢ|/‖∂rᵢ/∂X‖ from the gradient of a fully connected layer (Sun et al. 2021).

    r is the representation: what the defended layer receives. The paper looks for r′ with ‖r − r′‖₀ ≤ ε whose image is
    farthest from X, and finds, by r's first derivative, that rᵢ is to be zero where |rᵢ|·‖∂rᵢ/∂X‖⁻¹ is largest.
    The gradient of the layer's weights is then computed with r′: columns of zeros. Everything else, its
    bias and the convolutions before it, is sent as it is, which is how it was broken: whoever leaves the layer out of
    the matching sees the image (Balunović et al. 2022, Section 5).

    Departures. Scores are summed over the examples of the update. The published code prunes the smallest sums of
    ‖∂rᵢ/∂X‖/|rᵢ|, which for one image is the same order but for dead features (rᵢ = 0), which it prunes first: their
    columns are zero anyway. Here they come last, for ‖r − r′‖₀ doesn't count them. r is taken in evaluation mode. Under
    FedAvg, which the paper protects in every local step, the columns of ΔW are pruned, by r at the received weights.

    Args:
        rate: share of the layer's features that is pruned.
        layer: its name in the model; null: the last fully connected layer.
    """

    name = "soteria"
    summary = "Soteria: prunes the features that tell most of the image from one layer's gradient"
    paper = "Sun et al. 2021 (Soteria)"
    needs_examples = True

    rate: Annotated[Number, Field(gt=0, le=1)] = 0.4
    layer: str | None = None

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:  # noqa: ARG002
        """Return the update with columns of zeros in the layer's weights; BadInput without layer or examples."""
        own = context.examples(self.name)
        name, layer = self._layer(own.model, update.tensors)
        own.model.eval()
        scores = torch.zeros(layer.in_features, device=own.batches[0][0].device)
        for inputs, _ in own.batches:
            scores += feature_scores(own, layer, inputs)
        pruned = scores.argsort(descending=True, stable=True)[: share(self.rate, len(scores))].cpu()
        tensors = dict(update.tensors)
        tensors[name] = tensors[name].clone()
        tensors[name][:, pruned] = 0
        return changed(update, tensors, ClientDefenceInfo(self.name, sparse=True))

    def _layer(self, model: nn.Module, sent: Mapping[str, Tensor]) -> tuple[str, nn.Linear]:
        """Return the defended layer and the name of its weights."""
        linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        linear = {name: part for name, part in linear.items() if f"{name}.weight".lstrip(".") in sent}
        if not linear:
            raise BadInput(
                "soteria prunes a fully connected layer's gradient, and this model has none; use another model"
            )
        name = next(reversed(linear)) if self.layer is None else self.layer
        if name not in linear:
            raise BadInput(f"soteria: '{name}' is no fully connected layer; this model has {', '.join(linear)}")
        return f"{name}.weight".lstrip("."), linear[name]


def feature_scores(own: OwnExamples, layer: nn.Linear, inputs: Tensor) -> Tensor:
    """Return (d,) Σ |rᵢ|/‖∂rᵢ/∂X‖ over the examples, 0 for dead features; ``layer`` receives one row an example."""
    seen: list[Tensor] = []

    def note(_: nn.Module, given: tuple[Any, ...]) -> None:
        seen.append(given[0])

    if not inputs.is_floating_point():
        raise BadInput("soteria needs features' derivatives by the inputs, and tokens have none; leave it out for text")
    leaf = inputs.detach().clone().requires_grad_()
    handle = layer.register_forward_pre_hook(note)
    try:
        own.model(leaf)
    finally:
        handle.remove()
    if len(seen) != 1 or seen[0].ndim != 2 or len(seen[0]) != len(inputs) or not seen[0].requires_grad:
        raise BadInput("soteria needs a layer that receives each example's features once, as one row; set its layer")
    (features,) = seen
    whole = features.sum(dim=0)  # examples don't mix, so a row of the gradient is its own example's
    lengths = []
    for some in torch.eye(len(whole), device=whole.device).split(_AT_ONCE):
        (slopes,) = torch.autograd.grad(whole, leaf, some, retain_graph=True, is_grads_batched=True)
        lengths.append(slopes.flatten(2).norm(dim=2))
    slope = torch.cat(lengths)  # (d, n)
    size = features.detach().abs().T
    return torch.where(slope > 0, size / slope.clamp(min=1e-30), 0).sum(dim=1)
