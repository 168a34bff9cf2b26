"""The methods that optimise images: a paper each, in one short definition."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from fedaudit.attacks.base import GRIDS, MOST_EXAMPLES, SEARCHED, Case, Progress, register
from fedaudit.attacks.findings import Trace
from fedaudit.attacks.inversion.objectives import Objective
from fedaudit.attacks.inversion.priors import (
    CHANNELS,
    Subspace,
    fading_smoothness,
    in_subspaces,
    looks_like_photographs,
    subspaces,
    telling,
)
from fedaudit.attacks.inversion.reconstruct import affordable, explore, reconstruct, with_priors
from fedaudit.attacks.inversion.template import (
    QUICK,
    FedAvgWay,
    GradientInversion,
    Prepared,
    Schedule,
)
from fedaudit.attacks.local_training import is_adaptive
from fedaudit.task.info import TaskInfo
from fedaudit.transcript.update import Update
from fedaudit.utils.validation import Count, Fraction, NonNegative, Positive

_COARSE_RATE = 1e-2  # Xu et al. 2022, Section IV-A
_SHORT = 0.3  # share of the iterations: each of two starts where there is no time for more
_IMAGES = "images, volumes, signals or examples of several inputs, and a classifier"
_LABELS = "labels: given, or inferable from the last fully connected layer"


@register
class InvG(GradientInversion):
    """Inverting Gradients (Geiping et al. 2020, Eq. 4 and Section 6).

    Cosine over the whole gradient, total variation, Adam on the sign of the gradient with step decay, pixels clamped.
    FedAvg by simulation of the local steps. Departures: total variation is 1e-4 by default, AGIC's setting for an
    untrained ResNet20-4, and the iterations are AGIC's 10,000 (Geiping et al. use 4,800 to 24,000).
    """

    name = "invg"
    examples: ClassVar[tuple[str, ...]] = SEARCHED
    summary = "cosine of gradients, total variation, signed Adam"
    paper = "Geiping et al. 2020 (Inverting Gradients)"
    needs: ClassVar[tuple[str, ...]] = (_IMAGES, _LABELS, "local training config, for FedAvg updates")
    distance = "cosine"
    fedavg: ClassVar[FedAvgWay] = "simulation"
    first_settings = QUICK

    total_variation: NonNegative = 1e-4
    signed: bool = True
    schedule: Schedule = "steps"
    clamp: bool = True

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.searchable and case.recovers(cls.examples) and (case.update_kind == "gradient" or case.can_simulate)


@register
class AGIC(InvG):
    """AGIC (Xu et al. 2022): layer-weighted cosine (Eq. 6-8) and, for FedAvg, the one-batch approximation (Eq. 4).

    Adam works on the gradient's values at a constant rate (Section V-A names no schedule); ``signed: true`` and
    ``schedule: steps`` are InvG's. Departures: pixels are clamped, as in InvG. ΔW is divided by the number of local
    steps, which Eq. 4 leaves out and a cosine doesn't notice. Biases and normalisations, which the paper doesn't
    mention, weigh what the layer before them does. β is 50 for untrained networks; the paper takes 2 for trained ones,
    with total_variation 1e-2 for a trained ResNet20-4 (1e-3 and 1e-1 for ResNet50, untrained and trained). Several
    epochs (Section IV-B) are ``agic-epochs``.
    """

    name = "agic"
    summary = "layer-weighted cosine; FedAvg as one batch"
    paper = "Xu et al. 2022 (AGIC)"
    needs = (_IMAGES, _LABELS)
    fedavg = "one-batch"

    signed: bool = False
    schedule: Schedule = "constant"
    beta: Positive = 50.0
    relu_modifier: bool = True

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.searchable and case.recovers(cls.examples)

    def needs_training_config(self, update: Update) -> bool:  # noqa: ARG002
        """A cosine needs the direction of ΔW only."""
        return False

    def notes(self, prepared: Prepared) -> list[str]:
        """Say so where the one-batch approximation, the layer weights or the ReLU modifier reach their limits."""
        notes = super().notes(prepared)
        convolutions = [layer for layer in prepared.layers if layer.kind == "conv"]
        if not convolutions:
            notes.append("the model has no convolution: layer weights are all equal")
        elif self.relu_modifier and not any(layer.relu_follows for layer in convolutions):
            notes.append("no ReLU follows a convolution: the ReLU modifier is 1 throughout")
        training = prepared.update.training
        if training is None and prepared.update.kind == "weights":
            notes.append(
                "how the client trained isn't known (learning rate, local steps): its update is taken for one batch's "
                "gradient of unknown length, of which the direction alone is matched"
            )
        if (
            training
            and prepared.update.kind == "weights"
            and training.local_steps > 1
            and training.learning_rate >= _COARSE_RATE
        ):
            notes.append(
                f"learning rate {training.learning_rate:g} over {training.local_steps} local steps: the paper advises "
                "against the one-batch approximation from 0.01 on"
            )
        return notes


@register
class AGICPlus(AGIC):
    """AGIC with what gradients say of their layers' inputs, raced starts, moves, and a rate that falls to zero.

    Our own. The gradient of a layer's weights is a sum of the patches that the layer sees, so it tells the subspace in
    which they lie, whatever the loss and the layers above do. A prior asks that of the images (:func:`.in_subspaces`),
    for every layer with fewer patches than a patch has numbers: it gets most descents out of where AGIC is stuck, and
    ends near the very pixels. It says little of large batches, and isn't there where an update is sparse, of signs
    only, noisy, or of Adam's.

    What is still stuck is often the thing in another place: a network with global pooling hardly knows where a thing
    is, and between the places lies a barrier. So a share of the iterations goes to short descents from several starts,
    and to shifts and flips of the best one (:func:`.explore`); the objective alone chooses. The rest is one
    descent from half the rate, which falls linearly to zero. All the way a small denoiser, trained on drawn shapes,
    pulls the images away from noise, ever less (:class:`.Denoiser`), and total variation fades with it. Everything
    else is AGIC's. In a batch every image moves on its own, one a round.

    What had failed on stuck images: unsigned or smaller steps, β of 5 and 500, no ReLU modifier, small or smooth
    starts, more total variation, the plain or layer-wise cosine, relative L2, softplus sharpened on the way,
    Levenberg-Marquardt, and fresh starts of Adam without moves. ``agic/plus-tuning`` compares it with its parts on
    CIFAR-100, ``agic/plus`` measures it on other data. Every evaluation of the objective counts as an iteration, moved
    copies included; one with the prior takes two to three times as long.

    Args:
        moving: share of the iterations that is spent on starts and moves; where it pays neither for two starts nor for
            a start and a round of moves, as below some 990 iterations by default, all are spent on one descent.
        starts: descents from new noise, the best of which is moved about; fewer where their share doesn't pay for all.
        start_iterations: of each of these; the objective after them chooses.
        denoising: weight of the pull towards the denoised images, at first; a tenth of it in the end. Images of one or
            three channels, and volumes slice by slice; not used for others.
        subspace: weight of the prior on subspaces, times 1 for a single image where the gradients of at least half of
            the layers span all that the layers see, and 0.03 else. Where it is 0.03 it may lead noise astray: of a
            single image every other start goes without it, the first one, too, and where ``moving`` doesn't pay for two
            of ``start_iterations`` there are two of 30 % of the iterations each.
    """

    name = "agic-plus"
    examples = GRIDS
    summary = "AGIC with the subspaces that gradients give away, raced starts, shifts and flips"
    paper = "this project, after Xu et al. 2022 (AGIC)"

    signed: bool = True
    schedule: Schedule = "linear"
    moving: Fraction = 0.75
    starts: Count = 4
    start_iterations: Count = 400
    denoising: NonNegative = 0.03
    subspace: NonNegative = 1.0
    pin_contrast: bool = True
    calibrate: bool = True

    first_settings: ClassVar[dict[str, Any]] = {**QUICK, "largest": MOST_EXAMPLES}

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.updates_alone and case.recovers(cls.examples)

    def subspaces(self, prepared: Prepared) -> dict[str, Subspace]:
        """Return what the layers' gradients say of their patches; nothing where numbers of them weren't sent."""
        defence = prepared.update.sanitised
        if not self.subspace or is_adaptive(prepared.update) or (defence and (defence.sparse or defence.signs)):
            return {}
        blank = prepared.task_info.blank(len(prepared.labels))[0].to(prepared.labels.device)
        scaled = defence is None or (defence.clip and not (defence.noise or defence.bound))  # which keeps every span
        return subspaces(prepared.victim, prepared.layers, prepared.gradient, blank, defended=not scaled)

    def priors(self, prepared: Prepared) -> list[tuple[float, Objective]]:  # noqa: ARG002
        """Return none: those that fade begin anew with every restart."""
        return []

    def _denoises(self, task_info: TaskInfo) -> bool:
        channels, *size = task_info.input_shape
        return self.denoising > 0 and len(size) > 1 and channels in CHANNELS

    def notes(self, prepared: Prepared) -> list[str]:
        """Say so where the denoiser, which knows images, is left out, or sees slices."""
        notes, kind = super().notes(prepared), prepared.task_info.example_kind
        if len(kind.axes) == 3 or not self.denoising:
            return notes
        if self._denoises(prepared.task_info):
            return [*notes, f"the denoiser is one of images: it sees {kind.plural} slice by slice"]
        return [*notes, f"the denoiser is one of images of 1 or 3 channels: of {kind.plural} it is left out"]

    def search(
        self, objective: Objective, prepared: Prepared, count: int, generator: torch.Generator, progress: Progress
    ) -> tuple[list[Tensor], Trace]:
        """Explore, then descend from what was found."""
        adam = self.optimiser == "adam"
        objective = with_priors(objective, [(self.total_variation, fading_smoothness(self.iterations))])
        if adam and self._denoises(prepared.task_info):
            pull = looks_like_photographs(prepared.pixel_range, self.iterations)
            objective = with_priors(objective, [(self.denoising, pull)])
        without = objective
        known, share = telling(self.subspaces(prepared), count)
        if known:
            objective = with_priors(objective, [(share * self.subspace, in_subspaces(prepared.victim, known))])
        if self.inverter is not None:
            return self.from_answer(objective, prepared, generator, progress)
        doubtful = count == 1 and share < 1
        budget, length = round(self.moving * self.iterations) if adam else 0, self.start_iterations
        axes = len(prepared.task_info.input_shape) - 1
        starts, rounds = affordable(budget, self.starts, length, axes)
        wanted, short = min(2, self.starts), round(_SHORT * self.iterations)
        if doubtful and starts < wanted and wanted * (short + 1) <= budget:
            starts, length, rounds = wanted, short, 0
        if not starts or prepared.label_source == "optimised":  # no start is better where targets change, too
            return super().search(objective, prepared, count, generator, progress)
        settings = self.optimisation()
        images, before = explore(
            objective,
            lambda: self.initial(prepared, count, generator)[0].to(prepared.labels.device),
            prepared.pixel_range,
            generator,
            lambda done, _: progress(done, self.iterations),
            at_first=[without, objective] if doubtful else [objective],
            starts=starts,
            start_iterations=length,
            rounds=rounds,
            **{name: settings[name] for name in ("learning_rate", "optimiser", "signed", "clamp")},
        )
        spent = before.iterations[-1]
        found, after = reconstruct(
            objective,
            [images],
            prepared.pixel_range,
            generator,
            lambda done, _: progress(spent + done, self.iterations),
            **settings | {"iterations": self.iterations - spent, "learning_rate": self.learning_rate / 2},
        )
        progress(self.iterations, self.iterations)
        trace = Trace(
            before.iterations[:-1] + [spent + done for done in after.iterations],
            before.objective[:-1] + after.objective,
            torch.cat([before.snapshots[:-1], after.snapshots]),
        )
        return found, trace
