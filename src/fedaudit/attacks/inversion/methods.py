"""The methods: a paper each, in one short definition."""

from __future__ import annotations

from typing import ClassVar

from pydantic.dataclasses import dataclass

from fedaudit.attacks.base import ATTACK_CONFIG, register
from fedaudit.attacks.inversion.layer_weights import OthersWeight, Shape, layer_weights
from fedaudit.attacks.inversion.template import FedAvgWay, GradientInversion, Prepared
from fedaudit.update import Update
from fedaudit.validation import NonNegative, Positive

_COARSE_RATE = 1e-2  # Xu et al. 2022, Section IV-A
_NEEDS = ("images and a classifier", "labels: given, or inferable from the last fully connected layer")


@register
@dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class DLGAdam(GradientInversion):
    """DLG with Adam instead of L-BFGS: the first baseline of AGIC (Xu et al. 2022, Section V-A).

    Squared Euclidean distance over all tensors (Zhu et al. 2019, Eq. 4), Adam at 0.1, no prior. Departures: labels are
    inferred or given instead of optimised, as in AGIC's experiments; pixels aren't clamped. FedAvg by simulation.
    """

    name: ClassVar[str] = "dlg-adam"
    summary: ClassVar[str] = "squared distance of gradients, Adam"
    paper: ClassVar[str] = "Zhu et al. 2019 (DLG), with Adam as in Xu et al. 2022"
    needs: ClassVar[tuple[str, ...]] = (*_NEEDS, "training facts, for FedAvg updates")
    distance: ClassVar[str] = "squared-l2"
    fedavg: ClassVar[FedAvgWay] = "simulation"


@register
@dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class InvG(GradientInversion):
    """Inverting Gradients (Geiping et al. 2020, Eq. 4 and Section 6).

    Cosine over the whole gradient, total variation, Adam on the sign of the gradient with step decay, pixels clamped.
    FedAvg by simulation of the local steps. Departures: total variation is 1e-4 by default, AGIC's setting for an
    untrained ResNet20-4, and the iterations are AGIC's 10,000 (Geiping et al. use 4,800 to 24,000).
    """

    name: ClassVar[str] = "invg"
    summary: ClassVar[str] = "cosine of gradients, total variation, signed Adam"
    paper: ClassVar[str] = "Geiping et al. 2020 (Inverting Gradients)"
    needs: ClassVar[tuple[str, ...]] = (*_NEEDS, "training facts, for FedAvg updates")
    distance: ClassVar[str] = "cosine"
    fedavg: ClassVar[FedAvgWay] = "simulation"

    total_variation: NonNegative = 1e-4
    signed: bool = True
    decay: bool = True
    clamp: bool = True


@register
@dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class AGIC(InvG):
    """AGIC (Xu et al. 2022): layer-weighted cosine (Eq. 6-8) and, for FedAvg, the one-batch approximation (Eq. 4).

    Departures: the paper doesn't say whether Adam gets the gradient or its sign, nor its schedule; here both are
    InvG's, so that the two differ in what the paper claims and in nothing else. Biases and normalisations, which the
    paper doesn't mention, weigh what the layer before them does. Several epochs aren't used yet.

    Args:
        beta: β, the last convolution's weight; 50 for untrained and 2 for trained networks in the paper, which also
            takes total_variation 1e-2 for a trained ResNet20-4 (1e-3 and 1e-1 for ResNet50, untrained and trained).
        shape: of the weights from 1 to β: ``linear`` (Eq. 7), ``logarithmic``, ``exponential`` (Table I).
        relu_modifier: the 1/(1 − p) of Eq. 8.
        others: what biases and normalisations weigh: ``preceding``, ``one`` or ``zero``.
    """

    name: ClassVar[str] = "agic"
    summary: ClassVar[str] = "layer-weighted cosine; FedAvg as one batch"
    paper: ClassVar[str] = "Xu et al. 2022 (AGIC)"
    needs: ClassVar[tuple[str, ...]] = _NEEDS
    fedavg: ClassVar[FedAvgWay] = "one-batch"

    beta: Positive = 50.0
    shape: Shape = "linear"
    relu_modifier: bool = True
    others: OthersWeight = "preceding"

    def needs_training_facts(self, update: Update) -> bool:  # noqa: ARG002
        """A cosine needs the direction of ΔW only."""
        return False

    def weights(self, prepared: Prepared) -> dict[str, float]:
        """Return α of Eq. 8."""
        return layer_weights(
            prepared.layers,
            prepared.gradient,
            end=self.beta,
            shape=self.shape,
            relu_modifier=self.relu_modifier,
            others=self.others,
        )

    def notes(self, prepared: Prepared, update: Update) -> list[str]:
        """Say so where the one-batch approximation, the layer weights or the ReLU modifier reach their limits."""
        notes = []
        convolutions = [layer for layer in prepared.layers if layer.kind == "conv"]
        if not convolutions:
            notes.append("the model has no convolution: layer weights are all equal")
        elif self.relu_modifier and not any(layer.relu_follows for layer in convolutions):
            notes.append("no ReLU follows a convolution: the ReLU modifier is 1 throughout")
        facts = update.facts
        if facts and update.kind == "weights" and facts.local_steps > 1 and facts.learning_rate >= _COARSE_RATE:
            notes.append(
                f"learning rate {facts.learning_rate:g} over {facts.local_steps} local steps: the paper advises "
                "against the one-batch approximation from 0.01 on"
            )
        return notes
