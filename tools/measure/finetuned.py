"""What lowers what a fine-tuned language model recites, and at what price in perplexity.

    python -m tools.measure.finetuned [--seeds 3]

A small decoder learns 2,000 notes of a made-up clinic, which stand for public text; four clients then fine-tune
adapters on 60 other notes, 20 of which their client has three times. Of each way to train: how many notes come out of
the last model that was sent (``extraction``), how exposed planted texts are (``dp-canaries``, ``of: texts``), and the
perplexity of that model on notes that nobody trained on. A seed draws other notes, texts and weights; of each figure
the mean is printed, with Student's 95 % interval. Two and a half minutes a seed of one core. Where Opacus is installed
the last way is a federation that really runs: its clients train by Opacus, and a recorder watches.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.util
import math
import tempfile
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
ROUNDS, EPOCHS, BATCH, RATE, CLIP = 8, 4, 10, 1.0, 0.5
DP = {"name": "dp", "level": "sample", "where": "local", "clip": CLIP, "epsilon": None}


@dataclass(frozen=True)
class Way:
    """One way to fine-tune.

    Args:
        changes: of the federation.
        defence: of the clients.
        opacus: the noise that clients add by Opacus, beside a clipped length of CLIP.
    """

    name: str
    rank: int = 16
    repeated: bool = True
    changes: dict[str, Any] = field(default_factory=dict)
    defence: dict[str, Any] | None = None
    opacus: float | None = None


WAYS = (
    Way("as it is"),
    Way("each note once", repeated=False),
    Way("rank 2", rank=2),
    Way("8 epochs, not 32", changes={"local_epochs": 1}),
    Way("DP-SGD, noise 0.5", defence={**DP, "noise": 0.5}),
    Way("Opacus, noise 0.5", opacus=0.5),
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
    federation = {"name": "f", "algorithm": "fedavg", "clients": CLIENTS, "rounds": ROUNDS, "examples": len(data.train),
                  "partition": {"scheme": "natural"}, "batch_size": BATCH, "local_epochs": EPOCHS,
                  "learning_rate": RATE, **way.changes}  # fmt: skip
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
        with tempfile.TemporaryDirectory() as folder:
            if way.opacus is None:
                recording: Any = fedaudit.simulate(scenario, data=data, model=model, progress=False)
                last = recording.transcript.rounds[-1].weights
            else:
                recording, planted = folder, attack["name"] == "dp-canaries"
                last = record(folder, way.opacus, copy.deepcopy(model), data, tokens, planted=planted, seed=seed)
                attack = {"name": attack["name"]} if planted else attack
            found = fedaudit.attack(recording, [attack], threat=threat, model=model, progress=False, seed=seed)
            (result,) = fedaudit.evaluate(found, controls=False, progress=False).result.findings
        for metric in result.metrics:
            told |= {metric.name: metric.value, f"{metric.name}{OTHERS}": metric.baseline or 0.0}
        if result.epsilon is not None:
            told |= {"shown": result.epsilon.demonstrated or 0.0, "claimed": result.epsilon.claimed or 0.0}
            continue
        model.load_state_dict(last)
        with torch.no_grad():
            told["perplexity"] = math.exp(float(loss_of(model, others[RECORDS:], tokens)))
    return told


def record(
    folder: str, noise: float, model: Transformer, data: Dataset, tokens: TokenInfo, *, planted: bool, seed: int
) -> dict[str, Tensor]:
    """Record clients that train ``model`` by Opacus, with ``planted`` texts or without; return what was sent last."""
    from opacus import PrivacyEngine
    from opacus.accountants import RDPAccountant
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(seed)
    own, canaries, last = data.train, None, {}
    assert own.groups is not None
    assert data.test is not None
    if planted:
        accountant, batches = RDPAccountant(), math.ceil(int(own.groups.bincount().min()) / BATCH)
        accountant.history = [
            (noise, 1 / batches, ROUNDS * EPOCHS * batches)
        ]  # at least: planted texts make batches more
        promised = accountant.get_epsilon(1e-5)
        canaries = fedaudit.CanaryTexts(
            model, PLANTED, length=own.inputs.shape[1], tokens=tokens, claimed=promised, delta=1e-5, seed=seed
        )
    recorder = fedaudit.Recorder(folder, module=model, tokens=tokens, canaries=canaries)
    for _ in range(ROUNDS):
        last = copy.deepcopy(model.state_dict())
        recorder.begin_round(last)
        states = []
        for client in range(CLIENTS):
            texts = own.inputs[own.groups == client]
            if canaries is not None:
                texts = torch.cat([texts, canaries.of(client, CLIENTS)])
            local = copy.deepcopy(model)
            with recorder.capture() as seen:
                private, optimiser, loader = PrivacyEngine().make_private(
                    module=local,
                    optimizer=torch.optim.SGD([p for p in local.parameters() if p.requires_grad], RATE),
                    data_loader=DataLoader(TensorDataset(texts), BATCH),
                    noise_multiplier=noise,
                    max_grad_norm=CLIP,
                )
                for _ in range(EPOCHS):
                    for (batch,) in loader:
                        optimiser.zero_grad()
                        loss_of(private, batch, tokens).backward()
                        optimiser.step()
            recorder.update(f"client {client}", local.state_dict(), seen, num_examples=len(texts))
            states.append(local.state_dict())
        recorder.end_round()
        model.load_state_dict({name: torch.stack([s[name] for s in states]).mean(0) for name in last})
    recorder.candidates(data.test.inputs, data.test.targets)
    recorder.close(model.state_dict())
    return last


OTHERS = " of others"
SHOWN = (
    *("extracted_in_1000", f"extracted_in_1000{OTHERS}", "exposure", f"exposure{OTHERS}"),
    *("shown", "claimed", "perplexity"),
)


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="part of a way's name")
    asked = parser.parse_args()
    seeds = range(asked.seeds)
    notes = fedaudit.load_dataset("notes-causal")
    tokens = notes.tokens
    assert tokens is not None
    drawn = [notes.train.inputs[torch.randperm(len(notes.train), generator=generator(s, "notes"))] for s in seeds]
    ranks = {way.rank for way in WAYS}
    bases = [{rank: base(rank, tokens, drawn[seed][:PUBLIC], seed) for rank in ranks} for seed in seeds]
    print("way; " + "; ".join(SHOWN), flush=True)
    for way in WAYS:
        if asked.only not in way.name or (way.opacus is not None and importlib.util.find_spec("opacus") is None):
            continue
        found = [measured(way, bases[seed], drawn[seed], tokens, seed) for seed in seeds]
        cells = [paired_interval([one[name] for one in found]) for name in SHOWN]
        print("; ".join([way.name, *(f"{c.mean:.3g} [{c.low:.3g}, {c.high:.3g}]" for c in cells)]), flush=True)


if __name__ == "__main__":
    main()
