"""Diagnostic or deployment: does a finding rest on updates such as federations in use send? By stated criteria.

A finding is of a *deployment* if it meets every criterion below, or if the federation really ran and was recorded. Else
it is a *diagnostic*: it shows what can leak at worst, and that the pipeline works. What each criterion asks stands in
docs/explanation/verdicts.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedaudit.data import Dataset
from fedaudit.data.dataset import Split
from fedaudit.models import has_batch_norm, own_copy
from fedaudit.results import AttackSummary, FindingResult
from fedaudit.scenario.scenario import Scenario, apply_override, scenario_from
from fedaudit.simulation.history import answers
from fedaudit.simulation.protocols import protocol_of
from fedaudit.simulation.simulator import Recording
from fedaudit.simulation.spec import FederationSpec
from fedaudit.task.targets import NEXT_TOKEN
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput

LEAST_BATCH = 8  # examples a local step
LEAST_EXAMPLES = 16  # examples an update, each counted as often as it is used
_MEASURED = 200  # held-out examples, at most
_AT_ONCE = 20  # of them
_UNKNOWN = ("untrained", "as given")  # of a network before the first round, which says nothing of it after others
_EPOCHS, _USES = 5, 9000  # of the training that is proposed: at least so many passes, and uses of an example


@dataclass(frozen=True)
class Facts:
    """What decides, of the updates that a finding rests on.

    Attributes:
        recorded: the federation really ran, and was recorded.
        unlearnt: why the network that was attacked counts as untrained; empty: it doesn't.
        fixed_norm: BatchNorm normalises by fixed statistics while clients train.
        batch: examples a local step, median.
        examples: examples an update, each counted as often as it is used, median; infinite where no update travels.
    """

    recorded: bool
    unlearnt: str
    fixed_norm: bool
    batch: float
    examples: float

    @property
    def reasons(self) -> list[str]:
        """Why a finding is a diagnostic, in words; empty: it is one of a deployment."""
        failed = {
            self.unlearnt: bool(self.unlearnt),
            "BatchNorm normalises by fixed statistics while clients train (eval mode)": self.fixed_norm,
            f"batches of {_many(self.batch)}, fewer than {LEAST_BATCH}": self.batch < LEAST_BATCH,
            f"updates over {_many(self.examples)}, fewer than {LEAST_EXAMPLES}": self.examples < LEAST_EXAMPLES,
        }
        return [] if self.recorded else [reason for reason, fails in failed.items() if fails]

    def setting(self) -> dict[str, Any]:
        """Return the fields of a result that say so."""
        return {"setting": "diagnostic" if self.reasons else "deployment", "diagnostic_because": self.reasons}


def _many(number: float) -> str:
    return f"{number:.3g} example{'' if number == 1 else 's'}"


def together(facts: Sequence[Facts]) -> Facts:
    """Return what decides about several findings together: of each fact the one furthest from a deployment."""
    return Facts(
        recorded=all(f.recorded for f in facts),
        unlearnt=next((f.unlearnt for f in facts if f.unlearnt), ""),
        fixed_norm=any(f.fixed_norm for f in facts),
        batch=min(f.batch for f in facts),
        examples=min(f.examples for f in facts),
    )


@dataclass
class Settings:
    """Says of every finding of an audit which it is; a network's accuracy is measured once a round.

    ``trained``: what was done to the network before the first round, as results describe it. ``accuracy``: held-out at
    the end, by federation, where it was measured.
    """

    recordings: Sequence[Recording]
    scenario: Scenario
    trained: str
    accuracy: Mapping[str, float]
    _of: dict[tuple[str, str], list[Facts]] = field(default_factory=dict)
    _learnt: dict[tuple[str, int], str] = field(default_factory=dict)

    @cached_property
    def _by_name(self) -> dict[str, tuple[Recording, FederationSpec]]:
        specs = {name: spec for name, spec, _ in self.scenario.runs()}
        return {r.transcript.name: (r, specs[r.transcript.name]) for r in self.recordings}

    def of(self, finding: FindingResult, seen: Observation) -> FindingResult:
        """Return the finding, which is of what ``seen`` shows, with its setting."""
        facts = self._facts(*self._by_name[finding.federation], seen)
        if finding.status == "done":
            self._of.setdefault((finding.federation, finding.attack), []).append(facts)
        return finding.model_copy(update=facts.setting())

    def of_all(self, summary: AttackSummary) -> AttackSummary:
        """Return the summary with its setting: a deployment only where each of its findings is of one."""
        facts = self._of.get((summary.federation, summary.attack))
        return summary.model_copy(update=together(facts).setting()) if facts else summary

    def _facts(self, recording: Recording, spec: FederationSpec, seen: Observation) -> Facts:
        transcript = recording.transcript
        if transcript.sent.grown:  # from nothing: there is no network that may be untrained
            sizes = [m.update.num_examples for m in seen.messages] or [0]
            return Facts(
                recorded=transcript.recording is not None,
                unlearnt="",
                fixed_norm=False,
                batch=min(sizes),
                examples=statistics.median(sizes),
            )
        sent = {(r.index, u.client): u for r in transcript.rounds for u in r.updates}
        updates: list[Update] = [
            m.update if m.update.members else sent.get((m.round, m.client), m.update) for m in seen.messages
        ] or list(sent.values())
        steps = [size for u in updates for size in (u.training.batch_sizes if u.training else (u.num_examples,))]
        examples = [u.num_examples for u in updates]
        rounds = {m.round for m in seen.messages} or {r.index for r in transcript.rounds}
        return Facts(
            recorded=transcript.recording is not None,
            unlearnt="" if transcript.recording else self._unlearnt(recording, spec, rounds),
            fixed_norm=transcript.task_info.batch_norm == "eval" and has_batch_norm(transcript.module),
            batch=statistics.median(steps or [spec.batch_size]),
            examples=statistics.median(examples or [math.inf]),
        )

    # --- is the network trained? ----------------------------------------------------------------------------------

    def _unlearnt(self, recording: Recording, spec: FederationSpec, rounds: set[int]) -> str:
        """Return why the network of the last of ``rounds`` counts as untrained; empty: it doesn't."""
        name, last = recording.transcript.name, max(rounds, default=spec.rounds - 1)
        if self.trained == "untrained" and last == 0:
            return "the network is untrained in round 0"
        if len(rounds) != 1 and name in self.accuracy:  # what the whole federation has learnt is asked of its end
            reached, least = self.accuracy[name], least_accuracy(recording, self.scenario)
            return f"the network was hardly trained: accuracy {reached:.2f}, below {least:g}" if reached < least else ""
        if spec.server is not None or not recording.transcript.rounds or not len(recording.truth.candidates):
            # An altered network says nothing of the one that clients trained; of a vertical one only parts travel.
            return "" if self.trained not in _UNKNOWN else "nobody measured whether the network had learnt anything"
        if (name, last) not in self._learnt:
            self._learnt[name, last] = self._measured(recording, last)
        return self._learnt[name, last]

    def _measured(self, recording: Recording, index: int) -> str:
        """Return why the network that was sent in round ``index`` counts as untrained, by its answers."""
        transcript, info = recording.transcript, recording.transcript.task_info
        least = least_accuracy(recording, self.scenario)
        module = own_copy(transcript.module)
        module.load_state_dict(next(r.weights for r in transcript.rounds if r.index == index))
        parts = _held_out(recording)
        said = f"the network was hardly trained in round {index}"
        if info.num_classes is None:
            module.eval()
            with torch.no_grad():
                told = torch.cat([module(info.normalise(part.inputs)) for part in parts])
            true = torch.cat([part.targets for part in parts])
            if info.heads is not None:
                with torch.no_grad():
                    own, one = (float(transcript.loss(o, true)) for o in (told, told.mean(0).expand_as(told)))
                return "" if own < one else f"{said}: its loss is no lower than that of one answer for all"
            why = info.task_kind.unlearnt(told, true, info.example_kind.element)
            return why and f"{said}: {why}"
        counts = sum((answers(module, info, part) for part in parts), torch.zeros(2, info.num_classes)).double()
        of_class = counts.sum(dim=0)
        reached, guess = float(counts[1].sum() / of_class.sum()), float(of_class.max() / of_class.sum())
        if reached < least:
            return f"{said}: accuracy {reached:.2f}, below {least:g}"
        return "" if reached > guess else f"{said}: accuracy {reached:.2f}, as by naming the most frequent class always"

    # --- the deployment version of the audit ----------------------------------------------------------------------

    def as_deployed(self, data: Dataset) -> list[str]:
        """Return settings, ``key=value`` of ``--set``, that make the federations of the scenario like a deployment.

        The network is trained, BatchNorm is in train mode, clients take batches, and two epochs where they train
        themselves. Of large updates one a federation is attacked. Empty where no finding is a diagnostic, or where
        there is no such scenario. ``data`` are the clients'.
        """
        facts: dict[str, list[Facts]] = {}
        for (name, _), own in self._of.items():
            facts.setdefault(self._by_name[name][1].name, []).extend(own)
        scenario, worst = self.scenario, {name: together(own) for name, own in facts.items()}
        if not any(f.reasons for f in worst.values()) or not all(protocol_of(f).updates for f in scenario.federations):
            return []
        settings = []
        if any(f.unlearnt for f in worst.values()):
            epochs = max(_EPOCHS, math.ceil(_USES / len(data.train)), 2 * scenario.model.training.epochs)
            settings.append(f"model.training.epochs={epochs}")
        if any(f.fixed_norm for f in worst.values()):
            settings.append("model.batch_norm=train")
        held = len(data.test if scenario.data.split == "test" else data.train)
        for spec in scenario.federations:
            settings += [f"federations.{spec.name}.{key}={value}" for key, value in _changes(spec, worst, held).items()]
        larger = any(".batch_size=" in one for one in settings)
        if larger and scenario.evaluation.max_updates != 1 and any(a.finds.kind == "images" for a in scenario.attacks):
            settings.append("evaluation.max_updates=1")
        return settings if _possible(scenario, settings) else []


def _changes(spec: FederationSpec, worst: Mapping[str, Facts], held: int) -> dict[str, Any]:
    """Return what to change of a federation, so that every client has an update's worth of examples, in batches."""
    if (own := worst.get(spec.name)) is None:
        return {}
    changes: dict[str, Any] = {"batch_norm": "train"} if own.fixed_norm and spec.batch_norm == "eval" else {}
    if own.batch >= LEAST_BATCH and own.examples >= LEAST_EXAMPLES:
        return changes
    clients = max(1, min(spec.clients, held // LEAST_EXAMPLES))
    if clients < spec.clients:
        changes["clients"] = clients
    if clients < (spec.clients_per_round or 0):
        changes["clients_per_round"] = clients
    if (held if spec.examples is None else spec.examples) < clients * LEAST_EXAMPLES:
        changes["examples"] = clients * LEAST_EXAMPLES
    if spec.algorithm == "fedsgd":
        return changes | {"batch_size": max(spec.batch_size, LEAST_EXAMPLES)}
    steps = {"local_steps": "null"} if spec.local_steps else {}
    local = {"batch_size": max(spec.batch_size, LEAST_BATCH), **steps, "local_epochs": max(spec.local_epochs or 0, 2)}
    return changes | local


def _possible(scenario: Scenario, settings: Sequence[str]) -> bool:
    values = scenario.model_dump(mode="json")
    try:
        for setting in settings:
            values = apply_override(values, setting)
        scenario_from(values, where="the scenario")
    except BadInput:
        return False
    return True


def least_accuracy(recording: Recording, scenario: Scenario) -> float:
    """Return the accuracy below which a federation's model was hardly trained.

    Of models that predict the next token it is no more than by naming the most frequent one always: good ones are right
    about one token in three.
    """
    least, truth = scenario.evaluation.min_accuracy, recording.truth
    if not recording.transcript.task_info.causal or not len(truth.candidates):
        return least
    counts = NEXT_TOKEN.asked(truth.candidate_labels).bincount()
    return min(least, float(counts.max() / counts.sum().clamp(min=1)))


def _held_out(recording: Recording) -> list[Split]:
    """Return at most 200 examples, evenly spread over the candidates, that no update used, in small parts.

    All of them, where updates used every one.
    """
    truth, kind = recording.truth, recording.transcript.task_info.example_kind
    rows = torch.linspace(0, len(truth.candidates) - 1, min(_MEASURED, len(truth.candidates))).long()
    inputs, targets = truth.candidates[rows], truth.candidate_labels[rows]
    used = [kind.fingerprints(examples) for examples in truth.inputs.values()]
    free = ~torch.isin(kind.fingerprints(inputs), torch.cat(used)) if used else torch.ones(len(rows), dtype=torch.bool)
    if not free.any():
        free |= True
    pairs: Iterable[tuple[Tensor, Tensor]] = zip(
        inputs[free].split(_AT_ONCE), targets[free].split(_AT_ONCE), strict=True
    )
    return [Split(*pair) for pair in pairs]
