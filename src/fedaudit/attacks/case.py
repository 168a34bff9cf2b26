"""What an attack is told when it is asked whether it fits: the task, the adversary, and the updates."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fedaudit.models.vertical import Top
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.update import UpdateKind

_MOST_EXAMPLES = 128  # in one update; beyond, only which labels they have is asked
_MOST_STEPS = 16  # that are worth simulating
_IMAGES = ("image",)  # kinds of examples


@dataclass(frozen=True, kw_only=True)
class Case:
    """A federation, before anything was attacked; see :meth:`fedaudit.attacks.Attack.fits`.

    Attributes:
        kind: of the examples, such as ``image``.
        num_classes: of the labels; None: these are real values, or the tokens of a text.
        threat: who the adversary is, and what it knows.
        update_kind: what clients send.
        examples: in one update that the adversary reads.
        steps: of local training in it; None: unknown.
        rounds: of the federation.
        clients: whose updates there are.
        sums: the adversary reads sums of several clients' updates only.
        neurons: of the fully connected layer that the model begins with; 0: it begins with something else.
        rectified: a ReLU follows that layer.
        attribute_is_input: the hidden attribute is among the model's inputs.
        malicious: behaviour of the malicious clients, where the adversary is one of them.
        server: what a malicious server does to the model that it sends.
        top: of a vertical federation, the server's network; None: it is no vertical one.
    """

    kind: str
    num_classes: int | None
    threat: ThreatModel
    update_kind: UpdateKind = "weights"
    examples: int = 1
    steps: int | None = 1
    rounds: int = 1
    clients: int = 1
    sums: bool = False
    neurons: int = 0
    rectified: bool = False
    attribute_is_input: bool = False
    malicious: str | None = None
    server: str | None = None
    top: Top | None = None

    @property
    def images(self) -> bool:
        """Whether the examples are images."""
        return self.kind in _IMAGES

    def classifies(self, kinds: Collection[str]) -> bool:
        """Return whether the model is a classifier of such examples."""
        return self.num_classes is not None and self.kind in kinds

    @property
    def reads_updates(self) -> bool:
        """Whether the adversary reads updates."""
        return self.threat.adversary != "client"

    @property
    def reads_clients(self) -> bool:
        """Whether it reads the updates of several clients, each by itself."""
        return self.reads_updates and self.clients > 1 and not self.sums

    @property
    def updates_alone(self) -> bool:
        """Whether the adversary has nothing but updates, and asks for nothing but what is in them."""
        return self.reads_updates and self.threat.records is None and self.threat.client_property is None

    @property
    def searchable(self) -> bool:
        """Whether it may search for the examples: it has updates alone, of not too many of them."""
        return self.updates_alone and self.examples <= _MOST_EXAMPLES

    @property
    def asks_for_members(self) -> bool:
        """Whether it asks which of its records are clients'."""
        return self.threat.records is not None and self.threat.hidden_attribute is None

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
        return self.knows_scale and (self.steps or 1) <= _MOST_STEPS

    def solves(self, kinds: Collection[str]) -> bool:
        """Return whether the first layer's gradient may give away examples of these kinds, one by one."""
        return self.searchable and self.classifies(kinds) and self.examples < self.neurons
