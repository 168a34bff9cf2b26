"""The linear equations that an update and the weights give for the input of one block of a chain (R-GAP, Section 3).

With x a block's input, z = A·x + c what its activation sees and k = ∂L/∂z:

- weight constraints: A·x = z − c, once z is known from the block after it;
- gradient constraints: a layer's gradient is linear in the layer's input, once k is known. For a convolution
  ∂L/∂W[o, c, i, j] = Σ_p k[o, p]·x[c, p·stride + (i, j)]: the same matrix for every input channel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedaudit.task import Loss
from fedaudit.utils import NotApplicable
from fedaudit_catalogue.attacks.chain import Block, Step, chain

TOLERANCE = 1e-7  # relative; smaller singular values drown in the rounding of single precision
_INVERSE_ITERATIONS = 5
_CHUNK = 256  # examples of the unit basis at a time
_MOST_BYTES = 16 * 2**30  # of one block's equations


@dataclass(frozen=True)
class Equations:
    """A system matrix·x = values, (m, n) and (m,), or None where only the rank is asked for.

    Attributes:
        count: how many equations these stand for: those that say the same of one channel are merged before.
        parts: the matrix's distinct diagonal blocks, each of which is there ``repeats`` times.
    """

    matrix: Tensor
    values: Tensor | None
    count: int
    parts: tuple[Tensor, ...]
    repeats: int = 1

    def rank(self) -> int:
        """Return the rank of the matrix; what is below :data:`TOLERANCE` counts as zero."""
        return self.repeats * sum(rank(part) for part in self.parts)


def rank(matrix: Tensor) -> int:
    """Return how many singular values of (m, n) ``matrix`` are above :data:`TOLERANCE` times the largest."""
    values = torch.linalg.svdvals(matrix)
    return int((values > TOLERANCE * values[0]).sum())


def balanced(equations: list[Equations]) -> tuple[Tensor, Tensor]:
    """Return all equations as one matrix (m, n) and right side (m,), each system scaled to values of size one.

    Gradients and activations differ by orders of magnitude; both come with single precision's relative error.
    """
    matrices, rights = [], []
    for one in equations:
        assert one.values is not None
        scale = one.values.square().mean().sqrt()
        if scale > 0:
            matrices.append(one.matrix / scale)
            rights.append(one.values / scale)
    if not matrices:
        n = equations[0].matrix.shape[1]
        return torch.zeros((1, n), dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    return torch.cat(matrices), torch.cat(rights)


def solve(equations: list[Equations]) -> tuple[Tensor, bool]:
    """Return the solution (n,) of all equations, and whether they leave some of the unknowns open.

    Least squares by QR. Where singular values are below :data:`TOLERANCE` times (a bound of) the largest, with the term
    ‖λx‖², λ being that threshold: what is left open is then zero, as in the solution of least norm.
    """
    matrix, right = balanced(equations)
    n = matrix.shape[1]
    size = (matrix.abs().sum(dim=0).max() * matrix.abs().sum(dim=1).max()).sqrt()
    threshold = TOLERANCE * max(float(size), 1e-300)
    r = _triangle(torch.cat([matrix, right[:, None]], dim=1))
    is_open = len(r) < n or _smallest_singular_value(r[:n, :n]) < threshold
    if is_open:
        damping = torch.cat([threshold * torch.eye(n, dtype=r.dtype), r.new_zeros((n, 1))], dim=1)
        r = _triangle(torch.cat([r, damping]))
    return torch.linalg.solve_triangular(r[:n, :n], r[:n, n:], upper=True)[:, 0], is_open


def _triangle(matrix: Tensor) -> Tensor:
    """Return the R of the QR decomposition of ``matrix``."""
    return torch.as_tensor(torch.linalg.qr(matrix, mode="r").R)


def _smallest_singular_value(triangle: Tensor) -> float:
    """Return about the smallest singular value of an upper triangular (n, n), by inverse iteration."""
    v = torch.randn((len(triangle), 1), dtype=triangle.dtype, generator=torch.Generator().manual_seed(0))
    if not triangle.diagonal().all():
        return 0.0
    length = 1.0
    for _ in range(_INVERSE_ITERATIONS):
        v = torch.linalg.solve_triangular(triangle.T, v / v.norm(), upper=False)
        v = torch.linalg.solve_triangular(triangle, v, upper=True)
        length = float(v.norm())
    return float(length**-0.5)


def check_size(block: Block) -> None:
    """Raise NotApplicable unless the equations of ``block`` fit into memory."""
    needed = 8 * 3 * block.unknowns * (block.unknowns + math.prod(block.output_shape))
    if needed > _MOST_BYTES:
        raise NotApplicable(
            f"layer '{block.name}' has {block.unknowns:,} inputs, whose equations take {needed / 2**30:.0f} GiB; "
            "use smaller images or fewer channels, or run an attack that optimises (invg, agic)"
        )


def weight_constraints(block: Block, before: Tensor | None = None) -> Equations:
    """Return A·x = z − c; ``before`` is z (*output_shape), and None leaves ``values`` out."""
    matrix, constant = _affine_matrix(block.steps, block.input_shape)
    values = None if before is None else before.flatten() - constant
    return Equations(matrix, values, len(matrix), (matrix,))


def gradient_constraints(block: Block, k: Tensor, gradient: Mapping[str, Tensor] | None) -> list[Equations]:
    """Return what the gradients of the block's layers say of its input, one system a layer.

    ``k`` is (*output_shape) ∂L/∂z. ``gradient``: as far as it is there; None: the rank only, of all layers whose weight
    is trained.
    """
    found = []
    for i, step in enumerate(block.steps):
        weight = getattr(step.module, "weight", None)
        name = f"{step.name}.weight"
        if step.kind == "plain" or not isinstance(weight, Tensor):
            continue
        if (gradient is None and not weight.requires_grad) or (gradient is not None and name not in gradient):
            continue
        shape = _shape_after(block.steps[:i], block.input_shape)
        reached = _shape_after(block.steps[: i + 1], block.input_shape)
        after = Block(block.steps[i + 1 :], block.activation, block.inverse, reached, block.output_shape)
        own = _own_equations(step, shape, adjoint(after, k), None if gradient is None else gradient[name])
        if i:
            matrix, constant = _affine_matrix(block.steps[:i], block.input_shape)
            values = None if own.values is None else own.values - own.matrix @ constant
            whole = own.matrix @ matrix
            own = Equations(whole, values, own.count, (whole,))
        found.append(own)
    return found


def _shape_after(steps: tuple[Step, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    x = torch.zeros((1, *shape), dtype=torch.float64)
    with torch.no_grad():
        for step in steps:
            x = step.run(x)
    return tuple(x.shape[1:])


def adjoint(block: Block, k: Tensor) -> Tensor:
    """Return Aᵀk, (*input_shape)."""
    with torch.enable_grad():
        leaf = torch.zeros((1, *block.input_shape), dtype=torch.float64, requires_grad=True)
        (found,) = torch.autograd.grad((block.affine(leaf * 1)[0] * k).sum(), leaf)
    return torch.as_tensor(found[0])


def _affine_matrix(steps: tuple[Step, ...], shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return A (m, n) and c (m,) of the affine map that ``steps`` are."""
    n = math.prod(shape)

    def run(x: Tensor) -> Tensor:
        for step in steps:
            x = step.run(x)
        return x.flatten(1)

    with torch.no_grad():
        constant = run(torch.zeros((1, *shape), dtype=torch.float64))[0]
        matrix = torch.empty((len(constant), n), dtype=torch.float64)
        for start in range(0, n, _CHUNK):
            count = min(_CHUNK, n - start)
            basis = torch.zeros((count, n), dtype=torch.float64)
            basis[torch.arange(count), start + torch.arange(count)] = 1
            matrix[:, start : start + count] = (run(basis.view(count, *shape)) - constant).T
    return matrix, constant


def _own_equations(step: Step, shape: tuple[int, ...], k: Tensor, gradient: Tensor | None) -> Equations:
    """Return what one layer's gradient says of that layer's own input, k being ∂L/∂ of its output."""
    module = step.module
    if isinstance(module, nn.Conv2d):
        return _of_convolution(module, shape, k, gradient)
    if isinstance(module, nn.Linear):
        return _same_for_every_channel([k.reshape(-1, 1)], shape[0], None if gradient is None else [gradient])
    assert isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)
    assert module.running_mean is not None
    assert module.running_var is not None
    channels, positions = shape[0], math.prod(shape[1:])
    rows = k.reshape(channels, positions) / (module.running_var + module.eps).sqrt()[:, None]
    matrix = torch.block_diag(*rows.unbind())
    values = None if gradient is None else gradient + rows.sum(dim=1) * module.running_mean
    return Equations(matrix, values, channels, (matrix,))


def _of_convolution(module: nn.Conv2d, shape: tuple[int, ...], k: Tensor, gradient: Tensor | None) -> Equations:
    channels, height, width = shape
    pixels = height * width
    groups = module.groups
    pad = module._reversed_padding_repeated_twice  # also where the padding is given as a word
    basis = F.pad(torch.eye(pixels, dtype=torch.float64).view(pixels, 1, height, width), pad)
    patches = F.unfold(basis, module.kernel_size, module.dilation, 0, module.stride)  # (pixels, kernel, positions)
    ks = k.reshape(groups, -1, patches.shape[-1])
    matrices = [torch.einsum("nqp,op->oqn", patches, one).reshape(-1, pixels) for one in ks]
    if gradient is None:
        return _same_for_every_channel(matrices, channels, None)
    per_group = gradient.reshape(groups, -1, channels // groups, math.prod(module.kernel_size))
    values = [g.permute(0, 2, 1).reshape(-1, channels // groups) for g in per_group]
    return _same_for_every_channel(matrices, channels, values)


def _same_for_every_channel(matrices: list[Tensor], channels: int, values: list[Tensor] | None) -> Equations:
    """Return the equations of all channels: ``matrices[g]``·x_c = ``values[g]``[:, c] for the channels c of group g.

    The R of a tall matrix's QR decomposition replaces it, and Qᵀ·values the values: the same least squares.
    """
    each = channels // len(matrices)
    parts: list[Tensor] = []
    rights: list[Tensor] = []
    for i, matrix in enumerate(matrices):
        q, r = torch.linalg.qr(matrix) if len(matrix) > matrix.shape[1] else (None, matrix)
        parts.append(r)
        if values is not None:
            right = values[i] if q is None else q.T @ values[i]
            rights.append(right.T.flatten())
    count = sum(len(matrix) for matrix in matrices) * each
    whole = torch.block_diag(*[part for part in parts for _ in range(each)])
    return Equations(whole, torch.cat(rights) if values is not None else None, count, tuple(parts), each)


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
        unknowns: elements of the block's input.
        virtual: constraints that the layers before it put on its input, whatever the image: an input that is larger
            than what it was computed from lies on a surface of fewer dimensions. They aren't linear (an activation lies
            between), so the recursion doesn't use them.
        rank: of both sorts of constraints together.
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
        """The whole network's, which is its worst layer's."""
        worst = {layer.verdict for layer in self.layers}
        if "deficient" in worst:
            return "deficient"
        return "counted" if "with virtual constraints" in worst else "invertible"

    @property
    def index(self) -> float:
        """Σ_i (d − i + 1)/d · (rank_i − unknowns_i) over the layers i = 1 … d: 0 if all are determined, else below.

        What the first layers lack weighs most, because nothing after them can mend it.
        """
        d = len(self.layers)
        return sum(-layer.missing * (d - i) / d for i, layer in enumerate(self.layers)) + 0.0


def rank_analysis(
    module: nn.Module, input_shape: tuple[int, ...], loss: Loss, num_classes: int, *, generator: torch.Generator
) -> RankAnalysis:
    """Count unknowns and independent equations of every layer of ``module``: R-GAP's rank analysis.

    It needs the network alone, in its mode of training, with its weights; it assumes one example and all gradients
    sent. The gradient constraints depend on the example through k = ∂L/∂z, so their rank is that at a random input and
    a random label; for all inputs but a set of measure zero that is the greatest possible (Zhu & Blaschko, ICLR 2021).
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
