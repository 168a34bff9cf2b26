"""Which engine computes the step, and the check that a fast one may be used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedaudit.attacks.inversion.engines.first_order import first_order
from fedaudit.attacks.inversion.engines.passes import Traced, eager
from fedaudit.attacks.inversion.engines.reference import Engine, reference
from fedaudit.attacks.inversion.objectives import Distance
from fedaudit.attacks.victim import Victim
from fedaudit.update import TrainingConfig

EngineName = Literal["auto", "reference", "frozen", "compiled"]

AGREEMENT = 0.999  # least cosine between the fast and the exact gradient
CHECK_EVERY = 500
TRACE_FROM = 20  # steps; below, tracing costs more than it saves
COMPILE_FROM = 5_000  # steps; below, compiling does


@dataclass
class GuardedEngine:
    """A fast engine under guard: compared with the exact one now and then, and given up where they differ.

    Attributes:
        exact: double backward.
        fast: first-order passes.
        notes: what the user should know; filled while running.
        every: steps from one comparison to the next; 0 for none at all.
    """

    exact: Engine
    fast: Engine
    notes: list[str] = field(default_factory=list)
    every: int = CHECK_EVERY
    _calls: int = 0
    _fallen_back: bool = False

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the step by the fast engine, or, once it was caught out, by the exact one."""
        if self._fallen_back:
            return self.exact(images)
        value, grad = self.fast(images)
        if self.every and self._calls % self.every == 0 and (exact := self._exact_step(images)) is not None:
            exact_value, exact_grad = exact
            a, b = grad.flatten().double(), exact_grad.flatten().double()
            agreement = (torch.dot(a, b) / (a.norm() * b.norm())).item()
            if not agreement >= AGREEMENT:  # also where it isn't a number
                self._fallen_back = True
                self.notes.append(
                    f"engine: reference from iteration {self._calls} on, because the first-order one's gradient had "
                    f"cosine {agreement:.4f} to the exact one"
                )
                value, grad = exact_value, exact_grad
        self._calls += 1
        return value, grad

    def _exact_step(self, images: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the exact step, or None (with a note) where torch has no second derivative of the model."""
        try:
            return self.exact(images)
        except RuntimeError as error:
            if "is not implemented" not in str(error):
                raise
            note = f"engine: unchecked, because torch has no second derivative of this model ({error})"
            self.notes.extend([note] if note not in self.notes else [])
            return None


def make_engine(
    name: EngineName,
    victim: Victim,
    labels: Tensor,
    training: TrainingConfig,
    distance: Distance,
    steps: int,
) -> GuardedEngine:
    """Return the engine ``name``.

    ``auto`` is the first-order one under guard: as the model is written for a handful of steps, traced for more,
    compiled for many. ``frozen`` is the traced one, ``compiled`` the compiled one, both without guard.

    Args:
        name: of the engine.
        victim: the model.
        labels: (n,) of the images.
        training: the local training that is matched.
        distance: of the descent W − W_T to the observed one.
        steps: how many will be taken.
    """
    exact = _without_fused_attention(reference(victim, labels, training, distance))
    if name == "reference":
        return GuardedEngine(exact, exact, every=0)
    traced = Traced(victim, compiled=name == "compiled" or (name == "auto" and steps >= COMPILE_FROM))
    passes = eager(victim) if name == "auto" and steps < TRACE_FROM else traced.passes()
    fast = first_order(victim, labels, training, distance, passes)
    return GuardedEngine(exact, fast, traced.notes, every=CHECK_EVERY if name == "auto" else 0)


def _without_fused_attention(engine: Engine) -> Engine:
    """Let ``engine`` compute attention by its definition: torch's fused kernels have no second derivative."""

    def step(images: Tensor) -> tuple[Tensor, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            return engine(images)

    return step
