"""Dual gradient pruning: neither the largest elements are sent nor the smallest."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedaudit.defences.client_defences import ClientContext, ClientDefence, changed
from fedaudit.defences.compressing import share
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import register
from fedaudit.utils.validation import Number

Part = Annotated[Number, Field(ge=0, lt=1)]


@register(frozen=False)
class DualGradientPruning(ClientDefence):
    """Sends what is left of each tensor without its largest and its smallest elements (Xue et al. 2024, DGP).

    With error feedback, as in the paper: p = g + e is pruned, and what isn't sent is the next round's e. Of d elements
    of a tensor the ⌈k₁·d⌉ largest by magnitude and then the ⌈k₂·d⌉ smallest become zero, all but one at most.

    The paper does so in every step of distributed training; under FedAvg g is ΔW here. Its variant with positions that
    all clients share (ADGP) isn't here.

    Args:
        largest: k₁, the share of the largest elements that isn't sent.
        smallest: k₂, that of the smallest.
        memory: error feedback.

    Raises:
        BadInput: nothing would be sent.
    """

    name = "dgp"
    summary = "dual gradient pruning: neither the largest elements nor the smallest, with error feedback"
    paper = "Xue et al. 2024 (DGP)"

    largest: Part = 0.05
    smallest: Part = 0.75
    memory: bool = True

    kept: dict[str, Tensor] = field(default_factory=dict, init=False)  # e

    def __post_init__(self) -> None:
        if self.largest + self.smallest >= 1:
            raise BadInput(
                f"dgp: largest {self.largest:g} and smallest {self.smallest:g} leave nothing to send; their sum must "
                "be below 1"
            )

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:  # noqa: ARG002
        """Return the update with zeros in place of what isn't sent."""
        sent = {}
        for name, tensor in update.tensors.items():
            whole = tensor + self.kept[name] if name in self.kept else tensor
            order = whole.reshape(-1).abs().argsort(stable=True)
            few, most = share(self.smallest, len(order)), len(order) - share(self.largest, len(order))
            few = min(few, len(order) - 1)
            mask = torch.zeros(len(order), dtype=torch.bool)
            mask[order[few : max(most, few + 1)]] = True
            sent[name] = whole.where(mask.view_as(whole), 0)
            if self.memory:
                self.kept[name] = whole - sent[name]
        return changed(update, sent, ClientDefenceInfo(self.name, sparse=True))
