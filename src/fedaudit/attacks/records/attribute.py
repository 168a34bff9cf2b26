"""Attribute inference: what value a record has of an attribute that the adversary doesn't know."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from fedaudit.attacks.base import ATTACK_CONFIG, Case, Progress, register
from fedaudit.attacks.findings import Finding
from fedaudit.attacks.records.target import RecordsAttack, Target, held, public
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.queries import QuerySet
from fedaudit.utils.errors import NotApplicable

_SMOOTH = 1.0  # added to every count of public examples


@dataclass(frozen=True, kw_only=True)
class AttributeFinding(Finding, kind="attribute"):
    """The hidden attribute of each of the adversary's records.

    Attributes:
        values: (n,) int64, the number of the value that the attack names.
        scores: (n, k) float64, the higher, the more likely that value.
    """

    values: Tensor
    scores: Tensor


@checked_dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class AttributeAttack(RecordsAttack):
    """What the attacks on attributes share: records that lack one."""

    recovers = "attributes"
    finds = AttributeFinding

    def check(self, observation: Observation) -> None:
        """Raise unless the records lack an attribute, and the model can be had."""
        super().check(observation)
        if not len(held(observation).codes):
            raise NotApplicable("nothing is hidden in the records; set threat.hidden_attribute, to 'sex' for example")

    @abstractmethod
    def scores(self, observation: Observation, target: Target) -> Tensor:
        """Return (n, k) float64: for each record and value, the higher the more likely."""

    def _run(
        self, observation: Observation, generator: torch.Generator, _device: str, progress: Progress
    ) -> AttributeFinding:
        target = self.target(observation, generator, progress)
        scores = self.scores(observation, target)
        return AttributeFinding(values=scores.argmax(dim=1), scores=scores, notes=target.notes)


@register
class AttributeLoss(AttributeAttack):
    """The value with which the model fits the record best (Yeom et al. 2018, Adversary 4; Fredrikson et al. 2014).

    The adversary knows the rest of the record and its label, fills every value in, and names the one of least loss.
    With ``prior`` it names the one of largest log-probability, log P(value | label) − loss, with the probabilities of
    the public examples (one is added to each count): Fredrikson's maximum a posteriori estimate for a classifier.
    Departure: Yeom's adversary compares the loss with its distribution on the training data, which nobody tells it.

    Args:
        prior: how often each value occurs counts, too; needs public examples.
    """

    name = "attribute-loss"
    summary = "fills in the value of a hidden attribute with which the model's loss is least"
    paper = "Yeom et al. 2018 (Privacy risk in machine learning); Fredrikson et al. 2014"
    needs = ("records of a table that lack an attribute (threat.hidden_attribute)",)

    prior: bool = False

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.threat.hidden_attribute is not None and case.attribute_is_input

    def check(self, observation: Observation) -> None:
        """Raise unless the attribute is one of the model's inputs."""
        super().check(observation)
        if not len(held(observation).columns):
            raise NotApplicable("the hidden attribute isn't one of the model's inputs; attribute-features is for such")
        if self.prior:
            public(observation)

    def scores(self, observation: Observation, target: Target) -> Tensor:
        """Return minus the loss with each value filled in, with ``prior`` plus the value's log-probability."""
        records = held(observation)
        losses = []
        for code in records.codes:
            filled = records.inputs.clone()
            filled[:, records.columns] = code
            losses.append(target.losses(filled, records.labels))
        scores = -torch.stack(losses, dim=1)
        return scores + _log_prior(records) if self.prior else scores


def _log_prior(records: QuerySet) -> Tensor:
    """Return (n, k) the logarithm of how often each value occurs among public examples of the record's class."""
    k = len(records.codes)
    if records.labels.is_floating_point() or records.labels.ndim > 1:
        counts = torch.bincount(records.public_values, minlength=k).double().expand(len(records), k)
    else:
        same = (records.labels[:, None] == records.public_labels).double()
        counts = same @ torch.nn.functional.one_hot(records.public_values, k).double()
    return ((counts + _SMOOTH) / (counts + _SMOOTH).sum(dim=1, keepdim=True)).log()


@register
class AttributeFeatures(AttributeAttack):
    """What the model's features say of an attribute that it was not trained for (Song & Shmatikov 2020; Melis 2019).

    A logistic regression learns from public examples, whose attribute is known, to tell it from what goes into the
    model's last fully connected layer, and is applied to the records. Where the attribute stands in some of the inputs,
    these are left at 0 for both. Departures: the papers' attack models are networks.

    What it finds may stand in the examples just as well: an attribute is often told from the others. So it is to be
    compared with the same on the examples themselves.

    Args:
        features: ``penultimate``, or ``inputs``: the examples themselves, which takes no model at all.
    """

    name = "attribute-features"
    summary = "tells a hidden attribute from the model's penultimate features"
    paper = "Song & Shmatikov 2020 (Overlearning reveals sensitive attributes)"
    needs = (
        "records that lack an attribute (threat.hidden_attribute)",
        "public data (threat.knows_public_data, threat.public_examples)",
    )

    features: Literal["penultimate", "inputs"] = "penultimate"

    @classmethod
    def fits(cls, case: Case) -> bool:
        return case.threat.hidden_attribute is not None and case.threat.public_examples is not None

    def check(self, observation: Observation) -> None:
        """Raise unless there are public examples of two values at least."""
        super().check(observation)
        public(observation)
        if len(held(observation).public_values.unique()) < 2:
            raise NotApplicable("all public examples have one value of the attribute; raise threat.public_examples")

    def scores(self, observation: Observation, target: Target) -> Tensor:
        """Return each value's log-probability; of values that no public example has, minus infinity."""
        records = held(observation)
        known = records.public_inputs.clone()
        known[:, records.columns] = 0.0
        see = target.features if self.features == "penultimate" else (lambda inputs: inputs.flatten(1).double())
        classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
        classifier.fit(see(known).numpy(), records.public_values.numpy())
        found = torch.as_tensor(classifier.predict_proba(see(records.inputs).numpy())).clamp(min=1e-300).log()
        scores = torch.full((len(records), len(records.codes)), -torch.inf, dtype=torch.float64)
        return scores.index_copy(1, torch.as_tensor(classifier.classes_), found)
