"""How often nothing is called something: audits of true nulls, judged by the evaluation directly.

    python -m tests.measure.nulls [--audits 400] [--only rows]

Each null is what somebody could say who knows everything but the update: other people's rows and notes, of the same
labels; every class equally often. Beside it stands the power: how often an effect that is planted is found.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from scipy.stats import binomtest

from fedaudit.evaluation import FINDING_TYPES
from fedaudit.utils.seeds import generator
from tests.evaluation.test_rows import KINDS, people, scene
from tests.evaluation.test_sequences import NOTES
from tests.evaluation.test_sequences import judged as of_notes
from tests.evaluation.test_verdicts import judged as of_labels
from tests.evaluation.test_verdicts import labels_of

LEAKS = ("recovered", "identifiable", "inferred")


def rows(seed: int, *, planted: bool, size: int = 16) -> str:
    """Half of ``size`` rows are the update's own, or none is."""
    everybody, others = people(400, 1000 + seed), people(size, 500_000 + seed)
    found = torch.cat([everybody[: size // 2], others[size // 2 :]]) if planted else others
    return FINDING_TYPES["rows"].verdict([scene(found, everybody[:size], everybody, columns=KINDS)]).verdict


def notes(seed: int, *, planted: bool, size: int = 8) -> str:
    """Half of ``size`` notes are the update's own, or none is; the others are of the same wards."""
    order = torch.randperm(len(NOTES.train), generator=generator(seed, "notes"))
    true, labels = NOTES.train.inputs[order[:size]], NOTES.train.targets[order[:size]]
    others = []
    for i, label in enumerate(labels):
        alike = order[size:][NOTES.train.targets[order[size:]] == label]
        others.append(NOTES.train.inputs[alike[i]])
    own = size // 2 if planted else 0
    return of_notes(torch.cat([true[:own], torch.stack(others)[own:]]), true, labels, seed)


def labels(seed: int, *, planted: bool, clients: int = 10, batch: int = 16) -> str:
    """Every class equally often for each client, or half of the labels the client's own."""
    batches = torch.randint(10, (clients, batch), generator=generator(seed, "batches"))
    findings = []
    for client, true in enumerate(batches):
        found = torch.arange(batch) % 10
        if planted:
            found = torch.cat([true[: batch // 2], found[batch // 2 :]])
        findings.append(labels_of(true.tolist(), found.tolist(), 10, client=client))
    return of_labels(findings).verdict


NULLS: dict[str, Callable[..., str]] = {
    "rows, batch of 16": rows,
    "rows, batch of 4": lambda seed, planted: rows(seed, planted=planted, size=4),
    "notes, batch of 8": notes,
    "notes, batch of 2": lambda seed, planted: notes(seed, planted=planted, size=2),
    "labels, ten clients": labels,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--audits", type=int, default=400)
    parser.add_argument("--only", default="")
    told = parser.parse_args()
    print("| null | called a leak | at most (95 %) | planted effect found |\n|---|---|---|---|")
    for name, null in NULLS.items():
        if told.only not in name:
            continue
        false, true = (
            sum(null(seed, planted=planted) in LEAKS for seed in range(n))
            for planted, n in ((False, told.audits), (True, max(1, told.audits // 4)))
        )
        bound = binomtest(false, told.audits).proportion_ci(0.9).high
        n = max(1, told.audits // 4)
        print(f"| {name} | {false} of {told.audits} | {bound:.1%} | {true} of {n} |", flush=True)


if __name__ == "__main__":
    main()
