"""What lowers what a fine-tuned language model recites, and at what price in perplexity.

    python -m tools.measure.finetuned [--seeds 3]

A small decoder learns 2,000 notes of a made-up clinic, which stand for public text; four clients then fine-tune
adapters on 60 other notes, 20 of which their client has three times. Of each way to train: how many notes come out of
the last model that was sent (``extraction``), how exposed planted texts are (``dp-canaries``, ``of: texts``), and the
perplexity of that model on notes that nobody trained on. A seed draws other notes, texts and weights; of each figure
the mean is printed, with Student's 95 % interval. Two and a half minutes a seed of one core.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fedaudit
from fedaudit.data import Dataset
from fedaudit.evaluation.statistics import paired_interval
from fedaudit.modalities import TokenInfo
from fedaudit.models.transformer import Transformer
from fedaudit.utils.seeds import generator

PUBLIC, TRAINED, REPEATED, TESTED, RECORDS, PLANTED, WIDTH, CLIENTS = 2000, 60, 20, 800, 100, 100, 64, 4
DP = {"name": "dp", "level": "sample", "where": "local", "clip": 0.5, "epsilon": None}


@dataclass(frozen=True)
class Way:
    """One way to fine-tune.

    Args:
        changes: of the federation.
        defence: of the clients.
    """

    name: str
    rank: int = 16
    repeated: bool = True
    changes: dict[str, Any] = field(default_factory=dict)
    defence: dict[str, Any] | None = None


WAYS = (
    Way("as it is"),
    Way("each note once", repeated=False),
    Way("rank 2", rank=2),
    Way("8 epochs, not 32", changes={"local_epochs": 1}),
    Way("DP-SGD, noise 0.5", defence={**DP, "noise": 0.5}),
)


def base(rank: int, tokens: TokenInfo, texts: Tensor, seed: int) -> Transformer:
    """Return the decoder after its training on public texts; from now on its adapters are trained."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(texts.shape[1], tokens.vocabulary, WIDTH, 2, tokens, 0.0, decoder=True, rank=rank)
    whole = [p for name, p in model.named_parameters() if ".down." not in name and ".up." not in name]
    trained = [p.requires_grad for p in model.parameters()]
    for parameter in whole:
        parameter.requires_grad_(True)
    optimiser, order = torch.optim.Adam(whole, lr=3e-3), generator(seed, "public")
    for _ in range(15):
        for rows in torch.randperm(len(texts), generator=order).split(50):
            optimiser.zero_grad()
            loss_of(model, texts[rows], tokens).backward()
            optimiser.step()
    for parameter, own in zip(model.parameters(), trained, strict=True):
        parameter.requires_grad_(own)
    return model


def loss_of(model: nn.Module, texts: Tensor, tokens: TokenInfo) -> Tensor:
    """Return the mean loss of the next token."""
    return nn.functional.cross_entropy(model(texts), tokens.following(texts))


def held(texts: Tensor, tokens: TokenInfo, others: Tensor, *, repeated: bool) -> Dataset:
    """Return what four clients hold, each a quarter, with or without the notes that are there again."""
    owners = torch.arange(len(texts)) % CLIENTS
    if repeated:
        texts, owners = (torch.cat([one, one[:REPEATED], one[:REPEATED]]) for one in (texts, owners))
    told: dict[str, Any] = {"vocabulary": tokens.vocabulary, "padding": tokens.padding, "end": tokens.end}
    data = Dataset.from_tokens(texts, test=others, **told)
    return dataclasses.replace(data, train=dataclasses.replace(data.train, groups=owners))


def measured(
    way: Way, bases: Mapping[int, Transformer], every: Tensor, tokens: TokenInfo, seed: int
) -> dict[str, float]:
    """Return the figures of one way to fine-tune, by name."""
    own, others = every[PUBLIC : PUBLIC + TRAINED], every[PUBLIC + TRAINED : PUBLIC + TRAINED + TESTED]
    data = held(own, tokens, others, repeated=way.repeated)
    federation = {"name": "f", "algorithm": "fedavg", "clients": CLIENTS, "rounds": 8, "examples": len(data.train),
                  "partition": {"scheme": "natural"}, "batch_size": 10, "local_epochs": 4, "learning_rate": 1.0,
                  **way.changes}  # fmt: skip
    made: dict[str, Any] = {"data": {"name": "digits", "split": "train"}, "federations": [federation], "seed": seed}
    if way.defence is not None:
        made["defences"] = {"client_defence": way.defence}
    told: dict[str, float] = {}
    asked: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({"name": "extraction", "prefix": 10}, {"target_records": RECORDS}),
        ({"name": "dp-canaries", "of": "texts", "canaries": PLANTED}, {}),
    )
    for attack, threat in asked:
        scenario, model = {**made, "attacks": [attack], "threat": threat}, copy.deepcopy(bases[way.rank])
        recording = fedaudit.simulate(scenario, data=data, model=model, progress=False)
        found = fedaudit.attack(recording, [attack], threat=threat, progress=False, seed=seed)
        (result,) = fedaudit.evaluate(found, controls=False, progress=False).result.findings
        for metric in result.metrics:
            told |= {metric.name: metric.value, f"{metric.name}{OTHERS}": metric.baseline or 0.0}
        if result.epsilon is not None:
            told |= {"shown": result.epsilon.demonstrated or 0.0, "claimed": result.epsilon.claimed or 0.0}
            continue
        model.load_state_dict(recording.transcript.rounds[-1].weights)
        with torch.no_grad():
            told["perplexity"] = math.exp(float(loss_of(model, others[RECORDS:], tokens)))
    return told


OTHERS = " of others"
SHOWN = (
    *("extracted_in_1000", f"extracted_in_1000{OTHERS}", "exposure", f"exposure{OTHERS}"),
    *("shown", "claimed", "perplexity"),
)


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    notes = fedaudit.load_dataset("notes-causal")
    tokens = notes.tokens
    assert tokens is not None
    drawn = [notes.train.inputs[torch.randperm(len(notes.train), generator=generator(s, "notes"))] for s in seeds]
    ranks = {way.rank for way in WAYS}
    bases = [{rank: base(rank, tokens, drawn[seed][:PUBLIC], seed) for rank in ranks} for seed in seeds]
    print("way; " + "; ".join(SHOWN), flush=True)
    for way in WAYS:
        found = [measured(way, bases[seed], drawn[seed], tokens, seed) for seed in seeds]
        cells = [paired_interval([one[name] for one in found]) for name in SHOWN]
        print("; ".join([way.name, *(f"{c.mean:.3g} [{c.low:.3g}, {c.high:.3g}]" for c in cells)]), flush=True)


if __name__ == "__main__":
    main()
