"""Every attack with its shortest run, and a scenario in which it applies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedaudit.attacks import Attack, make_attack
from fedaudit.data import load_dataset
from fedaudit_catalogue.train_generator import TrainingPlan, train_generator

# The shortest run of any attack.
ITERATIONS = ("iterations", "pre_iterations", "fit_iterations")
FEW = ("canaries", "group", "latent_iterations", "generator_iterations", "epochs", "restarts")
QUICK = dict.fromkeys(ITERATIONS, 3) | dict.fromkeys(FEW, 2) | {"hidden": 8, "updates": 10, "shadows": 6}

FEDAVG: dict[str, Any] = {
    "name": "f", "algorithm": "fedavg", "clients": 3, "rounds": 4, "examples": 60, "batch_size": 10, "local_epochs": 1,
    "learning_rate": 0.1,
}  # fmt: skip
PUBLIC: dict[str, Any] = {"target_records": 20, "knows_public_data": True, "public_examples": 20}
RECORDS: dict[str, Any] = {"data": {"name": "digits", "split": "train"}, "federations": [FEDAVG], "threat": PUBLIC}
HIDDEN = {
    **RECORDS,
    "data": {"name": "digits-parity", "split": "train"},
    "threat": {**PUBLIC, "hidden_attribute": "large"},
}
PROPERTY = {
    "data": {"name": "digits-parity", "split": "train"},
    "model": {"name": "mlp", "width": 8},
    "federations": [{**FEDAVG, "rounds": 1}],
    "threat": {"client_property": "large=5 to 9", "knows_public_data": True, "public_examples": 60},
}
SPANNED = {"name": "f", "clients": 3, "examples": 24, "batch_size": 8}
FULL = {
    "name": "f", "algorithm": "fedavg", "clients": 3, "clients_per_round": 1, "rounds": 60, "batch_size": 500,
    "local_steps": 5, "learning_rate": 0.05,
}  # fmt: skip
TEXT = {
    "data": {"name": "notes-causal"},
    "model": {"name": "decoder", "width": 64},
    "federations": [{"name": "f", "clients": 2, "examples": 4, "batch_size": 2}],
}
CLASSIFIED = {
    "data": {"name": "notes"},
    "model": {"name": "encoder", "width": 16},
    "federations": [{"name": "f", "clients": 2, "examples": 2, "batch_size": 1}],
}
TEXTS = {
    "data": {"name": "notes-causal", "split": "train"},
    "model": {"name": "decoder", "width": 16},
    "federations": [FEDAVG],
    "threat": {"target_records": 20},
}
VERTICAL = {"name": "f", "algorithm": "vertical", "clients": 2, "examples": 6, "batch_size": 4, "rounds": 12}
SPLIT = {"name": "f", "algorithm": "split", "examples": 6, "batch_size": 4, "rounds": 3, "vertical": {"cut": 2}}
PARTY = {"data": {"name": "digits-parity"}, "federations": [VERTICAL], "threat": {"adversary": "client"}}
LOCAL = {"data": {"name": "diabetes", "split": "train"}, "model": {"name": "linear"}, "federations": [FEDAVG]}


def malicious(**settings: Any) -> dict[str, Any]:
    return {**RECORDS, "federations": [{**FEDAVG, "malicious": settings}]}


SCENARIOS: dict[str, dict[str, Any]] = {
    "learned-inversion": {
        "data": {"name": "digits", "split": "train"},
        "federations": [{"name": "f", "clients": 2, "examples": 100, "batch_size": 50}],
        "threat": {"knows_labels": True, "knows_public_data": True, "public_examples": 1100},
    },
    "imprint": {
        "federations": [{"name": "f", "clients": 2, "examples": 4, "server": {"name": "imprint", "units": 16}}],
        "threat": {"adversary": "malicious-server"},
    },
    "loki": {
        "federations": [{"name": "f", "clients": 2, "examples": 8, "server": {"name": "loki", "units": 16}}],
        "threat": {"adversary": "malicious-server", "sees": "sum"},
    },
    "fishing": {
        "federations": [{"name": "f", "clients": 2, "examples": 4, "server": {"name": "fishing", "target": 4}}],
        "threat": {"adversary": "malicious-server"},
    },
    "trap-weights": {
        "model": {"name": "mlp", "width": 64},
        "federations": [{"name": "f", "clients": 2, "examples": 4, "server": "trap-weights"}],
        "threat": {"adversary": "malicious-server"},
    },
    "seer": {
        "data": {"name": "digits", "split": "test"},
        "model": {"name": "mlp", "width": 8},
        "federations": [{"name": "f", "clients": 2, "examples": 4, "server": {"name": "seer", "steps": 2}}],
        "threat": {"adversary": "malicious-server", "knows_public_data": True, "public_examples": 100},
    },
    "peftleak": {
        "model": {"name": "vit-adapters", "width": 64},
        "federations": [{"name": "f", "clients": 2, "examples": 4, "server": "peftleak"}],
        "threat": {"adversary": "malicious-server"},
    },
    "decepticons": {
        "data": {"name": "notes"},
        "model": {"name": "encoder", "width": 64},
        "federations": [{"name": "f", "clients": 2, "examples": 4, "server": "decepticons"}],
        "threat": {"adversary": "malicious-server"},
    },
    "sratta": {
        "model": {"name": "mlp", "width": 200},
        "federations": [{**FEDAVG, "examples": 9, "batch_size": 3, "local_epochs": 2, "learning_rate": 0.5}],
        "threat": {"sees": "sum"},
    },
    "spear": {"model": {"name": "mlp"}},
    "cocktail": {"model": {"name": "mlp"}},
    "exact-linear": {"model": {"name": "mlp"}},
    **{
        name: {"data": {"name": "breast-cancer"}, "model": {"name": "mlp"}}
        for name in ("spear-rows", "exact-linear-rows")
    },
    "r-gap": {"model": {"name": "leaky-cnn"}, "federations": [{"name": "f", "clients": 2, "examples": 2}]},
    "gias": {"threat": {"knows_public_data": True}},
    "gan": {
        **malicious(name="gan", lacks=[3], start=1, steps=2, images=4, keep=1, latent=4, width=4),
        "threat": {"adversary": "client"},
    },
    "agrevader": {**malicious(name="agrevader", start=1), "threat": {"adversary": "client", "target_records": 20}},
    **dict.fromkeys(("dager", "somp", "token-presence"), TEXT),
    "lamp": CLASSIFIED,
    **dict.fromkeys(("extraction", "min-k", "zlib-ratio", "reference-loss"), TEXTS),
    "last-update": LOCAL,
    "local-model": LOCAL,
    "local-model-exact": {**LOCAL, "federations": [FULL]},
    **dict.fromkeys(("loss-threshold", "gradient-norm", "shadow-models", "lira", "rmia", "source-inference"), RECORDS),
    "source-outputs": {**RECORDS, "threat": {**PUBLIC, "known_records": 5}},
    **dict.fromkeys(("fedmia", "loss-series", "stacked", "range-membership"), RECORDS),
    "projection-residual": {**RECORDS, "model": {"name": "mlp", "width": 32}, "federations": [SPANNED]},
    "property-inference": PROPERTY,
    "attribute-loss": {**RECORDS, **LOCAL, "threat": {**PUBLIC, "hidden_attribute": "sex"}},
    "attribute-features": HIDDEN,
    "tableak": {"data": {"name": "diabetes"}, "model": {"name": "mlp"}},
    "cafe": {
        "model": {"name": "cafe-cnn", "width": 2},
        "federations": [{**VERTICAL, "rounds": 30, "vertical": {"protocol": "aggregated-gradients"}}],
    },
    "unsplit": {"federations": [SPLIT]},
    "fsha": {
        "federations": [{**SPLIT, "server": "fsha"}],
        "threat": {"adversary": "malicious-server", "knows_public_data": True, "public_examples": 20},
    },
    "model-completion": {
        "federations": [{**SPLIT, "examples": 30, "vertical": {"cut": 2, "known_labels": 1}}],
        "threat": {"adversary": "client"},
    },
    "direct-labels": {"federations": [{**VERTICAL, "vertical": {"top": "sum"}}], "threat": {"adversary": "client"}},
    **dict.fromkeys(("norm-scoring", "direction-scoring"), PARTY),
    "timberstrike": {
        "data": {"name": "breast-cancer"},
        "model": {"name": "xgboost"},
        "federations": [{"name": "f", "algorithm": "trees", "clients": 2, "examples": 24, "rounds": 2}],
    },
    "dp-canaries": {"defences": {"client_defence": {"name": "dp", "epsilon": None}}},
}


def quick_attack(name: str, folder: Path) -> Attack:
    """Return the attack with settings of its shortest run; files that it needs are made in ``folder``."""
    known = make_attack(name).settings()
    settings: dict[str, Any] = {key: value for key, value in QUICK.items() if key in known}
    if name in ("averaged", "epochs", "fishing"):
        settings["attack"] = {"name": "invg", "iterations": 3}
    if name == "gias":
        settings["generator_file"] = str(folder / "digits.safetensors")
        plan = TrainingPlan(steps=2)
        train_generator(load_dataset("digits"), Path(settings["generator_file"]), latent=4, width=4, plan=plan)
    return make_attack(name, settings)
