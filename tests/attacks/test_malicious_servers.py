"""What every malicious server keeps to, by one table: what it refuses, what is recorded of it, and who reads it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fedaudit.attacks import ImageFinding, make_attack
from fedaudit.pipeline.prepare import resolve
from fedaudit.scenario.scenario import Scenario, scenario_from
from fedaudit.simulation.server_behaviour import SERVER_BEHAVIOURS
from fedaudit.simulation.simulator import Recording
from fedaudit.transcript.transcript import Transcript
from fedaudit.utils.errors import BadInput, NotApplicable
from tests.attacks.server_cases import PUBLIC, SERVERS, best_psnr
from tests.build import recorded, seen_in

# Settings with which a server that trains its weights is quick.
QUICK: dict[str, dict[str, Any]] = {
    "geminio": {
        "federation": {"examples": 8, "batch_size": 8, "server": {"name": "geminio", "epochs": 1}},
        "threat": {"public_examples": 100},
    },
    "seer": {
        "model": {"width": 8},
        "federation": {"server": {"name": "seer", "steps": 1}},
        "threat": {"public_examples": 100},
    },
}
# Split learning's servers have no updates to read: `tests/simulation/test_split.py`.
OF_UPDATES = {entry.name for entry in SERVER_BEHAVIOURS} - {"fsha"}


def server(name: str, **settings: Any) -> dict[str, Any]:
    return {"server": {"name": name, **settings}}


def quick(name: str) -> Scenario:
    return SERVERS[name].but(**QUICK.get(name, {}))()


@cache
def played(name: str) -> Recording:
    return recorded(quick(name))


def without(name: str) -> Scenario:
    """Return the scenario with an honest server."""
    values = SERVERS[name].but(**QUICK.get(name, {})).values({"server": None})
    return scenario_from({**values, "threat": {key: v for key, v in values["threat"].items() if key == "sees"}})


def test_every_server_that_reads_updates_is_in_the_table():
    assert set(SERVERS) == OF_UPDATES


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVERS)
def test_the_same_bits_come_twice_and_survive_the_disk(name, tmp_path: Path):
    transcript = played(name).transcript
    assert recorded(quick(name)).transcript.digest() == transcript.digest()
    transcript.save(tmp_path / "kept")
    read = Transcript.load(tmp_path / "kept")
    assert read.task_info == transcript.task_info
    assert (read.digest(), read.fingerprint()) == (transcript.digest(), transcript.fingerprint())
    assert not read.adversary_log.keys() ^ transcript.adversary_log.keys()


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        *((name, {name}) for name in ("imprint", "loki", "trap-weights", "fishing", "decepticons")),
        ("geminio", {"invg", "agic", "agic-plus"}),  # what it sends is read by ordinary inversions
    ],
)
def test_attacks_that_read_it_are_chosen_where_the_server_plays_it(name, chosen):
    made = scenario_from({**quick(name).model_dump(), "attacks": None})
    assert chosen <= {attack.name for attack in resolve(made).scenario.attacks}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, f"server: {name}") for name in ("imprint", "loki", "fishing")),
        ("decepticons", "without bins"),
        ("peftleak", "leads patches"),
        ("seer", "no decoder"),
    ],
)
def test_an_honest_server_alters_nothing_and_its_updates_are_refused(name, reason):
    made = without(name)
    honest = recorded(made)
    assert honest.transcript.task_info.inserted is None
    assert not honest.transcript.adversary_log
    seen = seen_in(made, honest)[0]
    with pytest.raises(NotApplicable, match=reason):
        make_attack(name)(seen, generator=torch.Generator())


@pytest.mark.parametrize(("name", "more"), [("imprint", 0.1), ("loki", 0.2)])
def test_public_examples_tell_where_the_bins_are(name, more):
    shares = []
    for threat in ({}, PUBLIC):
        made = SERVERS[name](server(name, units=96 if name == "imprint" else 64, spread=5.0), threat=threat)
        recording = recorded(made)
        (seen,) = seen_in(made, recording)
        found = make_attack(name)(seen, generator=torch.Generator().manual_seed(0))
        assert isinstance(found, ImageFinding)
        (true,) = recording.truth.inputs.values()
        shares.append(float((best_psnr(true, found.images) >= 40).double().mean()))
        assert recording.transcript.records is None
    assert shares[1] > shares[0] + more


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), [("geminio", {"target": 1, "epochs": 1}), ("seer", {"steps": 2})])
def test_it_is_honest_until_it_starts_and_sends_the_same_from_then_on(name, settings):
    scenarios = SERVERS[name].but(federation={"rounds": 3}, threat={"public_examples": 100})
    first, second, third = (r.weights for r in recorded(scenarios(server(name, start=1, **settings))).transcript.rounds)
    honest = recorded(scenarios(server(name, start=9))).transcript.rounds[0].weights
    assert all(torch.equal(first[n], t) for n, t in honest.items())
    assert not any(torch.equal(second[n], t) for n, t in first.items())
    assert all(torch.equal(second[n], t) for n, t in third.items())


_AVG = {"algorithm": "fedavg", "local_steps": 1}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    *((name, {}, {"threat": {"adversary": "server", "knows_public_data": False, "public_examples": None}},
       "malicious-server") for name in SERVERS),
    ("imprint", {"server": None}, {}, "no federation says"),
    ("imprint", server("imprimt"), {}, "'imprint'"),
    ("imprint", server("imprint", units=1), {}, "2 to"),
    ("imprint", server("imprint", unit=3), {}, "units"),
    ("imprint", {"algorithm": "fedavg", "local_epochs": 2, **server("imprint", sparse=False)}, {}, "sparse: true"),
    ("imprint", {}, {"data": "notes", "model": {"name": "decoder"}}, "real values"),
    ("imprint", {}, {"threat": {"knows_public_data": True, "public_examples": 10**6}}, "nobody's"),
    ("loki", server("loki", units=1), {}, "2 to"),
    ("loki", server("loki", scale=0), {}, "scale"),
    ("loki", {}, {"data": "breast-cancer", "model": {"name": "mlp"}}, "for images"),
    ("trap-weights", {}, {"model": {"name": "convnet-small"}}, "first fully connected"),
    ("trap-weights", {}, {"model": {"name": "logistic"}}, "ReLU"),
    ("trap-weights", server("trap-weights", scale=1), {}, "scale"),
    ("fishing", server("fishing", target=10), {}, "0 to 9"),
    ("fishing", server("fishing", members=5), {}, "public examples"),
    ("fishing", server("fishing", weight=0), {}, "weight"),
    ("fishing", {}, {"data": "breast-cancer", "model": {"name": "mlp"}}, "three or more classes"),
    ("decepticons", {}, {"model": {"name": "decoder"}}, "last one alone"),
    ("decepticons", {}, {"data": "notes-causal", "model": {"name": "decoder-lora"}}, "is trained"),
    ("decepticons", _AVG, {}, "fedsgd"),
    ("peftleak", {}, {"model": {"name": "vit"}}, "vit-adapters"),
    ("peftleak", {}, {"data": "photos"}, r"model\.width to 256"),
    ("peftleak", _AVG, {}, "fedsgd"),
    ("geminio", server("geminio", target=10), {}, "0 to 9"),
    ("geminio", server("geminio", batch=1), {}, "batch is 1"),
    ("geminio", {}, {"threat": {"public_examples": 63}}, "64 public examples or more, 8 of class 0"),
    ("geminio", {}, {"threat": {"public_examples": 65}}, "64 public examples or more, 8 of class 0"),
    ("geminio", server("geminio", chosen="dark"), {"threat": {"public_examples": 63}}, "64 public examples or more; "),
    ("geminio", {}, {"data": "diabetes", "threat": {"public_examples": 100}}, "classifiers"),
    ("geminio", server("geminio", chosen="bright"), {"data": "breast-cancer", "threat": {"public_examples": 100}},
     "for images"),
    ("seer", {"batch_norm": "train"}, {"model": {"name": "convnet-small", "width": 8}}, "batch_norm: eval"),
    ("seer", {}, {"model": {"name": "fcn-3-dropout"}}, "dropout"),
    ("seer", {}, {"threat": {"public_examples": 63}}, "64 public examples"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "federation", "rest", "says"), REFUSED)
def test_what_can_not_be_is_refused_in_one_line(name, federation, rest, says):
    with pytest.raises(BadInput, match=says) as refused:
        recorded(SERVERS[name].but(federation={"examples": 8, "batch_size": 2})(federation, **rest))
    assert "\n" not in str(refused.value)
