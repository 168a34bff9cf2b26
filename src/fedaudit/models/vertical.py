"""The model of a vertical federation: a network for each party's features, and the server's on what they put out.

In split learning there is one party, the client, with all features: a network is cut in two.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fedaudit.utils.errors import BadInput

Features = Literal["strips", "quadrants"]
Top = Literal["sum", "linear", "mlp"]

_HIDDEN = 64  # units of the server's hidden layer (mlp)


class VerticalModel(nn.Module):
    """The whole model, as if one machine held all features.

    Args:
        parties: a network each, from its own features to its embedding.
        server: from all embeddings, side by side, to the outputs; None: the outputs are their sum.
        parts: of each party the rows and columns of an image, or the columns of a table, that are its features.
    """

    def __init__(self, parties: Sequence[nn.Module], server: nn.Module | None, parts: Sequence[tuple[slice, ...]]):
        super().__init__()
        self.parties = nn.ModuleList(parties)
        self.server = server
        self.parts = tuple(parts)

    def features(self, inputs: Tensor) -> list[Tensor]:
        """Return each party's share of ``inputs`` (n, ...)."""
        return [share_of(inputs, part) for part in self.parts]

    def embed(self, shares: Sequence[Tensor]) -> list[Tensor]:
        """Return each party's embeddings (n, e) of its share."""
        return [torch.as_tensor(party(share)) for party, share in zip(self.parties, shares, strict=True)]

    def merge(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Return the server's outputs (n, k) for the parties' embeddings."""
        if self.server is None:
            return torch.stack(list(embeddings)).sum(dim=0)
        return torch.as_tensor(self.server(torch.cat(list(embeddings), dim=1)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs (n, k) for whole examples (n, ...)."""
        return self.merge(self.embed(self.features(inputs)))


def parts_of(features: Features, parties: int, input_shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Return each party's part of an example as slices of its last axes: adjacent columns, or an image's quadrants."""
    if features == "quadrants":
        if parties != 4 or len(input_shape) != 3 or min(input_shape[1:]) < 2:
            raise BadInput(
                f"features 'quadrants' are an image's, for 4 parties; here are {parties} and examples of shape "
                f"{input_shape}: use strips"
            )
        down, right = (n // 2 for n in input_shape[1:])
        rows, columns = (slice(0, down), slice(down, None)), (slice(0, right), slice(right, None))
        return [(row, column) for row in rows for column in columns]
    width = input_shape[-1]
    if parties > width:
        raise BadInput(f"{parties} parties can't share {width} columns; lower clients")
    ends = [width * i // parties for i in range(parties + 1)]
    return [(slice(a, b),) for a, b in itertools.pairwise(ends)]


def share_of(inputs: Tensor, part: tuple[slice, ...]) -> Tensor:
    """Return a party's part of examples (n, ...): slices of the last dimensions."""
    return inputs[(..., *part)]  # type: ignore[index]


def share_shape(part: tuple[slice, ...], input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a party's share of an example."""
    return tuple(share_of(torch.zeros((1, *input_shape), device="meta"), part).shape[1:])


def halves(model: nn.Module, cut: str | int) -> tuple[nn.Sequential, nn.Sequential]:
    """Return the layers of ``model`` up to ``cut``, a name or number (from 1), and those after it, the server's."""
    if not isinstance(model, nn.Sequential):
        raise BadInput(
            "split learning cuts a model that is a sequence of layers; use lenet-5, convnet or mlp, for example"
        )
    layers = dict(model.named_children())
    names = list(layers)
    place = names.index(cut) + 1 if cut in names else cut
    if not isinstance(place, int) or not 1 <= place < len(names):
        raise BadInput(
            f"vertical.cut is '{cut}'; it must be one of {', '.join(names[:-1])}, or a number from 1 to "
            f"{len(names) - 1}"
        )
    front, back = (
        nn.Sequential(OrderedDict((name, layers[name]) for name in part)) for part in (names[:place], names[place:])
    )
    if not any(True for _ in front.parameters()):
        raise BadInput(
            f"vertical.cut is '{cut}', before the first layer with weights: examples would be sent as they are"
        )
    return front, back


def server_network(top: Top, embeddings: int, outputs: int) -> nn.Module | None:
    """Return the server's network on ``embeddings`` numbers; None for a sum."""
    if top == "sum":
        return None
    if top == "linear":
        return nn.Linear(embeddings, outputs)
    return nn.Sequential(nn.Linear(embeddings, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, outputs))
