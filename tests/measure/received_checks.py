"""How often the checks of a received model cry wolf, and which server they notice: six architectures on real data.

    python -m tests.measure.received_checks DATA ROWS.csv [SEED]

appends to ROWS.csv what every check finds in ordinary rounds, by a client that remembers the last ones, and in what
malicious servers send from the weights of such a federation: at its beginning, to a client that remembers nothing, and
after its last round. DATA holds CIFAR-10. About four minutes of one core a seed.

    python -m tests.measure.received_checks ROWS.csv

prints the table of these rows: of each check, the alarms and the area under the ROC curve against each server.
"""

from __future__ import annotations

import copy
import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.defences.received import LIMITS, Check, ReceivedHistory, check_received
from fedaudit.models.inserted_module import WithInsertedModule, with_inserted_module
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.server_behaviour import SERVER_BEHAVIOURS, ServerStep, sent
from fedaudit.simulation.simulator import Federation, simulate
from fedaudit.utils.errors import BadInput
from fedaudit.utils.machine import one_thread
from fedaudit.utils.registry import make
from tests.measure.false_alarms import area

ROUNDS = 12
DIGITS, CIFAR = {"name": "digits", "split": "test"}, {"name": "cifar10", "split": "test", "limit": 1500}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {  # with its data, and how many examples clients hold
    "mlp": ({"name": "mlp", "width": 64}, DIGITS, 300),
    "lenet": ({"name": "lenet"}, DIGITS, 300),
    "convnet-small": ({"name": "convnet-small", "width": 8}, DIGITS, 300),
    "strided-cnn": ({"name": "strided-cnn"}, DIGITS, 300),
    "resnet20": ({"name": "resnet20", "width": 4}, CIFAR, 160),
    "vit": ({"name": "vit", "width": 32}, DIGITS, 300),
}
WAYS: dict[str, dict[str, Any]] = {
    "even": {"learning_rate": 0.05, "local_epochs": 1},
    "uneven, momentum": {
        "learning_rate": 0.05, "local_epochs": 2, "momentum": 0.9, "partition": {"scheme": "dirichlet", "alpha": 0.3},
    },
    "two of five clients a round": {"learning_rate": 0.1, "local_epochs": 1, "clients_per_round": 2},
}  # fmt: skip
SERVERS: dict[str, dict[str, Any]] = {
    "imprint": {"name": "imprint", "units": 128},
    "loki": {"name": "loki", "units": 128},
    "fishing, by class": {"name": "fishing", "target": 3},
    "fishing, by a feature": {"name": "fishing", "target": 3, "members": 20},
    "trap-weights": {"name": "trap-weights"},
    "trap-weights, scale 0.5": {"name": "trap-weights", "scale": 0.5},
    "seer": {"name": "seer"},
}
ONLY = {"seer": ("mlp", "even")}  # what else it may train takes minutes
FIELDS = ("seed", "model", "way", "server", "when", "round", "check", "value", "alarm")


def federation_of(model: str, way: str, seed: int, data_dir: Path | None) -> Federation:
    """Return an honest federation, with 300 public examples put aside that only malicious servers look at."""
    spec, data, examples = MODELS[model]
    of = {"name": "f", "algorithm": "fedavg", "clients": 5, "examples": examples, "rounds": ROUNDS, "batch_size": 16}
    made = scenario_from(
        {
            "seed": seed,
            "data": data,
            "model": spec,
            "federations": [of | WAYS[way]],
            "threat": {"adversary": "server"},
            "attacks": ["labels"],
        }
    )
    (federation,) = resolve(made, data_dir=data_dir).federations
    return federation


def own_examples(federation: Federation, client: int) -> tuple[Tensor, Tensor]:
    """Return up to 32 of a client's examples, as the model sees them, and their classes."""
    data = federation.client_data[client]
    return federation.task_info.normalise(data.inputs[:32]), data.targets[:32]


def manipulated(
    federation: Federation, server: dict[str, Any], weights: dict[str, Tensor], client: int
) -> tuple[dict[str, Tensor], nn.Module]:
    """Return what a client is sent by a malicious server whose honest model has these weights, and the architecture.

    Raises:
        BadInput: the server can't play with such a model.
    """
    behaviour = make(SERVER_BEHAVIOURS, server["name"], {k: v for k, v in server.items() if k != "name"})
    info = behaviour.task_info(federation.task_info, federation.spec.plan)
    module = with_inserted_module(copy.deepcopy(federation.model), info)
    behaviour.check(module, info, federation.spec.plan)
    prefix = "body." if isinstance(module, WithInsertedModule) else ""
    state = {**module.state_dict(), **{prefix + name: t for name, t in weights.items()}}
    public = federation.dataset.train
    rows = torch.randperm(len(public), generator=torch.Generator().manual_seed(federation.seed))[:900]
    step = ServerStep(
        0, (client,), federation.spec.plan, module, state, info, federation.loss,
        torch.Generator().manual_seed(federation.seed), info.normalise(public.inputs[rows]), public.targets[rows],
    )  # fmt: skip
    common, own = sent(behaviour, step)
    return own.get(client, common), module


def checked(model: str, way: str, seed: int, data_dir: Path | None) -> Iterator[tuple[str, str, int, list[Check]]]:
    """Yield server ("none" where it is honest), when, the round, and what the client found."""
    federation = federation_of(model, way, seed, data_dir)
    transcript = simulate(federation).transcript
    loss, module = transcript.loss, transcript.module
    histories: dict[int, ReceivedHistory] = {}
    client = -1
    for record in transcript.rounds:
        client = record.updates[0].client  # always the same where all take part
        examples = own_examples(federation, client)
        history = histories.setdefault(client, ReceivedHistory())
        for seen in {update.client for update in record.updates} - {client}:
            check_received(record.weights, module, history=histories.setdefault(seen, ReceivedHistory()))
        found = check_received(record.weights, module, loss=loss, examples=examples, history=history)
        yield "none", "", record.index, found
    last, first = transcript.rounds[-1], transcript.rounds[0]
    examples = own_examples(federation, client)
    for name, server in SERVERS.items():
        if (model, way) != ONLY.get(name, (model, way)):
            continue
        for when, record, known in (("first", first, None), ("last", last, copy.deepcopy(histories[client]))):
            try:
                state, sent_as = manipulated(federation, server, dict(record.weights), client)
            except BadInput as error:
                print(f"{name} not on {model}: {error}", file=sys.stderr)
                break
            found = check_received(state, module, module=sent_as, loss=loss, examples=examples, history=known)
            yield name, when, record.index, found


def collect(path: Path, seed: int, data_dir: Path | None) -> None:
    """Append all rows of a seed."""
    new = not path.exists()
    with path.open("a", newline="") as file, one_thread():
        writer = csv.writer(file)
        if new:
            writer.writerow(FIELDS)
        for model in MODELS:
            for way in WAYS:
                print(model, way, flush=True)
                for server, when, index, found in checked(model, way, seed, data_dir):
                    for check in found:
                        row = (seed, model, way, server, when, index, check.name, f"{check.value:.6g}", check.alarm)
                        writer.writerow(row)
                    file.flush()


Place = tuple[str, ...]  # of a model: all of a row but what a check found


def read(path: Path) -> dict[str, dict[Place, dict[str, float]]]:
    """Return what was found: server and when to the models, each with the value of every check."""
    found: dict[str, dict[Place, dict[str, float]]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            place = tuple(row[name] for name in FIELDS[:6])
            of = found.setdefault(f"{row['server']} {row['when']}".strip(), {})
            of.setdefault(place, {})[row["check"]] = float(row["value"])
    return found


def alarms(values: dict[str, float]) -> list[str]:
    """Return the checks that raise an alarm by today's limits."""
    return [name for name, value in values.items() if not value <= LIMITS[name]]


def table(path: Path) -> None:
    """Print the table."""
    found = read(path)
    ordinary = list(found.pop("none").values())
    wolf = [alarms(values) for values in ordinary]
    print(f"false alarms: {sum(map(bool, wolf))} of {len(ordinary)}", {c for one in wolf for c in one})
    for check in LIMITS:
        values = sorted(one[check] for one in ordinary if check in one)
        cells = []
        for of in found.values():
            theirs = [one[check] for one in of.values() if check in one]
            told = f"{area(values, theirs):.2f} ({sum(v > LIMITS[check] for v in theirs)})" if theirs else "–"
            cells.append(told)
        top = ", ".join(f"{value:.3g}" for value in values[-3:])
        print("|", " | ".join([check, f"{sum(v > LIMITS[check] for v in values)}; {top}", *cells]), "|")
    print(
        "| any alarm |",
        " | ".join(f"{sum(bool(alarms(o)) for o in of.values())} of {len(of)}" for of in found.values()),
    )
    print(list(found))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        table(Path(sys.argv[1]))
    else:
        collect(Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0, Path(sys.argv[1]))
