"""Federations of boosted trees, which clients grow and send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedaudit.data import Split
from fedaudit.modalities import Column
from fedaudit.results import AdversaryRecord, FederationRecord, ModelRecord
from fedaudit.scenario import FederationSpec, ThreatModel
from fedaudit.simulation import Federation, Recording
from fedaudit.simulation.protocols import AsScenario, Change, EasyCase, Protocol, SimulationOptions, register
from fedaudit.task import TaskInfo
from fedaudit.transcript import Transcript, Truth
from fedaudit.utils import BadInput, generator, many, one_of
from fedaudit_trees.boosters import convert_boosters
from fedaudit_trees.boosting import BoosterRecorder
from fedaudit_trees.growing import check_task, check_trees, grow, play, replay_error
from fedaudit_trees.model import TreeEnsemble
from fedaudit_trees.record import HELD, TreeRecord, TreeSpec

_GROWN = {
    "bagging": "in a round each grows {n} on its own rows, and all join the model",
    "cyclic": "in turn, one a round, each grows {n} on its own rows, which join the model",
    "histogram": "one tree a round grows on the sum of the clients' histograms",
}


@register
class Trees(Protocol):
    """Bagging, cyclic, or by histograms."""

    sent = TreeRecord
    described = "a federation of trees"
    own_model = "a federation of trees grows its model itself; leave model out"
    instead = "its trees' settings"
    contradicts = (
        "learning_rate or reg_lambda are others, rows are missing, weighted or drawn anew for each tree (subsample), "
        "the model had other trees than were recorded, or clients add noise to what they send"
    )
    sends = "trees"
    deployed = "trees over as many examples as federations in use have"
    deployment = "this was a diagnostic: trees of few rows; of a deployment: raise examples to 16 a client or more"

    def model(self, spec: FederationSpec, name: str, width: int | None, task_info: TaskInfo) -> nn.Module:  # noqa: ARG002
        """Return a model without trees."""
        check_task(task_info)
        return TreeEnsemble(task_info.outputs)

    def check(self, federation: Federation) -> None:
        """Refuse what a federation of trees can't have."""
        check_trees(federation)

    def simulate(self, federation: Federation, options: SimulationOptions) -> Recording:
        """Run the rounds."""
        return Recording(*play(federation, options.report))

    def adversary(self, threat: ThreatModel, spec: FederationSpec) -> AdversaryRecord:
        """Return what is read of the trees."""
        assert isinstance(spec.settings, TreeSpec)
        return _adversary(threat, spec.settings)

    def federation(self, transcript: Transcript, spec: FederationSpec) -> FederationRecord:
        """Return how it was."""
        record = _record(transcript)
        own = record.spec
        sizes = one_of(sorted({m.num_examples for m in record.messages}), "example")
        what = _GROWN[own.protocol].format(n=one_of(sorted({len(m.booster.trees) for m in record.messages}), "tree"))
        kept = f", with noise of deviation {own.noise:g} on the sums in the leaves" if own.noise else ""
        kept += "" if own.cover else ", without cover"
        kept += "; secure aggregation shows the sum of all histograms only" if record.clients < spec.clients else ""
        description = (
            f"{many(spec.rounds, 'round')}, {many(spec.clients, 'client')} ({sizes} a message); {what}: depth "
            f"{own.max_depth} at most, least cover of a leaf {own.min_child_weight:g}, λ {own.reg_lambda:g}, "
            f"η {record.learning_rate:g}{kept}"
            + ("" if transcript.recording else f"; examples: {spec.drawn}, partition {spec.partition.scheme}")
        )
        return FederationRecord(
            name=transcript.name,
            algorithm="trees",
            update_kind="weights",
            clients=spec.clients,
            rounds=spec.rounds,
            batch_size=max(m.num_examples for m in record.messages),
            local_steps=None,
            local_epochs=None,
            learning_rate=record.learning_rate,
            updates_observed=len(record.messages),
            description=description,
        )

    def changes(self, spec: Mapping[str, Any]) -> Sequence[Change]:
        """Return that only sums leave, or noisy ones."""
        if spec["trees"]["protocol"] == "histogram":
            return []
        place = f"federations.{spec['name']}.trees"
        summed = "Then the trees are of all clients' rows, and only sums over all of them are seen."
        noisy = "Counts of leaves are no longer exact. It costs accuracy."
        return [
            Change(
                "Add histograms up under secure aggregation.",
                summed,
                (f"{place}.protocol=histogram", "threat.sees=sum"),
            ),
            Change("Add noise to the sums in the leaves.", noisy, (f"{place}.noise=2",)),
        ]

    def easy_case(self, recording: Recording, spec: FederationSpec | None, images: bool) -> EasyCase | str:  # noqa: ARG002
        """Return two clients of 24 known rows, of eight columns of 0 or 1.

        They bag 20 trees each, at the audited step and λ, with cover and without noise, of half of the columns, drawn
        anew for each. Labels are drawn at random, and trees split as long as that gains anything: they learn the rows
        by heart. The first client is the observer, and its rows what such an adversary holds.
        """
        record, info = _record(recording.transcript), recording.transcript.task_info
        rng, classes = generator(0, "control", "trees"), info.num_classes
        columns = tuple(Column(f"column {i + 1}", "categorical", (i,), ("0", "1"), codes=(0.0, 1.0)) for i in range(8))
        everybody = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * len(columns))[torch.randperm(256, generator=rng)]
        labels = torch.randint(2, (256,), generator=rng) if classes else torch.randn(256, 1, generator=rng)
        held = [Split(everybody[i : i + 24], labels[i : i + 24]) for i in (0, 24)]
        own = TreeSpec(reg_lambda=record.spec.reg_lambda, max_depth=8, min_child_weight=0.0, columns=0.5)
        try:
            grown = grow(held, own, record.learning_rate, 20, classes, rng)
        except BadInput:
            return "xgboost isn't installed, so no known trees can be grown: pip install 'fedaudit[trees]'"
        task = replace(info, input_shape=(len(columns),), columns=columns, mean=(0.0,), std=(1.0,))
        log = dict(zip(HELD, (held[0].inputs, held[0].targets), strict=True))
        transcript = recording.transcript
        made = Transcript("control-same", task, transcript.module, transcript.loss, [], log, sent=grown)
        inputs, targets = ({(0, c): getattr(one, name) for c, one in enumerate(held)} for name in ("inputs", "targets"))
        rows = {key: torch.arange(24) for key in inputs}
        truth = Truth(inputs, targets, everybody, labels, recording.truth.about, rows)
        text = "24 known rows of eight columns of 0 or 1, 20 trees of half of the columns each, undefended"
        return EasyCase(Recording(made, truth), text)

    def recorded(self, transcript: Transcript) -> AsScenario:
        """Return a recording as a scenario says it."""
        trees = _record(transcript)
        federation = {
            "name": transcript.name,
            "algorithm": "trees",
            "clients": trees.clients,
            "rounds": trees.messages[-1].round + 1,
            "learning_rate": trees.learning_rate,
            "trees": trees.spec.model_dump(mode="json"),
        }
        model = ModelRecord(
            name=transcript.task_info.model,
            parameters=sum(len(tree.leaves) for m in trees.messages for tree in m.booster.trees),
            initialisation="given",
            batch_norm="none",
            trained="as it travelled in the federation",
            dropout="none",
        )
        return AsScenario({"federations": [federation], "attacks": ["timberstrike"]}, model)

    def convert(self, folder: Path, out: Path) -> Sequence[str]:
        """Read the boosters and what lies beside them."""
        return convert_boosters(folder, out)

    def recorder(self, folder: Path, name: str, **columns: Sequence[float] | None) -> BoosterRecorder:
        """Return what records boosters and watches xgboost."""
        return BoosterRecorder(folder, name=name, **columns)

    def replay_errors(self, transcript: Transcript, truth: Truth) -> dict[tuple[int, int], float]:
        """Return how far the leaves' values that known rows give are from those that were sent."""
        trees, errors = _record(transcript), {}
        for message in trees.messages:
            if (key := (0, message.client)) in truth.inputs:
                held = Split(transcript.task_info.normalise(truth.inputs[key]), truth.labels[key])
                errors[message.round, message.client] = replay_error(trees, message, held)
        return errors


def _record(transcript: Transcript) -> TreeRecord:
    assert isinstance(transcript.sent, TreeRecord)
    return transcript.sent


def _adversary(threat: ThreatModel, spec: TreeSpec) -> AdversaryRecord:
    client, histogram = threat.adversary == "client", spec.protocol == "histogram"
    summed = histogram and (client or threat.group_size > 1)
    known = {
        "the step, λ and the other settings of training, and how columns are standardised": threat.knows_training,
        "every client's trees: splits and the leaves' values": not histogram,
        "the sums of gradients and hessians in their nodes (cover)": not histogram and spec.cover,
        "the trees of all, and each client's sums of gradients and hessians in their leaves": histogram and not summed,
        "the trees of all, and the sums over all clients in their leaves": summed,
        "the clients' rows, or any of them": False,
        "the distribution of the columns, but for mean and standard deviation": False,
    }
    return AdversaryRecord(
        adversary=threat.adversary,
        summary=f"client {spec.observer}, who reads the model of every round" if client else threat.summary,
        knows=[text for text, yes in known.items() if yes],
        does_not_know=[text for text, yes in known.items() if not yes],
        acts=False,
    )
