"""What every attack is: keyword-only hyper-parameters in the constructor, an observation in the call."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, final

import torch
from torch import Tensor

from fedaudit.attacks import local_training, standards
from fedaudit.attacks.findings import Finding, ImageFinding
from fedaudit.epsilon.canaries import CanarySpec
from fedaudit.modalities import example_kind
from fedaudit.models.vertical import Top
from fedaudit.results import MappingRecord
from fedaudit.simulation.local_training import FAILURES
from fedaudit.task.base import Task
from fedaudit.task.targets import CLASSIFICATION, task_named
from fedaudit.transcript.observation import Message, Observation
from fedaudit.transcript.sent import SENT, Sent, Updates
from fedaudit.transcript.threat import Scope, ThreatModel
from fedaudit.transcript.update import UpdateKind
from fedaudit.utils import seeds
from fedaudit.utils.errors import BadInput, FedAuditError, NotApplicable
from fedaudit.utils.machine import full_precision
from fedaudit.utils.registry import SETTINGS, Plugin, Registry, listed, make
from fedaudit.utils.registry import register as register

MOST_EXAMPLES = 128  # in one update; beyond, only which labels they have is asked
MOST_STEPS = 16  # that are worth simulating
INSTEAD = "name no attack, and those that fit are run"
_LONGEST = 300  # letters of another's error
GRIDS = ("image", "volume", "signal")  # kinds of examples on a grid, of which neighbours are alike
SEARCHED = (*GRIDS, "packed")  # that a search finds without anything that is known of grids


@contextmanager
def own_failures(attack: str, observation: Observation) -> Iterator[None]:
    """Turn what a user's own model or loss raises under an attack into NotApplicable, in one line."""
    try:
        yield
    except FedAuditError:
        raise
    except FAILURES as error:
        task_info = observation.task_info
        no_memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)
        if no_memory or "custom" not in (task_info.model, task_info.loss):
            raise
        remedy = ""
        if "is not implemented" in str(error):
            remedy = (
                "; torch can't derive that operation twice: write it with others (hard sigmoid as relu6(x + 3) / 6), "
                "or audit single gradients (fedsgd), which the faster engine attacks without"
            )
        raise NotApplicable(
            f"{attack} can't work with this model and loss: {type(error).__name__}: {str(error)[:_LONGEST]}{remedy}"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Case:
    """A federation, before anything was attacked; see :meth:`fedaudit.attacks.Attack.fits`.

    Attributes:
        kind: of the examples, such as ``image``.
        num_classes: of the labels; None: these are real values, or the tokens of a text.
        task: what the model is asked for, one of :data:`fedaudit.task.TASKS`.
        known_loss: it is one of fedaudit's own, which take soft targets, too.
        examples: in one update that the adversary reads.
        steps: of local training in it; None: unknown.
        clients_per_round: of these, at most.
        sums: the adversary reads sums of several clients' updates only.
        noisy: clients add noise of its own to every update.
        neurons: of the fully connected layer that the model begins with; 0: it begins with something else.
        rectified: a ReLU follows that layer.
        attribute_is_input: the hidden attribute is among the model's inputs.
        malicious: behaviour of the malicious clients, where the adversary is one of them.
        server: what a malicious server does to the model that it sends.
        protocol: of the federation, by the ``kind`` of what it sends.
        top: of a vertical federation, the server's network.
        cut: it is split learning, the client's part of a network and the server's.
        known_labels: the party that looks knows some.
    """

    kind: str
    num_classes: int | None
    threat: ThreatModel
    task: str = CLASSIFICATION.name
    known_loss: bool = True
    update_kind: UpdateKind = "weights"
    examples: int = 1
    steps: int | None = 1
    rounds: int = 1
    clients: int = 1
    clients_per_round: int = 1
    sums: bool = False
    noisy: bool = False
    neurons: int = 0
    rectified: bool = False
    attribute_is_input: bool = False
    malicious: str | None = None
    server: str | None = None
    protocol: str = Updates.kind
    top: Top | None = None
    cut: bool = False
    known_labels: bool = False

    @property
    def task_kind(self) -> Task:
        """What the model is asked for."""
        return task_named(self.task)

    @property
    def images(self) -> bool:
        """Whether the examples are images, or others for which the same attacks search."""
        return self.kind in SEARCHED

    def classifies(self, kinds: Collection[str]) -> bool:
        """Return whether the model is a classifier of such examples."""
        return self.num_classes is not None and self.kind in kinds

    @property
    def next_token(self) -> bool:
        """Whether the model predicts the next token of texts."""
        return self.kind == "tokens" and self.num_classes is None and self.task_kind.one_class

    def recovers(self, kinds: Collection[str]) -> bool:
        """Return whether a search may look for such examples, whose targets are classes, granted, or sought beside."""
        return self.kind in kinds and (self.num_classes is not None or self.threat.knows_labels or self.known_loss)

    @property
    def reads_updates(self) -> bool:
        """Whether the adversary reads updates."""
        return self.threat.reads_updates

    @property
    def reads_clients(self) -> bool:
        """Whether it reads the updates of several clients, each by itself."""
        return self.reads_updates and self.clients > 1 and not self.sums

    @property
    def updates_alone(self) -> bool:
        """Whether the adversary has nothing but updates, and asks for nothing but what is in them."""
        return self.reads_updates and self.threat.target_records is None and self.threat.client_property is None

    @property
    def searchable(self) -> bool:
        """Whether it may search for the examples: it has updates alone, of not too many of them."""
        return self.updates_alone and self.examples <= MOST_EXAMPLES

    @property
    def asks_for_members(self) -> bool:
        """Whether it asks which of its records are clients'."""
        return self.threat.target_records is not None and self.threat.hidden_attribute is None

    @property
    def knows_training(self) -> bool:
        """Whether it knows how clients train."""
        return self.threat.knows_training and self.steps is not None

    @property
    def knows_scale(self) -> bool:
        """Whether it knows what an update is a multiple of."""
        return self.update_kind == "gradient" or self.knows_training

    @property
    def can_simulate(self) -> bool:
        """Whether it knows how an update was made, in so few steps that repeating them is worth it."""
        return self.knows_scale and (self.steps or 1) <= MOST_STEPS

    def solves(self, kinds: Collection[str]) -> bool:
        """Return whether the first layer's gradient may give away examples of these kinds, one by one."""
        return self.searchable and self.classifies(kinds) and self.examples < self.neurons


ATTACK_CONFIG = SETTINGS  # of base classes that aren't registered themselves

Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """Report progress to nobody."""


# What an attack makes of the sum of several clients' updates, by its scope.
_ON_SUMS: dict[Scope, str] = {
    "update": "works: the examples of all clients in the sum are those of one update",
    "client": "refused: it needs one client's own messages",
    "federation": "works: it needs no single update",
}

ATTACKS: Registry[type[Attack]] = Registry("attack", "fedaudit.attacks")


class Attack(Plugin, ABC):
    """Base of all attacks. A subclass is a frozen, keyword-only dataclass, made and registered by ``@register``.

    It implements :meth:`check` and :meth:`_run`; whoever runs an attack calls it.

    Class attributes, shown by ``fedaudit list attacks``:
        name, summary, paper; ``threat_model``: which adversaries can run it; ``needs``: what it must be given;
        ``default_scope``: what one run of it receives: one update, all messages of one client, or all that the
        adversary sees of a federation; ``examples``: the kinds of examples that it is for, any if there are none;
        ``recovers``: what it is after, in words; ``finds``: the class of finding that it returns; ``standards``: what
        standards call it beside what they call its finding (:mod:`fedaudit.attacks.standards`); ``on_sums``: what it
        makes of the sum of several clients' updates, where its scope doesn't say; ``uses``: how it uses
        updates (:meth:`ways`); ``needs_classes``: the model must be a classifier; ``takes_client_weights``: it reads
        sums of clients who were sent different weights; ``reads``: updates, or what
        another protocol sends, whose federations it is for, and no others; ``averages``: it takes a
        client's updates of all rounds together, so that each one's own noise averages out; ``first_settings``: other
        than its defaults, where it is run because it :meth:`fits`; ``control``: the case that it must win, where that
        isn't the one of its kind of finding.
    """

    registry = ATTACKS

    threat_model: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    default_scope: ClassVar[Scope] = "update"
    examples: ClassVar[tuple[str, ...]] = ()
    recovers: ClassVar[str] = "training images"
    finds: ClassVar[type[Finding]] = ImageFinding
    standards: ClassVar[tuple[str | MappingRecord, ...]] = ()
    on_sums: ClassVar[str] = ""
    uses: ClassVar[tuple[local_training.Way, ...]] = ()
    needs_classes: ClassVar[bool] = False
    takes_client_weights: ClassVar[bool] = False
    averages: ClassVar[bool] = False
    reads: ClassVar[type[Sent]] = Updates
    first_settings: ClassVar[Mapping[str, Any]] = {}
    control: ClassVar[str | None] = None

    @classmethod
    def fits(cls, case: Case) -> bool:  # noqa: ARG003
        """Return whether an audit that names no attacks runs this one on such a federation; by default it doesn't.

        A subclass inherits the answer, as it does ``first_settings``.
        """
        return False

    @classmethod
    def recovers_of(cls, kind: str) -> str:
        """Return what it is after in examples of a kind, in words: training images, or volumes."""
        return cls.recovers.replace("images", example_kind(kind).plural) if kind in cls.examples else cls.recovers

    def check(self, observation: Observation) -> None:
        """Raise before any compute if this attack can't be run; here, where it isn't for such examples.

        An attack that needs more overrides this, and calls it.

        Raises:
            NotApplicable: with the reason and the remedy.
        """
        task_info = observation.task_info
        if self.examples and task_info.kind not in self.examples:
            *first, last = (example_kind(name).described for name in self.examples)
            suited = f"{', '.join(first)} or {last}" if first else last
            these = f"these are {task_info.example_kind.described}, {tuple(task_info.input_shape)}: {INSTEAD}"
            if task_info.packed_inputs is not None:
                these = (
                    f"an example has several inputs here, {task_info.packed_inputs}: exact-linear, invg, agic and "
                    f"tableak look for all of them; or {INSTEAD}"
                )
            raise NotApplicable(f"{self.name} is for {suited}; {these}")
        if not isinstance(observation.sent, self.reads):
            if self.reads.not_this:
                raise NotApplicable(f"{self.name} is for {self.reads.federations}, and this one {self.reads.not_this}")
            observation.need_messages()
        if self.scope() == "client" and any(message.update.members for message in observation.messages):
            raise NotApplicable(
                f"{self.name} needs one client's own messages, and only sums of several clients' updates are known "
                "(secure aggregation); audit with threat.sees=updates, or by an attack on single updates"
            )
        for message in observation.messages:
            ways = self.ways(observation, message)
            if ways and message.client_weights and not self.takes_client_weights:
                raise NotApplicable(
                    f"{self.name} needs one model, and the clients of this sum were sent different weights; use loki, "
                    "where a server made them for it, or audit with threat.sees=updates"
                )
            local_training.refuse(self.name, ways, message, task_info)
        self.check_targets(observation)

    def check_targets(self, observation: Observation) -> None:
        """Raise where the model is asked for something that this attack can't do with.

        Raises:
            NotApplicable: with the reason.
        """
        if self.needs_classes and observation.task_info.num_classes is None:
            asked = observation.task_info.asked
            raise NotApplicable(f"{self.name} needs a classifier, one class an example; this model predicts {asked}")

    def ways(self, observation: Observation, message: Message) -> Sequence[local_training.Way]:  # noqa: ARG002
        """Return how this attack uses an update: columns of :data:`fedaudit.attacks.local_training.TABLE`.

        What that refuses is refused by :meth:`check`, and what it approximates is in the finding's notes. By default
        they are those in ``uses``: none, where only the models count that travelled.
        """
        return self.uses

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if cls.__call__ is not Attack.__call__:
            raise TypeError(f"{cls.__name__} overrides Attack.__call__, which checks and times; implement _run")
        for earlier, kind in (("vertical", "vertical"), ("trees_only", "trees")):
            if vars(cls).get(earlier):  # as attacks said it before ``reads``
                cls.reads = SENT[kind].value

    @final
    def __call__(
        self,
        observation: Observation,
        *,
        generator: torch.Generator | None = None,
        seed: int = 0,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> Finding:
        """Check, then run the attack.

        Args:
            observation: what the adversary saw, cut down to this attack's scope.
            generator: every random draw of the attack comes from it; None: from one of its own.
            seed: of that one.
            progress: called with (done, total) iterations, now and then.

        Returns:
            A ``finds``, with this attack's name, its time and its notes, each once.

        Raises:
            NotApplicable: as :meth:`check`, or it turned out on the way.
            TypeError: the attack returned something else.
        """
        started = time.perf_counter()
        with full_precision(device), own_failures(self.name, observation):
            self.check(observation)
            found = self._run(observation, generator or seeds.generator(seed), device, progress or silent)
        if not isinstance(found, self.finds):
            raise TypeError(f"{self.name} returned a {type(found).__name__}, not a {self.finds.__name__}")
        seconds = time.perf_counter() - started
        notes = list(found.notes)
        for message in observation.messages:
            notes += local_training.notes(self.ways(observation, message), message, observation.task_info)
        return dataclasses.replace(found, attack=self.name, notes=tuple(dict.fromkeys(notes)), seconds=seconds)

    @abstractmethod
    def _run(self, observation: Observation, generator: torch.Generator, device: str, progress: Progress, /) -> Finding:
        """Return what is recovered from ``observation``, which :meth:`check` has let through.

        Arguments as in :meth:`__call__`, which fills in name and time. NotApplicable: it turned out on the way.
        """

    def scope(self) -> str:
        """Return what one run with these settings receives: ``default_scope``, unless a setting changes it."""
        return self.default_scope

    inverts: ClassVar[bool] = False  # whether a calibration may learn an inverter for it

    def calibration(self, observation: Observation) -> tuple[Attack, Observation] | None:  # noqa: ARG002
        """Return what is to be calibrated before this attack is run, and on which update; None: nothing.

        An attack that returns something has ``with_settings``, which is given what the calibration chose.
        """
        return None

    def with_settings(self, settings: Mapping[str, Any], inverter: Any = None) -> Self:
        """Return the same with what a calibration chose; only of attacks with a :meth:`calibration`."""
        raise NotImplementedError(f"{self.name} is never calibrated")

    def beforehand(self, observation: Observation) -> Sequence[tuple[Attack, Observation]]:  # noqa: ARG002
        """Return what is run before this attack, and on what, once for all attacks that ask for the same; nothing here.

        Each is kept like an attack. An attack that returns something has ``prepared``, which is given what was found,
        in that order.
        """
        return ()

    def prepared(self, found: Sequence[Finding]) -> Self:
        """Return the same with what was found :meth:`beforehand`."""
        raise NotImplementedError(f"{self.name} needs nothing beforehand")

    def effort(self) -> int:
        """Return the iterations of a run on one update, those of all restarts together; 1 where it has none."""
        return int(getattr(self, "iterations", 1) * getattr(self, "restarts", 1))

    def files(self) -> list[Path]:
        """Return the files that the settings name: a finding depends on what is in them."""
        return []

    def only_class(self, observation: Observation) -> int | None:  # noqa: ARG002
        """Return the one class whose examples it can recover from such updates; None: of any."""
        return None

    def canary_spec(self) -> CanarySpec | None:
        """Return the canaries that it needs in the federation, if any: other attacks would then see another one."""
        return None

    def public_examples(self) -> Tensor | None:
        """Return fingerprints (n,) of the public examples that the adversary's knowledge was made from, if any.

        The audit refuses an attack that has a victim among them: see ``fingerprints`` of the kind of examples.
        """
        return None

    @classmethod
    def info(cls) -> dict[str, Any]:
        """Return what ``fedaudit list --json`` says beside name and summary."""
        info = {"paper": cls.paper, "threat_model": cls.threat_model, "needs": list(cls.needs)}
        info |= {"on_sums": cls.on_sums or _ON_SUMS[cls.default_scope]}
        info |= {"scope": cls.default_scope, "looks_at": cls.default_scope}  # the second is its former name
        return info | {"mapping": [record.model_dump() for record in cls.by_standards()]}

    @classmethod
    def by_standards(cls) -> list[MappingRecord]:
        """Return what standards call this attack.

        Raises:
            ValueError: ``standards`` names an identifier that isn't known.
        """
        return standards.mapping(cls.finds.kind, cls.standards)


def make_attack(name: str, settings: Mapping[str, Any] | None = None) -> Attack:
    """Return the attack ``name`` with ``settings``.

    Raises:
        BadInput: no such attack or setting, or a value that isn't allowed.
    """
    return make(ATTACKS, name, settings)


# What a user may give: objects, names, or mappings of a name and settings; a single one needs no list.
Attacks = str | Mapping[str, Any] | Attack | Sequence[str | Mapping[str, Any] | Attack]


def attacks_of(given: Attacks | None) -> list[Attack]:
    """Return the attacks of a user's ``attacks``, each made once, none twice; none of None."""
    made = []
    for one in listed(() if given is None else given, "attacks"):
        if isinstance(one, Attack):
            made.append(one)
            continue
        settings = {"name": one} if isinstance(one, str) else one.written() if isinstance(one, Plugin) else dict(one)
        made.append(make_attack(str(settings.pop("name", "")), settings))
    names = [attack.name for attack in made]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BadInput(f"attacks names '{min(twice)}' twice; give each once")
    return made
