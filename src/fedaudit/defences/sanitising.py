"""Sanitisers: what a client does to its update before the update leaves."""

from __future__ import annotations

from typing import Protocol

import torch

from fedaudit.registry import Registry
from fedaudit.update import Update


class Sanitiser(Protocol):
    """Changes an update before it leaves the client; one instance per client, so it may keep state between rounds."""

    def __call__(self, update: Update, generator: torch.Generator) -> Update:
        """Return the update that is sent."""
        ...


# Each entry is a factory without arguments that makes one client's sanitiser.
SANITISERS: Registry[type[Sanitiser]] = Registry("sanitiser")


@SANITISERS.register("none", "the update leaves as it is: no defence", side="client", paper="-")
class NoSanitiser:
    """Sends the update as it is."""

    def __call__(self, update: Update, generator: torch.Generator) -> Update:  # noqa: ARG002
        """Return ``update``."""
        return update
