"""Which model an attack on records queries: the global one, the one that a client returned, or that client's own."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor, nn

from fedaudit.attacks.base import ATTACK_CONFIG, ATTACKS, Attack, Progress, make_attack
from fedaudit.attacks.findings import Finding, LocalModelFinding
from fedaudit.attacks.local_model.methods import LastUpdate
from fedaudit.task.info import TaskInfo
from fedaudit.task.training import Loss
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.queries import QuerySet
from fedaudit.utils.errors import BadInput, NotApplicable

_AT_ONCE = 250  # examples of which outputs are in memory, fewer where they are more than so many values
_MOST_VALUES = 2**24

ModelName = Literal["global", "client", "rebuilt"]


@dataclass(frozen=True)
class Target:
    """A model in evaluation mode to ask about records, its mean loss, and notes on how it was got."""

    module: nn.Module
    task_info: TaskInfo
    loss: Loss
    notes: tuple[str, ...] = ()

    def features(self, inputs: Tensor) -> Tensor:
        """Return (n, d) float64, what goes into the last linear layer that runs, for (n, ...) examples."""
        seen: list[Tensor] = []
        linear = [layer for layer in self.module.modules() if isinstance(layer, nn.Linear)]
        hooks = [layer.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for layer in linear]
        parts = []
        try:
            for part in inputs.split(250):
                seen.clear()
                with torch.no_grad():
                    self.module(self.task_info.normalise(part))
                if not seen:
                    raise NotApplicable("the model has no fully connected layer, before which its features would be")
                parts.append(seen[-1].flatten(1).double())
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat(parts)

    def outputs(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs (n, k), of masks (n, classes, *spatial), float64, for examples of a data set."""
        parts = [part for part, _ in self.in_parts(inputs)]
        return torch.cat(parts).double() if parts else torch.zeros(0, *self.task_info.output_shape).double()

    def answers(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return each example's outputs (n, k), or without classes its loss (n, 1), which saves a mask's memory."""
        if classified(self.task_info):
            return self.outputs(inputs)
        return self.losses(inputs, labels)[:, None]

    def losses(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss (n,) of each example by itself, float64; the outputs of a few are in memory at a time."""
        parts = [self.losses_of(part.double(), own) for part, (own,) in self.in_parts(inputs, labels)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def in_parts(self, inputs: Tensor, *beside: Tensor) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
        """Yield outputs of some examples at a time, with what is told of each of them ``beside``."""
        size = max(1, min(_AT_ONCE, _MOST_VALUES // math.prod(self.task_info.output_shape)))
        for part, *own in zip(inputs.split(size), *(one.split(size) for one in beside), strict=True):
            if len(part):
                with torch.no_grad():
                    yield self.module(self.task_info.normalise(part)), tuple(own)

    def losses_of(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the same of outputs (n, ...): of several labels, numbers or pixels of an example the mean."""
        labels = labels.double() if labels.is_floating_point() else labels
        each = [self.loss(outputs[i : i + 1], labels[i : i + 1]) for i in range(len(labels))]
        return torch.stack(each) if each else outputs.new_zeros(0)

    def gradients(self, inputs: Tensor, labels: Tensor) -> Iterator[dict[str, Tensor]]:
        """Yield for each example by itself the gradient of its loss, float64, by name of the parameter that has one."""
        module = copy.deepcopy(self.module).double()
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        labels = labels.double() if labels.is_floating_point() else labels
        inputs = self.task_info.normalise(inputs)
        inputs = inputs.double() if inputs.is_floating_point() else inputs  # tokens are whole
        for example, label in zip(inputs.split(1), labels.split(1), strict=True):
            grads = torch.autograd.grad(self.loss(module(example), label), list(parameters.values()), allow_unused=True)
            yield {name: g for name, g in zip(parameters, grads, strict=True) if g is not None}


def classified(task_info: TaskInfo) -> bool:
    """Whether an example has one class, so that what a model says of it are the logits; else it is the loss."""
    return task_info.num_classes is not None and not task_info.causal


@checked_dataclass(frozen=True, kw_only=True, config=ATTACK_CONFIG)
class RecordsAttack(Attack):
    """What the attacks on records share: they hold examples, and query one model.

    Args:
        model: ``global``, the last one that every participant received; ``client``, the last one that a client
            returned, W + ΔW, which a server or an eavesdropper sees; or ``rebuilt``, the one that the client would have
            trained alone, reconstructed from its messages (Xu & Neglia 2021 warn of just this).
        rebuild: the attack that reconstructs it: its name and settings.
    """

    threat_model = "server, eavesdropper or client, passive; a client sees the global model only"
    default_scope = "federation"

    model: ModelName = "global"
    rebuild: dict[str, Any] = field(default_factory=lambda: {"name": "local-model"})

    def __post_init__(self) -> None:
        if not isinstance(self._reconstructor, Attack) or self._reconstructor.recovers != "local models":
            known = [e.name for e in ATTACKS if e.value.recovers == "local models"]
            raise BadInput(
                f"attack '{self.name}': rebuild: '{self._reconstructor.name}' reconstructs no model; "
                f"known: {', '.join(known)}"
            )

    @cached_property
    def _reconstructor(self) -> Attack:
        if self.model == "client":
            return LastUpdate()
        settings = dict(self.rebuild)
        name = settings.pop("name", None)
        if not isinstance(name, str):
            raise BadInput(f"attack '{self.name}': rebuild: give the name of the attack that reconstructs the model")
        return make_attack(name, settings)

    def scope(self) -> str:
        """Return ``client`` where the model is one client's."""
        return "federation" if self.model == "global" else "client"

    def check(self, observation: Observation) -> None:
        """Raise unless there are records, and the model can be had."""
        super().check(observation)
        held(observation)
        if self.model != "global":
            self._reconstructor.check(observation)

    def target(self, observation: Observation, generator: torch.Generator, progress: Progress | None = None) -> Target:
        """Return the model that the attack queries; NotApplicable where it can't be reconstructed."""
        state = dict(observation.weights[-1])
        notes: tuple[str, ...] = ()
        if self.model != "global":
            found = self._reconstructor(observation, generator=generator, progress=progress)
            assert isinstance(found, LocalModelFinding)
            last = observation.messages[-1]
            state = {**last.weights, **last.update.buffers, **found.state}
            notes = found.notes
        return target_of(observation, state, notes)


def target_of(observation: Observation, state: Mapping[str, Tensor], notes: tuple[str, ...] = ()) -> Target:
    """Return the model of an observation with such a state, to ask about records."""
    module = copy.deepcopy(observation.module)
    module.load_state_dict(dict(state))
    return Target(module.eval(), observation.task_info, observation.loss, notes)


def held(observation: Observation) -> QuerySet:
    """Return the records that the adversary holds; NotApplicable where it has none."""
    if observation.records is None or not len(observation.records):
        raise NotApplicable(
            "the adversary holds no records to ask about: where a federation is simulated, set "
            "threat.target_records=300; a recording or a Flower app needs examples that nobody trained on (--records "
            "FILE, Recorder.candidates)"
        )
    return observation.records


def whole(observation: Observation) -> QuerySet:
    """Return the records, if nothing is hidden in them; else NotApplicable."""
    records = held(observation)
    if len(records.columns):
        raise NotApplicable("the records lack an attribute; for membership leave threat.hidden_attribute out")
    return records


def public(observation: Observation) -> tuple[Tensor, Tensor]:
    """Return the public examples that the adversary holds, and their labels; NotApplicable where it has none."""
    records = observation.records
    if records is None or not len(records.public_inputs):
        raise NotApplicable(
            "the adversary holds no public examples; set threat.knows_public_data: true and threat.public_examples"
        )
    return records.public_inputs, records.public_labels


@dataclass(frozen=True, kw_only=True)
class MembershipFinding(Finding, kind="membership"):
    """Of each of the adversary's records, how much it looks like a member, and whether the attack says it is one.

    Attributes:
        scores: (n,) float64; the higher, the more like an example that was trained on. With ``clients`` (n, k): the
            more like one that this client trained on.
        members: (n,) or (n, k) bool: the attack's own decision.
        clients: (k,) int64, ascending, the clients that were asked about one by one; None: all together.
        again: (b, n) float64 the scores with other shadow models, each time a random half of them; b is 0 where the
            attack has none, or few.
    """

    scores: Tensor
    members: Tensor
    clients: Tensor | None = None
    again: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))


def upper_half(scores: Tensor) -> Tensor:
    """Return a mask (n,) of the scores above their median: the adversary knows that half of its records are members."""
    return scores > scores.quantile(0.5)


def above(scores: Tensor, non_members: Tensor, share: float) -> Tensor:
    """Return a mask (n,) of the scores above all but ``share`` of those of examples that nobody trained on."""
    return scores > non_members.quantile(1 - share)
