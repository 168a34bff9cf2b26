"""How often the checks of a received model cry wolf, and which server they notice: seven architectures on real data.

    python -m tools.measure.received_checks DATA ROWS.csv [SEED] [MODEL … | hard] [SERVER …]

appends to ROWS.csv what every check finds in ordinary rounds, by a client that remembers the last ones, and in what
malicious servers send from the weights of such a federation: at its beginning, to a client that remembers nothing, and
after its last round. DATA holds CIFAR-10. Two minutes of one core a seed, of the six ordinary
models; ``hard``: of seven with few clients a round (Adult and MNIST, too), ten minutes.

    python -m tools.measure.received_checks ROWS.csv [MORE.csv] [ROC.png]

prints the table of these rows: of each check, the area under the ROC curve against each server, and the alarms.
"""

from __future__ import annotations

import copy
import csv
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from fedaudit.defences.received import LIMITS, Check, ReceivedHistory, check_received
from fedaudit.models.inserted_module import WithInsertedModule, with_inserted_module
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.client import Federation
from fedaudit.simulation.server_behaviour import SERVER_BEHAVIOURS, ServerStep, sent
from fedaudit.simulation.simulator import simulate
from fedaudit.utils.errors import BadInput
from fedaudit.utils.machine import one_thread
from fedaudit.utils.registry import make
from tools.measure.false_alarms import area

ROUNDS = 12
DIGITS, CIFAR = {"name": "digits", "split": "test"}, {"name": "cifar10", "split": "test", "limit": 1500}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {  # with its data, and how many examples clients hold
    "mlp": ({"name": "mlp", "width": 64}, DIGITS, 300),
    "lenet": ({"name": "lenet"}, DIGITS, 300),
    "convnet-small": ({"name": "convnet-small", "width": 8}, DIGITS, 300),
    "strided-cnn": ({"name": "strided-cnn"}, DIGITS, 300),
    "resnet20": ({"name": "resnet20", "width": 4}, CIFAR, 160),
    "vit": ({"name": "vit", "width": 32}, DIGITS, 300),
    "vit-adapters": ({"name": "vit-adapters", "width": 64}, DIGITS, 300),
    "mlp, Adult": ({"name": "mlp", "width": 64}, {"name": "adult", "split": "test", "limit": 4000}, 250),
    "cnn-1d, ECGs": ({"name": "cnn-1d"}, {"name": "ecg-synthetic", "split": "train"}, 100),
    "encoder, notes": ({"name": "encoder"}, {"name": "notes", "split": "test"}, 150),
    "lenet-5, MNIST": ({"name": "lenet-5"}, {"name": "mnist", "split": "test", "limit": 4000}, 250),
}
WAYS: dict[str, dict[str, Any]] = {
    "even": {"learning_rate": 0.05, "local_epochs": 1},
    "uneven, momentum": {
        "learning_rate": 0.05, "local_epochs": 2, "momentum": 0.9, "partition": {"scheme": "dirichlet", "alpha": 0.3},
    },
    "two of five clients a round": {"learning_rate": 0.1, "local_epochs": 1, "clients_per_round": 2},
}  # fmt: skip
# few clients a round, small batches, for long: harder on a client that compares with what it remembers
HARD: dict[str, dict[str, Any]] = {
    "one of eight": {"learning_rate": 0.1, "local_epochs": 2, "clients": 8, "clients_per_round": 1, "rounds": 40},
    "three of ten": {"learning_rate": 0.05, "local_epochs": 2, "clients": 10, "clients_per_round": 3, "rounds": 40},
    "two of twelve, uneven, momentum": {
        "learning_rate": 0.05, "local_epochs": 3, "momentum": 0.9, "clients": 12, "clients_per_round": 2, "rounds": 60,
        "partition": {"scheme": "dirichlet", "alpha": 0.3},
    },
    "four, uneven, momentum": {
        "learning_rate": 0.05, "local_epochs": 2, "momentum": 0.9, "clients": 4, "rounds": 30,
        "partition": {"scheme": "dirichlet", "alpha": 0.3},
    },
}  # fmt: skip
_SPLIT = {"digits": 350}  # no more examples than that
ORDINARY = ("mlp", "lenet", "convnet-small", "strided-cnn", "resnet20", "vit")
IN_HARD = ("mlp", "lenet", "convnet-small", "mlp, Adult", "cnn-1d, ECGs", "encoder, notes", "lenet-5, MNIST")
# of vit-adapters alone: what peftleak reads
FEDSGD: dict[str, dict[str, Any]] = {"gradients": {"algorithm": "fedsgd", "learning_rate": 0.05}}
SERVERS: dict[str, dict[str, Any]] = {
    "imprint": {"name": "imprint", "units": 128},
    "loki": {"name": "loki", "units": 128},
    "fishing, by class": {"name": "fishing", "target": 3},
    "fishing, by a feature": {"name": "fishing", "target": 3, "members": 20},
    "trap-weights": {"name": "trap-weights"},
    "trap-weights, scale 0.5": {"name": "trap-weights", "scale": 0.5},
    "seer": {"name": "seer"},
    "peftleak": {"name": "peftleak"},
    "geminio": {"name": "geminio", "target": 3},
    "geminio, losses up to 5": {"name": "geminio", "target": 3, "most": 5.0},
    "geminio, bright": {"name": "geminio", "chosen": "bright"},
}
_TRAINED = (("mlp", "convnet-small", "resnet20"), "even")
ONLY = {  # models and way
    "seer": (("mlp",), "even"),  # what else it may train takes minutes
    "peftleak": (("vit-adapters",), "gradients"),
    **{name: _TRAINED for name in SERVERS if name.startswith("geminio")},  # as does this
}
_TELLS = 0.6  # least area of a curve that is drawn
FIELDS = ("seed", "model", "way", "server", "when", "round", "check", "value", "limit")


def federation_of(model: str, way: str, seed: int, data_dir: Path | None) -> Federation:
    """Return an honest federation, whose clients hold test data; servers look at training data."""
    spec, data, examples = MODELS[model]
    of: dict[str, Any] = {"name": "f", "algorithm": "fedavg", "clients": 5, "rounds": ROUNDS}
    of |= {"batch_size": 8 if way in HARD else 16} | (WAYS | HARD | FEDSGD)[way]
    of["examples"] = min(_SPLIT.get(data["name"], 3 * examples), examples * of["clients"] // 5)
    made = scenario_from(
        {
            "seed": seed,
            "data": data,
            "model": spec,
            "federations": [of],
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


def checked(
    model: str, way: str, seed: int, data_dir: Path | None, servers: Mapping[str, dict[str, Any]] = SERVERS
) -> Iterator[tuple[str, str, int, list[Check]]]:
    """Yield server ("none" where it is honest), when, the round, and what the client found."""
    federation = federation_of(model, way, seed, data_dir)
    transcript = simulate(federation).transcript
    loss, module = transcript.loss, transcript.module
    histories: dict[int, ReceivedHistory] = {}
    client = -1
    known: dict[str, Any]
    for record in transcript.rounds:
        client = record.updates[0].client  # always the same where all take part
        examples = own_examples(federation, client)
        history = histories.setdefault(client, ReceivedHistory())
        for seen in {update.client for update in record.updates} - {client}:
            known = {"loss": loss, "examples": own_examples(federation, seen)} if way in HARD else {}
            other = histories.setdefault(seen, ReceivedHistory())
            check_received(record.weights, module, **known, history=other, index=record.index)
        known = {"loss": loss, "examples": examples, "history": history, "index": record.index}
        found = check_received(record.weights, module, **known)
        yield "none", "", record.index, found
    last, first = transcript.rounds[-1], transcript.rounds[0]
    examples = own_examples(federation, client)
    for name, server in servers.items():
        models, only = ONLY.get(name, ((model,), way))
        if model not in models or way != only:
            continue
        for when, record, remembered in (("first", first, None), ("last", last, copy.deepcopy(histories[client]))):
            try:
                state, sent_as = manipulated(federation, server, dict(record.weights), client)
            except BadInput as error:
                print(f"{name} not on {model}: {error}", file=sys.stderr)
                break
            own: dict[str, Any] = {"loss": loss, "examples": examples, "history": remembered, "index": record.index + 1}
            found = check_received(state, module, module=sent_as, **own)
            yield name, when, record.index, found


def collect(path: Path, seed: int, data_dir: Path | None, chosen: Collection[str] = ()) -> None:
    """Append all rows of a seed, or those of the chosen models and servers; ``hard``: of few clients a round."""
    hard = "hard" in chosen
    models = IN_HARD if hard else [name for name in MODELS if name in chosen] or ORDINARY
    servers = {name: server for name, server in SERVERS.items() if name in chosen} or SERVERS
    new = not path.exists()
    with path.open("a", newline="") as file, one_thread():
        writer = csv.writer(file)
        if new:
            writer.writerow(FIELDS)
        for model in models:
            for way in HARD if hard else WAYS | FEDSGD if model == "vit-adapters" else WAYS:
                if model == "encoder, notes" and "partition" in HARD.get(way, {}):
                    continue  # notes have no classes to be uneven by
                print(model, way, flush=True)
                for server, when, index, found in checked(model, way, seed, data_dir, servers):
                    for check in found:
                        measured = f"{check.value:.6g}", f"{check.limit:.6g}"
                        writer.writerow((seed, model, way, server, when, index, check.name, *measured))
                    file.flush()


Place = tuple[str, ...]  # of a model: all of a row but what a check found
Found = dict[str, tuple[float, float]]  # check to value and limit


def read(path: Path) -> dict[str, dict[Place, Found]]:
    """Return what was found: server and when to the models, each with the value and the limit of every check."""
    found: dict[str, dict[Place, Found]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            place = tuple(row[name] for name in FIELDS[:6])
            of = found.setdefault(f"{row['server']} {row['when']}".strip(), {})
            of.setdefault(place, {})[row["check"]] = float(row["value"]), float(row["limit"])
    return found


def alarms(found: Found) -> list[str]:
    """Return the checks that raise an alarm."""
    return [name for name, (value, limit) in found.items() if not value <= limit]


def table(paths: list[Path], picture: Path | None) -> None:
    """Print the table, and draw the ROC curves."""
    found: dict[str, dict[Place, Found]] = {}
    for path in paths:
        for name, of in read(path).items():
            found.setdefault(name, {}).update(of)
    honest = found.pop("none")
    ordinary = list(honest.values())
    for model, way in dict.fromkeys(place[1:3] for place in honest):
        cries = [alarms(values) for place, values in honest.items() if place[1:3] == (model, way)]
        of_checks = Counter(check for one in cries for check in one)
        print(f"{model}, {way}: {sum(map(bool, cries))} false alarms in {len(cries)} rounds", dict(of_checks))
    print(f"all: {sum(bool(alarms(values)) for values in ordinary)} in {len(ordinary)}")
    print("| check | ordinary: alarms; largest |", " | ".join(found), "|")
    print("|---|---|" + "---|" * len(found))
    for check in LIMITS:
        values = [one[check][0] for one in ordinary if check in one]
        cells = []
        for of in found.values():
            theirs = [one[check][0] for one in of.values() if check in one]
            rate = f"{sum(check in alarms(one) for one in of.values())}/{len(theirs)}"
            cells.append(f"{area(values, theirs):.2f}; {rate}" if theirs else "–")
        cried = sum(check in alarms(one) for one in ordinary)
        print(f"| {check} | {cried}; {max(values):.3g} |", " | ".join(cells), "|")
    rates = (f"{sum(bool(alarms(one)) for one in of.values())}/{len(of)}" for of in found.values())
    print(
        f"| **any alarm** | {sum(bool(alarms(values)) for values in ordinary)} of {len(ordinary)} |",
        " | ".join(rates),
        "|",
    )
    if picture is not None:
        draw(ordinary, found, picture)


def draw(ordinary: list[Found], found: dict[str, dict[Place, Found]], picture: Path) -> None:
    """Draw the ROC curves of the checks that tell anything, a panel for each server that was swapped in at the end."""
    shown = [name for name in found if name.endswith("last")]
    size = (3.0 * ((len(shown) + 1) // 2), 6.2)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(2, (len(shown) + 1) // 2, sharex=True, sharey=True).flatten()
    colours = {name: f"C{place % 10}" for place, name in enumerate(LIMITS)}
    for axis, server in zip(axes, shown, strict=False):
        axis.plot([0, 1], [0, 1], color="0.8", linewidth=1)
        for check, colour in colours.items():
            honest = torch.tensor([one[check][0] for one in ordinary if check in one])
            theirs = torch.tensor([one[check][0] for one in found[server].values() if check in one])
            if not len(theirs) or area(honest.tolist(), theirs.tolist()) < _TELLS:
                continue
            limits = torch.cat([honest, theirs]).unique().flip(0)
            rates = [
                [0.0, *((values >= limit).double().mean().item() for limit in limits)] for values in (honest, theirs)
            ]
            style = "--" if list(LIMITS).index(check) >= len(LIMITS) // 2 else "-"
            axis.plot(*rates, style, color=colour, label=check)
        axis.set_title(server.removesuffix(" last"), fontsize=9)
        axis.legend(fontsize=6, loc="lower right")
    for axis in axes[len(shown) :]:
        axis.remove()
    figure.supxlabel("ordinary rounds above the limit", fontsize=9)
    figure.supylabel("manipulated models above the limit", fontsize=9)
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Collect rows, or make the table of some."""
    files = [Path(word) for word in sys.argv[1:]]
    if files[0].is_dir():
        collect(files[1], int(sys.argv[3]) if len(sys.argv) > 3 else 0, files[0], sys.argv[4:])
    else:
        table([path for path in files if path.suffix == ".csv"], next((f for f in files if f.suffix == ".png"), None))


if __name__ == "__main__":
    main()
