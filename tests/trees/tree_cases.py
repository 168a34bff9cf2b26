"""Federations of trees without xgboost: boosters written by hand, or grown by scikit-learn's trees."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.tree import DecisionTreeRegressor
from torch import Tensor

from fedaudit.task.info import TaskInfo
from fedaudit.task.training import LOSSES
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.transcript import Transcript
from fedaudit_trees.model import TreeEnsemble
from fedaudit_trees.record import TreeMessage, TreeSpec, tree_record

ETA, LAMBDA = 0.3, 1.0
Floats = NDArray[np.float64]


def model(*trees: dict[str, Any], features: int = 2, objective: str = "binary:logistic") -> bytes:
    """Return the JSON that xgboost 3.2 gives of such trees."""
    score = "[5E-1]" if objective == "binary:logistic" else "[0E0]"
    learner = {
        "feature_names": [],
        "gradient_booster": {"model": {"trees": trees}, "name": "gbtree"},
        "learner_model_param": {"base_score": score, "num_class": "0", "num_feature": str(features)},
        "objective": {"name": objective},
    }
    return json.dumps({"learner": learner, "version": [3, 2, 0]}).encode()


def stump(feature: int, at: float, left: tuple[float, float], right: tuple[float, float]) -> dict[str, Any]:
    """Return a tree of one split; ``left`` and ``right`` are (G, H)."""
    values = [-ETA * g / (h + LAMBDA) for g, h in (left, right)]
    return {
        "left_children": [1, -1, -1],
        "right_children": [2, -1, -1],
        "split_indices": [feature, 0, 0],
        "split_conditions": [at, *values],
        "base_weights": [0.0, *values],
        "sum_hessian": [left[1] + right[1], left[1], right[1]],
        "split_type": [0, 0, 0],
    }


def boosted(x: Floats, y: Floats, rounds: int, depth: int, *, logistic: bool = True) -> tuple[bytes, Floats]:
    """Return trees grown on (n, d) rows by Newton's method, of scikit-learn's structure, and the margins (n,)."""
    margin, trees = np.zeros(len(x)), []
    for _ in range(rounds):
        p = 1 / (1 + np.exp(-margin)) if logistic else margin
        g, h = p - y, p * (1 - p) if logistic else np.ones(len(x))
        fitted = DecisionTreeRegressor(max_depth=depth, random_state=0).fit(x, -g / h, sample_weight=h)
        tree, at = fitted.tree_, fitted.apply(x)
        sums = {leaf: (g[at == leaf].sum(), h[at == leaf].sum()) for leaf in np.unique(at)}
        value = np.array(
            [-ETA * sums[i][0] / (sums[i][1] + LAMBDA) if i in sums else 0.0 for i in range(tree.node_count)]
        )
        cover = np.array([h[fitted.decision_path(x).toarray()[:, i] > 0].sum() for i in range(tree.node_count)])
        inner = tree.children_left >= 0
        trees.append(
            {
                "left_children": tree.children_left.tolist(),
                "right_children": tree.children_right.tolist(),
                "split_indices": np.where(inner, tree.feature, 0).tolist(),
                "split_conditions": np.where(inner, tree.threshold, value).tolist(),
                "base_weights": value.tolist(),
                "sum_hessian": cover.tolist(),
            }
        )
        margin = margin + value[at]
    return model(*trees, features=x.shape[1], objective="binary:logistic" if logistic else "reg:squarederror"), margin


def transcript(
    *messages: tuple[int, int, bytes, int], features: int = 2, classes: int | None = 2, clients: int = 1, **spec: Any
) -> Transcript:
    """Return the transcript of a federation of trees; messages are (round, client, JSON, examples)."""
    info = TaskInfo(
        model="xgboost", width=None, batch_norm="eval", loss="cross-entropy" if classes else "mse", kind="table",
        input_shape=(features,), num_classes=classes, mean=(0.0,), std=(1.0,),
    )  # fmt: skip
    record = tree_record(TreeSpec(reg_lambda=LAMBDA, **spec), ETA, clients, [TreeMessage(*m) for m in messages])
    module = TreeEnsemble(info.outputs)
    return Transcript("f", info, module, LOSSES[info.loss], [], sent=record)


def seen(*messages: tuple[int, int, bytes, int], **rest: Any) -> Observation:
    """Return what the server sees of the first client."""
    return observe(transcript(*messages, **rest), ThreatModel()).split("client")[0]


def rows_of(x: Tensor, y: Tensor) -> list[tuple[bool, bool, int]]:
    """Return the quadrants of (n, 2) rows with their labels, sorted."""
    return sorted((bool(a < 0), bool(b < 0), int(c)) for (a, b), c in zip(x.tolist(), y.tolist(), strict=True))


def noise(n: int, d: int, seed: int = 0) -> Floats:
    """Return (n, d) normal rows, as float32 has them."""
    drawn = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    return np.asarray(drawn.double().numpy())
