"""What lowers what a fine-tuned language model recites, and at what price in perplexity.

    python -m tools.measure.finetuned

A small decoder learns 2,000 notes of a made-up clinic, which stand for public text; four clients then fine-tune
adapters on 60 other notes, 20 of which their client has three times. Of each way to train: how many notes come out of
the last model that was sent (``extraction``), how exposed planted texts are (``dp-canaries``, ``of: texts``), and the
perplexity of that model on notes that nobody trained on. Two minutes of one core.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import fedaudit
from fedaudit.data import Dataset
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


def base(rank: int, tokens: TokenInfo, texts: Tensor) -> Transformer:
    """Return the decoder after its training on public texts; from now on its adapters are trained."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Transformer(texts.shape[1], tokens.vocabulary, WIDTH, 2, tokens, 0.0, decoder=True, rank=rank)
    whole = [p for name, p in model.named_parameters() if ".down." not in name and ".up." not in name]
    trained = [p.requires_grad for p in model.parameters()]
    for parameter in whole:
        parameter.requires_grad_(True)
    optimiser, order = torch.optim.Adam(whole, lr=3e-3), generator(0, "public")
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


def main() -> None:
    """Print a row for each way."""
    notes = fedaudit.load_dataset("notes-causal")
    tokens = notes.tokens
    assert tokens is not None
    every = notes.train.inputs[torch.randperm(len(notes.train), generator=generator(0, "notes"))]
    own, others = every[PUBLIC : PUBLIC + TRAINED], every[PUBLIC + TRAINED : PUBLIC + TRAINED + TESTED]
    bases = {rank: base(rank, tokens, every[:PUBLIC]) for rank in {way.rank for way in WAYS}}
    print("way; came out, in 1,000 draws (others); exposure (others), ε shown; ε claimed; perplexity", flush=True)
    for way in WAYS:
        data = held(own, tokens, others, repeated=way.repeated)
        federation = {"name": "f", "algorithm": "fedavg", "clients": CLIENTS, "rounds": 8, "examples": len(data.train),
                      "partition": {"scheme": "natural"}, "batch_size": 10, "local_epochs": 4, "learning_rate": 1.0,
                      **way.changes}  # fmt: skip
        made: dict[str, Any] = {"data": {"name": "digits", "split": "train"}, "federations": [federation]}
        if way.defence is not None:
            made["defences"] = {"client_defence": way.defence}
        told: dict[str, tuple[float, float | None]] = {}
        claimed = shown = perplexity = None
        asked: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
            ({"name": "extraction", "prefix": 10}, {"target_records": RECORDS}),
            ({"name": "dp-canaries", "of": "texts", "canaries": PLANTED}, {}),
        )
        for attack, threat in asked:
            scenario, model = {**made, "attacks": [attack], "threat": threat}, copy.deepcopy(bases[way.rank])
            recording = fedaudit.simulate(scenario, data=data, model=model, progress=False)
            found = fedaudit.attack(recording, [attack], threat=threat, progress=False)
            (result,) = fedaudit.evaluate(found, controls=False, progress=False).result.findings
            told |= {m.name: (m.value, m.baseline) for m in result.metrics}
            if result.epsilon is not None:
                claimed, shown = result.epsilon.claimed, result.epsilon.demonstrated
                continue
            model.load_state_dict(recording.transcript.rounds[-1].weights)
            with torch.no_grad():
                perplexity = math.exp(float(loss_of(model, others[RECORDS:], tokens)))
        said = {name: f"{value:.3g} ({other:.3g})" for name, (value, other) in told.items() if other is not None}
        print(f"{way.name}; {said['extracted']}, {said['extracted_in_1000']}; {said['exposure']}, {shown:.2g}; "
              f"{'–' if claimed is None else f'{claimed:.3g}'}; {perplexity:.3g}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
