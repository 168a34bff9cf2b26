"""What every sanitiser is: it changes a client's update before the update leaves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedaudit.defences.settings import arguments, check_settings
from fedaudit.update import SanitiserInfo, Tensors, Update
from fedaudit.utils.registry import Registry


@dataclass(frozen=True)
class ClientContext:
    """What a client has at hand beside its own update.

    Attributes:
        weights: the global model's state that it received this round.
        layers: names of the parameters and buffers of each layer, in forward order.
        clients: that take part in a round.
    """

    weights: Tensors
    layers: tuple[tuple[str, ...], ...]
    clients: int


class Sanitiser(Protocol):
    """Changes an update before it leaves the client; one instance per client, so it may keep state between rounds."""

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:
        """Return the update that is sent."""
        ...


# Each entry is a class whose keyword-only parameters are the settings; one instance a client.
SANITISERS: Registry[type[Sanitiser]] = Registry("sanitiser")


def make_sanitiser(name: str, settings: Mapping[str, Any] | None = None) -> Sanitiser:
    """Return one client's sanitiser ``name``.

    Raises:
        BadInput: no such sanitiser or setting, or a value that isn't allowed.
    """
    checked = check_settings(SANITISERS, name, settings or {})
    entry = SANITISERS[name]
    return entry.value(**arguments(entry, checked))


@SANITISERS.register("none", "the update leaves as it is: no defence", side="client", paper="-")
class NoSanitiser:
    """Sends the update as it is."""

    def __call__(self, update: Update, context: ClientContext, generator: torch.Generator) -> Update:  # noqa: ARG002
        """Return ``update``."""
        return update


def changed(update: Update, tensors: Tensors, how: SanitiserInfo) -> Update:
    """Return ``update`` with other tensors, and what everybody knows of how they came about."""
    return replace(update, tensors=tensors, sanitised=how)


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return all numbers as one (d,) vector, in the order of the names."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def unflat(vector: Tensor, like: Mapping[str, Tensor]) -> Tensors:
    """Undo :func:`flat`."""
    pieces = vector.split([tensor.numel() for tensor in like.values()])
    return {name: piece.view_as(tensor) for (name, tensor), piece in zip(like.items(), pieces, strict=True)}


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the Euclidean norm over all tensors, in float64."""
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
