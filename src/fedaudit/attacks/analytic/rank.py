"""The rank analysis of R-GAP (Zhu & Blaschko, ICLR 2021): how many unknowns and equations each layer has.

It needs the network only: its weights, and where it would be attacked (one example, all gradients sent). The gradient
constraints depend on the example through k = ∂L/∂z, so their rank is that at a random input and a random label; for all
inputs but a set of measure zero it is the greatest that there can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedaudit.attacks.analytic.chain import Block, chain
from fedaudit.attacks.analytic.constraints import (
    Equations,
    check_size,
    gradient_constraints,
    rank,
    weight_constraints,
)
from fedaudit.task.training import Loss

LayerVerdict = Literal["determined", "with virtual constraints", "deficient"]
Verdict = Literal["invertible", "counted", "deficient"]

VERDICTS: dict[Verdict, str] = {
    "invertible": "every layer's input is determined: r-gap recovers one example from its gradient exactly",
    "counted": "there are as many constraints as unknowns, but some aren't linear: r-gap's recursion doesn't find the "
    "input, an attack that optimises may",
    "deficient": "some layers have fewer constraints than unknowns: r-gap recovers the rest, least norm elsewhere",
}


@dataclass(frozen=True)
class LayerRank:
    """What is known of one block's input.

    Attributes:
        layer: names of the block's layers.
        unknowns: elements of the block's input.
        virtual: constraints that the layers before it put on its input, whatever the image: an input that is larger
            than what it was computed from lies on a surface of fewer dimensions. They aren't linear (an activation
            lies between), so the recursion doesn't use them.
        weight_constraints, gradient_constraints: how many equations there are.
        weight_rank, gradient_rank: how many of them are independent.
        rank: of both together.
    """

    layer: str
    unknowns: int
    virtual: int
    weight_constraints: int
    gradient_constraints: int
    weight_rank: int
    gradient_rank: int
    rank: int

    @property
    def missing(self) -> int:
        """How many linear equations are missing."""
        return self.unknowns - self.rank

    @property
    def verdict(self) -> LayerVerdict:
        """Whether the input follows."""
        if self.missing == 0:
            return "determined"
        return "with virtual constraints" if self.missing <= self.virtual else "deficient"


@dataclass(frozen=True)
class RankAnalysis:
    """The layers in forward order."""

    layers: tuple[LayerRank, ...]

    @property
    def verdict(self) -> Verdict:
        """Of the whole network: as its worst layer's."""
        worst = {layer.verdict for layer in self.layers}
        if "deficient" in worst:
            return "deficient"
        return "counted" if "with virtual constraints" in worst else "invertible"

    @property
    def index(self) -> float:
        """Σ_i (d − i + 1)/d · (rank_i − unknowns_i) over the layers i = 1 … d: 0 if all are determined, else below.

        What is missing at the first layers weighs most, because nothing after it can mend it.
        """
        d = len(self.layers)
        return sum(-layer.missing * (d - i) / d for i, layer in enumerate(self.layers)) + 0.0


def rank_analysis(
    module: nn.Module, input_shape: tuple[int, ...], loss: Loss, num_classes: int, *, generator: torch.Generator
) -> RankAnalysis:
    """Count unknowns and independent equations of every layer of ``module``.

    Args:
        module: in the mode (BatchNorm, dropout) of the client's training; it isn't changed. See
            :func:`.r_gap.as_trained`.
        input_shape: of one example, (C, H, W) or (d,).
        loss: of the client's training.
        num_classes: outputs of the network.
        generator: of the random input and label.

    Raises:
        NotApplicable: the network is no chain of affine layers and invertible activations; or it is too large.
    """
    blocks = chain(module, input_shape)
    for block in blocks:
        check_size(block)
    image = torch.randn((1, *input_shape), generator=generator, dtype=torch.float64)
    label = torch.randint(num_classes, (1,), generator=generator)
    ks = _derivatives(blocks, image, loss, label)
    layers = []
    dimensions = blocks[0].unknowns  # of the set of all possible inputs of the block
    for i, block in enumerate(blocks):
        by_gradient = gradient_constraints(block, ks[i], None)
        by_weight = weight_constraints(block)
        weight_rank = by_weight.rank()
        last = i + 1 == len(blocks)  # what the logits are isn't known: no weight constraints
        layers.append(_layer(block, by_gradient, None if last else by_weight, weight_rank, dimensions))
        dimensions = min(dimensions, weight_rank)
    return RankAnalysis(tuple(layers))


def _derivatives(blocks: list[Block], image: Tensor, loss: Loss, label: Tensor) -> list[Tensor]:
    """Return ∂L/∂z of every block, (*output_shape)."""
    before = []
    with torch.enable_grad():
        x = image.requires_grad_()
        for block in blocks:
            z = block.affine(x * 1)
            before.append(z)
            x = block.activation(z * 1)
        return [k[0] for k in torch.autograd.grad(loss(x, label), before)]


def _layer(
    block: Block, by_gradient: list[Equations], by_weight: Equations | None, weight_rank: int, dimensions: int
) -> LayerRank:
    ranks = [one.rank() for one in by_gradient]
    gradient_rank = ranks[0] if len(ranks) == 1 else rank(_scaled(by_gradient)) if ranks else 0
    weight_rank = 0 if by_weight is None else weight_rank
    if max(gradient_rank, weight_rank) == block.unknowns or min(gradient_rank, weight_rank) == 0:
        together = max(gradient_rank, weight_rank)
    else:
        together = rank(_scaled([*by_gradient, *([by_weight] if by_weight else [])]))
    return LayerRank(
        layer=block.name,
        unknowns=block.unknowns,
        virtual=max(0, block.unknowns - dimensions),
        weight_constraints=0 if by_weight is None else by_weight.count,
        gradient_constraints=sum(one.count for one in by_gradient),
        weight_rank=weight_rank,
        gradient_rank=gradient_rank,
        rank=together,
    )


def _scaled(equations: list[Equations]) -> Tensor:
    """Return all equations in one matrix, each system scaled to entries of size one."""
    sizes = [float(one.matrix.norm()) / max(1, int(one.matrix.count_nonzero())) ** 0.5 for one in equations]
    return torch.cat([one.matrix / size for one, size in zip(equations, sizes, strict=True) if size > 0])
