"""The derivative of what a client sends by its examples, as products with vectors and, where it is small, whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Of examples (n, ...): what is sent of them, any number of tensors, differentiable twice.
Sent = Callable[[Tensor], Sequence[Tensor]]


class Derivative:
    """J, (numbers sent, numbers of the examples), at ``examples`` (n, ...): products, by two passes back each.

    What is sent may be weighed number by number (:attr:`weights`), as by the inverse of its noise: J is of what is
    weighed then.
    """

    def __init__(self, sent: Sent, examples: Tensor, weights: Tensor | None = None) -> None:
        self.examples = examples.detach().clone().requires_grad_()
        self.value = torch.cat([part.flatten() for part in sent(self.examples)])  # (numbers sent,), with its graph
        self.weights = weights
        self._dual = torch.zeros_like(self.value, requires_grad=True)
        weighed = self._dual if weights is None else self._dual * weights
        (self._back,) = torch.autograd.grad(
            self.value, self.examples, weighed, create_graph=True, materialize_grads=True
        )

    @property
    def shape(self) -> tuple[int, int]:
        """How many numbers are sent, and of how many the examples are."""
        return self.value.numel(), self.examples.numel()

    def forward(self, vector: Tensor) -> Tensor:
        """Return J·v, (numbers sent,), of v as the examples."""
        if not self._back.requires_grad:  # what is sent doesn't depend on the examples
            return torch.zeros_like(self.value)
        (product,) = torch.autograd.grad(
            self._back, self._dual, vector.view_as(self.examples), retain_graph=True, materialize_grads=True
        )
        return product.detach()

    def backward(self, vector: Tensor) -> Tensor:
        """Return Jᵀ·u, as the examples, of u (numbers sent,)."""
        weighed = vector if self.weights is None else vector * self.weights
        (product,) = torch.autograd.grad(
            self.value, self.examples, weighed, retain_graph=True, materialize_grads=True
        )
        return product.detach()

    def normal(self, vector: Tensor) -> Tensor:
        """Return JᵀJ·v, as the examples."""
        return self.backward(self.forward(vector))

    def gram(self) -> Tensor:
        """Return JᵀJ, (D, D) float64: one product a column. For small D alone."""
        size = self.examples.numel()
        rows = [self.normal(torch.eye(size, dtype=self.examples.dtype)[i]).flatten().double() for i in range(size)]
        found = torch.stack(rows)
        return (found + found.T) / 2
