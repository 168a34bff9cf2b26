"""The same computation has the same fingerprint, in every process, and another one has another."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

import fedaudit
from fedaudit.attacks import ATTACKS, make_attack
from fedaudit.pipeline import run as auditing
from fedaudit.pipeline.parts import data, federations
from fedaudit.pipeline.prepare import resolve
from fedaudit.pipeline.run import record, run_audit
from fedaudit.pipeline.trials import Trial
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation import record_draw, simulator
from fedaudit.simulation.protocols import horizontal
from fedaudit.task.training import TrainingConfig
from fedaudit.transcript.observation import Observation, observe
from fedaudit.transcript.threat import ThreatModel
from fedaudit.transcript.update import ClientDefenceInfo
from fedaudit.utils import registry
from fedaudit.utils.fingerprint import code_version, file_digest, fingerprint
from fedaudit.utils.plain_yaml import dumps
from tests.conftest import Command

VALUES: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "logistic"},
    "federations": [{"name": "f", "clients": 1, "examples": 2, "batch_size": 2}],
    "threat": {"knows_labels": True},
    "attacks": [{"name": "invg", "iterations": 1}],
}
KEY = """
from tests.utils.test_fingerprint import key, observation
print(key(observation()))
"""


def observation() -> Observation:
    made = resolve(scenario_from(VALUES))
    (only,) = record(made)
    (seen,) = observe(only.transcript, made.scenario.threat).split()
    return seen


def key(seen: Observation, **changes: Any) -> str:
    (message,) = seen.messages
    update = dataclasses.replace(message.update, **changes)
    return Trial(
        make_attack("dlg-adam"), dataclasses.replace(seen, messages=(dataclasses.replace(message, update=update),)),
        0, "cpu",
    ).key()  # fmt: skip


# What counts --------------------------------------------------------------------------------------------------------


def test_every_part_of_an_update_counts_its_defence_among_them() -> None:
    seen = observation()
    before = key(seen)
    (message,) = seen.messages
    changes: dict[str, Any] = {
        "client": 1,
        "kind": "weights",
        "tensors": {name: t + 1e-6 for name, t in message.update.tensors.items()},
        "num_examples": 2,  # as it is: another number contradicts the rest
        "training": None,
        "buffers": {"n": torch.ones(1)},
        "labels": torch.tensor([9, 9]),
        "sanitised": ClientDefenceInfo("top-k", sparse=True),
        "seconds": 1.0,
        "members": (0, 1),
    }
    assert changes.keys() == {field.name for field in dataclasses.fields(message.update)}
    assert {name for name, value in changes.items() if key(seen, **{name: value}) == before} == {"num_examples"}
    one, two = (key(seen, sanitised=ClientDefenceInfo("dp", noise=noise)) for noise in (0.1, 0.2))
    assert len({before, one, two}) == 3


def test_the_adversary_the_attack_and_its_settings_count() -> None:
    seen = observation()
    keys = [
        Trial(make_attack("dlg-adam"), seen, 0, "cpu").key(),
        Trial(make_attack("dlg-adam"), seen, 1, "cpu").key(),
        Trial(make_attack("dlg-adam", {"iterations": 7}), seen, 0, "cpu").key(),
        Trial(make_attack("invg"), seen, 0, "cpu").key(),
        Trial(make_attack("dlg-adam"), dataclasses.replace(seen, threat=ThreatModel()), 0, "cpu").key(),
        Trial(make_attack("dlg-adam"), dataclasses.replace(seen, loss=lambda a, b: (a - b).sum()), 0, "cpu").key(),
    ]
    assert len(set(keys)) == len(keys)


def test_a_module_counts_by_what_it_computes_and_not_by_weights_that_mean_nothing() -> None:
    def net(activation: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(64, 10)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return activation(self.layer(x.flatten(1)))

        return Net()

    seen = observation()
    one, same, other = (key(dataclasses.replace(seen, module=net(f))) for f in (torch.relu, torch.relu, torch.tanh))
    assert one == same != other


@pytest.mark.slow
def test_it_is_the_same_in_another_process() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'src'}", "PYTHONHASHSEED": "7"}
    found = subprocess.run([sys.executable, "-c", KEY], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == key(observation())


PLUGIN = """
import torch
from fedaudit.attacks import Attack, ImageFinding, register
from fedaudit.utils.fingerprint import computation

@register
class Grey(Attack):
    name, summary, paper, threat_model, needs = "grey", "grey images", "none", "server, passive", ("images",)
    shade: float = 0.5

    def _run(self, observation, generator, device, progress, /):
        return ImageFinding(images=torch.full((1, 1, 8, 8), self.shade), labels=torch.zeros(1), label_source="none")
"""


@pytest.mark.slow
def test_another_package_s_attack_has_one_that_lasts_until_its_code_changes(tmp_path: Path) -> None:
    told = []
    for name, code in {
        "same": PLUGIN,
        "again": PLUGIN,
        "changed": PLUGIN.replace("self.shade)", "1 - self.shade)"),
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "grey.py").write_text(code)
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path / name}{os.pathsep}{Path(__file__).parents[2] / 'src'}"}
        command = [sys.executable, "-c", "import grey; print(grey.computation(grey.Grey, grey.Grey().settings()))"]
        told.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert told[0] == told[1] != told[2]


THINGS: dict[str, tuple[Any, Any]] = {
    "elements": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "dtype": (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.float32)),
    "which name a tensor has": ({"a": torch.zeros(1), "b": torch.ones(1)}, {"b": torch.zeros(1), "a": torch.ones(1)}),
    "where a list ends": ([["a"], ["b"]], [["a", "b"], []]),
    "kind of number": (1, 1.0),
    "word and number": ("1", 1),
    "a loss's settings": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1)),
    "a function": (functional.relu, functional.tanh),
    "a field that is called training": (SimpleNamespace(training=1), SimpleNamespace(training=2)),
    "a dataclass": (TrainingConfig(0.1, 1, (2,)), TrainingConfig(0.1, 1, (2,), momentum=0.5)),
}


@pytest.mark.parametrize("name", THINGS)
def test_what_differs_has_another_fingerprint(name: str) -> None:
    one, other = THINGS[name]
    assert fingerprint(one) == fingerprint(one) != fingerprint(other)


def test_what_is_equal_has_the_same_one() -> None:
    shared, a, b = {"w": torch.ones(2)}, {"w": torch.ones(2)}, {"w": torch.ones(2)}
    assert fingerprint([shared, shared]) == fingerprint([a, b])
    assert fingerprint({"a": torch.ones(1), "b": torch.zeros(1)}) == fingerprint(
        {"b": torch.zeros(1), "a": torch.ones(1)}
    )
    assert fingerprint(torch.arange(6.0).view(2, 3).T) == fingerprint(torch.arange(6.0).view(2, 3).T.contiguous())
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.load_state_dict(one.state_dict())
    assert fingerprint(one.eval()) == fingerprint(other.train())


def test_what_holds_itself_has_one() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    other: list[Any] = [2]
    other.append(other)
    assert len({fingerprint(loop), fingerprint(other)}) == 2


def test_the_code_counts_but_not_what_only_shows_results(tmp_path: Path) -> None:
    home = tmp_path / "fedaudit"
    shutil.copytree(Path(fedaudit.__file__).parent, home, ignore=shutil.ignore_patterns("__pycache__"))
    (home / "report" / "page.py").write_text("changed")
    assert version_of(home) == code_version()
    for path in ("utils/winograd.cpp", "simulation/client.py", "defences/privacy.py", "transcript/update.py"):
        before = version_of(home)
        (home / path).write_text("changed")
        assert version_of(home) != before, path
    before = version_of(home)
    (home / "transcript" / "update.py").rename(home / "transcript" / "updates.py")
    assert version_of(home) != before


def version_of(home: Path) -> str:
    """Return the code version that a copy of the package says it has."""
    spec = importlib.util.spec_from_file_location("copy_of_fingerprint", home / "utils" / "fingerprint.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.code_version())


def test_files_count_by_what_is_in_them(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"1")
    assert file_digest(tmp_path / "d" / "a") == file_digest(tmp_path / "b") == hashlib.sha256(b"1").hexdigest()
    before = file_digest(tmp_path / "d")
    (tmp_path / "d" / "a").rename(tmp_path / "d" / "c")
    assert file_digest(tmp_path / "d") != before
    assert file_digest(tmp_path / "nothing") is None


# Nothing twice ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_audit_makes_and_checks_everything_once(
    monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path
) -> None:
    made: Counter[str] = Counter()

    def count(where: Any, name: str, label: Callable[..., str] = lambda *_, **__: "") -> None:
        function = getattr(where, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            made[f"{name} {label(*args, **kwargs)}".strip()] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(where, name, counted)

    for where, name in (
        (simulator, "partition"), (record_draw, "draw"), (data, "load_dataset"), (horizontal, "build_model"),
        (federations, "check"), (auditing, "resolve"), (auditing, "check_public_examples"),
    ):  # fmt: skip
        count(where, name)
    count(registry, "make", lambda _, name, *rest: name)
    entry = ATTACKS._entries["invg"]
    attacks: list[Any] = []

    def attack(**settings: Any) -> Any:
        attacks.append(entry.value(**settings))
        return attacks[-1]

    monkeypatch.setitem(ATTACKS._entries, "invg", dataclasses.replace(entry, value=cast(Any, attack)))
    gan = {"name": "gan", "target": 3, "missing_classes": [3], "start": 0}
    spec = {"algorithm": "fedavg", "clients": 3, "examples": 30, "batch_size": 5, "local_steps": 1}
    values = {
        **VALUES,
        "model": {"name": "convnet-small", "width": 4},
        "federations": [
            {**spec, "name": "a"},
            {**spec, "name": "b", "malicious": {**gan, "steps": 1, "images": 1}},
        ],
        "defences": [{}, {"aggregator": "median"}],
        "threat": {"target_records": 4},
        "evaluation": {"max_updates": 1, "accuracy_every": 1},
    }
    (tmp_path / "s.yaml").write_text(dumps(values))
    assert command("audit", tmp_path / "s.yaml", "--out", tmp_path / "out", "--workers", "1").code == 0
    # what a scenario names is made once; the deployment that a diagnostic offers is a second scenario, which is read
    # to see that it is one
    assert made == {
        "resolve": 1, "load_dataset": 1, "build_model": 1, "partition": 2, "draw": 2, "check": 4,
        "make invg": 2, "make gan": 2, "make median": 2, "make mean": 1, "make none": 2, "check_public_examples": 1,
    }  # fmt: skip
    assert len(attacks) == 2


def test_a_simulation_changes_none_of_its_federation_s_parts() -> None:
    spec = {"name": "f", "algorithm": "fedavg", "clients": 3, "examples": 30, "batch_size": 5, "local_steps": 1}
    values = {**VALUES, "federations": [{**spec, "rounds": 3}], "defences": {"aggregator": "afa"}}
    (federation,) = resolve(scenario_from(values)).federations
    before = fingerprint(federation)
    one, again = (simulator.simulate(federation).transcript.fingerprint() for _ in range(2))
    assert one == again
    assert fingerprint(federation) == before


def test_what_was_kept_of_an_update_without_its_defence_is_not_used(tmp_path: Path) -> None:
    """Two federations that differ in nothing but what is said of the update: each has its own finding."""
    run_audit(scenario_from(VALUES), store=tmp_path)
    seen = observation()
    (message,) = seen.messages
    update = dataclasses.replace(message.update, sanitised=ClientDefenceInfo("sign", signs=True))
    told = dataclasses.replace(seen, messages=(dataclasses.replace(message, update=update),))
    attack = make_attack("invg", {"iterations": 1})
    assert (tmp_path / f"{Trial(attack, seen, 0, 'cpu').key()}.safetensors").is_file()
    assert not (tmp_path / f"{Trial(attack, told, 0, 'cpu').key()}.safetensors").exists()
