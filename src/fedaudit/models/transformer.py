"""Small transformers for text: a decoder as in GPT-2 and an encoder as in BERT, with learned positions.

Both normalise before each part of a block (pre-LN) and once at the end. Without dropout unless their name says so.
"""

from __future__ import annotations

from functools import partial
from math import sqrt

import torch
from torch import Tensor, nn

from fedaudit.modalities import TokenInfo
from fedaudit.models.families import MODELS
from fedaudit.utils.errors import BadInput

_WIDTH = 128
_HEADS = (4, 2, 1)
_DROPOUT = 0.1  # of GPT-2 and BERT, where the name says that there is any
_RANK = 16  # of adapters


class ZeroLinear(nn.Linear):
    """A fully connected layer that starts at zero."""

    starts_at_zero = True

    def reset_parameters(self) -> None:
        """Set everything to zero."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class Adapted(nn.Module):
    """A frozen layer W beside an adapter of low rank that is trained, W + B·A (Hu et al. 2022, LoRA, Eq. 3).

    B is zero at the start; the adapter isn't scaled (the paper's α is the rank).
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width)
        self.down, self.up = nn.Linear(width, rank, bias=False), ZeroLinear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (…, width) for (…, width)."""
        return torch.as_tensor(self.frozen(x) + self.up(self.down(x)))


class SelfAttention(nn.Module):
    """Multi-head scaled dot-product attention of a sequence to itself, (n, length, width) in and out."""

    def __init__(self, width: int, rank: int = 0) -> None:
        super().__init__()
        self.heads = next(h for h in _HEADS if width % h == 0)
        self.query, self.key, self.value = (Adapted(width, rank) if rank else nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Return the attention of ``x``, where position i sees position j if ``seen`` (n, length, length) says so."""
        n, length, width = x.shape
        q, k, v = (
            layer(x).view(n, length, self.heads, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = (q @ k.transpose(2, 3) / sqrt(width // self.heads)).masked_fill(~seen[:, None], -torch.inf)
        mixed = (scores.softmax(dim=3) @ v).transpose(1, 2).reshape(n, length, width)
        return torch.as_tensor(self.output(mixed))


class Block(nn.Module):
    """Attention and a network of one hidden layer with GELU, each normalised before and added to what comes in."""

    def __init__(self, width: int, dropout: float, rank: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = SelfAttention(width, rank)
        self.hidden, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Return (n, length, width) for (n, length, width); ``seen`` as in :class:`SelfAttention`."""
        x = x + self.dropout(self.attention(self.norm1(x), seen))
        return torch.add(x, self.dropout(self.out(nn.functional.gelu(self.hidden(self.norm2(x))))))


class Transformer(nn.Module):
    """Tokens (n, length) to logits: (n, outputs) of a sequence, or (n, outputs, length) of a causal task.

    A sequence is classified by the mean over its tokens (an encoder) or by its last token (a decoder), as in
    ``GPT2ForSequenceClassification``. Padding is seen by nobody. With a ``rank``, only adapters of queries, keys and
    values are trained, and of a classifier its last layer.
    """

    def __init__(
        self,
        length: int,
        outputs: int,
        width: int,
        depth: int,
        tokens: TokenInfo,
        dropout: float,
        *,
        decoder: bool,
        rank: int = 0,
    ) -> None:
        super().__init__()
        self.info, self.decoder = tokens, decoder
        self.token = nn.Embedding(tokens.vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, dropout, rank) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, outputs)
        if rank:
            adapted = [part for part in self.modules() if isinstance(part, Adapted)]
            trained = {id(layer.weight) for part in adapted for layer in (part.down, part.up)}
            trained |= set() if tokens.causal else {id(p) for p in self.fc.parameters()}
            for parameter in self.parameters():
                parameter.requires_grad_(id(parameter) in trained)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of tokens (n, length)."""
        n, length = tokens.shape
        places = torch.arange(length, device=tokens.device)
        real = torch.ones_like(tokens, dtype=torch.bool) if self.info.padding is None else tokens != self.info.padding
        itself = torch.eye(length, dtype=torch.bool, device=tokens.device)
        seen = real[:, None, :].expand(n, length, length)
        if self.decoder:
            seen = seen & (places[:, None] >= places[None, :])
        x = self.dropout(self.token(tokens) + self.position(places))
        for block in self.blocks:
            x = block(x, seen | itself)
        x = self.norm(x)
        if self.info.causal:
            return torch.as_tensor(self.fc(x).transpose(1, 2))
        if self.decoder:
            weights = (places == (real * places).amax(dim=1, keepdim=True)).to(x.dtype)
        else:
            weights = real.to(x.dtype) / real.sum(dim=1, keepdim=True).clamp(min=1)
        return torch.as_tensor(self.fc((weights[:, :, None] * x).sum(dim=1)))


def _build(
    shape: tuple[int, ...],
    outputs: int,
    width: int,
    tokens: TokenInfo,
    *,
    name: str,
    decoder: bool,
    depth: int = 2,
    dropout: float = 0.0,
    rank: int = 0,
) -> nn.Module:
    if tokens.causal and not decoder:
        raise BadInput(f"model '{name}' sees what follows, so it can't learn to predict it; use a decoder")
    return Transformer(shape[0], outputs, width, depth, tokens, dropout, decoder=decoder, rank=rank)


_GPT2 = "after Radford et al. 2019 (GPT-2)"
_BERT = "after Devlin et al. 2019, BERT (NAACL), normalised before each part, by the mean over tokens"
_LORA = "after Radford et al. 2019 (GPT-2) and Hu et al. 2022, LoRA (ICLR), on queries, keys and values"
for _name, _summary, _paper, _more in (
    ("decoder", "a two-layer transformer that sees what precedes: next tokens, or classes", _GPT2, {}),
    ("decoder-4", "the same with four layers", _GPT2, {"depth": 4}),
    ("decoder-dropout", "the two-layer decoder with dropout 0.1", _GPT2, {"dropout": _DROPOUT}),
    ("decoder-lora", "the two-layer decoder, of which adapters of rank 16 are trained (LoRA)", _LORA, {"rank": _RANK}),
    ("encoder", "a two-layer transformer that sees the whole sequence: classes", _BERT, {}),
    ("encoder-dropout", "the two-layer encoder with dropout 0.1", _BERT, {"dropout": _DROPOUT}),
):
    MODELS.register(_name, _summary, input="tokens", width=_WIDTH, paper=_paper)(
        partial(_build, name=_name, decoder=_name.startswith("decoder"), **_more)
    )
