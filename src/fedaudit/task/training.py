"""How clients train: the loss that they minimise, the optimiser and its settings, and what of it isn't modelled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from fedaudit.modalities import NOTHING
from fedaudit.utils.errors import BadInput, unknown_name
from fedaudit.utils.validation import LARGEST

CROSS_ENTROPY, BCE, MSE = "cross-entropy", "bce-with-logits", "mse"
DICE, DICE_CROSS_ENTROPY = "dice", "dice-cross-entropy"

Loss = Callable[[Any, Any], Tensor]  # of outputs and targets, tensors unless a model has several outputs

_SMOOTH = 1e-5  # of Dice, in pixels: what a class that is neither there nor predicted counts


def bce_with_logits(
    outputs: Tensor, targets: Tensor, reduction: str = "mean", pos_weight: Tensor | None = None
) -> Tensor:
    """Return the binary cross-entropy of logits (n, k), the mean over all of them.

    Targets are (n, k) labels; for one logit the classes 0 and 1, int64 (n,), or masks (n, *spatial) without the pixels
    ``NOTHING``. ``pos_weight``: (k,) weights of labels that are 1; for masks (1,).
    """
    if outputs.ndim > 2 and not targets.is_floating_point():
        masks = targets.reshape(outputs.shape)
        asked = (masks != NOTHING).to(outputs.dtype)
        asked = asked if reduction == "sum" else asked * (asked.numel() / asked.sum())
        return nn.functional.binary_cross_entropy_with_logits(
            outputs, masks.to(outputs.dtype), asked, reduction=reduction, pos_weight=pos_weight
        )
    wanted = targets.view(outputs.shape).to(outputs.dtype)
    return nn.functional.binary_cross_entropy_with_logits(outputs, wanted, reduction=reduction, pos_weight=pos_weight)


def dice_loss(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return 1 − Dice of probabilities, the mean over examples and classes (Milletari et al. 2016, V-Net).

    Departures from its Section 3, as in MONAI: probabilities aren't squared, and the background is a class, too. Of one
    logit they are its sigmoid, and class 1 alone counts.

    Outputs are (n, c, *spatial) logits, targets int64 (n, *spatial) classes, where a pixel ``NOTHING`` counts nothing,
    or (n, c, *spatial) probabilities of them.
    """
    one = outputs.shape[1] == 1
    likely = (outputs.sigmoid() if one else outputs.softmax(dim=1)).flatten(2)
    if targets.is_floating_point():
        true = targets.flatten(2)
    else:
        asked = targets.flatten(1) != NOTHING  # without a branch: a GPU's recorded step has none
        true = nn.functional.one_hot(targets.flatten(1) * asked, max(outputs.shape[1], 2)).movedim(-1, 1)
        likely, true = likely * asked[:, None], true[:, -outputs.shape[1] :].to(likely.dtype) * asked[:, None]
    both, either = (likely * true).sum(dim=2), likely.sum(dim=2) + true.sum(dim=2)
    lost = 1 - (2 * both + _SMOOTH) / (either + _SMOOTH)
    return lost.sum() if reduction == "sum" else lost.mean()


def dice_cross_entropy(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return :func:`dice_loss` plus (binary) cross-entropy, as nnU-Net and MONAI train (Isensee et al. 2021)."""
    if outputs.shape[1] == 1:
        return dice_loss(outputs, targets, reduction) + bce_with_logits(outputs, targets, reduction)
    return dice_loss(outputs, targets, reduction) + nn.functional.cross_entropy(outputs, targets, reduction=reduction)


LOSSES: dict[str, Callable[..., Tensor]] = {
    CROSS_ENTROPY: nn.functional.cross_entropy,
    BCE: bce_with_logits,
    MSE: nn.functional.mse_loss,
    DICE: dice_loss,
    DICE_CROSS_ENTROPY: dice_cross_entropy,
}


def loss_name(loss: Loss) -> str:
    """Return a loss function's name: ``custom`` for a user's own, or the plain mean binary cross-entropy's."""
    if not callable(loss):
        raise BadInput(f"loss is {loss!r}; give a function of (outputs, targets), such as nn.MSELoss()")
    if loss is nn.functional.binary_cross_entropy_with_logits:
        return BCE
    several = isinstance(loss, nn.BCEWithLogitsLoss) and loss.pos_weight is not None and loss.pos_weight.numel() > 1
    if not isinstance(loss, nn.BCEWithLogitsLoss) or several:
        return "custom"
    if loss.weight is not None or loss.pos_weight is not None or loss.reduction != "mean":
        raise BadInput(
            "BCEWithLogitsLoss of one logit is taken without weight and pos_weight, as the mean; for a weighted loss "
            "give the model two outputs, and nn.CrossEntropyLoss(weight=…); for masks call "
            "binary_cross_entropy_with_logits in a function of your own"
        )
    return BCE


def class_logits(outputs: Tensor) -> Tensor:
    """Return a classifier's outputs as (n, classes) logits: of a single one z, of class 1 against class 0, 0 and z."""
    return torch.cat([torch.zeros_like(outputs), outputs], dim=1) if outputs.shape[1] == 1 else outputs


def loss_function(
    name: str,
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
    summed: bool = False,
) -> Loss:
    """Return the loss that ``name`` stands for: the mean over the batch, or with ``summed`` the sum.

    Args:
        name: one of ``LOSSES``.
        label_smoothing: of cross-entropy.
        class_weights: of cross-entropy; of binary cross-entropy over labels or pixels what each weighs where it is 1.
        summed: as torch's ``reduction='sum'``.

    Raises:
        BadInput: no such loss.
    """
    if name not in LOSSES:
        raise BadInput(unknown_name("loss", name, LOSSES))
    if label_smoothing == 0 and class_weights is None and not summed:
        return LOSSES[name]
    options: dict[str, Any] = {"reduction": "sum" if summed else "mean"}

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        weight = None if class_weights is None else outputs.new_tensor(class_weights)
        if name != CROSS_ENTROPY:
            weights = {} if weight is None else {"pos_weight": weight}
            return LOSSES[name](outputs, targets, **options, **weights)
        return nn.functional.cross_entropy(outputs, targets, weight, label_smoothing=label_smoothing, **options)

    return loss


Optimiser = Literal["sgd", "adam", "adamw", "other"]
Precision = Literal["float32", "bfloat16", "float16"]
WeightsPrecision = Literal["float32", "float64", "bfloat16", "float16"]

# What a recording of real training can tell that nothing here models: name -> in words, for notes and reports.
UNMODELLED = {
    "optimiser": "clients train by another optimiser than SGD, Adam and AdamW, or by several",
    "optimiser-state": "the optimiser kept its state (momentum, moments) from an earlier round",
    "optimiser-settings": "the optimiser's settings changed within an update in a way that isn't recorded",
    "gradients-changed": "gradients were changed between backward pass and step, by more than clipping",
    "several-inputs": "the model takes several inputs in a form that isn't recorded",
    "several-losses": "a step's gradient comes from several losses or models",
    "loss": "clients minimise a loss that isn't one of fedaudit's",
    "no-gradient": "the model is known by its answers alone, without a gradient",
    "nothing-seen": "no training step was seen: the model may be trained in another thread or process",
}
TOLD = "counts as it was told and not as it was seen"  # of facts, in notes
UNREPEATABLE = "can't be repeated"  # likewise, of a training that a replay isn't held against


class Pass(NamedTuple):
    """One forward and backward pass of a step that accumulates gradients: its examples, and the weight of its loss."""

    examples: int
    weight: float


def _check_numbers(thing: object, what: str, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(thing, name)
        if not (math.isfinite(value) and value >= 0 and (name != "momentum" or value < 1)):
            raise BadInput(f"{what}'s {name} is {value}; it must be 0 or more" + ", below 1" * (name == "momentum"))


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that the optimiser treats otherwise than the rest.

    Attributes:
        learning_rate: as a multiple of the rest's; 0 where they aren't trained.
        momentum, weight_decay: instead of the rest's.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # where it is read from a file

    parameters: tuple[str, ...]
    learning_rate: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_numbers(self, "a parameter group", ("learning_rate", "momentum", "weight_decay"))


@dataclass(frozen=True)
class TrainingConfig:
    """How the client trained: part of the federation's plan, so known to the server that wrote the plan.

    Attributes:
        learning_rate, local_steps, momentum, weight_decay, proximal_mu: of local training; the rate is the first
            step's.
        batch_sizes: examples in each local step.
        data_size: distinct examples that the client holds, which FedAvg's server weighs by; None if not told.
        optimiser: ``sgd``, ``adam``, ``adamw``, or ``other`` (then ``unmodelled`` says so).
        nesterov, dampening: of SGD's momentum, as in ``torch.optim.SGD``.
        betas, epsilon, amsgrad: of Adam and AdamW, as in ``torch.optim.Adam``.
        learning_rates: of each step, where it changes; empty where it doesn't.
        groups: parameters that are treated otherwise.
        passes: of each step, the passes whose gradients were accumulated; empty where every step has one pass, of
            weight 1.
        clip_norm, clip_value: each step's gradient is clipped to this norm, or each element to this size (``torch.nn.
            utils.clip_grad_norm_``, ``clip_grad_value_``); None: it isn't.
        precision: of the forward pass (autocast).
        weights: the precision of the model's weights, and so of all that is computed with them.
        unmodelled: keys of :data:`UNMODELLED`: what else happened that nothing here models.

    Raises:
        BadInput: a number that no training has.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # where it is read from a file

    learning_rate: float
    local_steps: int
    batch_sizes: tuple[int, ...]
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal_mu: float = 0.0
    data_size: int | None = None
    optimiser: Optimiser = "sgd"
    nesterov: bool = False
    dampening: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    amsgrad: bool = False
    learning_rates: tuple[float, ...] = ()
    groups: tuple[ParameterGroup, ...] = ()
    passes: tuple[tuple[Pass, ...], ...] = ()
    clip_norm: float | None = None
    clip_value: float | None = None
    precision: Precision = "float32"
    weights: WeightsPrecision = "float32"
    unmodelled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.batch_sizes) != self.local_steps:
            raise BadInput(f"an update of {self.local_steps} local steps lists {len(self.batch_sizes)} batch sizes")
        if self.local_steps < 1 or min(self.batch_sizes) < 1:
            raise BadInput("an update needs one local step or more, each on a batch of one example or more")
        if self.data_size is not None and self.data_size < max(self.batch_sizes):
            raise BadInput(f"an update lists a batch of {max(self.batch_sizes)}, but {self.data_size} examples in all")
        if not 0 < self.learning_rate <= LARGEST:
            raise BadInput(
                f"an update's learning rate is {self.learning_rate}; it must be above 0, and {LARGEST:g} at most"
            )
        _check_numbers(self, "an update", ("momentum", "weight_decay", "proximal_mu"))
        self._check_optimiser()

    def _check_optimiser(self) -> None:
        shares = (*self.betas, self.dampening)
        if not all(math.isfinite(share) and 0 <= share <= 1 for share in shares) or max(self.betas) == 1:
            raise BadInput(f"an update's betas {self.betas} and dampening {self.dampening} must lie in [0, 1)")
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise BadInput(f"an update's epsilon is {self.epsilon}; it must be 0 or more")
        if any(not math.isfinite(rate) or rate < 0 for rate in self.learning_rates):
            raise BadInput("one of an update's learning rates isn't a number from 0")
        for name in ("learning_rates", "passes"):
            given = getattr(self, name)
            if given and len(given) != self.local_steps:
                raise BadInput(f"an update of {self.local_steps} local steps lists {len(given)} {name}")
        sizes = tuple(sum(p.examples for p in step) for step in self.passes)
        if self.passes and (sizes != self.batch_sizes or min(p.examples for s in self.passes for p in s) < 1):
            raise BadInput(f"an update's passes have {sizes} examples, its batches {self.batch_sizes}")
        if any(not math.isfinite(p.weight) for step in self.passes for p in step):
            raise BadInput("a pass of an update has a weight that isn't a number")
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise BadInput(f"an update's {name} is {value}; it must be above 0")
        if unknown := set(self.unmodelled) - set(UNMODELLED):
            raise BadInput(f"an update says '{min(unknown)}', which this fedaudit doesn't know")

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of every step."""
        return self.learning_rates or (self.learning_rate,) * self.local_steps

    @property
    def plain_sgd(self) -> bool:
        """Whether it is what simulated clients do: SGD in single precision, at one rate, all parameters alike.

        Attacks take double precision for single.
        """
        plain = TrainingConfig(
            self.learning_rate,
            self.local_steps,
            self.batch_sizes,
            self.momentum,
            self.weight_decay,
            self.proximal_mu,
            self.data_size,
            weights="float64" if self.weights == "float64" else "float32",
        )
        return self == plain

    @property
    def rounds(self) -> bool:
        """Whether all of it, or a part, is computed in half precision."""
        return "float16" in self.precision + self.weights


@dataclass(frozen=True)
class LocalPlan:
    """How clients train, which the server itself has laid down.

    Attributes:
        sends_gradient: the gradient of one batch; otherwise what local training changed.
        learning_rate: of the clients' SGD, or where they send gradients the server's step.
        clients: who take part in a round, at most.
    """

    sends_gradient: bool
    one_step: bool
    learning_rate: float
    batch_size: int
    clients: int
