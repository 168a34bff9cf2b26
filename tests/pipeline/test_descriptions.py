"""What is said of a federation that its privacy budget ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedaudit.pipeline.run import Audit, run_audit
from fedaudit.report.terminal import print_summary
from fedaudit.scenario.scenario import scenario_from
from tests.conftest import Command

FEDERATION = {"name": "fed", "clients": 3, "examples": 12, "batch_size": 4, "learning_rate": 0.05}
DP = {"name": "dp", "noise": 2.0, "epsilon": 4.0}


def values(federation: dict[str, Any], defences: Any) -> dict[str, Any]:
    return {
        "data": {"name": "digits"},
        "model": {"name": "lenet", "initialisation": "uniform"},
        "federations": [{**FEDERATION, **federation}],
        "defences": defences,
        "threat": {"knows_labels": True},
        "attacks": [{"name": "invg", "iterations": 1}],
        "evaluation": {"max_updates": 1},
    }


def audited(federation: dict[str, Any], defences: Any) -> Audit:
    return run_audit(scenario_from(values(federation, defences)))


def test_a_federation_that_its_privacy_budget_ended_says_so(tmp_path, capsys):
    finished = audited({"rounds": 9}, {"client_defence": DP})
    (record,) = finished.result.federations
    assert record.history is not None
    stopped = record.history.stopped
    assert stopped is not None
    assert 0 < stopped < record.rounds == 9
    assert record.description.startswith(f"{stopped} of 9 rounds (then the privacy budget was spent), 3 clients")
    print_summary(finished.result)
    assert f"fed: {stopped} of 9 rounds ran, then the privacy budget was spent" in capsys.readouterr().out
    assert f">{stopped} of 9</td>" in finished.save(tmp_path).read_text()


def test_so_does_one_that_was_recorded(tmp_path: Path, command: Command) -> None:
    (tmp_path / "s.yaml").write_text(scenario_from(values({"rounds": 9}, {"client_defence": DP})).to_yaml())
    assert command("simulate", tmp_path / "s.yaml", "--out", tmp_path / "t").code == 0
    attack = ["--attack", "labels", "--workers", "1", "--out", tmp_path / "a"]
    assert command("attack", tmp_path / "t", *attack).code == 0
    assert "of 9 rounds (then the privacy budget was spent)" in (tmp_path / "a" / "report.html").read_text()
