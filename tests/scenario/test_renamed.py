"""What was spelled otherwise until 0.3 means what it meant, and one line names the new spelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedaudit
from fedaudit.results import AuditResult
from fedaudit.scenario.scenario import Scenario, load_scenario, scenario_from
from fedaudit.transcript.threat import ThreatModel
from fedaudit.utils import renamed
from fedaudit.utils.errors import BadInput
from tests.conftest import Command

DATA = Path(__file__).parents[1] / "data"
OLD: dict[str, Any] = {
    "data": {"name": "digits", "white": 16},
    "model": {"name": "mlp", "spare_outputs": 1},
    "federations": [
        {
            **{"name": "f", "algorithm": "fedavg", "clients": 3, "local_epochs": 1, "rounds": 2, "record": [1]},
            **{"draw": "random", "malicious": {"name": "gan", "target": 3, "lacks": [3], "start": 0}},
        }
    ],
    "defences": [{"name": "noisy", "sanitiser": {"name": "dp", "noise": 2.0}}, {"name": "plain", "sanitiser": "none"}],
    "threat": {"adversary": "client", "records": 20},
    "attacks": [{"name": "span"}, "loss-threshold"],
    "evaluation": {"updates": 3, "clients": 1, "federations": ["f"], "least_accuracy": 0.2, "what_if": True},
}
NEW: dict[str, Any] = {
    "data": {"name": "digits", "max_pixel_value": 16},
    "model": {"name": "mlp", "extra_classes": 1},
    "federations": [
        {
            **{"name": "f", "algorithm": "fedavg", "clients": 3, "local_epochs": 1, "rounds": 2, "keep_rounds": [1]},
            **{"sampling": "stratified", "malicious": {"name": "gan", "target": 3, "missing_classes": [3], "start": 0}},
        }
    ],
    "defences": [
        {"name": "noisy", "client_defence": {"name": "dp", "noise": 2.0}},
        {"name": "plain", "client_defence": "none"},
    ],
    "threat": {"adversary": "client", "target_records": 20},
    "attacks": [{"name": "projection-residual"}, "loss-threshold"],
    "evaluation": {
        **{"max_updates": 3, "max_clients": 1, "attacked_federations": ["f"], "min_accuracy": 0.2},
        "compare_defences": True,
    },
}


COMPARED = {"federation": "f", "metric": "membership_auc", "unit": "", "outcome": "undecided", "p_value": 1.0} | {
    "difference": {"mean": 0.0, "median": 0.0, "low": -1.0, "high": 1.0, "n": 2}
}


@pytest.fixture(autouse=True)
def _untold() -> None:
    renamed.say.cache_clear()


def test_a_scenario_of_before_is_the_same_and_each_word_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    assert scenario_from(OLD) == scenario_from(OLD) == scenario_from(NEW)
    said = [record.getMessage() for record in caplog.records]
    pairs = {**{k: v for names in renamed.KEYS.values() for k, v in names.items()}, "span": "projection-residual"}
    assert sorted(said) == sorted(
        f"fedaudit: note: '{old}' is '{new}' now; write that"
        for old, new in {**pairs, "sampling: random": "sampling: stratified"}.items()
    )
    caplog.clear()
    assert scenario_from(json.loads(scenario_from(NEW).model_dump_json())) == scenario_from(NEW)
    assert not caplog.records


@pytest.mark.parametrize("words", [OLD, NEW])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("defences.0.sanitiser.noise=3", "defences.0.client_defence.noise=3"),
        ("threat.records=40", "threat.target_records=40"),
        ("federations.f.malicious.lacks=[4]", "federations.f.malicious.missing_classes=[4]"),
        ("evaluation.updates=7", "evaluation.max_updates=7"),
    ],
)
def test_old_and_new_words_go_together_in_overrides(words, old, new, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(json.dumps(words))
    assert load_scenario(file, [old]) == load_scenario(file, [new]) != scenario_from(NEW)


def test_both_words_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="'records' is 'target_records' now, and both are given"):
        ThreatModel(records=4, target_records=4)  # type: ignore[call-arg]
    (tmp_path / "s.yaml").write_text("model: {spare_outputs: 1, extra_classes: 2}\n")
    with pytest.raises(BadInput, match="both are given"):
        load_scenario(tmp_path / "s.yaml", ["model.width=8"])


def test_python_names_and_flags_of_before_are_found(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    from fedaudit import attacks, defences

    assert defences.Sanitiser is fedaudit.Sanitiser is fedaudit.ClientDefence  # type: ignore[attr-defined]
    assert attacks.WhichTokens is attacks.TokenPresence  # type: ignore[attr-defined]
    for package, names in renamed.PYTHON.items():
        if not package.startswith("fedaudit.adapters"):
            assert all(new in dir(__import__(package, fromlist=["*"])) for new in names.values())
    caplog.clear()
    assert "compare-defences" in command("audit", "--what-if", "--flower", "nowhere").err
    assert "'--what-if' is '--compare-defences' now" in caplog.text
    assert "what-if" not in command("audit", "--help").out


def test_results_of_schema_2_are_read_with_every_value_under_its_new_name(tmp_path: Path) -> None:
    records, images = (DATA / f"results-2-{name}.json" for name in ("records", "images"))
    old, new = json.loads(records.read_text()), AuditResult.load(records)
    assert (old["schema_version"], new.schema_version) == (2, 3)
    assert new.federations[0].client_defence == old["federations"][0]["sanitiser"] == "top-k"
    assert new.federations[0].history is not None
    assert new.federations[0].history.timing.client_defence == old["federations"][0]["course"]["timing"]["sanitising"]
    assert (new.not_asked, new.out_of_scope) == (old["not_tried"], old["not_tested"])
    assert new.scenario["threat"]["target_records"] == 20
    assert Scenario.model_validate(new.scenario).federations[0].sampling == "stratified"
    assert {f.attack for f in new.findings} == {s.attack for s in new.summaries} == {a.name for a in new.attacks}
    assert "projection-residual" in {f.attack for f in new.findings}
    for was, now in zip(old["findings"], new.findings, strict=True):
        assert was["leak"] == now.is_leak
        assert [one["as_high"] for one in was["most_exposed"]] == [one.nonmembers_above for one in now.most_exposed]
    assert [s["evidence"] and s["evidence"]["by_guessing"] for s in old["summaries"]] == [
        s.evidence and s.evidence.baseline for s in new.summaries
    ]
    values = {**old, "comparisons": [{**COMPARED, "a": "span", "b": "loss-threshold"}]}
    records = tmp_path / "results.json"
    records.write_text(json.dumps(values))
    assert [(c.a, c.b) for c in AuditResult.load(records).comparisons] == [("projection-residual", "loss-threshold")]
    (was,), (now,) = json.loads(images.read_text())["findings"], AuditResult.load(images).findings
    assert (was["things"], was["images"][0]["by_luck"]) == (now.example_noun, now.images[0].chance_level)
    assert was["images"][0]["nearer_to_other"] == now.images[0].distractor_margin_db
    assert (was["images"][0]["toned"] is None) == (now.images[0].tone_aligned is None)
