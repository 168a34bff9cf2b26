"""How often the verdict is right: 48 set-ups that are known to leak or known to be safe.

    python -m tools.measure.right_verdicts [--source FOLDER] [--out FOLDER] [--only PART]

Each is audited by the command line of the source tree in FOLDER, so that two versions can be compared, and its
verdict is compared with what is known beforehand. *Leaking*: more effort, or an exact attack, does recover the data, so
whatever the attack reaches here, "not demonstrated" would mislead. *Safe*: what travels is drowned in noise, or holds
nothing, so any claim of a leak would mislead. "Inconclusive" misleads nobody, and is counted by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from tests.transcript.integrity_cases import seal_again

LEAK = (
    "recovered",
    "identifiable",
    "inferred",
    "recognisable",
    "partly recognisable",
    "demonstrated",
    "partly demonstrated",
)
_MODEL = {"name": "convnet-small", "width": 16}
_NOISE = {"client_defence": {"name": "dp", "clip": 1.0, "noise": 1.0, "epsilon": None}}
_FAINT = {"client_defence": {"name": "dp", "clip": 100.0, "noise": 1e-7, "epsilon": None}}


def _images(
    attack: str = "invg", iterations: int = 200, batch: int = 1, defences: Any = None, **model: Any
) -> dict[str, Any]:
    federation = {"name": "f", "algorithm": "fedsgd", "clients": 2 // batch or 1, "examples": 2, "batch_size": batch}
    return _audit({"name": attack, "iterations": iterations}, federation, defences, model)


def _fedavg(attack: str = "agic", iterations: int = 200, steps: int = 2, defences: Any = None) -> dict[str, Any]:
    federation = {"name": "f", "algorithm": "fedavg", "clients": 1, "examples": 2, "batch_size": 1}
    return _audit(
        {"name": attack, "iterations": iterations},
        {**federation, "local_steps": steps, "learning_rate": 0.001},
        defences,
        {},
    )


def _audit(attack: dict[str, Any], federation: dict[str, Any], defences: Any, model: dict[str, Any]) -> dict[str, Any]:
    return {
        "data": {"name": "photos", "split": "test"},
        "model": {**_MODEL, **model},
        "federations": [federation],
        "defences": defences or {},
        "attacks": [attack],
    }


def _labels(examples: int, defences: Any = None) -> dict[str, Any]:
    federation = {"name": "f", "clients": 1, "examples": examples, "batch_size": examples}
    return {**_audit({"name": "labels"}, federation, defences, {}), "data": {"name": "digits", "split": "train"}}


def _members(
    rounds: int,
    records: int,
    rate: float = 0.1,
    defences: Any = None,
    attack: str = "loss-threshold",
    examples: int = 300,
    epochs: int = 2,
) -> Any:
    federation = {"name": "f", "algorithm": "fedavg", "clients": 5, "rounds": rounds, "examples": examples}
    return {
        "data": {"name": "digits", "split": "train"},
        "model": {"name": "mlp", "width": 64},
        "federations": [{**federation, "batch_size": 10, "local_epochs": epochs, "learning_rate": rate}],
        "defences": defences or {},
        "threat": {"adversary": "server", "target_records": records},
        "attacks": [{"name": attack}],
    }


def _property(labels: str = "alike", defences: Any = None, clients: int = 16, **shares: float) -> dict[str, Any]:
    spread = {"scheme": "attribute", "attribute": "large=5 to 9", "labels": labels, **shares}
    federation = {"name": "f", "algorithm": "fedavg", "clients": clients, "rounds": 2, "examples": 480}
    return {
        "data": {"name": "digits-parity", "split": "train"},
        "model": {"name": "mlp", "width": 32},
        "federations": [{**federation, "batch_size": 10, "local_epochs": 1, "learning_rate": 0.1, "partition": spread}],
        "defences": defences or {},
        "threat": {"client_property": "large=5 to 9", "knows_public_data": True, "public_examples": 300},
        "attacks": [{"name": "property-inference", "updates": 40}],
    }


def _attribute(rounds: int, rate: float, defences: Any = None) -> dict[str, Any]:
    federation = {"name": "f", "algorithm": "fedavg", "clients": 5, "rounds": rounds, "examples": 300}
    return {
        "data": {"name": "digits-parity", "split": "train"},
        "model": {"name": "mlp", "width": 64},
        "federations": [{**federation, "batch_size": 10, "local_epochs": 2, "learning_rate": rate}],
        "defences": defences or {},
        "threat": {
            "adversary": "server",
            "target_records": 200,
            "hidden_attribute": "large",
            "knows_public_data": True,
            "public_examples": 60,
        },
        "attacks": [{"name": "attribute-features"}],
    }


def _attribute_of_patients(rounds: int, rate: float, examples: int = 150, epochs: int = 5) -> dict[str, Any]:
    """The loss tells the sex of the patients whom the model has learnt by heart, and hardly that of others."""
    federation = {"name": "f", "algorithm": "fedavg", "clients": 5, "rounds": rounds, "examples": examples}
    return {
        "data": {"name": "diabetes", "split": "train"},
        "model": {"name": "mlp", "width": 64},
        "federations": [{**federation, "batch_size": 10, "local_epochs": epochs, "learning_rate": rate}],
        "threat": {"adversary": "server", "target_records": min(200, 2 * examples), "hidden_attribute": "sex"},
        "attacks": [{"name": "attribute-loss"}],
    }


def _local(rounds: int, defences: Any = None) -> dict[str, Any]:
    federation = {"name": "f", "algorithm": "fedavg", "clients": 3, "clients_per_round": 1, "rounds": rounds}
    return {
        "data": {"name": "diabetes", "split": "train"},
        "model": {"name": "linear"},
        "federations": [{**federation, "batch_size": 500, "local_steps": 5, "learning_rate": 0.05}],
        "defences": defences or {},
        "threat": {"adversary": "eavesdropper"},
        "attacks": [{"name": "local-model", "mapping": "linear"}],
    }


# name to the scenario, and what is written wrongly into its transcript before it is attacked
LEAKING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "images, 5 iterations": (_images(iterations=5), {}),
    "images, 20 iterations": (_images(iterations=20), {}),
    "images, 600 iterations": (_images(iterations=600), {}),
    "images, agic, 10 iterations": (_images("agic", 10), {}),
    "images, agic, 600 iterations": (_images("agic", 600), {}),
    "images, dlg, 3 iterations": (_images("dlg", 3), {}),
    "images, batch of 2, 10 iterations": (_images(iterations=10, batch=2), {}),
    "images, batch of 2, 600 iterations": (_images(iterations=600, batch=2), {}),
    "images, BatchNorm in train mode": (_images(iterations=200, batch=2, batch_norm="train"), {}),
    "images, BatchNorm in train mode, 10 iterations": (_images(iterations=10, batch=2, batch_norm="train"), {}),
    "images, faint noise": (_images(iterations=400, defences=_FAINT), {}),
    "images, dgc": (_images(iterations=300, defences={"client_defence": "dgc"}), {}),
    "images, fedavg, 10 iterations": (_fedavg(iterations=10), {}),
    "images, fedavg, 600 iterations": (_fedavg(iterations=600), {}),
    "images, learning rate recorded tenfold": (_fedavg("invg", 200, 4), {"learning_rate": 0.01}),
    "images, learning rate recorded thousandfold": (_fedavg("invg", 200, 4), {"learning_rate": 1.0}),
    "labels of 8 examples": (_labels(8), {}),
    "members of an overfitted model": (_members(60, 120, examples=60, epochs=3), {}),
    "members, 12 records": (_members(40, 12), {}),
    "whose records are, overfitted models": (
        _members(60, 120, attack="source-inference", examples=60, epochs=3),
        {},
    ),
    "a property of clients": (_property(), {}),
    "a property of 70 %, labels go with it": (_property("natural", share=0.7, otherwise=0.3), {}),
    "an attribute of an overfitted model": (_attribute_of_patients(100, 0.05, examples=60, epochs=10), {}),
}
SAFE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "images, noise": (_images(iterations=800, defences=_NOISE), {}),
    "images, noise, 5 iterations": (_images(iterations=5, defences=_NOISE), {}),
    "images, noise, 100 iterations": (_images(iterations=100, defences=_NOISE), {}),
    "images, noise, agic": (_images("agic", 800, defences=_NOISE), {}),
    "images, noise, dlg": (_images("dlg", 20, defences=_NOISE), {}),
    "images, noise, batch of 2": (_images(iterations=800, batch=2, defences=_NOISE), {}),
    "images, noise, BatchNorm in train mode": (
        _images(iterations=800, batch=2, defences=_NOISE, batch_norm="train"),
        {},
    ),
    "images, noise, fedavg": (_fedavg(iterations=800, defences=_NOISE), {}),
    "images, noise, fedavg, invg": (_fedavg("invg", 800, defences=_NOISE), {}),
    "images, noise, fedavg, 8 steps": (_fedavg("invg", 800, steps=8, defences=_NOISE), {}),
    "labels of 8 examples, noise": (_labels(8, {"client_defence": {**_NOISE["client_defence"], "noise": 10.0}}), {}),
    "labels of 2 examples, noise": (_labels(2, {"client_defence": {**_NOISE["client_defence"], "noise": 10.0}}), {}),
    "members, one tiny step": (_members(1, 200, 1e-6), {}),
    "members, one tiny step, 12 records": (_members(1, 12, 1e-6), {}),
    "members, tiny steps": (_members(10, 200, 1e-6), {}),
    "members, noise": (_members(10, 200, 0.01, _NOISE), {}),
    "members, noise, gradient-norm": (_members(10, 200, 0.01, _NOISE, "gradient-norm"), {}),
    "members, tiny steps, gradient-norm": (_members(1, 100, 1e-6, None, "gradient-norm"), {}),
    "whose records are, noise": (
        _members(10, 200, 0.01, {"client_defence": {**_NOISE["client_defence"], "noise": 100.0}}, "source-inference"),
        {},
    ),
    "a property of clients, noise": (
        _property(defences={"client_defence": {**_NOISE["client_defence"], "noise": 100.0}}),
        {},
    ),
    "a property of clients, noise, labels go with it": (
        _property("natural", {"client_defence": {**_NOISE["client_defence"], "noise": 100.0}}),
        {},
    ),
    "an attribute, noise": (_attribute(1, 1e-6, {"client_defence": {**_NOISE["client_defence"], "noise": 10.0}}), {}),
    "an attribute that features show of anybody": (_attribute(40, 0.1), {}),
    "an attribute, tiny steps": (_attribute_of_patients(1, 1e-6), {}),
    "local models, noise": (_local(30, {"client_defence": {**_NOISE["client_defence"], "noise": 10.0}}), {}),
}


def main() -> None:
    """Audit all, and print and write what came of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--out", type=Path, default=Path("right-verdicts"))
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    tables = (("leaking", LEAKING), ("safe", SAFE))
    setups = [(truth, name, what) for truth, table in tables for name, what in table.items() if asked.only in name]
    asked.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(lambda s: _row(s[0], s[1], s[2], asked.source.resolve(), asked.seed), setups))
    (asked.out / "verdicts.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    for truth in ("leaking", "safe"):
        counts = [row["counts"] for row in rows if row["truth"] == truth]
        shares = {what: counts.count(what) for what in ("right", "inconclusive", "wrong")}
        print(f"{truth}: {len(counts)} set-ups, {shares}")


def _row(truth: str, name: str, what: tuple[dict[str, Any], dict[str, Any]], source: Path, seed: int) -> dict[str, Any]:
    scenario, wrong = what
    with tempfile.TemporaryDirectory() as draft:
        folder = Path(draft)
        values = {"version": 1, "name": name, "seed": seed, **scenario}
        (folder / "scenario.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        if wrong:
            _run(source, ["simulate", folder / "scenario.yaml", "--out", folder / "t"])
            for index in (folder / "t").glob("round-*.json"):
                entry = json.loads(index.read_text(encoding="utf-8"))
                for message in entry["messages"]:
                    message["training"] |= wrong
                index.write_text(json.dumps(entry), encoding="utf-8")
            seal_again(folder / "t")
            attack = scenario["attacks"][0]
            flags = ["--set", f"iterations={attack['iterations']}"]
            _run(source, ["attack", folder / "t", "--attack", attack["name"], *flags, "--out", folder / "a"])
        else:
            _run(source, ["audit", folder / "scenario.yaml", "--workers", "1", "--out", folder / "a"])
        result = json.loads((folder / "a" / "results.json").read_text(encoding="utf-8"))
    (summary,) = result["summaries"]
    verdict, claimed = summary["verdict"], summary["verdict"] in LEAK
    if verdict in ("inconclusive", "not applicable"):
        counts = "inconclusive"
    else:
        counts = "right" if claimed == (truth == "leaking") else "wrong"
    ran = sum(f["timing"]["seconds"] for f in result["findings"] if f.get("timing"))
    controls = [c["timing"]["seconds"] for c in result.get("controls", []) if c.get("timing")]
    row = {"truth": truth, "name": name, "verdict": verdict, "counts": counts, "text": summary["verdict_text"]}
    row |= {"attack_seconds": round(ran, 2), "control_seconds": round(sum(controls), 2), "controls": len(controls)}
    print(f"{truth:8} {name:50} {verdict:20} {counts:13} {ran:6.1f} s, controls {sum(controls):5.1f} s", flush=True)
    return row


def _run(source: Path, arguments: list[Any]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fedaudit", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")


if __name__ == "__main__":
    main()
