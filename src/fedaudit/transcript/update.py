"""What one client sends in one round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from pydantic import ConfigDict
from torch import Tensor

from fedaudit.task.training import Pass, TrainingConfig
from fedaudit.utils.errors import BadInput

UpdateKind = Literal["gradient", "weights"]

AT_HOME = "with each client"  # what a replay's ``home`` says of layers that aren't sent
CONTRADICTED = 0.05  # relative error from which the facts aren't those that the update was made with
_ANYTHING = 0.5  # relative error of an update that says nothing of the facts
_MOST_STEPS = 10**6
BEYOND_ROUNDING = 10  # times as far as a rounding takes it: it has one rounding, at the start, and training has many


class Replay(NamedTuple):
    """How close local training, repeated on the truth from the recorded facts, comes to the update that was sent.

    Attributes:
        error: ‖replayed − sent‖ / ‖sent‖; infinity where it can't be repeated, or diverges.
        rounding: how far it ends from itself, relative, if a rounding moves the weights at its start; 0 where the error
            is too small to ask.
        home: what the client trained from and wasn't sent, in words; empty: nothing.
        explanation: what explains the error, in words; empty: nothing has to, or nothing does.
        left: relative error that it leaves; infinity: it can't be repeated, so that nobody can tell.
    """

    error: float
    rounding: float = 0.0
    home: str = ""
    explanation: str = ""
    left: float = 0.0

    @property
    def reproduces(self) -> bool:
        """Whether training, repeated, gives what was sent, as far as rounding lets it."""
        return self.error <= max(CONTRADICTED, BEYOND_ROUNDING * self.rounding)

    @property
    def contradicts(self) -> bool:
        """Whether the facts can't be those that the update was made with."""
        return not self.explanation and not self.reproduces

    @property
    def verifies(self) -> bool:
        """Whether the replay can tell the facts from others: it can't where rounding alone explains any update."""
        if self.explanation:
            return self.left < _ANYTHING
        return self.reproduces and (self.error <= CONTRADICTED or BEYOND_ROUNDING * self.rounding < _ANYTHING)


@dataclass(frozen=True)
class PrivateSteps:
    """How a client's optimiser made its steps private: DP-SGD (Abadi et al. 2016, Algorithm 1).

    In each step every example's gradient is clipped; their sum gets Gaussian noise of ``noise`` times ``clip`` and is
    divided by ``divisor``. BadInput: a number that no such training has.

    Attributes:
        clip: norm of an example's gradient, at most.
        noise: σ, in units of ``clip``; where it changed, the least.
        divisor: the examples that a step is expected to have, which needn't be those that it has; 1 where the sum is
            taken as it is.
        steps: that were taken, including those without any example.
        rate: the probability with which each step drew an example (Poisson sampling); None: it wasn't seen drawn so.
        layers: norm of each parameter's part, where each is clipped by itself; empty: all together.
        empty: for each step that drew no example, how many that drew some came before it, and its learning rate.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # where it is read from a file

    clip: float
    noise: float
    divisor: float
    steps: int
    rate: float | None = None
    layers: tuple[float, ...] = ()
    empty: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        above = (self.clip, self.divisor, self.steps, *self.layers, 1.0 if self.rate is None else self.rate)
        least = (self.noise, *(value for one in self.empty for value in one))
        if not all(math.isfinite(x) and x > 0 for x in above) or not all(math.isfinite(x) and x >= 0 for x in least):
            raise BadInput("private steps need clip, divisor, steps and rate above 0, and noise from 0")
        if (self.rate or 0) > 1 or not len(self.empty) <= self.steps <= _MOST_STEPS:
            raise BadInput(
                f"private steps have a rate of 1 at most; {_MOST_STEPS:,} are allowed, and no more empty ones"
            )

    def __str__(self) -> str:
        clipped = "layer by layer, " * bool(self.layers) + f"to {self.clip:.3g}"
        noise = f"noise of {self.noise:.3g} times that" if self.noise else "no noise"
        drawn = "no Poisson sampling seen" if self.rate is None else f"Poisson sampling at {self.rate:.3g}"
        return (
            f"DP-SGD: each example's gradient clipped {clipped}, {noise}, the sum divided by {self.divisor:g}, {drawn}"
        )

    def in_order(self, training: TrainingConfig | None) -> list[tuple[float, tuple[Pass, ...]]]:
        """Return each step's learning rate and passes, with those that drew no example in their places."""
        taken: list[tuple[float, tuple[Pass, ...]]] = []
        if training is not None:
            passes = training.passes or tuple((Pass(n, 1.0),) for n in training.batch_sizes)
            taken = list(zip(training.rates, passes, strict=True))
        for before, rate in reversed(self.empty):
            taken.insert(before, (rate, ()))
        return taken


@dataclass(frozen=True)
class ClientDefenceInfo:
    """What everybody knows of the defence that an update went through: it is part of the federation's plan.

    Attributes:
        name: of the client-side defence.
        sparse: a zero means that the number wasn't sent.
        signs: only the sign of each number was sent.
        noise: standard deviation of the noise in each number that was sent.
        clip: length that the update has at most without the noise; None: nobody said.
        bound: size at which each number was clipped, before the noise; None: it wasn't, or nobody said.
        noises: (name, standard deviation) of the noise in each tensor's numbers, on average, where it isn't the same in
            all; empty: it is.
        unclipped: without the noise the update is as long as it was made.
        orthogonal: each tensor is as long as what it stands for and orthogonal to it, and nothing else is known of it.
        transform: what the examples went through before the training, see :mod:`fedaudit.task.transforms`.
        private: the clipping and noise that were in the training's own steps; None: there were none.

    Raises:
        BadInput: the noise isn't a number from 0, or clip or bound none above it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # where it is read from a file

    name: str
    sparse: bool = False
    signs: bool = False
    noise: float = 0.0
    clip: float | None = None
    bound: float | None = None
    noises: tuple[tuple[str, float], ...] = ()
    unclipped: bool = False
    orthogonal: bool = False
    transform: str | None = None
    private: PrivateSteps | None = None

    def __post_init__(self) -> None:
        for name, value in (("clip", self.clip), ("bound", self.bound)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise BadInput(f"an update's {name} is {value}; it must be above 0")
        for noise in (self.noise, *(one for _, one in self.noises)):
            if not (math.isfinite(noise) and noise >= 0):
                raise BadInput(f"an update's noise is {noise}; it must be 0 or more")


@dataclass(frozen=True)
class Update:
    """One client's message of one round.

    Attributes:
        client: who sent it.
        kind: ``gradient`` (FedSGD: the gradient of the mean loss over the batch) or ``weights``
            (FedAvg: ΔW = W_T − W).
        tensors: by parameter name; trainable parameters only, and of these only what was sent.
        num_examples: over how many examples (with repetition over epochs) the update was made.
        training: how the client trained; None where the adversary isn't told.
        buffers: BatchNorm's running statistics after local training, if they changed.
        labels: (num_examples,) the labels, or (num_examples, 1) targets, in the order of use; only where the threat
            model grants them.
        sanitised: the defence that it went through, if any.
        seconds: that local training took; None where it wasn't recorded.
        members: where this is the mean of several clients' updates, of which secure aggregation gives the sum only:
            these clients, of whom ``client`` is the first; empty otherwise.

    Raises:
        BadInput: the values contradict each other.
    """

    client: int
    kind: UpdateKind
    tensors: dict[str, Tensor]
    num_examples: int
    training: TrainingConfig | None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None
    sanitised: ClientDefenceInfo | None = None
    seconds: float | None = None
    members: tuple[int, ...] = ()

    @property
    def batch_size(self) -> float:
        """Examples of a batch, on average; all of them where nothing is known of the training."""
        return self.num_examples / (self.training.local_steps if self.training else 1)

    def __repr__(self) -> str:
        elements = sum(tensor.numel() for tensor in self.tensors.values())
        size = f"{elements:,} elements in {len(self.tensors)} tensors"
        whose = f"{len(self.members)} clients" if self.members else f"client {self.client}"
        return f"Update({whose}: {self.kind} of {self.num_examples} examples, {size})"

    def __post_init__(self) -> None:
        if self.client < 0:
            raise BadInput(f"client {self.client}: clients count from 0")
        if self.members and (
            len(self.members) < 2 or self.members[0] != self.client or len(set(self.members)) < len(self.members)
        ):
            raise BadInput(f"client {self.client}: a sum over the clients {list(self.members)}; it is of two or more")
        if self.num_examples < 1:
            raise BadInput(f"client {self.client}: an update over {self.num_examples} examples")
        if self.training is not None and sum(self.training.batch_sizes) != self.num_examples:
            sizes = f"{sum(self.training.batch_sizes)} examples in its batches"
            raise BadInput(f"client {self.client}: an update over {self.num_examples} examples, but {sizes}")
        if self.training is not None and self.kind == "gradient" and self.training.local_steps != 1:
            raise BadInput(f"client {self.client}: a gradient over {self.training.local_steps} local steps; it has one")
        if self.labels is not None and len(self.labels) != self.num_examples:
            raise BadInput(f"client {self.client}: {len(self.labels)} labels for {self.num_examples} examples")
