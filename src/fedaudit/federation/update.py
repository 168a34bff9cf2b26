"""What one client sends in one round, and what everybody in the federation knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from fedaudit.errors import BadInput, unknown_name

UpdateKind = Literal["gradient", "weights"]
Tensors = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "cross-entropy": nn.functional.cross_entropy,
    "mse": nn.functional.mse_loss,
}


def loss_function(name: str) -> Loss:
    """Return the loss (mean over the batch) that ``name`` stands for.

    Raises:
        BadInput: no such loss.
    """
    if name not in LOSSES:
        raise BadInput(unknown_name("loss", name, LOSSES))
    return LOSSES[name]


@dataclass(frozen=True)
class TrainingFacts:
    """How the client trained: part of the federation's plan, so known to the server that wrote the plan."""

    learning_rate: float
    local_steps: int
    batch_sizes: tuple[int, ...]
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal_mu: float = 0.0

    def __post_init__(self) -> None:
        if len(self.batch_sizes) != self.local_steps:
            raise BadInput(f"an update of {self.local_steps} local steps lists {len(self.batch_sizes)} batch sizes")


@dataclass(frozen=True)
class Update:
    """One client's message of one round.

    Attributes:
        client: who sent it.
        kind: ``gradient`` (FedSGD: the gradient of the mean loss over the batch) or ``weights``
            (FedAvg: ΔW = W_T − W).
        tensors: by parameter name; trainable parameters only.
        num_examples: over how many examples (with repetition over epochs) the update was made.
        facts: how the client trained; None where the adversary isn't told.
        buffers: BatchNorm's running statistics after local training, if they changed.
        labels: (num_examples,) the labels in the order of use; only where the threat model grants them.
    """

    client: int
    kind: UpdateKind
    tensors: Tensors
    num_examples: int
    facts: TrainingFacts | None
    buffers: Tensors = field(default_factory=dict)
    labels: Tensor | None = None


@dataclass(frozen=True)
class Setup:
    """What everybody in the federation knows beforehand: architecture, loss, preprocessing, classes.

    Attributes:
        model: registered name of the architecture, or ``custom`` for a user's own module.
        width: the architecture's width, or None for its own default.
        batch_norm: ``eval`` or ``train``: how clients run BatchNorm in local training.
        loss: registered name of the loss, or ``custom``.
        kind: ``image`` or ``table``.
        input_shape: of one example, (C, H, W) or (d,).
        num_classes: None for regression.
        mean, std: of the preprocessing, per channel; x_normalised = (x − mean) / std with x in [0, 1].
    """

    model: str
    width: int | None
    batch_norm: Literal["eval", "train"]
    loss: str
    kind: Literal["image", "table"]
    input_shape: tuple[int, ...]
    num_classes: int | None
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def outputs(self) -> int:
        """Number of outputs of the model: one per class, or one for regression."""
        return self.num_classes or 1

    def _channelwise(self, values: tuple[float, ...], like: Tensor) -> Tensor:
        shape = (1, -1, *([1] * (like.ndim - 2)))
        return torch.tensor(values, dtype=like.dtype, device=like.device).view(shape)

    def normalise(self, inputs: Tensor) -> Tensor:
        """Turn (n, C, H, W) pixels in [0, 1] into what the model sees; tables are returned as they are."""
        if self.kind == "table":
            return inputs
        return (inputs - self._channelwise(self.mean, inputs)) / self._channelwise(self.std, inputs)

    def denormalise(self, inputs: Tensor) -> Tensor:
        """Undo :meth:`normalise`."""
        if self.kind == "table":
            return inputs
        return inputs * self._channelwise(self.std, inputs) + self._channelwise(self.mean, inputs)

    def pixel_range(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised values of black and white, broadcastable to (n, C, H, W)."""
        return self.normalise(torch.zeros_like(like[:1])), self.normalise(torch.ones_like(like[:1]))
