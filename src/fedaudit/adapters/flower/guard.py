"""A guard in front of a site: audits the update that is about to leave, with the client's own data in hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import Tensor

from fedaudit.adapters import in_words
from fedaudit.adapters.flower.messages import check_names, is_training, log, refusal, server_round, state_in
from fedaudit.adapters.flower.tensors import load_state, save_state
from fedaudit.adapters.guard import NOT_LET_IN, REFUSED, SiteGuard
from fedaudit.capture.capture import Capture
from fedaudit.simulation.local_training import local_randomness
from fedaudit.utils.errors import BadInput

STATE = "fedaudit-guard"  # the guard's record in the context's state
MEMBERS = "fedaudit-guard.members"  # the same, of what is kept of the site's own examples


class Guard(SiteGuard):
    """A mod that attacks each update before it leaves: ``ClientApp(mods=[Guard(...)])``, the first of the mods.

    It watches the local training, which stays as it is, and plays the attacks that a curious server could play. What
    it finds is logged on the site; nothing is added to the reply. It refuses where ``on_fail`` is ``"refuse"``: the
    reply becomes an error, and the round goes on without this client. Where an update can't be audited (no training was
    seen, more than ``largest`` examples, the reply holds several models, no attack that ran measures what has a limit,
    an error of the guard's own) it says so, and does what ``unaudited`` says: by default such an update leaves where
    ``on_fail`` is ``"warn"``, and is refused where that is ``"refuse"``.

    Before every training it inspects the model that came in, as ``fedaudit check-model`` does, and logs what looks
    manipulated; where ``on_received`` is ``"refuse"`` such a model, or one that can't be checked, isn't trained on, and
    the reply is an error.

    With ``held_out`` it also watches, in every round, whether the site's own training examples can be told.

    Its settings are those of :class:`~fedaudit.adapters.guard.SiteGuard`. Attacks and limits are checked with the first
    training message.
    """

    _log = log
    _early = False

    def __call__(self, msg: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        """Have the client train, and audit what it is about to send."""
        if not is_training(msg):
            return call_next(msg, context)
        if not self._let_in(msg, context):
            return refusal(NOT_LET_IN, msg)
        before = _quietly(self._count, context)
        plays = before is None or self._plays(before)
        if not plays and self._others is None:
            return call_next(msg, context)
        index = (server_round(msg) or (before or 0) + 1) - 1
        self._check()  # before training, and not quietly
        sent = copy.deepcopy(msg.content)  # the client may change what it is given
        with Capture() as seen:
            reply = call_next(msg, context)
        with local_randomness(0):  # in a simulation the process trains on after the audit
            work = [self._look] * (self._others is not None) + [self._audit] * plays
            told = [_quietly(one, index, context, sent, seen, reply) for one in work]
        refused = any(told)
        if not refused and None in told:  # it couldn't be audited
            refused = self.unaudited == "refuse"
            log.warning("fedaudit guard: node %d: %s", context.node_id, "it doesn't leave" if refused else "it leaves")
        return refusal(REFUSED, msg) if refused else reply

    def _let_in(self, msg: Message, context: Context) -> bool:
        who = f"node {context.node_id}, round {server_round(msg)}"
        try:
            return self._inspected(msg, who, (str(context.run_id), str(context.node_id)))
        except Exception as error:
            return not self._not_let_in(error, who)

    def _inspected(self, msg: Message, who: str, job: tuple[str, str]) -> bool:
        records = msg.content.array_records
        count = len(next(iter(records.values()))) if len(records) == 1 else 0
        unnamed = [str(place) for place in range(count)]  # names tell these checks nothing but the architecture
        agreed, _ = self._own
        state = state_in(msg.content, list(agreed.state_dict()) if agreed is not None else unnamed)
        return self._lets_in(state, who, job)

    def _count(self, context: Context) -> int:
        """Return how many training messages came before this one: what a server says its round is proves nothing."""
        state = context.state.config_records.get(STATE)
        if state is None:
            state = context.state[STATE] = ConfigRecord({"messages": 0})
        before = int(state["messages"])
        state["messages"] = before + 1
        return before

    def _audit(self, index: int, context: Context, sent: RecordDict, seen: Capture, reply: Message) -> bool:
        """Attack the update; return whether it mustn't leave.

        Raises:
            BadInput: that can't be told.
        """
        if reply.has_error():
            return False
        who = f"node {context.node_id}, round {index + 1}"
        weights, state = _models(sent, seen, reply, who)
        self._check_size(seen)
        node = context.node_id
        folder = f"round-{index + 1}-node-{node}"
        gives_away = self._gives_away(
            weights, state, seen, index, name=f"node-{node}", client=str(node), who=who, folder=folder, follows=False
        )
        return gives_away and self.on_fail == "refuse"

    def _look(self, index: int, context: Context, sent: RecordDict, seen: Capture, reply: Message) -> bool:
        """Watch members; return whether the update mustn't leave.

        Raises:
            BadInput: that can't be told.
        """
        if reply.has_error():
            return False
        who = f"node {context.node_id}, round {index + 1}"
        state = _models(sent, seen, reply, who)[1]
        watch, kept = self._watch(), load_state(context.state, MEMBERS)
        if kept is not None:
            watch.load_state_dict(kept)
        try:
            return self._tells_members(watch, state, seen, who) and self.on_fail == "refuse"
        finally:
            _quietly(save_state, context.state, MEMBERS, watch.state_dict())  # what was found counts nevertheless


def _models(sent: RecordDict, seen: Capture, reply: Message, who: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the model that came in and the one that is about to leave.

    Raises:
        BadInput: no training was seen, or these are none.
    """
    if seen.module is None or not seen.inputs:
        raise BadInput(f"{who}: no training was seen (another thread or process?)")
    weights = state_in(sent, list(seen.module.state_dict()))
    state = state_in(reply.content, list(weights))
    check_names(state, weights)
    return weights, state


def _quietly(work: Callable[..., Any], *arguments: Any) -> Any:
    """Do the guard's own work; an error in it is logged and stops nothing."""
    try:
        return work(*arguments)
    except Exception as error:
        log.warning("fedaudit guard: this update isn't audited: %s", in_words(error))
        return None
