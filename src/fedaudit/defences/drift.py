"""What a client remembers of the models that it received, and whether the next one goes on from them."""

from __future__ import annotations

import math
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
_TIMES = 2.0  # the largest of the last rounds: up to there a measured value is ordinary
_MOST_GAP = 8  # missed rounds that count: it is the server that says which round it is


@dataclass
class ReceivedHistory:
    """What a client remembers of the models that it received in a job: the last one's weights, and a few numbers.

    Attributes:
        last: the last model's parameters of two axes or more (float32, on the CPU).
        index: the last one's round; -1: not known.
        changes: of each of up to 8 rounds, layer to |W_t − W_(t−1)| / |W_(t−1)|.
        gaps: of as many, rounds that lay between t − 1 and t, at most 8; 1 where they aren't known.
        rows: of as many, layer to its rows' lengths (float64).
        values: of as many, what checks measured on the client's own examples, by the check's name.
    """

    last: dict[str, Tensor] = field(default_factory=dict)
    index: int = -1
    changes: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=KEPT))
    gaps: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    rows: deque[dict[str, Tensor]] = field(default_factory=lambda: deque(maxlen=KEPT))
    values: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=KEPT))

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered, as plain values and tensors."""
        return {"last": self.last, "index": self.index, **{name: list(getattr(self, name)) for name in _NUMBERS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what :meth:`state_dict` returned."""
        self.last, self.index = dict(state["last"]), int(state.get("index", -1))
        for name in _NUMBERS:
            setattr(self, name, deque(state.get(name, ()), maxlen=KEPT))
        if any(not isinstance(lengths, Tensor) for one in self.rows for lengths in one.values()):
            self.rows.clear()  # 0.2.0 kept how many rows count
        if len(self.gaps) < len(self.changes):  # as 0.2.0 kept them
            self.gaps = deque([1] * len(self.changes), maxlen=KEPT)

    def limit(self, check: str, fixed: float, most: float = math.inf) -> float:
        """Return twice the largest value of a check in the last rounds, at least ``fixed``: more isn't ordinary.

        Of a value that can't be above ``most`` it lies at most half way from the largest to that.
        """
        largest = max((one[check] for one in self.values if check in one), default=0.0)
        return max(fixed, min(_TIMES * largest, (largest + most) / 2))

    def add(
        self, state: Mapping[str, Tensor], values: Mapping[str, float], index: int | None = None
    ) -> tuple[dict[str, float], dict[str, float], float]:
        """Compare a model with the last ones, then remember it.

        Args:
            state: as received.
            values: of checks on the client's own examples, by their names; ``loss``: in those of guessing.
            index: of the round; None: it isn't known, and taken for the one after the last.

        Returns:
            Layer to how many robust standard deviations the logarithm of its change lies above the median of the last
            ones', of changes as they are or by round, whichever says less; layer to the share of its rows that count no
            more; by how much the loss lies above the largest of the last ones and twice their range. Empty, and 0,
            where fewer than 3 are remembered. Infinite where a layer's weights were finite and aren't any more: the
            next one is compared with those that were.
        """
        gap = min(max(1, index - self.index), _MOST_GAP) if index is not None and self.index >= 0 else 1
        layers = {
            name: tensor.detach().float().cpu().clone()
            for name, tensor in state.items()
            if tensor.ndim >= 2 and tensor.is_floating_point()
        }
        broken = {name for name, w in layers.items() if not math.isfinite(float(w.norm()))}
        kept = {name: self.last[name] for name in broken if name in self.last}  # the next one goes on from these
        layers = {name: w for name, w in layers.items() if name not in broken}
        fits = {name: w for name, w in layers.items() if name in self.last and w.shape == self.last[name].shape}
        change = {
            name: float((w - self.last[name]).norm() / self.last[name].norm().clamp(min=1e-30))
            for name, w in fits.items()
        }
        rows = {name: w.flatten(1).double().norm(dim=1) for name, w in layers.items()}
        jumps = {name: self._jump(name, value, gap) for name, value in change.items()} | dict.fromkeys(kept, math.inf)
        lost = {name: self._lost(name, lengths) for name, lengths in rows.items()}
        losses = [one["loss"] for one in self.values if "loss" in one]
        rise = 0.0
        if "loss" in values and len(losses) >= FEWEST:
            rise = values["loss"] - max(losses) - 2 * (max(losses) - min(losses))
        self.last, self.index = layers | kept, self.index if index is None else index
        self.rows.append(rows)
        if any(change.values()):  # the same model again and again mustn't push the others out
            self.changes.append(change)
            self.gaps.append(gap)
        if values:
            self.values.append(dict(values))
        return jumps, lost, rise

    def _jump(self, name: str, change: float, gap: int) -> float:
        """Return the smaller of two: who wasn't asked for long meets larger changes, but not in proportion to that."""
        past = [
            (one[name], rounds)
            for one, rounds in zip(self.changes, self.gaps, strict=True)
            if one.get(name, 0) > 0  # a layer that came back as it was says nothing of how far it moves
        ]
        if len(past) < FEWEST or not change > 0:
            return 0.0
        whole = _deviations([moved for moved, _ in past], change)
        return min(whole, _deviations([moved / rounds for moved, rounds in past], change / gap))

    def _lost(self, name: str, lengths: Tensor) -> float:
        """Return by how much fewer rows count now, each as long as now or as usual, whichever is less.

        So a row that grew takes nothing from the others: in training a few may grow until the rest hardly counts.
        """
        past = [one[name] for one in self.rows if name in one and one[name].shape == lengths.shape]
        if len(past) < FEWEST:
            return 0.0
        usual = torch.stack(past).median(dim=0).values
        before = _counting(usual)
        return max(0.0, 1 - _counting(lengths.minimum(usual)) / before) if before else 0.0


_NUMBERS = ("changes", "gaps", "rows", "values")


def _deviations(past: list[float], now: float) -> float:
    logs = torch.tensor(past, dtype=torch.float64).log()
    scatter = _NORMAL * float((logs - logs.median()).abs().median())
    return (math.log(now) - float(logs.median())) / max(scatter, _FLOOR)


def _counting(lengths: Tensor) -> float:
    """Return how many rows count, (Σ ‖w‖)² / Σ ‖w‖²: all where they are alike, 0 of a layer of zeros."""
    total = float(lengths.square().sum())
    return float(lengths.sum()) ** 2 / total if total > 0 else 0.0
