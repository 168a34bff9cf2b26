"""Gradient inversion: recover the training images from one update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedaudit.utils.lazy import lazy

if TYPE_CHECKING:
    from fedaudit.attacks.inversion.engines.guarded import AGREEMENT, make_engine
    from fedaudit.attacks.inversion.engines.reference import one_gradient
    from fedaudit.attacks.inversion.local_epochs import agreed
    from fedaudit.attacks.inversion.objectives import Objective, flatten, unflatten, weighted_cosine
    from fedaudit.attacks.inversion.priors import smoothness
    from fedaudit.attacks.inversion.reconstruct import make_step, with_priors
    from fedaudit.attacks.inversion.reconstruct import reconstruct as optimise
    from fedaudit.attacks.inversion.template import (
        Composed,
        GradientInversion,
        OptimiserName,
        Prepared,
        Schedule,
        Start,
        prepare,
        to_pixels,
    )
    from fedaudit.attacks.labels.inference import LabelMethod
    from fedaudit.attacks.victim import Victim
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "AGREEMENT",
    "Composed",
    "GradientInversion",
    "LabelMethod",
    "Objective",
    "OptimiserName",
    "Prepared",
    "Schedule",
    "Start",
    "Victim",
    "agreed",
    "flatten",
    "make_engine",
    "make_step",
    "one_gradient",
    "optimise",
    "prepare",
    "smoothness",
    "to_pixels",
    "unflatten",
    "weighted_cosine",
    "with_priors",
]
