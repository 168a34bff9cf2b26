"""What an inverter answers by itself, as an attack."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from torch import Generator

from fedaudit.attacks.base import GRIDS, Attack, Case, Progress, register
from fedaudit.attacks.findings import ImageFinding
from fedaudit.attacks.inversion.inverter import Inverter, check, learnt
from fedaudit.attacks.inversion.template import GradientInversion, prepare
from fedaudit.attacks.labels.inference import LabelMethod
from fedaudit.attacks.local_training import Way, whole_epochs
from fedaudit.attacks.victim import need_signal
from fedaudit.transcript.observation import Message, Observation
from fedaudit.utils.errors import NotApplicable
from fedaudit.utils.fingerprint import tensor_digest
from fedaudit.utils.seeds import generator
from fedaudit.utils.validation import Count


@register
class LearnedInversion(Attack):
    """Images by regression, learnt on updates of the adversary's own examples (Wu et al. 2023; Xue et al. 2023).

    The adversary has examples as the clients have, makes updates of them in the very way that the observed one was
    made, defences included, and learns what leads back: see :mod:`fedaudit.attacks.inversion.inverter`, which also
    says where that departs from the papers. One inverter serves all updates of the same facts. An answer takes no
    search, so it is as blurred as what the update leaves open; ``agic-plus`` searches on from it.

    Args:
        updates: own ones that are learnt from, for each update that is attacked, and for six at most.
        label_inference: as of ``invg``; not used where labels are granted.
        calibrate: an audit learns one inverter for all updates of the same facts; else each is learnt for by itself.
        start: what it is.
        learned: digest of the inverter, which is filled in.
    """

    name = "learned-inversion"
    summary = "a regression from updates to images, learnt on updates of public examples"
    paper = "this project, after Wu et al. 2023 (Learning to Invert) and Xue et al. 2023 (FGLA)"
    threat_model = GradientInversion.threat_model
    examples: ClassVar[tuple[str, ...]] = GRIDS
    needs: ClassVar[tuple[str, ...]] = (
        "images, volumes or signals with bounds, and a classifier that ends with a fully connected layer",
        "labels: given, or inferable from the last fully connected layer",
        "some 1,100 examples of the clients' kind (threat.knows_public_data, threat.public_examples: 1100), of which "
        "every second one is kept for controls",
    )
    needs_classes = True
    inverts = True

    updates: Count = 1000
    label_inference: LabelMethod = "auto"
    calibrate: bool = True
    start: Literal["learned"] = "learned"
    learned: str = ""
    inverter: Any = dataclasses.field(init=False, default=None, repr=False, compare=False)  # an Inverter

    @classmethod
    def fits(cls, case: Case) -> bool:
        return (
            case.searchable
            and case.recovers(cls.examples)
            and case.num_classes is not None
            and case.threat.public_examples is not None
        )

    def effort(self) -> int:
        """Return the own updates, each of which costs what an iteration of a search does."""
        return self.updates

    def calibration(self, observation: Observation) -> tuple[Attack, Observation] | None:
        """Return itself and its update, until it has an inverter."""
        return (self, observation) if self.calibrate and self.inverter is None else None

    def with_settings(self, settings: Mapping[str, Any], inverter: Inverter | None = None) -> Self:
        """Return the attack with an inverter."""
        if inverter is None:
            return dataclasses.replace(self, **settings)
        ready = dataclasses.replace(self, **settings, learned=tensor_digest(inverter.weights).hex()[:16])
        object.__setattr__(ready, "inverter", inverter)
        return ready

    def check(self, observation: Observation) -> None:
        """Refuse what tells an inverter nothing."""
        super().check(observation)
        need_signal(observation.single().update)
        check(observation)

    def ways(self, observation: Observation, message: Message) -> Sequence[Way]:  # noqa: ARG002
        """Return that labels are inferred; training is repeated as it was."""
        return () if message.update.labels is not None else ("labels",)

    def _learnt(self, observation: Observation, progress: Progress) -> Inverter:
        """Return an inverter, learnt on the public examples."""
        records = observation.records
        if records is None or not len(records.public_inputs):
            raise NotApplicable(
                "no inverter was learnt: the adversary needs examples of its own "
                "(threat.knows_public_data: true, and threat.public_examples: 1100)"
            )
        examples = records.public_inputs[::2], records.public_labels[::2].flatten()  # controls take the others
        return learnt(observation, examples, generator(0, "an inverter"), progress, most=self.updates)

    def _run(self, observation: Observation, _generator: Generator, device: str, progress: Progress) -> ImageFinding:
        update, own = observation.single().update, self.inverter or self._learnt(observation, progress)
        count, _ = whole_epochs(update.num_examples, update.training, update.labels)
        prepared = prepare(observation, self.label_inference, device, num_examples=count)
        labels = prepared.labels.cpu()
        rows = [i for _ in range(update.num_examples // len(labels)) for i in range(len(labels))]
        return ImageFinding(
            images=own.answer(update, labels, observation.task_info)[rows],
            labels=labels[rows],
            label_source=prepared.label_source,
            iterations=own.updates * count,
            notes=(
                f"answered by an inverter learnt from {own.updates:,} updates of {own.examples:,} examples "
                f"({own.psnr:.1f} dB on those that were left out)",
                *prepared.notes,
            ),
        )
