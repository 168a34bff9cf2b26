"""What a site's guard makes of the model that comes in, before the site trains on it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal, get_args

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit.defences.received import check_received
from fedaudit.utils.errors import BadInput

Policy = Literal["warn", "refuse", "ignore"]
REFUSED = "the site's guard didn't let this model in"  # and not why: that would tell what it looks for


def check_policy(policy: str) -> None:
    """Refuse a policy that isn't one.

    Raises:
        BadInput: it isn't.
    """
    if policy not in get_args(Policy):
        raise BadInput(f"on_received is {policy!r}; give 'warn', 'refuse' or 'ignore'")


def let_in(
    state: Mapping[str, Tensor],
    policy: str,
    log: logging.Logger,
    who: str,
    *,
    agreed: nn.Module | None = None,
    examples: tuple[Tensor, Tensor] | None = None,
) -> bool:
    """Check a model that a site received, log each alarm, and return whether the site may train on it.

    Args:
        state: as it was received.
        policy: ``warn`` logs alarms, with ``refuse`` one is enough to keep the model out, ``ignore`` checks nothing.
        log: of the adapter.
        who: the site and the round, in words.
        agreed: the network that the federation agreed on; None: only weights are looked at.
        examples: the site's own, as the model sees them, and their classes.
    """
    if policy == "ignore":
        return True
    checks = check_received(state, agreed, loss=cross_entropy, examples=examples)
    alarms = [check for check in checks if check.alarm]
    done = "it isn't trained on" if policy == "refuse" else "it is trained on nevertheless"
    for check in alarms:
        log.warning(
            "fedaudit guard: %s: the received model is suspicious: %s: %s; %s", who, check.name, check.text, done
        )
    return not alarms or policy != "refuse"
