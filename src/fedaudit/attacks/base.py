"""What every attack is: keyword-only hyper-parameters in the constructor, an observation in the call."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedaudit.errors import BadInput
from fedaudit.registry import Registry
from fedaudit.threat import Observation
from fedaudit.validation import explain

# An attack's hyper-parameters are checked when it is made; an unknown one is refused.
ATTACK_CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Trace:
    """How an optimisation went, at the iterations at which a snapshot was kept.

    Attributes:
        iterations: (k,) numbers of finished iterations.
        objective: (k,) what was minimised, as the adversary sees it.
        snapshots: (k, n, C, H, W) pixels in [0, 1].
    """

    iterations: list[int]
    objective: list[float]
    snapshots: Tensor


@dataclass(frozen=True)
class Finding:
    """What an attack recovered from one observation. Contains no ground truth.

    Attributes:
        attack: registered name.
        images: (n, C, H, W) pixels in [0, 1].
        labels: (n,) the labels that the attack worked with.
        label_source: ``given``, or the name of the label inference.
        objective: final value of what was minimised: the attack's own measure of confidence, lower is better.
        iterations: of the optimiser, over all restarts.
        trace: of the restart that was kept.
        notes: what the user should know about this run.
        seconds: wall time.
    """

    attack: str
    images: Tensor
    labels: Tensor
    label_source: str
    objective: float
    iterations: int
    trace: Trace
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    def save(self, path: Path) -> None:
        """Write one safetensors file; whoever is interrupted leaves no half-written one.

        Raises:
            OSError: it can't be written.
        """
        about = {
            "attack": self.attack,
            "label_source": self.label_source,
            "objective": self.objective,
            "iterations": self.iterations,
            "trace": [self.trace.iterations, self.trace.objective],
            "notes": self.notes,
            "seconds": self.seconds,
        }
        tensors = {"images": self.images, "labels": self.labels, "snapshots": self.trace.snapshots}
        draft = path.with_suffix(".part")
        save_file(
            {k: v.detach().cpu().contiguous() for k, v in tensors.items()}, draft, metadata={"about": json.dumps(about)}
        )
        draft.replace(path)

    @classmethod
    def load(cls, path: Path) -> Finding:
        """Read what :meth:`save` wrote.

        Raises:
            BadInput: the file is truncated or something else.
        """
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["about"])
                tensors = {name: file.get_tensor(name) for name in ("images", "labels", "snapshots")}
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise BadInput(f"{path} is truncated or not a finding ({error}); delete it and run again") from None
        iterations, objective = about.pop("trace")
        about["notes"] = tuple(about["notes"])
        trace = Trace(iterations, objective, tensors["snapshots"])
        return cls(images=tensors["images"], labels=tensors["labels"], trace=trace, **about)


class Attack(ABC):
    """Base of all attacks. A subclass is a frozen, keyword-only dataclass, registered in ``ATTACKS``.

    Class attributes, shown by ``fedaudit list attacks``:
        name, summary, paper; ``threat_model``: which adversaries can play it; ``needs``: what it must be given.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str]
    threat_model: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]

    @abstractmethod
    def check(self, observation: Observation) -> None:
        """Raise before any compute if this attack can't be played.

        Raises:
            NotApplicable: with the reason and the remedy.
        """

    @abstractmethod
    def run(
        self,
        observation: Observation,
        *,
        generator: torch.Generator,
        device: str = "cpu",
        progress: Progress | None = None,
    ) -> Finding:
        """Play the attack.

        Args:
            observation: what the adversary saw.
            generator: every random draw of the attack comes from it.
            device: where to compute.
            progress: called with (done, total) iterations, now and then.

        Raises:
            NotApplicable: as :meth:`check`.
        """

    def settings(self) -> dict[str, Any]:
        """Return the hyper-parameters, JSON-serialisable."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]


ATTACKS: Registry[type[Attack]] = Registry("attack")


AttackClass = TypeVar("AttackClass", bound=type)


def register(cls: AttackClass) -> AttackClass:
    """Add an attack class to ``ATTACKS`` under its own name.

    Raises:
        TypeError: it isn't an Attack.
    """
    if not issubclass(cls, Attack):
        raise TypeError(f"{cls.__name__} isn't an Attack")
    info = {"paper": cls.paper, "threat_model": cls.threat_model, "needs": list(cls.needs)}
    return ATTACKS.register(cls.name, cls.summary, **info)(cls)


def make_attack(name: str, settings: dict[str, Any] | None = None) -> Attack:
    """Return the attack ``name`` with ``settings``.

    Raises:
        BadInput: no such attack or setting, or a value that isn't allowed.
    """
    cls = ATTACKS[name].value
    try:
        return cls(**(settings or {}))
    except ValidationError as error:
        known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        raise BadInput(f"attack '{name}': {explain(error, known=known)}") from None
