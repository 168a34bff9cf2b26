"""Which engine computes the step, and the check that a fast one may be used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedaudit.attacks.inversion.frozen import frozen
from fedaudit.attacks.inversion.matching import Engine, Victim, reference
from fedaudit.attacks.inversion.objectives import Distance
from fedaudit.update import TrainingFacts

EngineName = Literal["auto", "reference", "frozen"]

AGREEMENT = 0.999  # least cosine between the fast and the exact gradient
_CHECK_EVERY = 500


@dataclass
class Checked:
    """The frozen engine under guard: compared with the exact one now and then, and given up where they differ.

    Attributes:
        exact: double backward.
        fast: first-order passes.
        notes: what the user should know; filled while running.
    """

    exact: Engine
    fast: Engine
    notes: list[str] = field(default_factory=list)
    _calls: int = 0
    _fallen_back: bool = False

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the step by the fast engine, or, once it was caught out, by the exact one."""
        if self._fallen_back:
            return self.exact(images)
        value, grad = self.fast(images)
        if self._calls % _CHECK_EVERY == 0 and (exact := self._exact_step(images)) is not None:
            exact_value, exact_grad = exact
            a, b = grad.flatten().double(), exact_grad.flatten().double()
            agreement = (torch.dot(a, b) / (a.norm() * b.norm())).item()
            if not agreement >= AGREEMENT:  # also where it isn't a number
                self._fallen_back = True
                self.notes.append(
                    f"engine: reference from iteration {self._calls} on, because the frozen one's gradient had cosine "
                    f"{agreement:.4f} to the exact one"
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
            note = f"engine: frozen, unchecked, because torch has no second derivative of this model ({error})"
            self.notes[:] = [note]
            return None


def make_engine(
    name: EngineName, victim: Victim, labels: Tensor, facts: TrainingFacts, distance: Distance
) -> Engine | Checked:
    """Return the engine ``name``; ``auto`` is the frozen one under guard.

    Args:
        name: of the engine.
        victim: the model.
        labels: (n,) of the images.
        facts: the local training that is matched.
        distance: of ΔW to the observed one.
    """
    exact = _without_fused_attention(reference(victim, labels, facts, distance))
    if name == "reference":
        return exact
    fast = frozen(victim, labels, facts, distance)
    return fast if name == "frozen" else Checked(exact, fast)


def _without_fused_attention(engine: Engine) -> Engine:
    """Let ``engine`` compute attention by its definition: torch's fused kernels have no second derivative."""

    def step(images: Tensor) -> tuple[Tensor, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            return engine(images)

    return step
