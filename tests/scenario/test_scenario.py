"""Scenarios: YAML in and out, --set, and what numbers mean."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedaudit.scenario.scenario import Scenario, apply_override, load_scenario, parse_setting, scenario_from
from fedaudit.utils.errors import BadInput

positive = st.floats(min_value=1e-12, max_value=1e12, allow_nan=False)
counts = st.integers(1, 10**6)
shapes = st.sampled_from(["linear", "logarithmic", "exponential"])
names = st.text(string.ascii_letters + string.digits, min_size=1, max_size=12)
# Words that YAML would take for something else than text, beside any printable text.
titles = st.sampled_from(
    ["1e-4", "-1.E5", "yes", "null", "~", "3", "1.0", "2024-01-01", "0x1f", "a: b", "# x", "'", '"', "é ☃"]
)
titles |= st.text(st.characters(codec="utf-8"), min_size=1, max_size=200).filter(str.isprintable)


@st.composite
def federations(draw: st.DrawFn, name: str) -> dict[str, Any]:
    clients = draw(st.integers(1, 20))
    values: dict[str, Any] = {
        "name": name,
        "algorithm": draw(st.sampled_from(["fedsgd", "fedavg", "fedprox"])),
        "clients": clients,
        "clients_per_round": draw(st.none() | st.integers(1, clients)),
        "rounds": draw(counts),
        "examples": draw(st.none() | st.integers(clients, 1000)),
        "batch_size": draw(counts),
        "learning_rate": draw(positive),
    }
    if values["algorithm"] != "fedsgd":
        values[draw(st.sampled_from(["local_steps", "local_epochs"]))] = draw(counts)
        values["momentum"] = draw(st.floats(0, 0.999))
        values["weight_decay"] = draw(st.floats(0, 1))
    if values["algorithm"] == "fedprox":
        values["proximal_mu"] = draw(positive)
    scheme, option = draw(st.sampled_from([("iid", None), ("dirichlet", "alpha"), ("classes-per-client", "k")]))
    values["partition"] = {"scheme": scheme}
    if option:
        values["partition"][option] = draw(positive if option == "alpha" else counts)
    return values


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    own = draw(st.lists(names, min_size=1, max_size=3, unique_by=str.lower))
    values = {
        "name": draw(titles),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "data": {
            "name": draw(names),
            "split": draw(st.sampled_from(["train", "test"])),
            "limit": draw(st.none() | counts),
        },
        "model": {
            "name": draw(names),
            "training": {"epochs": draw(st.integers(0, 100)), "learning_rate": draw(positive)},
        },
        "federations": [draw(federations(name)) for name in own],
        "threat": {"knows_labels": draw(st.booleans())},
        "attacks": [
            "invg",
            {
                "name": "agic",
                "beta": draw(positive),
                "shape": draw(shapes),
            },
        ],
        "evaluation": {"max_updates": draw(st.none() | counts)},
    }
    return scenario_from(values)


@settings(max_examples=10, deadline=None)
@given(scenario=scenarios())
def test_yaml_and_back(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.write_text(scenario.to_yaml(), encoding="utf-8")
    assert load_scenario(path) == scenario


def test_the_embedded_default_is_whole() -> None:
    scenario = load_scenario(None)
    assert [f.algorithm for f in scenario.federations] == ["fedsgd", "fedavg"]
    assert [a.name for a in scenario.attacks] == ["invg", "agic"]


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", ".1e-3", "+1e-4", "0.0001"])
def test_small_numbers_mean_what_they_look_like(text: str, tmp_path: Path) -> None:
    assert parse_setting(f"x={text}") == ("x", 1e-4)
    path = tmp_path / "s.yaml"
    path.write_text(
        f"federations: [{{name: a, learning_rate: {text}}}]\nattacks: [{{name: invg, total_variation: {text}}}]"
    )
    scenario = load_scenario(path)
    assert scenario.federations[0].learning_rate == 1e-4
    assert scenario.attacks[0].settings()["total_variation"] == 1e-4


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x=3", 3),
        ("x=1e3", 1000.0),
        ("x=true", True),
        ("x=null", None),
        ("x=", None),
        ("x=[1, 2]", [1, 2]),
        ("x={a: 1e-2}", {"a": 0.01}),
        ("x=a=b", "a=b"),
        ("x=nan", "nan"),
        ("x='3'", "3"),
        (" x =3", 3),
    ],
)
def test_values_of_settings(text: str, value: Any) -> None:
    key, parsed = parse_setting(text)
    assert key == "x"
    assert parsed == value
    assert type(parsed) is type(value)


VALUES = {
    "federations": [
        {"name": "first", "clients": 1},
        {"name": "second", "clients": 2},
        {"name": "0", "clients": 3, "malicious": "gan"},
    ],
    "defences": [{}, {"client_defence": "dp"}],
    "attacks": ["invg", {"name": "agic", "iterations": 5}],
}


@pytest.mark.parametrize(
    ("setting", "place", "value"),
    [
        ("federations.second.clients=9", ("federations", 1, "clients"), 9),
        ("federations.1.clients=9", ("federations", 1, "clients"), 9),
        ("federations.0.clients=9", ("federations", 2, "clients"), 9),  # a name comes before a number
        ("federations.first.partition.alpha=0.5", ("federations", 0, "partition", "alpha"), 0.5),
        ("attacks.invg.iterations=9", ("attacks", 0, "iterations"), 9),
        ("attacks.1.iterations=9", ("attacks", 1, "iterations"), 9),
        ("defences.1.client_defence.noise=2", ("defences", 1, "client_defence"), {"name": "dp", "noise": 2}),
        ("defences.0.client_defence=sign", ("defences", 0, "client_defence"), "sign"),
        ("federations.0.malicious.start=2", ("federations", 2, "malicious"), {"name": "gan", "start": 2}),
        ("model.training.epochs=3", ("model", "training", "epochs"), 3),
        ("seed=7", ("seed",), 7),
        ("attacks=[agic]", ("attacks",), ["agic"]),
    ],
)
def test_set_by_index_and_by_name(setting: str, place: tuple[str | int, ...], value: Any) -> None:
    before = yaml.safe_dump(VALUES)
    node: Any = apply_override(VALUES, setting)
    for part in place:
        node = node[part]
    assert node == value
    assert yaml.safe_dump(VALUES) == before  # what was given isn't changed


def test_set_keeps_everything_else() -> None:
    changed = apply_override(VALUES, "attacks.invg.iterations=9")
    assert changed["federations"] == VALUES["federations"]
    assert changed["attacks"] == [{"name": "invg", "iterations": 9}, {"name": "agic", "iterations": 5}]


def test_a_later_setting_wins_and_the_seed_flag_last() -> None:
    scenario = load_scenario(None, ["seed=1", "seed=2", "name=x"])
    assert (scenario.seed, scenario.name) == (2, "x")
    assert load_scenario(None, ["seed=1"], seed=5).seed == 5


@pytest.mark.parametrize(
    ("values", "suggestion"),
    [
        ({"sed": 1}, "'seed'"),
        ({"data": {"split_": 1}}, "'split'"),
        ({"model": {"training": {"momentun": 1}}}, "'momentum'"),
        ({"threat": {"know_labels": True}}, "'knows_labels'"),
        ({"evaluation": {"boostrap": 100}}, "'bootstrap'"),
    ],
)
def test_the_nearest_key_is_suggested(values: dict[str, Any], suggestion: str) -> None:
    with pytest.raises(BadInput, match=f"did you mean {suggestion}"):
        scenario_from({"federations": [{"name": "a"}], "attacks": ["invg"], **values})


def test_several_errors_are_counted() -> None:
    with pytest.raises(BadInput, match=r"\(and 1 more\)"):
        scenario_from({"federations": [{"name": "a", "clients": 0, "rounds": 0}], "attacks": ["invg"]})
