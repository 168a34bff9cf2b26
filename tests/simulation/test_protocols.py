"""Protocols are objects that are asked: nobody outside of their rooms looks which one it is."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

import fedaudit
from fedaudit.attacks import ATTACKS, Attack
from fedaudit.scenario.scenario import scenario_from
from fedaudit.simulation.protocols import PROTOCOLS, protocol_by, protocol_of
from fedaudit.simulation.spec import FederationSpec
from fedaudit.transcript.observation import Observation
from fedaudit.transcript.sent import SENT, UPDATES
from fedaudit.utils.errors import BadInput
from tests.questions import compared

SOURCE = Path(fedaudit.__file__).parent
KINDS = ["vertical", "trees"]
# What is a protocol's own, and what is written for it.
ROOMS = re.compile(
    r"(simulation/protocols/\w+|(simulation|transcript|models|evaluation)/vertical|attacks/(vertical/\w+|active/fsha))\.py"
)
MODULES = {
    name: path.read_text()
    for path in sorted(SOURCE.rglob("*.py"))
    if not ROOMS.fullmatch(name := path.relative_to(SOURCE).as_posix())
}
# The names that objects of before are still found by, which a new protocol hasn't, and what says how to get one.
NAMED = {
    *("simulation/spec.py", "transcript/sent.py", "attacks/base.py", "adapters/flower/audit.py"),
    "adapters/nvflare/audit.py",
    *("utils/distributions.py", "results/audit.py"),
}


def looks(code: str) -> list[int]:
    """Return the lines on which an attribute of a protocol's name is read, or something is compared with a name."""
    if not re.search(r"\.(vertical|trees)\b", code):
        return compared(code, {*KINDS, "split"})
    read = [n.lineno for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Attribute) and n.attr in KINDS]
    return read + compared(code, {*KINDS, "split"})


def test_nobody_outside_of_the_protocols_asks_which_one_it_is() -> None:
    assert len(MODULES) > 300
    assert {name: lines for name, code in MODULES.items() if (lines := looks(code))} == {}
    for code in (
        "if a.vertical is None: x",
        "b.trees.messages",
        'f.algorithm == "trees"',
        'a in ("split", "vertical")',
    ):
        assert looks(code), code
    assert not looks('FederationSpec(algorithm="trees", trees=x)')


def test_a_protocol_of_another_package_is_named_nowhere() -> None:
    own = re.compile(r"\b(TreeSpec|TreeEntry|TreeRecord|TimberStrike|Trees)\b|[\"']trees[\"']")
    assert {name for name, code in MODULES.items() if own.search(code)} == NAMED


def test_every_protocol_has_settings_records_and_algorithms_of_its_own() -> None:
    assert set(PROTOCOLS.names()) == set(SENT.names()) == {"horizontal", *KINDS}
    for entry in PROTOCOLS:
        protocol = entry.value
        assert protocol.sent.specified.kind == protocol.sent.kind == entry.name
        for algorithm in protocol.sent.specified.algorithms:
            assert protocol_by(algorithm) is protocol
            local = {"local_steps": 1, "proximal_mu": 0.1 * (algorithm == "fedprox")} if algorithm[:4] == "fedp" else {}
            local = {"local_steps": 1} if algorithm == "fedavg" else local
            cut = {"vertical": {"cut": 1}} if algorithm == "split" else {}
            spec = FederationSpec.model_validate({"name": "f", "algorithm": algorithm, **local, **cut})
            assert protocol_of(spec) is protocol
            assert isinstance(spec.settings, protocol.sent.specified)


def test_what_attacks_read_is_said_once() -> None:
    assert {entry.value.reads.kind for entry in ATTACKS} == {"horizontal", *KINDS}

    class Of0(Attack):
        trees_only = True

    assert Of0.reads is SENT["trees"].value


def test_what_was_sent_is_found_by_its_earlier_names(seen: Observation) -> None:
    assert seen.sent is UPDATES
    assert (seen.vertical, seen.trees) == (None, None)
    record = object.__new__(SENT["trees"].value)
    assert replace(seen, sent=record).trees is record


@pytest.fixture(scope="module")
def seen() -> Observation:
    scenario = {"data": {"name": "digits"}, "model": {"name": "logistic"}, "federations": [{"name": "f"}]}
    made = fedaudit.simulate(scenario_from({**scenario, "attacks": ["labels"]}), progress=False)
    return fedaudit.observe(made)


@pytest.mark.parametrize(
    ("federations", "reason"),
    [
        (
            [{"algorithm": "trees"}, {}],
            "boosted trees and horizontal federations train different models",
        ),
        ([{}, {"algorithm": "vertical"}], "horizontal federations and vertical federations train different models"),
        ([{"algorithm": "vertical"}, {"algorithm": "vertical", "clients": 5}], "train different models"),
        ([{"algorithm": "vertical", "trees": {}}], "trees is for algorithm: trees, not vertical"),
        ([{"algorithm": "trees", "vertical": {}}], "vertical is for algorithm: vertical, not trees"),
        ([{"trees": {}}], "trees is for algorithm: trees, not fedsgd"),
        ([{"algorithm": "trees", "batch_size": 2}], "batch_size isn't for a federation of trees"),
        ([{"algorithm": "vertical", "momentum": 0.5}], "momentum isn't for a vertical federation"),
        (
            [{"algorithm": "trees", "clients": 2, "trees": {"observer": 2}}],
            "trees.observer is 2, but clients are 0 to 1",
        ),
    ],
)
def test_what_a_protocol_cannot_have_is_refused(federations, reason) -> None:
    named = [{"name": f"f{i}", **federation} for i, federation in enumerate(federations)]
    with pytest.raises(BadInput, match=re.escape(reason)):
        scenario_from({"data": {"name": "digits"}, "federations": named, "attacks": ["labels"]})


def test_a_model_of_trees_is_for_trees_alone() -> None:
    one = {"data": {"name": "digits"}, "attacks": ["labels"]}
    with pytest.raises(BadInput, match="model xgboost"):
        scenario_from({**one, "model": {"name": "xgboost"}, "federations": [{"name": "f"}]})
    with pytest.raises(BadInput, match="leave model out"):
        scenario_from({**one, "model": {"name": "mlp"}, "federations": [{"name": "f", "algorithm": "trees"}]})
