"""Recurrent networks over signals: (channels, time) as a sequence of time steps, the last hidden state classified."""

from __future__ import annotations

from torch import Tensor, nn

from fedaudit.models.families import MODELS


class Recurrent(nn.Module):
    """A recurrent layer, LSTM or GRU, over a signal's time steps, and a linear layer on its last hidden state."""

    def __init__(self, layer: type[nn.LSTM | nn.GRU], channels: int, outputs: int, width: int) -> None:
        super().__init__()
        self.recurrent = layer(channels, width, batch_first=True)
        self.fc = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, time) -> logits (N, outputs)."""
        states, _ = self.recurrent(x.transpose(1, 2))
        logits: Tensor = self.fc(states[:, -1])
        return logits


@MODELS.register(
    "lstm",
    "one LSTM layer over a signal's time steps, one linear layer on its last state",
    input="signal",
    width=64,
    paper="Hochreiter & Schmidhuber 1997, Long Short-Term Memory (Neural Computation)",
)
def lstm(input_shape: tuple[int, ...], outputs: int, w: int) -> nn.Module:
    """Return an LSTM with forget gates (Gers et al. 2000), as torch has it, of w hidden units."""
    return Recurrent(nn.LSTM, input_shape[0], outputs, w)


@MODELS.register(
    "gru",
    "one layer of gated recurrent units over a signal's time steps, one linear layer on its last state",
    input="signal",
    width=64,
    paper="Cho et al. 2014, Learning Phrase Representations using RNN Encoder-Decoder (EMNLP)",
)
def gru(input_shape: tuple[int, ...], outputs: int, w: int) -> nn.Module:
    """Return a layer of w gated recurrent units, as torch has it: the reset gate is applied after the product."""
    return Recurrent(nn.GRU, input_shape[0], outputs, w)
