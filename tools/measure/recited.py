"""What a model of real text recites, and how often that is said of one that never saw the texts.

    python -m tools.measure.recited [NULLS]

The texts are 24 words each of Python's own documentation. Four clients learn 160 of them by heart. The nulls ask the
same model about texts that it never saw, half of which are called a client's.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import Counter
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

import fedaudit
from fedaudit.attacks import ExtractionFinding, MembershipFinding, make_attack
from fedaudit.data import Dataset
from fedaudit.evaluation import SURE, evaluate
from fedaudit.evaluation.statistics import rank_test
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.queries import NOBODY, QuerySet
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.truth import Truth
from fedaudit.utils.seeds import generator

LENGTH, WORDS, CLIENTS, TRAINED, RECORDS, UNSEEN = 24, 1000, 4, 160, 120, 800
ATTACKS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("extraction", {}),
    ("extraction", {"prefix": 18}),
    ("loss-threshold", {}),
    ("reference-loss", {}),
    ("min-k", {}),
    ("zlib-ratio", {}),
)


def texts() -> Tensor:
    """Return different texts (n, LENGTH), shuffled; the rarest words are one."""
    pages = [re.findall(r"\w+|[^\s\w]", topics[name].lower()) for name in sorted(topics)]
    words = Counter(word for page in pages for word in page).most_common(WORDS - 1)
    place = {word: i for i, (word, _) in enumerate(words, start=1)}
    tokens = [torch.tensor([place.get(word, 0) for word in page]) for page in pages]
    rows: Tensor = torch.cat([page[: len(page) // LENGTH * LENGTH].view(-1, LENGTH) for page in tokens]).unique(dim=0)
    return rows[torch.randperm(len(rows), generator=generator(0, "texts"))]


def null(observed: Observation, truth: Truth, found: Any, unseen: Tensor, seed: int) -> float:
    """Return the p-value where a random half of some unseen texts is called the clients'."""
    rng = generator(seed, "null")
    rows = torch.randperm(len(unseen), generator=rng)[:RECORDS]
    owners = torch.randint(CLIENTS, (RECORDS,), generator=rng)
    owners[RECORDS // 2 :] = NOBODY
    if isinstance(found, MembershipFinding):
        return rank_test(found.scores[rows][owners >= 0], found.scores[rows][owners < 0])[1]
    chosen = {name: getattr(found, name)[rows] for name in ("begins", "continued")}
    chosen |= {name: getattr(found, name)[:, rows] for name in ("logs", "greedy")}
    known = dataclasses.replace(truth, owners=owners, matched=torch.arange(RECORDS).roll(RECORDS // 2))
    seen = dataclasses.replace(observed, records=records(observed, unseen[rows]))
    p_value = evaluate(dataclasses.replace(found, **chosen), seen, known, seed=seed).result.p_value
    assert p_value is not None
    return p_value


def records(observed: Observation, chosen: Tensor) -> QuerySet:
    """Return texts as the adversary's records."""
    tokens = observed.task_info.tokens
    assert tokens is not None
    return QuerySet(chosen, tokens.following(chosen), chosen[:0], chosen[:0])


def main(nulls: int) -> None:
    """Print what comes out of each attack, and how many nulls have p at 1 % and at 5 % or less."""
    every = texts()
    data = Dataset.from_tokens(every[:TRAINED], vocabulary=WORDS, test=every[TRAINED + UNSEEN : TRAINED + UNSEEN + 600])
    federation = {"name": "f", "algorithm": "fedavg", "clients": CLIENTS, "rounds": 10, "examples": TRAINED,
                  "batch_size": 10, "local_epochs": 10, "learning_rate": 0.5}  # fmt: skip
    threat = {"target_records": RECORDS}
    made: dict[str, Any] = {"data": {"name": "digits", "split": "train"}, "model": {"name": "decoder", "width": 64}}
    made |= {"federations": [federation], "threat": threat, "attacks": ["extraction"]}
    recording = fedaudit.simulate(made, data=data, progress=False)
    observed, truth = observe(recording.transcript, ThreatModel.model_validate(threat)), recording.truth
    unseen = every[TRAINED : TRAINED + UNSEEN]
    others = dataclasses.replace(observed, records=records(observed, unseen))
    for name, settings in ATTACKS:
        attack = make_attack(name, settings)
        result = evaluate(attack(observed), observed, truth, seed=0).result
        told = [f"{m.name} {m.value:.3g} ({m.baseline:.3g})" for m in result.metrics if m.baseline is not None]
        print(name, settings, f"p = {result.p_value:.2g};", ", ".join(told), flush=True)
        found = attack(others)
        assert isinstance(found, ExtractionFinding | MembershipFinding)
        ps = [null(observed, truth, found, unseen, seed) for seed in range(nulls)]
        print(f"  nulls: {sum(p <= SURE for p in ps)} and {sum(p <= 5 * SURE for p in ps)} of {nulls}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 200)
