"""Rows of a table as something that can be optimised, and many restarts of them as one result.

A category is a softmax over as many numbers; restarts are brought into one order and pooled cell by cell; how far they
agree is the confidence (TabLeak, Vero et al. 2023, Sections 4.1 to 4.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedaudit.modalities.columns import Column

_NEAR = 0.319  # of a column's standard deviation: so near, a number counts as recovered
_FEW = 40  # categorical columns; of more, one padded softmax is faster than one each


class Relaxation:
    """From variables (…, v), a number for each numeric column and for each category, to rows (…, d) and back.

    Attributes:
        columns: of the table.
        width: v.

    Args:
        columns: of the table.
        d: numbers of a row, as the model sees it.
        device: of the variables.
    """

    def __init__(self, columns: Sequence[Column], d: int, device: str = "cpu") -> None:
        self.columns = tuple(columns)
        self.numeric = [column for column in columns if column.kind == "numeric"]
        self.categorical = [column for column in columns if column.kind == "categorical"]
        self.sizes = [len(column.categories) for column in self.categorical]
        self.width = len(self.numeric) + sum(self.sizes)
        places = [i for c in self.numeric for i in c.positions]
        # what stands where in (numbers, probabilities of all categories) @ mix
        self.mix = torch.zeros(self.width, d)
        for i, place in enumerate(places):
            self.mix[i, place] = 1.0
        row = len(places)
        for column in self.categorical:
            k = len(column.categories)
            self.mix[row : row + k, list(column.positions)] = column.values()
            row += k
        self.plain = torch.equal(self.mix, torch.eye(d))  # the table's own order, categories one-hot: nothing to mix
        # the table as blocks padded to the widest column, so that one softmax serves all
        self.padded = max(self.sizes, default=1)
        self.block = torch.zeros(sum(self.sizes), dtype=torch.int64)
        at = 0
        for i, k in enumerate(self.sizes):
            self.block[at : at + k] = i * self.padded + torch.arange(k)
            at += k
        whole = torch.arange(len(self.sizes) * self.padded)
        self.absent = ~torch.isin(whole, self.block)
        inverse = torch.zeros(len(whole), dtype=torch.int64)
        inverse[self.block] = torch.arange(len(self.block))
        self.mix, self.block = self.mix.to(device), self.block.to(device)
        self.absent, self.source = self.absent.to(device), inverse.to(device)

    def parts(self, variables: Tensor) -> Tensor:
        """Return (…, v): numbers as they are, and the probability of each category."""
        numbers, logits = variables.tensor_split([len(self.numeric)], dim=-1)
        if not self.sizes:
            return numbers
        if len(self.sizes) <= _FEW:
            return torch.cat([numbers, *(own.softmax(dim=-1) for own in logits.split(self.sizes, dim=-1))], dim=-1)
        padded = logits[..., self.source].masked_fill(self.absent, -torch.inf)
        shares = padded.unflatten(-1, (len(self.sizes), self.padded)).softmax(dim=-1).flatten(-2)
        return torch.cat([numbers, shares[..., self.block]], dim=-1)

    def rows(self, parts: Tensor) -> Tensor:
        """Return (…, d) what the model sees of numbers and probabilities (…, v)."""
        return parts if self.plain else parts @ self.mix

    def split(self, parts: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the numbers (…, m), and the probabilities (…, k) of each categorical column."""
        numbers, shares = parts.tensor_split([len(self.numeric)], dim=-1)
        return numbers, list(shares.split(self.sizes, dim=-1)) if self.sizes else []

    def hardened(self, parts: Tensor) -> Tensor:
        """Return parts (…, v) with the likeliest category of each column at 1 and the others at 0."""
        numbers, shares = self.split(parts)
        hard = [torch.nn.functional.one_hot(s.argmax(dim=-1), s.shape[-1]).to(s.dtype) for s in shares]
        return torch.cat([numbers, *hard], dim=-1)

    def in_order_of(self, model: Tensor, parts: Tensor) -> Tensor:
        """Return one restart's parts (n, v) in the order of another one's, ``model``.

        Paired one to one with as few cells that differ as can be (numbers: by more than the tolerance).
        """
        cost = torch.zeros(len(model), len(parts), dtype=torch.float64)
        mine, theirs = self.split(model)[0].double(), self.split(parts)[0].double()
        for i in range(mine.shape[1]):
            off = (mine[:, None, i] - theirs[None, :, i]).abs()
            cost += (off > _NEAR).double() + 1e-6 * off.clamp(max=100.0)
        if self.sizes:
            first, second = (self.hardened(p)[:, len(self.numeric) :].double() for p in (model, parts))
            cost += len(self.sizes) - first @ second.T
        return parts[torch.as_tensor(linear_sum_assignment(cost.numpy())[1])]

    def confidence(self, pool: Tensor) -> Tensor:
        """Return (n, c) in [0, 1], how far restarts (R, n, v), which are in one order, agree on each cell.

        Of a category one minus the entropy of the mean probabilities, in units of the largest entropy; of a number the
        probability that a normal distribution of the restarts' standard deviation is within the tolerance of its mean,
        which falls as its entropy rises.
        """
        numbers, shares = self.split(pool.double())
        found = torch.ones(pool.shape[1], len(self.columns), dtype=torch.float64)
        of_numbers = torch.special.erf(_NEAR / math.sqrt(2) / numbers.std(dim=0, correction=0).clamp(min=1e-9))
        own_numbers, own_shares = iter(of_numbers.T), iter(shares)
        for i, column in enumerate(self.columns):
            if column.kind == "numeric":
                found[:, i] = next(own_numbers)
                continue
            mean = next(own_shares).mean(dim=0)
            entropy = -(mean * mean.clamp(min=1e-30).log()).sum(dim=1)
            found[:, i] = 1 - entropy / math.log(len(column.categories)) if len(column.categories) > 1 else 1.0
        return found.clamp(0, 1).float()

    def pooled(self, pool: Tensor) -> Tensor:
        """Return (n, v) the median of restarts (R, n, v), which are in one order, with categories hardened."""
        return self.hardened(pool.median(dim=0).values)
