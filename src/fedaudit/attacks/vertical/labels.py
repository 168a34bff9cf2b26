"""Label inference by a party of a vertical federation, from the gradients that the server sends it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedaudit.attacks.base import Attack, Case, register
from fedaudit.attacks.findings import Finding
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.vertical import VerticalRecord
from fedaudit.utils.errors import NotApplicable

_TINY = 1e-30


@dataclass(frozen=True, kw_only=True)
class ExampleLabelFinding(Finding, kind="example-labels"):
    """The label of each example.

    Attributes:
        examples: (m,) int64 which they are: their numbers among the aligned examples.
        labels: (m,) int64.
        num_classes: of the model.
        without: (m,) int64 what the adversary's own features and labels tell without what it received; None: it has
            none.
        again: (r, 2, m) int64 both, labels and without, of further runs with other draws; None: nothing is drawn.
    """

    examples: Tensor
    labels: Tensor
    num_classes: int
    without: Tensor | None = None
    again: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LabelScoreFinding(Finding, kind="label-scores"):
    """How much speaks for each example being of the rarer of two classes.

    Attributes:
        examples: (m,) int64 which they are: their numbers among the aligned examples.
        scores: (m,) float64, higher for the rarer class.
    """

    examples: Tensor
    scores: Tensor


class _FromGradients(Attack):
    """What the attacks on labels share: who can run them, and on what."""

    threat_model = "client (a party) or eavesdropper, passive"
    default_scope = "federation"
    recovers = "labels"
    reads = VerticalRecord
    on_sums = "refused: it is for vertical federations, where there are none"

    def check(self, observation: Observation) -> None:
        """Raise where no gradients come down, or the adversary has the labels."""
        super().check(observation)
        record = _record(observation)
        if record.labels is not None:
            raise NotApplicable(
                f"{self.name} infers labels, and the server of a vertical federation holds them; set "
                "threat.adversary=client"
            )
        if not record.gradients.numel():
            raise NotApplicable(
                f"{self.name} needs the gradients of a party's embeddings, which the protocol "
                f"'{record.spec.protocol}' doesn't show it; set federations[].vertical.protocol: split"
            )


def _record(observation: Observation) -> VerticalRecord:
    record = observation.sent
    assert isinstance(record, VerticalRecord)  # Attack.check() saw to it
    return record


@register
class DirectLabels(_FromGradients):
    """The direct label inference attack (Fu et al. 2022), on models without a network at the server.

    Where the outputs are the sum of the parties' embeddings, the gradient of an embedding is that of the outputs. Under
    cross-entropy it is p − y over the batch size: its one negative element is the label's. An example that was in
    several batches gets the label that most of them say. With one output (binary cross-entropy) the sign is the label.
    """

    name = "direct-labels"
    summary = "labels from the sign of the outputs' gradient, where the server only adds embeddings up"
    paper = "Fu et al. 2022 (Label Inference Attacks Against Vertical Federated Learning)"
    needs = (
        "a vertical federation, protocol split, whose server has no network (vertical.top: sum)",
        "cross-entropy",
    )
    finds = ExampleLabelFinding

    @classmethod
    def fits(cls, case: Case) -> bool:
        return not case.threat.adversary.endswith("server") and case.top == "sum"

    def check(self, observation: Observation) -> None:
        """Raise where the gradients aren't the outputs'."""
        super().check(observation)
        top = _record(observation).spec.top
        if top != "sum":
            raise NotApplicable(
                f"{self.name} reads the gradient of the outputs, and here a network of the server ('{top}') stands "
                "between; it is for vertical.top: sum: run norm-scoring or direction-scoring"
            )
        if observation.task_info.num_classes is None or observation.task_info.loss == "mse":
            raise NotApplicable(f"{self.name} needs a classifier; this model predicts real values")

    def _run(self, observation: Observation, *_: object) -> ExampleLabelFinding:
        record, classes = _record(observation), observation.task_info.num_classes
        assert classes is not None
        gradients = record.gradients[:, 0].double()
        if not bool(gradients.any()):
            raise NotApplicable("labels can't be inferred: every gradient is zero")
        said = (gradients[..., 0] < 0).long() if gradients.shape[-1] == 1 else gradients.argmin(dim=-1)
        votes = torch.zeros(record.examples, max(classes, gradients.shape[-1]), dtype=torch.float64)
        votes.index_put_((record.batches.flatten(), said.flatten()), torch.ones(said.numel()).double(), accumulate=True)
        return ExampleLabelFinding(examples=record.used, labels=votes[record.used].argmax(dim=1), num_classes=classes)


class _Scoring(_FromGradients):
    """What both scorings share."""

    needs = ("a vertical federation, protocol split", "two classes")
    finds = LabelScoreFinding
    paper = "Li et al. 2022 (Label Leakage and Protection in Two-party Split Learning)"

    def check(self, observation: Observation) -> None:
        """Raise where there aren't two classes."""
        super().check(observation)
        classes = observation.task_info.num_classes
        if classes != 2:
            what = "real values" if classes is None else f"{classes} classes"
            raise NotApplicable(
                f"{self.name} tells two classes apart, and these labels are {what}; with vertical.top: sum run "
                "direct-labels"
            )

    def _run(self, observation: Observation, *_: object) -> LabelScoreFinding:
        record = _record(observation)
        gradients = record.gradients.double().transpose(1, 2).flatten(2)  # (T, K, numbers seen)
        if not bool(gradients.any()):
            raise NotApplicable("labels can't be inferred: every gradient is zero")
        said = torch.stack([self._score(batch) for batch in gradients])
        zeros = torch.zeros(record.examples, dtype=torch.float64)
        places = record.batches.flatten()
        total = zeros.index_put((places,), said.flatten(), accumulate=True)
        count = zeros.index_put((places,), torch.ones(len(places)).double(), accumulate=True)
        return LabelScoreFinding(examples=record.used, scores=(total / count.clamp_min(1))[record.used])

    def _score(self, gradients: Tensor, /) -> Tensor:
        """Return a score (K,) for a batch's gradients (K, d)."""
        raise NotImplementedError


@register
class NormScoring(_Scoring):
    """Norm scoring (Li et al. 2022): an example of the rarer class has the longer gradient.

    Its probability is predicted lower, so |p − y| is larger. The score is the gradient's norm, as a rank within its
    batch (0 to 1), and over several batches the mean of these: norms shrink while the model learns. That is our
    departure; the paper scores every batch by itself.
    """

    name = "norm-scoring"
    summary = "which of two classes an example is of, from the length of its embedding's gradient"

    @classmethod
    def fits(cls, case: Case) -> bool:
        return not case.threat.adversary.endswith("server") and case.top != "sum"

    def _score(self, gradients: Tensor) -> Tensor:
        norms = gradients.norm(dim=1)
        below = (norms[:, None] > norms[None]).double() + 0.5 * (norms[:, None] == norms[None]).double()
        ranks: Tensor = (below.sum(dim=1) - 0.5) / max(1, len(norms) - 1)
        return ranks


@register
class DirectionScoring(_Scoring):
    """Direction scoring (Li et al. 2022): gradients of one class point one way, those of the other the opposite way.

    The score is the cosine with the gradient of a known example of the rarer class. The paper's adversary knows one;
    ours takes the longest gradient of every batch for it, as norm scoring would. Over several batches the mean counts.
    """

    name = "direction-scoring"
    summary = "which of two classes an example is of, from the direction of its embedding's gradient"

    @classmethod
    def fits(cls, case: Case) -> bool:
        return not case.threat.adversary.endswith("server") and case.top != "sum" and case.num_classes == 2

    def _score(self, gradients: Tensor) -> Tensor:
        norms = gradients.norm(dim=1)
        known = int(norms.argmax())
        cosines: Tensor = (gradients @ gradients[known]) / (norms * norms[known]).clamp_min(_TINY)
        return cosines
