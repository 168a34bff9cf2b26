"""What a site's guard makes of the model that comes in, before the site trains on it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit.defences.received import check_received
from fedaudit.utils.errors import BadInput
from fedaudit.utils.objects import load_object

Policy = Literal["warn", "refuse", "ignore"]
REFUSED = "the site's guard didn't let this model in"  # and not why: that would tell what it looks for


def check_policy(policy: str) -> None:
    """Refuse a policy that isn't one.

    Raises:
        BadInput: it isn't.
    """
    if policy not in get_args(Policy):
        raise BadInput(f"on_received is {policy!r}; give 'warn', 'refuse' or 'ignore'")


def agreed_network(given: nn.Module | str | None) -> nn.Module | None:
    """Return the network that the federation agreed on: a module, or ``package.module:name`` of one or what makes it.

    Raises:
        BadInput: there is none.
    """
    made = _made(given, "agreed")
    if made is not None and not isinstance(made, nn.Module):
        raise BadInput(f"agreed is {type(made).__name__}; give a torch module, or package.module:name of what makes it")
    return made


def own_examples(given: tuple[Tensor, Tensor] | str | None) -> tuple[Tensor, Tensor] | None:
    """Return a site's own examples and their classes: tensors, or ``package.module:name`` of them or what makes them.

    Raises:
        BadInput: there are none, or they don't fit together.
    """
    made = _made(given, "examples")
    if made is None:
        return None
    pair = isinstance(made, tuple | list) and len(made) == 2 and all(isinstance(part, Tensor) for part in made)
    if not pair or not len(made[0]) or len(made[0]) != len(made[1]):
        raise BadInput("examples must be two tensors of the same length, inputs and classes, or what returns them")
    return made[0], made[1]


def _made(given: Any, what: str) -> Any:
    if not isinstance(given, str):
        return given
    found = load_object(given, what)
    if isinstance(found, nn.Module | tuple | list) or not callable(found):
        return found
    try:
        return found()
    except Exception as error:
        raise BadInput(f"{what} '{given}' can't be called without arguments: {type(error).__name__}: {error}") from None


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
