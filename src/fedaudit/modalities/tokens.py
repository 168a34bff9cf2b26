"""Text as models see it: (length,) whole numbers, each the place of a word in a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import ConfigDict
from torch import Tensor, nn

from fedaudit.modalities.base import ExampleKind, register
from fedaudit.utils.errors import BadInput

NOTHING = -100  # a target that isn't asked for: what cross-entropy leaves out by default
_LARGEST = 10_000_000


@dataclass(frozen=True)
class TokenInfo:
    """What everybody in a federation on text knows of its tokens.

    Attributes:
        vocabulary: how many different tokens there are; they count from 0.
        padding: the token that fills up short sequences; None: there is none.
        end: the token that ends every sequence; None: there is none.
        causal: the model predicts at every position the token that follows; otherwise the class of the sequence.

    Raises:
        BadInput: the numbers don't fit together.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # where it is read from a file

    vocabulary: int
    padding: int | None = None
    end: int | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.vocabulary <= _LARGEST:
            raise BadInput(f"vocabulary is {self.vocabulary}; it must be 2 to {_LARGEST:,}")
        for name, token in (("padding", self.padding), ("end", self.end)):
            if token is not None and not 0 <= token < self.vocabulary:
                raise BadInput(f"{name} is {token}; it must be one of the {self.vocabulary} tokens, from 0")

    def following(self, tokens: Tensor) -> Tensor:
        """Return (n, length) the token that follows each of (n, length), and ``NOTHING`` where none does."""
        targets = torch.full_like(tokens, NOTHING)
        targets[:, :-1] = tokens[:, 1:]
        if self.padding is not None:
            targets[targets == self.padding] = NOTHING
        return targets

    def words_of(self, sequence: Tensor) -> list[int]:
        """Return the tokens of a sequence (length,) without those that everybody knows: padding and the end."""
        return [token for token in sequence.tolist() if token not in (self.padding, self.end)]

    def fault(self, tokens: Tensor) -> str | None:
        """Return why tokens (n, length) aren't of this vocabulary; None where they are."""
        if bool((tokens >= self.vocabulary).any()):
            return f"a token is {int(tokens.max())}, and the vocabulary has 0..{self.vocabulary - 1}"
        return None


def of_one_length(texts: Sequence[Tensor], least: int = 0) -> Tensor:
    """Return texts (n, length), or their targets, as one, ``least`` long or longer, ``NOTHING`` behind shorter ones."""
    longest = max([least, *(text.shape[1] for text in texts)])
    return torch.cat([nn.functional.pad(text, (0, longest - text.shape[1]), value=NOTHING) for text in texts])


def as_given(texts: Tensor) -> Tensor:
    """Return the texts (n, length) of one batch as long as they were before :func:`of_one_length`."""
    return texts[:, : int((texts != NOTHING).any(dim=0).sum())]


class Tokens(ExampleKind):
    """Sequences of tokens, which models see as they are."""

    name: ClassVar[str] = "tokens"
    summary: ClassVar[str] = "text, (length,) whole numbers, each the place of a word in a vocabulary"
    plural: ClassVar[str] = "sequences"
    described: ClassVar[str] = "sequences of tokens"
    axes: ClassVar[tuple[str, ...]] = ("length",)
    letters: ClassVar[str] = "length"
    arrays: ClassVar[str] = "(n, length)"
    array_axes: ClassVar[tuple[int, ...]] = (2,)
    element: ClassVar[str] = "token"
    dtype: ClassVar[torch.dtype] = torch.int64
    discrete: ClassVar[bool] = True

    def read(self, array: Tensor, where: str) -> Tensor:
        """Return whole numbers (n, length), none of which may be negative, as int64."""
        if array.is_floating_point() or array.dtype in (torch.bool, torch.complex64, torch.complex128):
            raise BadInput(f"{where}: tokens are whole numbers from 0, not {array.dtype}; give the tokenizer's numbers")
        tokens = array.to(torch.int64).contiguous()
        if fault := self.fault(tokens):
            raise BadInput(f"{where}: {fault}")
        return tokens

    def fault(self, examples: Tensor) -> str | None:
        """Return why examples (n, length) read from a file can't be tokens; None where they can."""
        if examples.dtype != self.dtype:
            return "tokens must be int64 numbers"
        if bool((examples < 0).any()):
            return f"a token is {int(examples.min())}; they count from 0"
        return None

    def normalise(self, examples: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:  # noqa: ARG002
        """Return the tokens as they are."""
        return examples

    def denormalise(self, inputs: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:  # noqa: ARG002
        """Return the tokens as they are."""
        return inputs


TOKENS = register(Tokens())
