"""Canary clients in Flower: nodes that send a known direction in place of a trained model, for an audit of ε."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict

from fedaudit.adapters.flower.messages import is_training, only_record, refusal
from fedaudit.adapters.flower.tensors import torch_state
from fedaudit.capture.canaries import CanaryClients
from fedaudit.utils.errors import BadInput

_CANARY = "canary"  # a node's config says its number under this name


class CanaryMod:
    """A client mod that makes canaries of some nodes; the others aren't touched.

    >>> canaries = CanaryClients(net(), 100, clip=1.0, claimed=4.0, seed=SECRET)  # doctest: +SKIP
    >>> app = ClientApp(mods=[fixedclipping_mod, CanaryMod(canaries)])  # doctest: +SKIP

    Put it *last*, so that whatever clips and adds noise on a client does so to canaries, too. A canary answers a
    training message with its direction, and trains nothing; it answers no other message. On the server, give the same
    canaries (the same ``seed``) to the :class:`fedaudit.Recorder` of an :class:`AuditStrategy`, which reads the global
    models. Which node is a canary isn't in any message, so no observer of single updates is audited.

    Args:
        canaries: the auditor's; every process makes them from the same seed.
        number: of a context, which canary the node is, or None; default: what the node's config says under
            ``canary`` (``--node-config "canary=3"``).
        examples: that a canary says it trained on: it weighs its update, so give what the promise supposes.
        metrics: names of the other metrics that your clients send, such as ``train_loss``: Flower's strategies refuse a
            round whose replies have different ones. A canary says 0.
    """

    def __init__(
        self,
        canaries: CanaryClients,
        number: Callable[[Context], int | None] | None = None,
        *,
        examples: int = 1,
        metrics: Sequence[str] = (),
    ) -> None:
        if examples < 1:
            raise BadInput(f"examples is {examples}; a canary says that it trained on one at least")
        self.canaries, self.number = canaries, number or _configured
        self.metrics = MetricRecord({**dict.fromkeys(metrics, 0.0), "num-examples": examples})

    def __call__(self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        """Answer as a canary, or let the node's own app answer.

        Raises:
            BadInput: the message isn't one model, or there is no such canary; Flower then sends an error.
        """
        number = self.number(context)
        if number is None:
            return call_next(message, context)
        if not is_training(message):
            return refusal("fedaudit: a canary answers training messages only", message)
        key, record = only_record(message, "message to a canary")
        content = RecordDict(
            {
                key: ArrayRecord(self.canaries.update(number, torch_state(record))),
                "metrics": copy.deepcopy(self.metrics),
            }
        )
        return Message(content, reply_to=message)


def _configured(context: Context) -> int | None:
    value = context.node_config.get(_CANARY)
    if value is None:
        return None
    if not isinstance(value, int):
        raise BadInput(f"the node's config says canary={value!r}; give a whole number")
    return value
