"""Without the package, whatever is of trees says in one line how to get it; and everything else is as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedaudit import BadInput, Transcript
from tests.trees.tree_cases import model, stump, transcript

pytestmark = pytest.mark.slow

# As where it isn't installed: nothing finds it.
WITHOUT = """
import importlib.metadata, sys
from fedaudit.utils import distributions
known, installed = importlib.metadata.entry_points, distributions._installed
def others(**asked):
    return tuple(point for point in known(**asked) if not point.value.startswith("fedaudit_trees"))
importlib.metadata.entry_points = others
distributions._installed = lambda extra: None if extra == "trees" else installed(extra)
sys.modules["fedaudit_trees"] = None
"""
HOW = "comes with fedaudit-trees, which isn't installed: pip install 'fedaudit[trees]'"
SCENARIO = """
data: {name: digits}
model: {name: linear}
federations: [{name: f, clients: 2, trees: null}]
attacks: [labels]
"""


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    run = WITHOUT + "from fedaudit.cli import main\nsys.exit(main())"
    line = [sys.executable, "-c", run, *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def refused(*words: str | Path) -> str:
    done = command(*words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    assert HOW in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("federations=[{name: f, algorithm: trees}]", "federations.0.algorithm: 'trees'"),
        ("federations.f.trees.noise=1", "federations.0: protocol 'trees'"),
        ("attacks=[timberstrike]", "attack 'timberstrike'"),
        ("model.name=xgboost", "model 'xgboost'"),
    ],
)
def test_a_scenario_says_how_to_get_it(tmp_path: Path, change: str, what: str) -> None:
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    assert what in refused("audit", tmp_path / "scenario.yaml", "--set", change, "--out", tmp_path / "out")


def test_a_recording_says_how_to_get_it(tmp_path: Path) -> None:
    transcript((0, 0, model(stump(0, 0.0, (1.0, 1.5), (-2.0, 1.0))), 10)).save(tmp_path / "trees")
    assert Transcript.load(tmp_path / "trees").trees is not None
    assert "protocol 'trees'" in refused("attack", tmp_path / "trees", "--out", tmp_path / "out")


def test_a_folder_of_boosters_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "trees.yaml").write_text("learning_rate: 0.3\n")
    assert "protocol 'trees'" in refused("convert", tmp_path, tmp_path / "new")
    done = command("attack", tmp_path, "--out", tmp_path / "out")
    assert "make one with 'fedaudit convert'" in done.stderr


def test_python_names_of_before_say_how_to_get_it() -> None:
    code = WITHOUT + "from fedaudit.attacks import TimberStrike"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"BadInput: fedaudit.attacks.TimberStrike {HOW}" in done.stderr


def test_other_audits_and_lists_go_on(tmp_path: Path) -> None:
    """Settings of trees that are null, as scenarios of before have them, are none."""
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    done = command("audit", tmp_path / "scenario.yaml", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "trees" not in json.loads((tmp_path / "out/results.json").read_text())["scenario"]["federations"][0]
    listed = command("list", "attacks", "--json")
    assert "timberstrike" not in {entry["name"] for entry in json.loads(listed.stdout)["attacks"]}


def test_where_it_is_installed_lists_say_so() -> None:
    line = [sys.executable, "-m", "fedaudit", "list", "attacks", "--json"]
    listed = subprocess.run(line, capture_output=True, text=True, check=False)
    packages = {entry["name"]: entry["package"] for entry in json.loads(listed.stdout)["attacks"]}
    assert packages["timberstrike"] == "fedaudit-trees"


@pytest.mark.peers
def test_an_app_that_sends_bytes_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="Flower isn't installed: pip install 'PATH_OF_THE_CLONE[flower]'")
    from fedaudit.adapters.flower import audit_flower
    from fedaudit.simulation.protocols import PROTOCOLS
    from tests.adapters.test_flower_trees import written

    app, sent, _ = written(tmp_path)
    assert "trees" in PROTOCOLS
    monkeypatch.delitem(PROTOCOLS._entries, "trees")
    with pytest.raises(BadInput, match="what reads these comes with fedaudit-trees"):
        audit_flower(app, nodes=3, config={"sent": str(sent)}, out=tmp_path / "out", progress=False)
