"""The derivative of what a client sends by its examples, as products with vectors and, where it is small, whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Of examples (n, ...): what is sent of them, any number of tensors, differentiable twice.
Sent = Callable[[Tensor], Sequence[Tensor]]


class Derivative:
    """J, (numbers sent, numbers of the examples), at ``examples`` (n, ...): products, by two passes back each.

    Args:
        sent: of examples; what is sent of them.
        examples: where the derivative is taken.
        weights: (numbers sent,) J's rows are multiplied by, as by the inverse of their noise.
    """

    def __init__(self, sent: Sent, examples: Tensor, weights: Tensor | None = None) -> None:
        self.examples = examples.detach().clone().requires_grad_()
        self.value = torch.cat([part.flatten() for part in sent(self.examples)])  # (numbers sent,), with its graph
        self.weights = weights
        self._dual = torch.zeros_like(self.value, requires_grad=True)
        self._back = torch.zeros_like(self.examples)
        if self.value.requires_grad:
            weighed = self._dual if weights is None else self._dual * weights
            (self._back,) = torch.autograd.grad(
                self.value, self.examples, weighed, create_graph=True, materialize_grads=True
            )

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
        if not self.value.requires_grad:
            return torch.zeros_like(self.examples)
        weighed = vector if self.weights is None else vector * self.weights
        (product,) = torch.autograd.grad(self.value, self.examples, weighed, retain_graph=True, materialize_grads=True)
        return product.detach()

    def normal(self, vector: Tensor) -> Tensor:
        """Return JᵀJ·v, as the examples."""
        return self.backward(self.forward(vector))

    def gram(self, report: Callable[[int], None] = lambda _: None) -> Tensor:
        """Return JᵀJ, (D, D): one product a column. For small D alone; ``report`` is told of every product."""
        rows = []
        for i in range(self.examples.numel()):
            unit = torch.zeros(self.examples.numel(), dtype=self.examples.dtype)
            unit[i] = 1
            rows.append(self.normal(unit).flatten())
            report(1)
        found = torch.stack(rows)
        return (found + found.T) / 2
