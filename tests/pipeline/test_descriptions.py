"""What is said of a federation: how long it went on, how its clients train, which defences were in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
        "evaluation": {"updates": 1},
    }


def audited(federation: dict[str, Any], defences: Any) -> Audit:
    return run_audit(scenario_from(values(federation, defences)))


LOCAL: dict[str, Any] = {"algorithm": "fedavg"}


@pytest.mark.parametrize(
    ("federation", "words"),
    [
        ({}, "1 round, 3 clients; each sends the gradient of one batch of 4 examples"),
        ({"examples": 3, "batch_size": 1}, "each sends the gradient of one batch of 1 example ("),
        ({**LOCAL, "local_epochs": 1}, "each trains for 1 local epoch on batches of 4 (4 examples)"),
        ({**LOCAL, "local_steps": 1, "batch_size": 1}, "each trains for 1 local step on batches of 1 (1 example)"),
        ({**LOCAL, "local_steps": 2, "rounds": 2}, "2 rounds, 3 clients; each trains for 2 local steps"),
    ],
)
def test_numbers_agree_with_their_nouns(federation, words):
    (record,) = audited(federation, {}).result.federations
    assert words in record.description
    assert record.defences == ""


@pytest.mark.parametrize(
    ("defences", "words"),
    [
        (
            {"sanitiser": {"name": "top-k", "ratio": 0.2}},
            "each client changes its update before it leaves, by top-k (sends the largest elements only, and keeps the "
            "rest for later; ratio=0.2, memory=true)",
        ),
        (
            {"sanitiser": {"name": "dp", "epsilon": None}},
            "level=client, where=local, epsilon=none, delta=1e-05, sampling=drawn)",
        ),
        (
            {"aggregator": {"name": "krum", "f": 0}},
            "the server merges by krum (the one update that is nearest to its neighbours; f=0) and left out 2 of 3 "
            "updates",
        ),
        ({"aggregator": "median"}, "the server merges by median (coordinate-wise median) and left out 0 of 3 updates"),
    ],
)
def test_defences_are_said_in_words(defences, words):
    (record,) = audited({}, defences).result.federations
    assert record.defences is not None
    assert words in record.defences
    assert record.description.endswith(f"; {record.defences}")


def test_the_comparison_explains_each_defence_beside_it(tmp_path):
    defences = [{}, {"name": "sparse", "sanitiser": {"name": "top-k", "ratio": 0.2}}]
    page = audited({}, defences).save(tmp_path).read_text()
    price = page.partition('id="price"')[2].partition("</section>")[0]
    assert "<dt>fed-none</dt><dd>No defence: updates leave as they are, and the server averages them.</dd>" in price
    assert "<dt>fed-sparse</dt><dd>Each client changes its update before it leaves, by top-k (sends" in price


def test_a_federation_that_its_privacy_budget_ended_says_so(tmp_path, capsys):
    finished = audited({"rounds": 9}, {"sanitiser": DP})
    (record,) = finished.result.federations
    assert record.course is not None
    stopped = record.course.stopped
    assert stopped is not None
    assert 0 < stopped < record.rounds == 9
    assert record.description.startswith(f"{stopped} of 9 rounds (then the privacy budget was spent), 3 clients")
    print_summary(finished.result)
    assert f"fed: {stopped} of 9 rounds ran, then the privacy budget was spent" in capsys.readouterr().out
    assert f">{stopped} of 9</td>" in finished.save(tmp_path).read_text()


def test_so_does_one_that_was_recorded(tmp_path: Path, command: Command) -> None:
    (tmp_path / "s.yaml").write_text(scenario_from(values({"rounds": 9}, {"sanitiser": DP})).to_yaml())
    assert command("simulate", tmp_path / "s.yaml", "--out", tmp_path / "t").code == 0
    attack = ["--attack", "labels", "--workers", "1", "--out", tmp_path / "a"]
    assert command("attack", tmp_path / "t", *attack).code == 0
    assert "of 9 rounds (then the privacy budget was spent)" in (tmp_path / "a" / "report.html").read_text()
