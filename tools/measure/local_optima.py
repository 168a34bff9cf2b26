"""How far Adult's clients' own models are from each other: python -m tools.measure.local_optima DATA [SEED].

Xu & Neglia 2021, Figure 1a: the relative Euclidean distance between the clients' own optima, those of the first three
(doctorates only) being far from the others'. Each optimum is scikit-learn's logistic regression. Departure: with its
usual penalty, C = 1, for some columns are constant with a client or tell its classes apart, and then there is no finite
optimum. A distance is relative to the mean of the two models' norms, which the paper doesn't say. The three clients are
small besides: as a control, as few examples of three others are taken.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression

from fedaudit.data import Split, load_dataset
from fedaudit.simulation.simulator import partition_clients
from fedaudit.simulation.spec import FederationSpec

_DOCTORS = 3  # the clients that hold doctorates only come first
Array = np.ndarray[Any, Any]


def main() -> None:
    """Print the distances, and their means within and between the two groups, as Markdown."""
    data = load_dataset("adult-phd", data_dir=Path(sys.argv[1]))
    spec = FederationSpec.model_validate({"name": "f", "clients": 10, "partition": {"scheme": "natural"}})
    held = partition_clients(data, "train", spec, seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    doctors, others = held[:_DOCTORS], held[_DOCTORS:]
    few = [other[: len(doctor)] for doctor, other in zip(doctors, others, strict=False)]
    models = np.array([_optimum(split) for split in [*held, *few]])
    norms = np.linalg.norm(models, axis=1)
    apart = np.linalg.norm(models[:, None] - models, axis=2) / ((norms[:, None] + norms) / 2)
    clients = range(len(held))
    print("| client |", " | ".join(map(str, clients)), "|")
    print("|---" * (len(held) + 1) + "|")
    for i in clients:
        print(f"| {i} |", " | ".join(f"{apart[i, j]:.2f}" for j in clients), "|")
    rest = slice(_DOCTORS, len(held))
    among = apart[rest, rest][np.triu_indices(len(others), 1)].mean()
    # the control's own clients, whose examples it has, are left out
    control = apart[len(held) :, 2 * _DOCTORS : len(held)].mean()
    print(
        f"\ndoctorates to others {apart[:_DOCTORS, rest].mean():.2f}, others among themselves {among:.2f}, "
        f"as few examples of others to others {control:.2f}"
    )


def _optimum(split: Split) -> Array:
    found = LogisticRegression(max_iter=5000, tol=1e-8).fit(split.inputs.double().numpy(), split.targets.numpy())
    return np.array([*found.coef_[0], *found.intercept_])


if __name__ == "__main__":
    main()
