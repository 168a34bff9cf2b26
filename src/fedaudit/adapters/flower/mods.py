"""fedaudit's client-side defences as Flower client mods: they change an update before it leaves the client."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message
from torch import Tensor

from fedaudit.adapters.flower.messages import is_training, only_record, refusal
from fedaudit.adapters.flower.tensors import (
    Parameters,
    layers_in,
    load_state,
    names_of,
    parameters_in,
    save_state,
    torch_state,
)
from fedaudit.defences import CLIENT_DEFENCES
from fedaudit.defences.client_defences import ClientContext, norm
from fedaudit.transcript.update import Update
from fedaudit.utils.errors import BadInput
from fedaudit.utils.registry import make
from fedaudit.utils.seeds import derive_seed

log = logging.getLogger("flwr")

_LOUD = 10  # noise so many times as long as the clip


class ClientDefenceMod:
    """A client mod that sanitises what local training changed: any client-side one of ``fedaudit list defences``.

    >>> app = ClientApp(mods=[ClientDefenceMod("top-k", {"ratio": 0.1})])  # doctest: +SKIP

    It fails closed: where the update can't be sanitised (no single ArrayRecord, other tensors than were sent, NaN), it
    raises, Flower sends an error in place of the update, and the round goes on without this client. It adds no key to
    a reply. What isn't sent (layers of ``ffl``, BatchNorm's statistics under ``dp``) travels as it was received.
    Metrics travel as they are: the loss and the number of examples aren't protected. Only answers to training messages
    are sanitised; an app that hands out the model in another answer isn't stopped.

    In deployment every message is a process of its own, so what a client-side defence remembers lies in the client's
    ``context.state``, as plain arrays and text, and never leaves the client. The order of mods counts: put it *after* a
    :class:`Guard`, which then audits what really leaves.

    ``dp`` has no default here: ``clip`` and ``noise`` must be given. A clip taken from the client's own updates would
    tell how long they are, which no ε counts, and noise of the length that a small ε asks for ends most trainings where
    every client adds its own: choose with eyes open. The mod logs each update's norm, on the client, to choose by. When
    ``epsilon`` is spent, the client answers with an error and trains no more.

    Args:
        client_defence: its registered name.
        settings: of the client-side defence.
        parameters: the module, or the names of its parameters; everything else counts as statistics. None: every
            floating-point tensor but BatchNorm's running statistics.
        layers: names of the tensors of each layer, for ``ffl`` with ``layers: modules``. None: tensors that share the
            name before the last dot.
        clients: that take part in a round, for ``dgc``'s ``clip``.
        seed: None takes noise and choices from the operating system, anew each round, so that nobody else knows them. A
            number makes them repeat, for tests only: whoever knows it takes the noise off.

    Raises:
        BadInput: no such client-side defence or setting, or settings that can't work on a client or would end the
        training.
    """

    def __init__(
        self,
        client_defence: str,
        settings: Mapping[str, Any] | None = None,
        *,
        parameters: Parameters = None,
        layers: Iterable[Iterable[str]] | None = None,
        clients: int | None = None,
        seed: int | None = None,
    ) -> None:
        self.client_defence = make(CLIENT_DEFENCES, client_defence, settings)
        self.rounds = self.client_defence.check_alone(settings or {}, clients)
        self.name = self.client_defence.name
        self._given = names_of(parameters)
        self._layers = None if layers is None else tuple(map(tuple, layers))
        self._clients = clients or 1
        self._seed = seed
        self._key = f"fedaudit.{self.name}"

    def __call__(self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        """Train, and return the reply with the sanitised update in it.

        Raises:
            BadInput: the update can't be sanitised; Flower then sends an error in its place.
        """
        if not is_training(message):
            return call_next(message, context)
        kept = load_state(context.state, self._key) or {"rounds": 0}
        rounds = int(kept["rounds"])
        if self.rounds is not None and rounds >= self.rounds:
            reason = f"fedaudit: the privacy budget is spent after {self.rounds} rounds; nothing was trained or sent"
            log.warning(reason)
            return refusal(reason, message)
        before = torch_state(only_record(message, "message")[1])  # a copy: training may change the arrays in place
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        key, record = only_record(reply, "reply")
        after = torch_state(record)
        update, whole = self._update(before, after)
        client_defence = self.client_defence.anew()
        if "client_defence" in kept:
            client_defence.load_state_dict(kept["client_defence"])
        draws: Any = None if self._seed is None and client_defence.secret else self._generator(context.node_id, rounds)
        sent = client_defence(update, whole, draws)
        new = before | sent.buffers
        for name, tensor in sent.tensors.items():  # before + (after − before) would be rounded
            new[name] = after[name] if tensor is update.tensors[name] else before[name] + tensor
        self._tell(update, sent)
        save_state(context.state, self._key, {"rounds": rounds + 1, "client_defence": client_defence.state_dict()})
        reply.content[key] = ArrayRecord({name: new[name].to(tensor.dtype) for name, tensor in after.items()})
        return reply

    def _update(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> tuple[Update, ClientContext]:
        """Return what local training changed, which must be finite, and what else the client-side defence is given."""
        if before.keys() != after.keys() or any(before[name].shape != after[name].shape for name in before):
            raise BadInput(f"{self.name}: the reply has other tensors than the message; it isn't sent")
        if not all(bool(torch.isfinite(tensor).all()) for tensor in after.values()):
            raise BadInput(f"{self.name}: the update has NaN or infinite values; it isn't sent")
        layers = self._layers or layers_in(before)
        if getattr(self.client_defence, "layers", None) == "modules" and len(layers) < 2:
            raise BadInput(f"{self.name}: names like '{next(iter(before))}' don't tell the layers; give layers=")
        names = parameters_in(before, self._given)
        update = Update(
            client=0,
            kind="weights",
            tensors={name: after[name] - before[name] for name in names},
            num_examples=1,  # no client-side defence looks at it; the reply's own number travels
            training=None,
            buffers={n: t for n, t in after.items() if n not in names and not t.equal(before[n])},
        )
        return update, ClientContext(before, layers, self._clients)

    def _tell(self, update: Update, sent: Update) -> None:
        before, after = norm(update.tensors.values()), norm(sent.tensors.values())
        log.info("fedaudit: %s: the update's norm is %.4g, what leaves has %.4g", self.name, before, after)
        clip = self.client_defence.settings().get("clip")
        if sent.sanitised is not None and sent.sanitised.noise and clip and after > _LOUD * clip:
            log.warning(
                "fedaudit: %s: the noise is %.0f times as long as the clip; averaged over n clients √n less. "
                "Few trainings survive that: a smaller model, more clients, or less noise and a larger epsilon",
                self.name,
                after / clip,
            )

    def _generator(self, node: int, rounds: int) -> torch.Generator:
        secret = secrets.randbits(63) if self._seed is None else derive_seed(self._seed, "sanitiser", node, rounds)
        return torch.Generator().manual_seed(secret)
