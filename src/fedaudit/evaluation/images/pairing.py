"""Which recovered image stands for which true one: the pairing of least total error, in every part."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedaudit.evaluation.images.space import Case


def pair(case: Case, images: Tensor) -> Tensor:
    """Return (k,) which of the (n, ...) images stand for the true ones, by least total squared error in each part."""
    chosen = []
    for part in case.parts:
        true = case.kind.vectors(case.truth.inputs[part.key])
        chosen.append(part.rows[assign(true, case.kind.vectors(images[part.rows]))])
    return torch.cat(chosen)


def assign(true: Tensor, images: Tensor, alike: Tensor | None = None) -> Tensor:
    """Return, for each of n ``true`` images or vectors, the index of the one of n ``images`` that is paired with it.

    The one-to-one pairing of least total squared error (Hungarian method). ``alike``: (n, n) bool, the pairs that come
    before all others.
    """
    cost = torch.cdist(true.flatten(1).double(), images.flatten(1).double()).square()
    if alike is not None:
        cost += ~alike * (1 + cost.sum())
    _, columns = linear_sum_assignment(cost.numpy())
    return torch.as_tensor(columns, dtype=torch.int64)


def matching(case: Case) -> float | None:
    """Return the share of images that were rightly tied to several rounds; None where each is of one round only.

    What one round alone gave (:attr:`ImageFinding.separate`) tells which example an image stands for, where the attack
    kept it: what is made of a wrong tie is like neither example. Equal labels come before all others.
    """
    finding, vectors = case.finding, case.kind.vectors
    if all(len(rounds) < 2 for rounds in finding.rounds):
        return None
    partners: dict[int, list[Tensor]] = {}
    for part in case.parts:
        images, labels = finding.images[part.rows], finding.labels[part.rows]
        if finding.separate:
            epoch = finding.rounds[int(part.rows[0])].index(part.key[0])
            images, labels = (of[part.rows] for of in finding.separate[epoch])
        true, true_labels = (of[part.key] for of in (case.truth.inputs, case.truth.labels))
        columns = assign(vectors(true), vectors(images), true_labels[:, None] == labels)
        for example, row in zip(true, part.rows[columns].tolist(), strict=True):
            partners.setdefault(row, []).append(example)
    tied = [examples for examples in partners.values() if len(examples) > 1]
    right = sum(all(e.equal(examples[0]) for e in examples) for examples in tied)
    return right / len(tied) if tied else None
