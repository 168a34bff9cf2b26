"""The scenario that ``fedaudit init`` writes: choices that fit together, settings that suit them, and its text."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedaudit.utils.errors import BadInput, unknown_name

if TYPE_CHECKING:
    from fedaudit.data import Dataset

ALGORITHMS = ("fedsgd", "fedavg", "fedprox")
MALICIOUS = "malicious-client"
ADVERSARIES = {
    "server": "an honest-but-curious server, who reads every update",
    "eavesdropper": "somebody on the network, who reads what the server reads",
    "client": "an honest-but-curious client, who sees the global models only",
    MALICIOUS: "a client that departs from the protocol to learn more",
}
MOST_CLIENTS = 1000
_A_ROUND = 10  # clients that take part in a round, at most
_ATTACKED = 4  # updates
_RECORDS = 200
_SMALL = ("mlp", "logistic", "linear")  # models that train in moments
_QUICK = (*_SMALL, "convnet-small", "lenet", "strided-cnn", "cnn-1d")  # that can be attacked in minutes
_SIDE = 64  # pixels, to which larger images are cut
_PLAIN = re.compile(r"[A-Za-z][\w./ (),-]*(?<! )", re.ASCII)  # texts that YAML takes as they are
_YAML_WORDS = ("true", "false", "yes", "no", "on", "off", "y", "n", "null")  # that mean something else bare
_VALUES = 20_000  # of an example; of larger ones fewer iterations are run


@dataclass(frozen=True)
class Choice:
    """What was asked for.

    Attributes:
        model: None: the one that suits the question.
        known: settings of the federation that are known from elsewhere, instead of ours.
        table: of a table in a file, its path and what is known of its columns.
    """

    data: str = "photos"
    model: str | None = None
    algorithm: str | None = None
    clients: int | None = None
    adversary: str = "server"
    known: dict[str, Any] = field(default_factory=dict)
    table: dict[str, Any] = field(default_factory=dict)
    told: tuple[str, ...] = ()


_NETWORKS = {4: ("cnn-3d",), 2: ("cnn-1d", "lstm", "gru")}  # by the axes of an example: of volumes and signals


def models_for(dataset: Dataset) -> tuple[str, ...]:
    """Return the models that are offered for the data, the usual one first; any other that takes them may be named."""
    if dataset.tokens is not None:
        return ("decoder", "decoder-lora") if dataset.tokens.causal else ("decoder", "encoder", "decoder-lora")
    if dataset.task_kind.dense:
        return ("unet",)
    axes = len(dataset.input_shape)
    if axes == 1:
        return ("linear", "mlp") if dataset.task_kind.real else ("mlp", "logistic")
    if axes in _NETWORKS:
        return (*_NETWORKS[axes], "mlp")
    return ("convnet-small", "lenet", "strided-cnn", "mlp", "resnet20")


def complete(choice: Choice, dataset: Dataset) -> Choice:
    """Return the choice with everything that was left open; BadInput where it asks for what can't be."""
    if choice.adversary not in ADVERSARIES:
        raise BadInput(f"--adversary: {unknown_name('adversary', choice.adversary, list(ADVERSARIES))}")
    if choice.algorithm is not None and choice.algorithm not in ALGORITHMS:
        raise BadInput(f"--algorithm: {unknown_name('algorithm', choice.algorithm, list(ALGORITHMS))}")
    question = question_of(choice, dataset)
    usual = {"inversion": 4, "words": 2}.get(question, 5)
    if "client" in choice.table and dataset.train.groups is not None:
        usual = int(dataset.train.groups.max()) + 1
        if choice.clients not in (None, usual):
            raise BadInput(
                f"--clients is {choice.clients}, and '{choice.table['client']}' has {usual} values; leave it out"
            )
    return replace(
        choice,
        model=choice.model or usual_model(choice.adversary, dataset),
        algorithm=choice.algorithm or ("fedsgd" if question in ("inversion", "words") else "fedavg"),
        clients=choice.clients or usual,
    )


def usual_model(adversary: str, dataset: Dataset) -> str:
    """Return the model that suits what the adversary is after."""
    question = question_of(Choice(adversary=adversary), dataset)
    if question == "drawing":
        return "strided-cnn"
    if question == "members" and dataset.num_classes is not None and dataset.tokens is None:
        return "mlp"
    return models_for(dataset)[0]


def question_of(choice: Choice, dataset: Dataset) -> str:
    """Return what is attacked: ``inversion``, ``words``, ``members``, ``attribute`` or ``drawing``.

    Images, volumes and signals are rebuilt, text is read, and of tables members or a hidden attribute are told; of
    images with masks members, too: a U-Net is hardly inverted.
    """
    if dataset.tokens is not None:
        if choice.adversary in (MALICIOUS, "client"):
            raise BadInput(
                f"--adversary {choice.adversary}: text is read in what clients send; take server or eavesdropper"
            )
        return "words"
    axes = len(dataset.input_shape)
    if choice.adversary == MALICIOUS:
        return "drawing" if axes == 3 and dataset.num_classes is not None else "members"
    if axes > 1 and choice.adversary != "client" and not dataset.task_kind.dense:
        return "inversion"
    return "attribute" if dataset.task_kind.real and dataset.attributes else "members"


def scenario_text(choice: Choice, dataset: Dataset) -> str:
    """Return a commented scenario of a complete choice."""
    question = question_of(choice, dataset)
    split = "test" if question in ("inversion", "words") else "train"
    held = len(dataset.test if split == "test" else dataset.train)
    clients = choice.clients or 1
    if clients > held:
        raise BadInput(
            f"--clients is {clients}, and the {split} split of {choice.data} has {held} examples; give fewer"
        )
    federation = _federation(choice, dataset, question, held)
    return _rendered(
        choice=choice,
        asked=question,
        hidden=_hidden(dataset),
        data=_data(choice, dataset, split),
        model=_model(choice, question),
        federation=federation,
        threat=_threat(choice, dataset, question, federation),
        attacks=_attacks(choice, dataset, question),
        evaluation=_evaluation(question, federation),
    )


def _rendered(**values: Any) -> str:
    import jinja2  # not needed for a command's help

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = Path(__file__).parent / "scenario.yaml.j2"
    return environment.from_string(template.read_text(encoding="utf-8")).render(values | {"written": _written})


def _written(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_written(key)}: {_written(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, str) and (not _PLAIN.fullmatch(value) or value.lower() in _YAML_WORDS):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _data(choice: Choice, dataset: Dataset, split: str) -> dict[str, Any]:
    from fedaudit.modalities import example_kind  # takes torch, which a command's help does without

    values: dict[str, Any] = {"name": choice.data, "split": split, **choice.table}
    if example_kind(dataset.kind).resizable and max(dataset.input_shape[1:]) > _SIDE:
        values["image_size"] = _SIDE
    return values


def _model(choice: Choice, question: str) -> dict[str, Any]:
    name = choice.model or ""
    values: dict[str, Any] = {"name": name}
    if name == "mlp":
        values["width"] = 64
    if question == "words":
        values["width"] = 128
    if name in ("convnet-small", "cnn-1d"):
        values["width"] = 32 if question == "inversion" else 16
    if name == "unet":
        values |= {"width": 8, "batch_norm": "train"}
    if name == "lenet" and question == "inversion":
        values["initialisation"] = "uniform"
    if "convnet" in name or name.startswith(("resnet", "cnn-")):
        values["batch_norm"] = "eval"
    return values


def _federation(choice: Choice, dataset: Dataset, question: str, held: int) -> dict[str, Any]:
    clients, sends_gradients = choice.clients or 1, choice.algorithm == "fedsgd"
    known = dict(choice.known)
    values: dict[str, Any] = {"name": choice.algorithm, "algorithm": choice.algorithm, "clients": clients}
    if clients > _A_ROUND:
        values["clients_per_round"] = _A_ROUND
    if question in ("inversion", "words"):
        text = question == "words"
        each = 4 if text or not sends_gradients else 1
        values |= {"rounds": 1, "examples": max(clients, min(clients * each, held))}
        values |= {"batch_size": 4} if text else {"sampling": "first", "batch_size": 1}
        local = {"local_steps": 4}
        rate = 0.01 if sends_gradients or text else 0.001
        known.pop("rounds", None)
    else:
        most = held if question == "drawing" else held // 3
        masks = dataset.task_kind.dense  # which take long to learn by heart
        usual = 40 if choice.model in _SMALL else 30 if masks else 10
        if question == "drawing":
            usual = 40 if max(dataset.input_shape) <= 16 else 25
        values |= {
            "rounds": usual * (2 if sends_gradients else 1),
            "examples": max(clients, min(most, clients * (200 if question == "drawing" else 20 if masks else 60))),
            "batch_size": 8 if question == "drawing" else 10,
        }
        local = {"local_epochs": 1 if question == "drawing" else 4 if masks else 2}
        rate = 0.02 if dataset.task_kind.real else 0.05 if question == "drawing" else 0.1
    if not sends_gradients:
        values |= {name: known.pop(name) for name in ("local_steps", "local_epochs") if name in known} or local
    values["learning_rate"] = rate
    if choice.model == "unet" and not sends_gradients:
        values["momentum"] = 0.9
    if choice.algorithm == "fedprox":
        values["proximal_mu"] = 0.01
    if "client" in choice.table:
        values["partition"] = {"scheme": "natural"}
    if choice.adversary == MALICIOUS:
        values["malicious"] = _malicious(question, dataset, values["rounds"])
    return values | {k: v for k, v in known.items() if not (sends_gradients and k.startswith("local_"))}


def _malicious(question: str, dataset: Dataset, rounds: int) -> dict[str, Any]:
    start = max(1, rounds // 4)
    if question == "members":
        return {"name": "agrevader", "start": start}
    target = min(3, (dataset.num_classes or 2) - 1)
    every = max(1, (rounds - start) // 5)
    return {"name": "gan", "target": target, "missing_classes": [target], "start": start, "every": every, "images": 128}


def _threat(choice: Choice, dataset: Dataset, question: str, federation: dict[str, Any]) -> dict[str, Any]:
    adversary = "client" if choice.adversary == MALICIOUS else choice.adversary
    values: dict[str, Any] = {"adversary": adversary}
    if question in ("inversion", "words"):
        return {**values, "knows_labels": False}
    if question == "drawing":
        return values
    examples = federation["examples"]
    malicious = 1 if choice.adversary == MALICIOUS else 0
    theirs = examples * (federation["clients"] - malicious) // federation["clients"]
    values["target_records"] = max(2, 2 * (min(_RECORDS, theirs) // 2 * 9 // 10))
    if question == "attribute":
        return {**values, "hidden_attribute": _hidden(dataset)}
    free = len(dataset.train) + len(dataset.test) - examples - values["target_records"] // 2
    if dataset.num_classes is not None and not malicious:
        values |= {"knows_public_data": True, "public_examples": max(4, min(_RECORDS, free // 3))}
    return values


def _hidden(dataset: Dataset) -> str:
    return next(iter(dataset.attributes), "")


def _attacks(choice: Choice, dataset: Dataset, question: str) -> list[str]:
    if question == "inversion":
        usual = 600 if choice.model in _QUICK else 100
        usual = max(50, min(usual, usual * _VALUES // math.prod(dataset.input_shape)))
        iterations = usual if choice.algorithm == "fedsgd" else usual // 2
        labels = ["labels"] if dataset.task_kind.label_sets else []
        return [*labels, *(f"{{name: {name}, iterations: {iterations}}}" for name in ("invg", "agic"))]
    if question == "words":
        return ["dager", "token-presence"]
    if question == "drawing":
        return ["gan"]
    if question == "attribute":
        return ["attribute-loss"]
    if choice.adversary == MALICIOUS:
        return ["agrevader", "loss-threshold"]
    shadows = ["shadow-models"] if dataset.num_classes is not None and choice.model in _SMALL else []
    return ["loss-threshold", "gradient-norm", *shadows]


def _evaluation(question: str, federation: dict[str, Any]) -> dict[str, Any]:
    if question in ("inversion", "words"):
        most = _ATTACKED if federation["algorithm"] == "fedsgd" else _ATTACKED // 2
        return {"max_updates": most, "controls": True}
    return {"accuracy_every": max(1, federation["rounds"] // 4), "controls": True}
