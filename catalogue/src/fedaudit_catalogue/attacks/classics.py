"""Gradient inversions of papers before AGIC's: DLG, with L-BFGS and with Adam, iDLG, CPL, and Geng et al. 2021."""

from __future__ import annotations

from torch import Tensor, nn

from fedaudit.attacks import SEARCHED, NotApplicable, Observation, register
from fedaudit.attacks.inversion import (
    GradientInversion,
    LabelMethod,
    Objective,
    OptimiserName,
    Prepared,
    Start,
    Victim,
)
from fedaudit.task import LOSSES, class_logits
from fedaudit.utils import Count, NonNegative, Positive
from fedaudit_catalogue.attacks.gradinversion import differentiated

_IMAGES = "images, volumes, signals or examples of several inputs, and a classifier"
_LABELS = "labels: given, or inferable from the last fully connected layer"
_ONE_STEP = "a gradient, or a FedAvg update of a single local step"
_BCE = "bce-with-logits"


@register
class DLG(GradientInversion):
    """Deep Leakage from Gradients (Zhu et al. 2019, Eq. 4 and Algorithm 1).

    Squared Euclidean distance over all tensors, L-BFGS with rate 1, labels optimised jointly as logits of soft targets;
    granted labels aren't used. Departures: L-BFGS has a line search, as in all methods here (without it two
    of ten digits end as noise); images are optimised in normalised space.
    """

    name = "dlg"
    examples = SEARCHED
    summary = "squared distance of gradients, images and labels optimised jointly, L-BFGS"
    paper = "Zhu et al. 2019 (DLG)"
    needs = (_IMAGES, "the loss cross-entropy", _ONE_STEP)
    distance = "squared-l2"
    fedavg = "single-step"
    only_single = "it optimises the labels beside the images"
    inverts = False

    iterations: Count = 300
    optimiser: OptimiserName = "l-bfgs"
    learning_rate: Positive = 1.0

    def check_targets(self, observation: Observation) -> None:
        """Refuse a loss that takes no class probabilities, too."""
        task_info = observation.task_info
        if task_info.loss not in LOSSES or (task_info.loss == _BCE and task_info.num_classes is not None):
            raise NotApplicable(
                f"{self.name} optimises soft labels, which the loss '{task_info.loss}' may not take; use idlg"
            )
        super().check_targets(observation)

    def joint(self, observation: Observation) -> bool:  # noqa: ARG002
        """Return that labels are optimised, granted ones, too."""
        return True


@register
class DLGAdam(GradientInversion):
    """DLG with Adam instead of L-BFGS: the first baseline of AGIC (Xu et al. 2022, Section V-A).

    Squared Euclidean distance over all tensors (Zhu et al. 2019, Eq. 4), Adam at 0.1, no prior. Departures: labels are
    inferred or given instead of optimised, as in AGIC's experiments; pixels aren't clamped. FedAvg by simulation.
    """

    name = "dlg-adam"
    examples = SEARCHED
    summary = "squared distance of gradients, Adam"
    paper = "Zhu et al. 2019 (DLG), with Adam as in Xu et al. 2022"
    needs = (_IMAGES, _LABELS, "local training config, for FedAvg updates")
    distance = "squared-l2"
    fedavg = "simulation"


@register
class IDLG(GradientInversion):
    """Improved DLG (Zhao et al. 2020): the label from the gradient first, then DLG's distance over the image alone.

    L-BFGS with rate 1, one example. Departure: granted labels are used.
    """

    name = "idlg"
    examples = SEARCHED
    summary = "the label from the gradient, then squared distance of gradients, L-BFGS; one example"
    paper = "Zhao et al. 2020 (iDLG)"
    needs = (_IMAGES, _LABELS, _ONE_STEP, "a single example")
    distance = "squared-l2"
    fedavg = "single-step"
    only_by_labels = True
    most_examples = 1

    iterations: Count = 300
    optimiser: OptimiserName = "l-bfgs"
    learning_rate: Positive = 1.0
    label_inference: LabelMethod = "idlg"


@register
class CPL(GradientInversion):
    """Client Privacy Leakage (Wei et al. 2020, Algorithm 1): patterned first image, label regulariser, L-BFGS.

    Squared Euclidean distance plus α·‖softmax(F(x)) − y‖². Departures: the pattern is a quarter of the image's side
    (the paper tries several); F are probabilities; α is small by default, because on an untrained network the true
    image doesn't have its label's probabilities either, so the term pulls away from it.

    Args:
        label_weight: α, of the label regulariser.
    """

    name = "cpl"
    summary = "squared distance, patterned first image, label regulariser, L-BFGS; one example"
    paper = "Wei et al. 2020 (CPL)"
    needs = (_IMAGES, _LABELS, _ONE_STEP, "a single example")
    distance = "squared-l2"
    fedavg = "single-step"
    only_by_labels = True
    most_examples = 1

    iterations: Count = 300
    optimiser: OptimiserName = "l-bfgs"
    learning_rate: Positive = 1.0
    start: Start = "patterned"
    label_weight: NonNegative = 1e-6

    def priors(self, prepared: Prepared) -> list[tuple[float, Objective]]:
        """Add the label regulariser."""
        own = (self.label_weight, label_regulariser(prepared.victim, prepared.labels))
        return [*super().priors(prepared), own]


@register
class Geng(GradientInversion):
    """Towards General Deep Leakage (Geng et al. 2021): label counts, clipping, scaling, full-batch FedAvg.

    Squared Euclidean distance, L-BFGS, and two regularisers: clipping, the distance to the valid pixel range, and
    scaling, the distance to the image scaled to fill it. A FedAvg update in which every step used all of the client's
    examples is divided by the number of steps; others are refused. Departure: the regularisers' weights are ours.

    Args:
        clipping: weight of the distance to the valid range.
        scaling: weight of the distance to the scaled image.
    """

    name = "geng"
    summary = "squared distance, clipping and scaling, label counts with duplicates, L-BFGS"
    paper = "Geng et al. 2021"
    needs = (_IMAGES, _LABELS, "a gradient, or a FedAvg update of full batches")
    distance = "squared-l2"
    fedavg = "full-batch"

    iterations: Count = 300
    optimiser: OptimiserName = "l-bfgs"
    learning_rate: Positive = 1.0
    label_inference: LabelMethod = "geng"
    clipping: NonNegative = 1e-4
    scaling: NonNegative = 1e-6

    def priors(self, prepared: Prepared) -> list[tuple[float, Objective]]:
        """Add clipping and scaling."""
        own = super().priors(prepared)
        if prepared.task_info.example_kind.bounds is None:
            return own
        return [
            *own,
            (self.clipping, outside_range(prepared.pixel_range)),
            (self.scaling, off_scale(prepared.pixel_range)),
        ]

    def notes(self, prepared: Prepared) -> list[str]:
        """Say so where there is no range of pixels."""
        kind = prepared.task_info.example_kind
        unbounded = [f"{kind.plural} have no range of values: clipping and scaling are left out"]
        return super().notes(prepared) + (unbounded if kind.bounds is None else [])


def outside_range(pixel_range: tuple[Tensor, Tensor]) -> Objective:
    """Return the squared distance to the normalised pixel range, (1, C, H, W) an end: clipping (Geng et al. 2021)."""

    def prior(images: Tensor) -> tuple[Tensor, Tensor]:
        beyond = images - images.clamp(*pixel_range)
        return beyond.square().sum(), 2 * beyond

    return prior


def off_scale(pixel_range: tuple[Tensor, Tensor]) -> Objective:
    """Return the squared distance of every image to itself scaled to fill the pixel range: scaling (Geng et al. 2021).

    The scaled image is taken as constant, so that the gradient pulls towards it. The range must be finite.
    """
    black, white = pixel_range

    def prior(images: Tensor) -> tuple[Tensor, Tensor]:
        pixels = (images - black) / (white - black)
        axes = tuple(range(1, images.ndim))
        least, most = pixels.amin(axes, keepdim=True), pixels.amax(axes, keepdim=True)
        scaled = (pixels - least) / (most - least).clamp_min(1e-6)
        away = images - (black + scaled * (white - black))
        return away.square().sum(), 2 * away

    return prior


def label_regulariser(victim: Victim, labels: Tensor) -> Objective:
    """Return ‖softmax(F(x)) − y‖² over the batch: CPL's label term (Wei et al. 2020, Algorithm 1)."""

    def value(images: Tensor) -> Tensor:
        outputs = class_logits(victim.outputs(images)).softmax(dim=1)
        return (outputs - nn.functional.one_hot(labels, outputs.shape[1])).square().sum()

    return differentiated(value)
