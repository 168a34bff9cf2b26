"""Boosted trees: xgboost's own JSON, read within bounds and without xgboost, and the ensemble that they make."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic_core import from_json
from torch import Tensor, nn

from fedaudit.utils import BOOSTER, BadInput

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]

MODEL = "xgboost"  # the name of the model in scenarios and results
OBJECTIVES = ("binary:logistic", "reg:squarederror")
_DEEPEST = 32
_KEYS = ("left_children", "right_children", "split_indices", "split_conditions")
_SUMS = ("base_weights", "sum_hessian", "loss_changes")


@dataclass(frozen=True, eq=False)
class Tree:
    """One tree of m nodes; node 0 is the root.

    Attributes:
        value: (m,) float32 of a node: x < value goes left; of a leaf, what is added to the margin (its weight times η).
        weights: (m,) of a leaf −η·G/(H + λ), of the sums of those who trained it; None where they weren't sent.
        cover: (m,) H, the sum of the hessians of the examples in a node; None where it wasn't sent, or was masked.
        gain: (m,) what an inner node's split gains, G_L²/(H_L + λ) + G_R²/(H_R + λ) − G²/(H + λ); None likewise.
    """

    left: Whole
    right: Whole
    feature: Whole
    value: NDArray[np.float32]
    weights: Floats | None
    cover: Floats | None
    gain: Floats | None = None

    @property
    def leaves(self) -> Whole:
        """Return (J,) the numbers of the leaves, in ascending order."""
        return np.flatnonzero(self.left < 0)

    def boxes(self, features: int) -> tuple[Floats, Floats]:
        """Return (J, d) twice: an example in leaf j has low ≤ x < high in every feature."""
        low, high = np.full((len(self.left), features), -np.inf), np.full((len(self.left), features), np.inf)
        for node in self._order():
            if self.left[node] < 0:
                continue
            f, v = self.feature[node], float(self.value[node])
            for child in (self.left[node], self.right[node]):
                low[child], high[child] = low[node], high[node]
            high[self.left[node], f] = min(high[node, f], v)
            low[self.right[node], f] = max(low[node, f], v)
        return low[self.leaves], high[self.leaves]

    def reached(self, rows: NDArray[np.float32]) -> Whole:
        """Return (n,) the leaf that each of (n, d) rows ends in."""
        at = np.zeros(len(rows), dtype=np.int64)
        for _ in range(_DEEPEST):
            inner = self.left[at] >= 0
            if not inner.any():
                break
            goes = rows[np.arange(len(rows)), self.feature[at]] < self.value[at]
            at = np.where(inner, np.where(goes, self.left[at], self.right[at]), at)
        return at

    def margin(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return (n,) what the tree adds to the margin of each of (n, d) rows."""
        return self.value[self.reached(rows)]

    def with_cover(self, rate: float, penalty: float) -> Tree:
        """Return the tree with the cover that weights and gains imply, if it wasn't sent; itself where they don't tell.

        For a split into l and r, with w = −G/(H + λ) at each node, G = G_l + G_r and H = H_l + H_r are two linear
        equations: H_r + λ = (gain + λ·w·w_l) / ((w_r − w)(w_r − w_l)), and likewise on the other side.

        Args:
            rate: η, by which the weights of leaves are scaled.
            penalty: λ.
        """
        inner = np.flatnonzero(self.left >= 0)
        if self.cover is not None or self.gain is None or self.weights is None or not len(inner):
            return self
        w, cover = np.where(self.left < 0, self.weights / rate, self.weights), np.zeros(len(self.left))
        own, gain = w[inner], self.gain[inner]
        with np.errstate(divide="ignore", invalid="ignore"):
            for side, other in ((self.left[inner], self.right[inner]), (self.right[inner], self.left[inner])):
                cover[side] = (gain + penalty * own * w[other]) / ((w[side] - own) * (w[side] - w[other])) - penalty
        cover[0] = cover[self.left[0]] + cover[self.right[0]]
        return replace(self, cover=np.maximum(cover, 0.0)) if np.isfinite(cover).all() else self

    def _order(self) -> list[int]:
        """Return the nodes from the root down."""
        order = [0]
        for node in order:
            if self.left[node] >= 0:
                order += [int(self.left[node]), int(self.right[node])]
        return order


@dataclass(frozen=True, eq=False)
class Booster:
    """A model of xgboost, or a part; ``base``: the margin before the first tree, of ``binary:logistic`` a logit."""

    objective: str
    base: float
    features: int
    trees: tuple[Tree, ...]


def read_booster(data: bytes, where: str) -> Booster:
    """Read what xgboost gives as ``save_raw("json")`` (from 1.6, tested with 3.2); ``where`` names it in errors."""
    if len(data) > BOOSTER.file:
        raise BadInput(f"{where} is larger than {BOOSTER.file:,} bytes, the most that are read of {BOOSTER.what}")
    try:
        learner = from_json(data)["learner"]
        objective, known = str(learner["objective"]["name"]), learner["learner_model_param"]
        kind = str(learner["gradient_booster"]["name"])
        features = int(known["num_feature"])
        score, *others = [float(part) for part in str(known["base_score"]).strip("[]").split(",")]
        model = learner["gradient_booster"]["model"] if kind == "gbtree" else {"trees": []}
        found, parallel = model["trees"], str(model.get("gbtree_model_param", {}).get("num_parallel_tree", "1"))
        nodes = sum(len(tree["left_children"]) for tree in found)
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise BadInput(
            f"{where}: not a model of xgboost in JSON, as save_raw('json') gives it, which UBJSON isn't "
            f"({type(error).__name__}: {str(error)[:100]})"
        ) from None
    if kind != "gbtree" or objective not in OBJECTIVES:
        raise BadInput(
            f"{where}: a {kind[:40]} of objective {objective[:40]}; gbtree of {' or '.join(OBJECTIVES)} is read"
        )
    if others or str(known.get("num_class", "0")) not in ("0", "1") or not 1 <= features <= 10**5:
        raise BadInput(f"{where}: models of one output and 1 to 100,000 features are read")
    if parallel != "1":
        raise BadInput(f"{where}: trees grown {parallel[:10]} at once; num_parallel_tree: 1 is read")
    if BOOSTER.items is not None and nodes > BOOSTER.items:
        raise BadInput(f"{where}: {nodes:,} nodes; at most {BOOSTER.items:,} are read")
    if objective == OBJECTIVES[0]:
        if not 0 < score < 1:
            raise BadInput(f"{where}: the base score {score:g} is no probability")
        score = math.log(score / (1 - score))
    if not math.isfinite(score):
        raise BadInput(f"{where}: the base score isn't finite")
    trees = tuple(_tree(tree, features, f"{where}, tree {i}") for i, tree in enumerate(found))
    return Booster(objective, score, features, trees)


def _tree(given: Any, features: int, where: str) -> Tree:
    try:
        left, right, feature = (np.array(given[key], dtype=np.int64) for key in _KEYS[:3])
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            value = np.array(given[_KEYS[3]], dtype=np.float32)
        more = [np.array(given[k], dtype=np.float64) if given.get(k) else None for k in _SUMS]
        categorical = any(given.get("split_type") or ())
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise BadInput(f"{where}: {type(error).__name__}: {str(error)[:100]}") from None
    m = len(left)
    whole = [part for part in (left, right, feature, value, *more) if part is not None]
    if not m or any(part.shape != (m,) for part in whole) or not all(np.isfinite(part).all() for part in whole):
        raise BadInput(f"{where}: its nodes' numbers aren't one each, or not finite")
    if categorical:
        raise BadInput(f"{where}: it splits by categories; one-hot columns are read (enable_categorical=False)")
    inner = left >= 0
    children = np.concatenate([left[inner], right[inner]])
    # Every node but the root is somebody's child, once, and comes after it: so there is no circle.
    if (
        not np.array_equal(np.sort(children), np.arange(1, m))
        or bool((np.concatenate([np.flatnonzero(inner)] * 2) >= children).any())
        or bool((right[~inner] >= 0).any())
        or bool(((feature < 0) | (feature >= features))[inner].any())
    ):
        raise BadInput(f"{where}: its nodes make no tree of {features} features (pruned trees are sent without gaps)")
    depth = np.zeros(m, dtype=np.int64)
    for node in np.flatnonzero(inner):
        depth[[left[node], right[node]]] = depth[node] + 1
    if depth.max() > _DEEPEST:
        raise BadInput(f"{where}: deeper than {_DEEPEST}")
    if more[1] is not None and bool((more[1] < 0).any()):
        raise BadInput(f"{where}: a negative sum of hessians")
    if m > 1 and more[1] is not None and bool((more[1] == 1).all()):  # as NVFlare masks it; children would add up to 2
        more[1] = None
    return Tree(left, right, feature, value, *more)


def write_booster(booster: Booster) -> bytes:
    """Return a model as JSON with the fields that :func:`read_booster` reads, as far as its trees have them."""
    score = 1 / (1 + math.exp(-booster.base)) if booster.objective == OBJECTIVES[0] else booster.base
    trees = []
    for tree in booster.trees:
        own: dict[str, Any] = dict(zip(_KEYS, (tree.left, tree.right, tree.feature, tree.value), strict=True))
        sums = zip(_SUMS, (tree.weights, tree.cover, tree.gain), strict=True)
        own |= {key: values for key, values in sums if values is not None}
        trees.append({key: values.tolist() for key, values in own.items()})
    learner = {
        "objective": {"name": booster.objective},
        "learner_model_param": {"base_score": repr(score), "num_class": "0", "num_feature": str(booster.features)},
        "gradient_booster": {"name": "gbtree", "model": {"trees": trees}},
    }
    return json.dumps({"learner": learner}, separators=(",", ":")).encode()


class TreeEnsemble(nn.Module):
    """The global model of a federation of trees, as everybody could evaluate it: margins as logits.

    Args:
        outputs: 2, classes: it returns (n, 2), zero and the margin; 1, a number: (n, 1), the margin.
        base: the margin before the first tree; the one parameter that isn't in trees.
    """

    def __init__(self, outputs: int, base: float = 0.0, trees: Sequence[Tree] = ()) -> None:
        super().__init__()
        self.outputs = outputs
        self.base = nn.Parameter(torch.tensor([base]))
        self.trees = tuple(trees)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (n, outputs) of inputs (n, d)."""
        rows = inputs.detach().cpu().numpy().astype(np.float32)
        total = np.zeros(len(rows), dtype=np.float32)
        for tree in self.trees:
            total += tree.margin(rows)
        margin = (torch.from_numpy(total).to(inputs.device) + self.base)[:, None]
        return margin if self.outputs == 1 else torch.cat([torch.zeros_like(margin), margin], dim=1)
