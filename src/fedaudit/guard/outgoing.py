"""What is about to leave a site: an update, and what else has too many numbers to pass unseen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedaudit.capture.capture import Capture
from fedaudit.defences.client_defences import norm
from fedaudit.transcript.files import Form

if TYPE_CHECKING:
    from fedaudit.pipeline.ledger import Filter

FEW = 100  # numbers in a result that is no update, up to which it leaves
_NAME = 64  # characters of a name that aren't counted
_EMPTY = 1 / 8  # numbers that a container without any counts for


@dataclass(frozen=True)
class OutgoingUpdate:
    """An update that is about to leave a site.

    Attributes:
        sent: the model that came in, by name.
        state: what is about to leave, in that ``form``.
        seen: the training that was watched.
        form: of ``state``.
        name: of the site.
        folder: where its report goes, below ``out``.
        follows: nothing changes the update after the training that was watched.
        went_through: filters that worked on ``state`` already, in their order.
        goes_through: filters that will, before it leaves the site.
    """

    sent: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    seen: Capture
    form: Form
    name: str
    folder: str
    follows: bool
    went_through: Sequence[Filter] = ()
    goes_through: Sequence[Filter] = ()

    def changes(self) -> dict[str, Tensor]:
        """Return the change of each tensor that is no whole number."""
        floating = {name: value for name, value in self.state.items() if value.is_floating_point()}
        if self.form != "weights":
            return floating
        return {name: value - self.sent[name] for name, value in floating.items() if name in self.sent}

    def norm(self) -> float | None:
        """Return the Euclidean norm of the change of all parameters; None: it isn't finite, or there are none."""
        if self.seen.module is None:
            return None
        parameters = {name for name, _ in self.seen.module.named_parameters(remove_duplicate=False)}
        found = norm(value for name, value in self.changes().items() if name in parameters)
        return found if 0 < found < math.inf else None

    def clipped(self, scale: float) -> dict[str, Tensor]:
        """Return what leaves where the change is scaled: what is no whole number moves towards what came in."""
        less = {name: scale * change for name, change in self.changes().items()}
        if self.form == "weights":
            less = {name: self.sent[name] + change for name, change in less.items()}
        return {**self.state, **less}


def few_numbers(content: object) -> bool:
    """Whether what leaves holds at most :data:`FEW` numbers; of a name the first 64 characters aren't counted."""
    try:
        return _numbers(content) <= FEW
    except RecursionError:
        return False


def _numbers(value: Any) -> float:
    """Return how many numbers are in a value, eight characters or bytes for one; infinite: nobody knows."""
    if (shape := getattr(value, "shape", None)) is not None:
        if getattr(getattr(value, "dtype", None), "hasobject", False):
            return math.inf
        held = getattr(value, "data", None)  # of Flower's arrays, whose shape is what the client says it is
        size = len(held) if isinstance(held, bytes) else getattr(value, "nbytes", 0)
        return float(max(math.prod(shape), size / 8))
    if isinstance(value, str | bytes | bytearray | memoryview):
        return len(value) / 8
    if isinstance(value, int):
        return max(1.0, value.bit_length() / 64)
    if value is None or isinstance(value, float):
        return 1.0
    if isinstance(value, Mapping):
        names = sum(max(0, len(str(name)) - _NAME) / 8 for name in value)
        return names + sum(map(_numbers, value.values())) or _EMPTY
    if isinstance(value, Sequence | Set):
        return sum(map(_numbers, value)) or _EMPTY
    return math.inf
