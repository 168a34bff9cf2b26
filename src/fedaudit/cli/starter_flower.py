"""What the files of a Flower app say of its federation, for ``fedaudit init --from-flower``; nothing of it is run."""

from __future__ import annotations

import ast
import itertools
import math
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedaudit.adapters.flower.app_file import NODES, flat, read_app
from fedaudit.cli.starter import MOST_CLIENTS, Choice
from fedaudit.utils.bounds import shown
from fedaudit.utils.errors import BadInput

_MOST_ROUNDS = 40  # that are simulated
_FILES, _BYTES = 200, 1_000_000  # of an app's sources, and of each
# Keys by which apps call the same thing; the templates of `flwr new` have the first ones.
_ROUNDS = ("num-server-rounds", "num-rounds", "rounds")
_EPOCHS = ("local-epochs", "epochs", "num-epochs")
_STEPS = ("local-steps",)
_BATCH = ("batch-size", "train-batch-size")
_RATE = ("learning-rate", "lr", "client-lr")
_FRACTION = ("fraction-train", "fraction-fit")
_PROXIMAL = ("proximal-mu", "mu")
_OPTIMISERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad")


def of_app(folder: Path, choice: Choice) -> tuple[Choice, dict[str, Any]]:
    """Return the choice with what the app says, flags counting for more, and which parts need no question any more."""
    app = read_app(folder)
    components = app.get("components", {})
    if not all(isinstance(components.get(name), str) for name in ("serverapp", "clientapp")):
        raise BadInput(f"{folder / 'pyproject.toml'}: [tool.flwr.app.components] needs serverapp and clientapp")
    config = {key.rpartition(".")[2].replace("_", "-").lower(): v for key, v in flat(app.get("config", {})).items()}
    called = set(_called(folder))
    strategies = sorted(name for name, _ in called if name.startswith(("Fed", "Krum", "Bulyan", "MultiKrum")))
    strategies = [name for name in strategies if name not in ("FederatedDataset", "FedAuditStrategy")]
    optimisers = sorted(name for name, _ in called if name in _OPTIMISERS)
    sets = sorted(text for name, text in called if name == "FederatedDataset" and text)
    clients = choice.clients or app["nodes"] or NODES
    if clients > MOST_CLIENTS:
        raise BadInput(f"the app has {clients} nodes, and init writes at most {MOST_CLIENTS} clients; give --clients")
    known, read = _federation(config, clients)
    if app["nodes"]:
        read.append(f"num-supernodes = {app['nodes']}")
    proximal = _number(config, _PROXIMAL)
    algorithm = "fedprox" if "FedProx" in strategies or proximal else "fedavg"
    if proximal and choice.algorithm in (None, "fedprox"):
        known["proximal_mu"] = proximal[1]
        read.append(f"{proximal[0]} = {proximal[1]}")
    read += [f"the strategy {name}" for name in strategies]
    unknown = [f"the data{f' ({shown(sets[0])})' if sets else ''}, and how many examples each client holds"]
    unknown += ["the model, its loss and how inputs are normalised"]
    unknown += [f"the optimiser ({', '.join(optimisers)}): fedaudit simulates SGD"] if optimisers != ["SGD"] else []
    unknown += [] if app["nodes"] or choice.clients else [f"how many clients there are: {NODES}, as Flower simulates"]
    unknown += [f"what {name} does beyond averaging" for name in strategies if name not in ("FedAvg", "FedProx")]
    where = shlex.quote(str(folder))
    run = f"fedaudit audit --flower {where} --nodes {clients}"
    told = (
        f"A federation like that of the Flower app '{shown(str(app['name']))}', on stand-ins for its data and model.",
        f"The app itself is audited by: {run} --out app-audit",
        "",
        *textwrap.wrap(f"Read from its files: {'; '.join(read) or 'nothing about its training'}.", 110),
        "Not known from them, so stand-ins here:",
        *(f"  - {line}" for line in unknown),
        "",
    )
    settled = {"algorithm": algorithm, "clients": clients}
    chosen = replace(choice, algorithm=choice.algorithm or algorithm, clients=clients, known=known, told=told)
    return chosen, settled


def _federation(config: Mapping[str, Any], clients: int) -> tuple[dict[str, Any], list[str]]:
    """Return settings of a federation, and where each was read."""
    known: dict[str, Any] = {}
    read = []
    for setting, keys, whole in (
        ("local_epochs", _EPOCHS, True),
        ("local_steps", _STEPS, True),
        ("batch_size", _BATCH, True),
        ("learning_rate", _RATE, False),
    ):
        found = _number(config, keys)
        if found and not (whole and not isinstance(found[1], int)) and not (setting == "local_steps" and known):
            known[setting] = found[1]
            read.append(f"{found[0]} = {found[1]}")
    if fraction := _number(config, _FRACTION):
        if fraction[1] < 1:
            known["clients_per_round"] = max(1, int(fraction[1] * clients))
        read.append(f"{fraction[0]} = {fraction[1]}")
    if rounds := _number(config, _ROUNDS):
        known["rounds"] = min(_MOST_ROUNDS, math.ceil(rounds[1]))
        read.append(f"{rounds[0]} = {rounds[1]}")
    return known, read


def _number(config: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, int | float] | None:
    """Return the first of these keys that has a number above 0, with it."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9:
            return key, value
    return None


def _called(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of everything that the app's sources call, with the text in its argument ``dataset``, if any."""
    files = (path for path in sorted(folder.rglob("*.py")) if not any(p.startswith(".") for p in path.parts[:-1]))
    for path in itertools.islice(files, _FILES):
        try:
            if path.stat().st_size > _BYTES:
                continue
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue  # it is the app's matter
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                texts = [
                    k.value.value for k in node.keywords if k.arg == "dataset" and isinstance(k.value, ast.Constant)
                ]
                yield name, str(texts[0]) if texts else ""
