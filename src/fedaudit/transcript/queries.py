"""Examples that the adversary holds: records, of each of which it asks something, and public ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

NOBODY = -1  # owner of a record that no client holds
UNUSED = -2  # owner of a record that a client holds, but that none of its updates used


@dataclass(frozen=True)
class Records:
    """What the adversary holds; nothing in it tells whose a record is.

    Attributes:
        inputs: (n, ...) as in a data set: pixels in [0, 1], or rows of a table; ``columns`` of these are 0.
        labels: (n,) or (n, 1).
        public_inputs: (m, ...) further examples, which nobody trained on.
        public_labels: (m,) or (m, 1).
        codes: (k, c) what stands in the hidden attribute's columns for each of its k values; k is 0 where none is
            hidden, c where it isn't one of the inputs.
        columns: (c,) of the inputs.
        public_values: (m,) which value the public examples have; empty where none is hidden.
        public_property: (m,) bool: which of the public examples have the property of clients that the adversary is
            after; empty where it is after none.
    """

    inputs: Tensor
    labels: Tensor
    public_inputs: Tensor
    public_labels: Tensor
    codes: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    columns: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    public_values: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    public_property: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))

    def __repr__(self) -> str:
        return f"Records({len(self)} records, {len(self.public_inputs)} public examples)"

    def __len__(self) -> int:
        return len(self.inputs)

    def stored(self) -> dict[str, Tensor]:
        """Return what is written to a file; what later versions added only where there is any."""
        return {n: t for n, t in vars(self).items() if n != "public_property" or len(t)}
