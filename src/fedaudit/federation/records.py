"""Examples that the adversary holds: records, of each of which it asks something, and public ones."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NOBODY = -1  # owner of a record that no client holds
UNUSED = -2  # owner of a record that a client holds, but that none of its updates used


@dataclass(frozen=True)
class Wanted:
    """What a threat model grants its adversary.

    Attributes:
        records: half of them are clients' examples.
        public: further examples of the same kind.
        in_hand: whether malicious clients have the records while the federation runs.
        pretrained: the model was trained on the whole train split before: none of that is an example that nobody
            trained on.
    """

    records: int = 0
    public: int = 0
    in_hand: bool = False
    pretrained: bool = False


@dataclass(frozen=True)
class Records:
    """What the adversary holds; nothing in it tells whose a record is.

    Attributes:
        inputs: (n, ...) as in a data set: pixels in [0, 1], or rows of a table.
        labels: (n,) or (n, 1).
        public_inputs: (m, ...) further examples, which nobody trained on.
        public_labels: (m,) or (m, 1).
    """

    inputs: Tensor
    labels: Tensor
    public_inputs: Tensor
    public_labels: Tensor

    def __len__(self) -> int:
        return len(self.inputs)
