"""LEAF's synthetic federated classification, drawn and not read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedaudit.data import Dataset, Layout, Request, Split, add_dataset
from fedaudit.modalities import example_kind

# The clients of Xu & Neglia 2021, Section 4.
_SIZES = (280, 184, 1536, 256, 208)
_FEATURES, _CLASSES, _CLUSTERS = 10, 2, 5
_HELD_OUT = 4  # one example is held out for every so many that a client has


def leaf_synthetic(
    sizes: tuple[int, ...], *, features: int, classes: int, clusters: int, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """Draw each client's inputs, float64 (n, features), and labels as LEAF does (Caldas et al. 2018, Appendix A).

    Every cluster k has a centre μ_k; client t of cluster k_t has the linear model Q·u_t, with u_t near μ_k and a matrix
    Q that all share, and inputs around a centre of its own, with variances i^(−1.2). Labels are the arg max of the
    noisy outputs. Clusters are equally likely. Sizes are given, where LEAF draws them; its random stream is another.
    """
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(features + 1, classes, clusters))
    variances = np.arange(1, features + 1) ** -1.2
    centres = rng.normal(rng.normal(size=(clusters, 1)), 1.0, size=(clusters, clusters))
    clients = []
    for n in sizes:
        centre = centres[rng.integers(clusters)]
        place = rng.normal(rng.normal(), 1.0, size=features)
        x = place + rng.normal(size=(n, features)) * np.sqrt(variances)
        model = shared @ rng.normal(centre, 0.1)  # (features + 1, classes)
        outputs = np.concatenate([np.ones((n, 1)), x], axis=1) @ model + rng.normal(0, 0.1, size=(n, classes))
        clients.append((torch.from_numpy(x), torch.from_numpy(outputs.argmax(axis=1))))
    return clients


def _leaf(_: list[Path], request: Request) -> Dataset:
    drawn = leaf_synthetic(
        tuple(n + n // _HELD_OUT for n in _SIZES),
        features=_FEATURES,
        classes=_CLASSES,
        clusters=_CLUSTERS,
        seed=request.seed,
    )
    parts: list[list[tuple[Tensor, Tensor, Tensor]]] = [[], []]
    for client, ((x, y), n) in enumerate(zip(drawn, _SIZES, strict=True)):
        for part, rows in zip(parts, (slice(n), slice(n, None)), strict=True):
            part.append((x[rows], y[rows], torch.full_like(y[rows], client)))
    (x, y, groups), (x_test, y_test, groups_test) = (
        tuple(torch.cat(column) for column in zip(*part, strict=True)) for part in parts
    )
    x, x_test, mean, std = example_kind("table").prepare(x, x_test)
    source = f"drawn here by LEAF's generator (Caldas et al. 2018) with seed {request.seed}"
    return Dataset(
        name=request.name,
        summary=request.summary,
        kind="table",
        task="classification",
        train=Split(x, y, groups),
        test=Split(x_test, y_test, groups_test),
        num_classes=_CLASSES,
        class_names=None,
        mean=mean,
        std=std,
        source=source,
    )


add_dataset(
    "leaf-synthetic",
    "LEAF's synthetic classification: 10 features, 2 classes, 5 clusters, 5 clients of 184 to 1,536 examples (drawn)",
    "drawn by fedaudit",
    Layout(_leaf),
    kind="table",
    needs="nothing",
)
