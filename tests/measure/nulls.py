"""How often nothing is called something: audits of true nulls, judged by the evaluation directly.

    python -m tests.measure.nulls [--audits 400] [--only rows]

Each null is what somebody could say who knows everything but the update: other people's rows, notes and pictures of the
same labels, class means in every round, every class equally often. Beside it stands the power: how often an effect that
is planted is found. Of ε the null is a mechanism that keeps its promise, and the effect one of four times the ε.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import numpy as np
import torch
from scipy.special import expit
from scipy.stats import binomtest
from torch import Tensor

from fedaudit.attacks import ImageFinding
from fedaudit.data import load_dataset
from fedaudit.epsilon import CanaryScores
from fedaudit.epsilon.bounds import demonstrated, gaussian_mu
from fedaudit.evaluation import FINDING_TYPES, evaluate
from fedaudit.evaluation.properties import covariates, partial_test
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import generator
from tests.evaluation.test_evaluation import seen
from tests.evaluation.test_rows import KINDS, people, scene
from tests.evaluation.test_sequences import NOTES
from tests.evaluation.test_sequences import judged as of_notes
from tests.evaluation.test_verdicts import judged as of_labels
from tests.evaluation.test_verdicts import labels_of, of_attributes, of_members

LEAKS = ("recovered", "identifiable", "inferred")


def rows(seed: int, *, planted: bool, size: int = 16) -> str:
    """All of ``size`` rows but two are the update's own, of four all, or none is."""
    everybody, others = people(400, 1000 + seed), people(size, 500_000 + seed)
    own = max(4, size - 2)
    found = torch.cat([everybody[:own], others[own:]]) if planted else others
    return FINDING_TYPES["rows"].verdict([scene(found, everybody[:size], everybody, columns=KINDS)]).verdict


def notes(seed: int, *, planted: bool, size: int = 8) -> str:
    """Half of ``size`` notes are the update's own, of two both, or none is; the others are of the same wards."""
    order = torch.randperm(len(NOTES.train), generator=generator(seed, "notes"))
    true, labels = NOTES.train.inputs[order[:size]], NOTES.train.targets[order[:size]]
    others = []
    for i, label in enumerate(labels):
        alike = order[size:][NOTES.train.targets[order[size:]] == label]
        others.append(NOTES.train.inputs[alike[i]])
    own = max(2, size // 2) if planted else 0
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


def pictures(
    found: Callable[[Tensor, Tensor, Tensor, torch.Generator], Tensor], style: bool = False
) -> Callable[..., str]:
    """Return an audit of eight digits: ``found`` makes images of victims, labels, other digits of these, and luck."""

    def audit(seed: int, *, planted: bool, rounds: int = 1) -> str:
        data, rng = load_dataset("digits").test, generator(seed, "digits")
        order = torch.randperm(len(data.inputs), generator=rng)
        inputs, labels = data.inputs[order], data.targets[order]
        if style:  # the clients' digits are paler than everybody else's
            inputs = torch.cat([0.6 * inputs[:60] + 0.3, inputs[60:]])
        true, targets = inputs[:8], labels[:8]
        pool = slice(8, 60) if style else slice(8, None)
        others = torch.stack([_another(inputs[pool], labels[pool], int(label), rng) for label in targets])
        truth = Truth(
            {(r, 0): true for r in range(rounds)}, {(r, 0): targets for r in range(rounds)}, inputs, labels, {}
        )
        findings = []
        for r in range(rounds):
            images = found(true, targets, others, rng)
            if planted:
                noise = torch.randn(true.shape, generator=rng)
                images = torch.cat([true[:4] + 0.05 * noise[:4], 0.5 + 0.2 * noise[4:]])
            made = ImageFinding(attack="a", images=images.clamp(0, 1), labels=targets, label_source="given")
            findings.append(evaluate(made, seen([r], examples=8), truth, seed=seed).result)
        return FINDING_TYPES["images"].verdict(findings).verdict

    return audit


def _another(inputs: Tensor, labels: Tensor, label: int, rng: torch.Generator) -> Tensor:
    own = torch.nonzero(labels == label).flatten()
    own = own if len(own) else torch.arange(len(labels))
    return inputs[own[torch.randint(len(own), (), generator=rng)]]


@functools.cache
def means() -> Tensor:
    train = load_dataset("digits").train
    return torch.stack([train.inputs[train.targets == c].mean(0) for c in range(10)])


def named(true: Tensor, targets: Tensor, others: Tensor, rng: torch.Generator) -> Tensor:
    """Return pictures drawn from all that are of the label, the victims among them."""
    both = torch.stack([others, true])
    chosen = (torch.rand(len(true), generator=rng) < 1 / 36).long()  # some 36 of each digit
    return both[chosen, torch.arange(len(true))]


def property_of_clients(seed: int, *, planted: bool, clients: int = 50) -> str:
    """A property that goes with how far from even a client's classes are, which no line through the shares tells."""
    rng = np.random.default_rng(seed)
    shares = rng.random(clients)
    labels = [torch.from_numpy((rng.random(40) < share).astype(int)) for share in shares]
    uneven = np.array([(float(own.double().mean()) - 0.5) ** 2 for own in labels])
    has = uneven + 0.02 * rng.standard_normal(clients) > 0.06
    if planted:
        scores = has + 0.5 * rng.standard_normal(clients)
    else:
        scores = uneven + 0.02 * rng.standard_normal(clients)
    r, p = partial_test(scores, has.astype(float), covariates(labels, [40] * clients, shares), seed=seed, deals=999)
    return "inferred" if r > 0 and p <= 0.01 else "not demonstrated"


def epsilon(mechanism: str, claimed: float = 2.0, count: int = 1000) -> Callable[..., str]:
    """Return an audit of independent canaries under a mechanism whose ε is exactly what is claimed (δ = 1e-5)."""

    def audit(seed: int, *, planted: bool) -> str:
        rng = np.random.default_rng(seed)
        true = 4 * claimed if planted else claimed
        inside = rng.random(count) < 0.5
        if mechanism == "Gaussian":
            scores = gaussian_mu(true, 1e-5) * inside + rng.standard_normal(count)
        elif mechanism == "discrete Gaussian":  # of a fine grid, whose ε is the Gaussian's
            scores = np.round(16 * (gaussian_mu(true, 1e-5) * inside + rng.standard_normal(count))) / 16
        elif mechanism == "Laplace":
            scores = inside + rng.laplace(scale=1 / true, size=count)
        else:  # randomised response; PrivUnit's scores are its, spread within each half of the sphere
            scores = np.where(rng.random(count) < expit(true), inside, ~inside).astype(float)
            scores += (0.9 * np.abs(rng.standard_normal(count)).clip(0, 1) if mechanism == "PrivUnit" else 0.0) - 0.5
        made = CanaryScores(scores[inside], scores[~inside], 0.99)
        bound = demonstrated(made.bounds(1e-5, independent=True, gaussian=mechanism == "Gaussian"))
        return "inferred" if bound is not None and bound.epsilon > claimed else "not demonstrated"

    return audit


NULLS: dict[str, Callable[..., str]] = {
    "rows, batch of 16": rows,
    "rows, batch of 4": lambda seed, planted: rows(seed, planted=planted, size=4),
    "notes, batch of 8": notes,
    "notes, batch of 2": lambda seed, planted: notes(seed, planted=planted, size=2),
    "labels, ten clients": labels,
    "images named at random": pictures(named),
    "images, class means, one round": pictures(lambda true, targets, others, rng: means()[targets]),
    "images, class means, five rounds": functools.partial(
        pictures(lambda true, targets, others, rng: means()[targets]), rounds=5
    ),
    "images, other people's": pictures(lambda true, targets, others, rng: others),
    "images, other people's in the clients' style": pictures(lambda true, targets, others, rng: others, style=True),
    "membership, 40 pairs": lambda seed, planted: of_members(seed, 1.0 if planted else 0.0).verdict,
    "attribute, 60 pairs": lambda seed, planted: of_attributes(seed, 0.9 if planted else 0.5).verdict,
    "attribute that anybody's tells": lambda seed, planted: of_attributes(seed, 0.9, 0.5 if planted else 0.9).verdict,
    "property, 50 clients": property_of_clients,
    **{
        f"ε of 2, {mechanism}": epsilon(mechanism)
        for mechanism in ("Gaussian", "discrete Gaussian", "Laplace", "randomised response", "PrivUnit")
    },
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
