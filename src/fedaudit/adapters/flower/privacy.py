"""Flower's differential privacy: what its mods make of an update, and which noise its strategies add at the server."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import RecordDict
from flwr.server import LegacyContext, Server
from flwr.server.strategy import FedAvg as OlderFedAvg
from flwr.server.strategy import Strategy as OlderStrategy
from flwr.serverapp.strategy import FedAvg, Strategy
from torch import Tensor, nn

from fedaudit.adapters.flower.in_process import App, Enough, Mod, described, run_app
from fedaudit.adapters.flower.tensors import layers_in, parameters_in
from fedaudit.defences.client_defences import ClientContext
from fedaudit.guard.budget import known_of
from fedaudit.pipeline.ledger import CLIPPING_MODS
from fedaudit.transcript.update import ClientDefenceInfo, Update
from fedaudit.utils.errors import BadInput

_CLIP = "clipping_norm"  # of an update, as Flower's strategies tell its mods


def strategies(thread: int) -> list[Mod]:
    """Return the strategies by which a ServerApp that runs in that thread trains, the outermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        for value in list(frame.f_locals.values()):
            found = value.strategy if isinstance(value, LegacyContext | Server) else value
            if isinstance(found, Strategy | OlderStrategy):
                return wrapped(found)
        frame = frame.f_back
    return []


def wrapped(strategy: Any) -> list[Mod]:
    """Return a strategy and those that it wraps; whatever averages as FedAvg does goes by that name."""
    found: list[Mod] = []
    while isinstance(strategy, Strategy | OlderStrategy):
        name, settings = described(strategy)
        for known, rule in ((FedAvg, "aggregate_train"), (OlderFedAvg, "aggregate_fit")):
            if isinstance(strategy, known) and getattr(type(strategy), rule) is getattr(known, rule):
                name = FedAvg.__name__
        found.append((name, settings))
        strategy = vars(strategy).get("strategy")
    return found


def strategies_of(app: App) -> list[Mod]:
    """Return the strategies of an app's server, told by what it does until it first asks a client; none if it fails."""
    found: list[Mod] = []
    thread = threading.get_ident()

    def asked(*_: Any) -> Any:
        found.extend(strategies(thread))
        raise Enough

    with contextlib.suppress(BadInput):
        run_app(app, watch=asked)
    return found


def known_of_mods(
    mods: Sequence[Mod],
    sent: RecordDict,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    module: nn.Module | None,
) -> ClientDefenceInfo | None:
    """Return what everybody knows of an update, ``state`` less ``weights``, that went through these mods.

    ``sent`` is the message that asked for it, in which clients are told the norm to which they clip.
    """
    if not mods:
        return None
    own = frozenset() if module is None else frozenset(name for name, _ in module.named_parameters())
    names = own & weights.keys() or None  # adapters may travel by other names
    tensors = {name: state[name] - weights[name] for name in parameters_in(weights, names) if name in state}
    update, info = Update(0, "weights", tensors, 1, None), None
    told = [record[_CLIP] for record in sent.config_records.values() if _CLIP in record]
    for mod in mods:
        if mod[0] in CLIPPING_MODS and told:
            info = ClientDefenceInfo(CLIPPING_MODS[mod[0]], clip=float(told[0]))
        else:
            info = known_of([mod], update, ClientContext(dict(weights), layers_in(weights), 1)) or info
    return info
