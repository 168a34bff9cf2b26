"""What every attack is: keyword-only hyper-parameters in the constructor, an observation in the call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedaudit.attacks.findings import Finding, ImageFinding
from fedaudit.threat import Observation, Scope
from fedaudit.utils.registry import SETTINGS, Plugin, Registry, make
from fedaudit.utils.registry import register as register

ATTACK_CONFIG = SETTINGS

Progress = Callable[[int, int], None]


ATTACKS: Registry[type[Attack]] = Registry("attack", "fedaudit.attacks")


class Attack(Plugin, ABC):
    """Base of all attacks. A subclass is a frozen, keyword-only dataclass, made and registered by ``@register``.

    Class attributes, shown by ``fedaudit list attacks``:
        name, summary, paper; ``threat_model``: which adversaries can play it; ``needs``: what it must be given;
        ``default_scope``: what one run of it receives: one update, all messages of one client, or all that the
        adversary sees of a federation; ``recovers``: what it is after, in words; ``finds``: the class of finding
        that it returns.
    """

    registry = ATTACKS

    threat_model: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    default_scope: ClassVar[Scope] = "update"
    recovers: ClassVar[str] = "training images"
    finds: ClassVar[type[Finding]] = ImageFinding

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
            observation: what the adversary saw, cut down to what this attack looks at.
            generator: every random draw of the attack comes from it.
            device: where to compute.
            progress: called with (done, total) iterations, now and then.

        Raises:
            NotApplicable: as :meth:`check`.
        """

    def scope(self) -> Scope:
        """Return what one run with these settings receives: ``default_scope``, unless a setting changes it."""
        return self.default_scope

    def files(self) -> list[Path]:
        """Return the files that the settings name: a finding depends on what is in them."""
        return []

    def public_examples(self) -> Tensor | None:
        """Return fingerprints (n,) of the public examples that the adversary's knowledge was made from, if any.

        The audit refuses an attack that has a victim among them; see :func:`fedaudit.models.generator.fingerprints`.
        """
        return None

    @classmethod
    def info(cls) -> dict[str, Any]:
        """Return what ``fedaudit list --json`` says beside name and summary."""
        info = {"paper": cls.paper, "threat_model": cls.threat_model, "needs": list(cls.needs)}
        return info | {"scope": cls.default_scope, "looks_at": cls.default_scope}  # the second is the name of old


def make_attack(name: str, settings: Mapping[str, Any] | None = None) -> Attack:
    """Return the attack ``name`` with ``settings``.

    Raises:
        BadInput: no such attack or setting, or a value that isn't allowed.
    """
    return make(ATTACKS, name, settings)
