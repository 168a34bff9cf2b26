"""What a client remembers of the models that it received, and whether the next one goes on from them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

KEPT = 8  # changes that are remembered
FEWEST = 3  # changes by which the next one is judged
_FLOOR = 0.25  # least scatter of a change's logarithm: by so much ordinary ones differ
_NORMAL = 1.4826  # times the median absolute deviation is a normal variable's standard deviation


@dataclass
class ReceivedHistory:
    """What a client remembers of the models that it received in a job: the last one's weights, and a few numbers.

    Attributes:
        last: the last model's parameters of two axes or more (float32, on the CPU).
        changes: of each of up to 8 rounds, layer to |W_t − W_(t−1)| / |W_(t−1)|.
        rows: of as many, layer to the number of rows that count, (Σ ‖w‖)² / Σ ‖w‖².
        losses: of as many, on the client's own examples, in those of guessing.
    """

    last: dict[str, Tensor] = field(default_factory=dict)
    changes: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=KEPT))
    rows: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=KEPT))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered, as plain values and tensors."""
        numbers = {name: list(getattr(self, name)) for name in ("changes", "rows", "losses")}
        return {"last": self.last, **numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what :meth:`state_dict` returned."""
        self.last = dict(state["last"])
        for name in ("changes", "rows", "losses"):
            setattr(self, name, deque(state[name], maxlen=KEPT))

    def add(self, state: Mapping[str, Tensor], loss: float | None) -> tuple[dict[str, float], dict[str, float], float]:
        """Compare a model with the last ones, then remember it.

        Args:
            state: as received.
            loss: on the client's own examples, in those of guessing; None: it isn't known.

        Returns:
            Layer to how many robust standard deviations the logarithm of its change lies above the median of the last
            ones'; layer to the share of its rows that count no more; by how much the loss lies above the median of the
            last ones. Empty, and 0, where fewer than 3 are remembered.
        """
        layers = {
            name: tensor.detach().float().cpu().clone()
            for name, tensor in state.items()
            if tensor.ndim >= 2 and tensor.is_floating_point()
        }
        fits = {name: w for name, w in layers.items() if name in self.last and w.shape == self.last[name].shape}
        change = {
            name: float((w - self.last[name]).norm() / self.last[name].norm().clamp(min=1e-30))
            for name, w in fits.items()
        }
        rows = {name: _rows(w) for name, w in layers.items()}
        jumps = {name: self._jump(name, value) for name, value in change.items()}
        lost = {name: self._lost(name, value) for name, value in rows.items()}
        rise = 0.0
        if loss is not None and len(self.losses) >= FEWEST:
            rise = loss - statistics.median(self.losses)
        self.last = layers
        self.rows.append(rows)
        if change:
            self.changes.append(change)
        if loss is not None:
            self.losses.append(loss)
        return jumps, lost, rise

    def _jump(self, name: str, change: float) -> float:
        past = torch.tensor([one[name] for one in self.changes if name in one], dtype=torch.float64)
        past = past[past > 0].log()  # a layer that came back as it was says nothing of how far it moves
        if len(past) < FEWEST or not change > 0:
            return 0.0
        scatter = _NORMAL * float((past - past.median()).abs().median())
        return (float(torch.tensor(change, dtype=torch.float64).log()) - float(past.median())) / max(scatter, _FLOOR)

    def _lost(self, name: str, count: float) -> float:
        past = [one[name] for one in self.rows if one.get(name)]
        return max(0.0, 1 - count / statistics.median(past)) if len(past) >= FEWEST else 0.0


def _rows(weight: Tensor) -> float:
    """Return (Σ ‖w‖)² / Σ ‖w‖² over rows: as many as there are where all are alike, 0 of a layer of zeros."""
    lengths = weight.flatten(1).double().norm(dim=1)
    total = float(lengths.square().sum())
    return float(lengths.sum()) ** 2 / total if total > 0 else 0.0
