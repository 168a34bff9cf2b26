"""Label inference as an attack of its own: which labels an update was made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedaudit.attacks.base import INSTEAD, Attack, Case, register
from fedaudit.attacks.findings import Finding
from fedaudit.attacks.labels.inference import LabelMethod, evidence_of, infer_labels
from fedaudit.attacks.labels.label_sets import SetEvidence, infer_label_sets, set_evidence_of
from fedaudit.attacks.local_training import Way, is_adaptive, whole_epochs
from fedaudit.attacks.mean_update import mean_of
from fedaudit.attacks.victim import WITHOUT_DROPOUT, load_victim, need_training, one_batch_gradient
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import NotApplicable


@dataclass(frozen=True, kw_only=True)
class LabelFinding(Finding, kind="labels"):
    """Labels.

    Attributes:
        labels: (n,) inferred, in no order.
        method: that inferred them.
        num_classes: of the model.
    """

    labels: Tensor
    method: str
    num_classes: int


@dataclass(frozen=True, kw_only=True)
class LabelSetFinding(LabelFinding, kind="label-sets"):
    """Labels of a multi-label task.

    Attributes:
        labels: (n, k) float32 of 0 and 1: the label sets of n examples, in no order. Where which labels occur together
            isn't told, each label stands as often as it is estimated to occur.
        method: ``sign``, of one example; ``span``: whole label sets were inferred, and the counts fit
            them; ``counts`` or ``signs``: how often each label occurs alone.
        num_classes: k, labels that an example may have.
        counts: (k,) float64, in how many examples each label is estimated to occur, not rounded.
    """

    counts: Tensor


@register
class Labels(Attack):
    """Label inference alone: which classes an update was made from, and how often each occurs, without the images.

    Of a multi-label task: which labels, in how many examples each, and which of them together
    (:mod:`fedaudit.attacks.labels.label_sets`); the adversary's public examples, if it holds any, tell how much the
    model's answers vary.

    A FedAvg update is taken as one batch, as by AGIC (Xu et al. 2022, Section V-A), so that counts are approximate
    where the model moves between the local steps. Where it is of whole passes over as many examples as the client is
    known to hold, each of them counts once a pass: the labels of one pass are inferred, and repeated.

    Args:
        method: ``auto``, ``idlg``, ``yin``, ``geng``, ``bias-corrected``, ``signs``, ``ilrg``, ``ilrg-pooled``,
            ``llg``, ``llg-star`` or ``llg-plus``; of a multi-label task ``auto`` alone.
    """

    name = "labels"
    summary = "which labels an update was made from, and how often each"
    paper = (
        "Zhao et al. 2020 (iDLG); Yin et al. 2021; Geng et al. 2021; Wainakh et al. 2022 (LLG); Ma et al. 2023 (iLRG)"
    )
    threat_model = "server or eavesdropper, passive"
    needs: ClassVar[tuple[str, ...]] = (
        "a model of classes, or of several labels, that ends in a fully connected layer",
    )
    recovers = "labels"
    finds = LabelFinding

    method: LabelMethod = "auto"

    @classmethod
    def fits(cls, case: Case) -> bool:
        return (
            case.updates_alone
            and (case.num_classes is not None or case.task_kind.label_sets)
            and case.knows_scale
            and not case.threat.knows_labels
            and (case.examples > 1 or not case.images)
        )

    def check(self, observation: Observation) -> None:
        """Raise where there is nothing to find out."""
        super().check(observation)
        message = observation.single()
        if observation.task_info.causal:
            raise NotApplicable(f"{self.name} needs a class an example, and a causal task has none: run dager")
        if observation.task_info.task_kind.label_sets and self.method != "auto":
            raise NotApplicable(f"label inference '{self.method}' is for one class an example; set method: auto")
        if message.update.labels is not None:
            raise NotApplicable("the adversary is granted the labels; set threat.knows_labels=false")
        need_training(self.name, observation)

    def check_targets(self, observation: Observation) -> None:
        """Raise unless examples have a class, or labels."""
        task_info = observation.task_info
        if task_info.num_classes is None and not task_info.task_kind.label_sets:
            asked = task_info.asked
            raise NotApplicable(
                f"{self.name} needs a class or labels of each example; this model predicts {asked}: {INSTEAD}"
            )

    def ways(self, _observation: Observation, message: Message) -> Sequence[Way]:
        """Return labels', and where an update is of several steps that of one batch."""
        training = message.update.training
        return ("labels",) if training is None or training.local_steps == 1 else ("one batch", "labels")

    def _run(self, observation: Observation, _generator: object, device: str, *_: object) -> LabelFinding:
        message, task_info = observation.single(), observation.task_info
        victim, layers = load_victim(observation, message, device)
        gradient = one_batch_gradient(message.update, device, message.weights)
        records = observation.records
        public = None
        if records is not None and len(records.public_inputs):
            public = task_info.normalise(records.public_inputs), records.public_labels
        notes = [WITHOUT_DROPOUT] if victim.dropout else []
        count, epochs = whole_epochs(message.update.num_examples, message.update.training)
        if epochs > 1:
            held = f"{count} example{'s' * (count > 1)}"
            notes.append(f"{epochs} passes over {held}: each label counts a multiple of {epochs}")
        if task_info.num_classes is None:
            seen = None if public is None else public[0]
            evidence = set_evidence_of(victim, layers, gradient, task_info, message.update, count, seen)
            return _label_sets(evidence, count, epochs, notes)
        known = evidence_of(
            victim,
            layers,
            gradient,
            task_info,
            signs=is_adaptive(message.update),
            batch_size=message.update.batch_size,
            public=public,
        )
        labels, method = infer_labels(self.method, known, count)
        return LabelFinding(
            labels=labels.cpu().repeat(epochs),
            method=method,
            num_classes=task_info.num_classes,
            notes=(f"labels inferred by {method}", *notes),
        )


_SAID = {
    "sign": "labels inferred by the sign of the last layer's gradient",
    "span": "label sets inferred by the span and the second moments of the last layer's gradient",
    "counts": "labels counted by the last layer's gradient; which of them occur together isn't told",
    "signs": "labels inferred by signs alone; how often each occurs, and which together, isn't told",
}


def _label_sets(evidence: SetEvidence, count: int, epochs: int, notes: Sequence[str]) -> LabelSetFinding:
    labels, counts, method = infer_label_sets(evidence, count)
    return LabelSetFinding(
        labels=labels.float().repeat(epochs, 1),
        counts=epochs * counts,
        method=method,
        num_classes=len(counts),
        notes=(_SAID[method], *notes),
    )


@register
class AveragedLabels(Labels):
    """Label inference on the mean of all updates of a client, in which each round's own noise averages out.

    The mean is that of :class:`.Averaged`: it stands as one update over all of the client's examples.

    Args:
        method: as of ``labels``.
    """

    name = "averaged-labels"
    summary = "which labels a client's updates were made from, by their mean over rounds, in which noise averages out"
    paper = "this project; the methods are those of labels"
    needs = (*Labels.needs, "several updates of a client that holds the same examples throughout")
    default_scope = "client"
    averages = True

    @classmethod
    def fits(cls, case: Case) -> bool:
        return super().fits(case) and case.noisy and case.rounds > 1 and not case.sums

    def check(self, observation: Observation) -> None:
        """Refuse what makes no mean, or what label inference refuses."""
        observation.need_messages()
        need_training(self.name, observation.split()[0])
        super().check(mean_of(observation)[0])

    def _run(self, observation: Observation, generator: object, device: str, *rest: object) -> LabelFinding:
        single, notes = mean_of(observation)
        found = super()._run(single, generator, device, *rest)
        return dataclasses.replace(found, notes=(*notes, *found.notes))
