"""What a user of the package meets first: names by completion, one line for each object, results of other versions."""

from __future__ import annotations

import copy
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedaudit
from fedaudit.results import AuditResult, FindingResult
from fedaudit.transcript.truth import Truth
from fedaudit.utils.errors import BadInput
from fedaudit.utils.renamed import KEYS, RESULTS
from tests.conftest import Command, refused

pytestmark = pytest.mark.usefixtures("kept_workers")

SAMPLE = Path(__file__).parents[1] / "data" / "results-1.json"  # written by the first version of schema 1
ATTACK = {"name": "invg", "iterations": 2}


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout


# Names --------------------------------------------------------------------------------------------------------------


def test_completion_finds_every_public_name_without_importing_torch():
    names, heavy = run("import fedaudit, sys\nprint(*dir(fedaudit))\nprint('torch' in sys.modules)").splitlines()
    assert {"audit", "simulate", "attack", "register", "Transcript", "ThreatModel"} <= set(names.split())
    assert set(fedaudit.__all__) <= set(names.split())
    assert heavy == "False"


@pytest.mark.parametrize("name", fedaudit.__all__)
def test_every_public_name_is_there(name):
    assert getattr(fedaudit, name) is not None


@pytest.mark.slow
def test_an_attack_registered_from_outside_runs_beside_ours():
    told = run(
        "import dataclasses, torch, fedaudit\n"
        "from fedaudit.attacks import ImageFinding\n"
        "@fedaudit.register\n"
        "@dataclasses.dataclass(frozen=True, kw_only=True)\n"
        "class Grey(fedaudit.Attack):\n"
        "    name, summary, paper, threat_model, needs = 'grey', 'always grey', '-', 'server', ()\n"
        "    def check(self, observation): pass\n"
        "    def _run(self, observation, generator, device, progress, /):\n"
        "        n = observation.single().update.num_examples\n"
        "        grey = torch.full((n, *observation.task_info.input_shape), 0.5)\n"
        "        labels = torch.zeros(n, dtype=torch.int64)\n"
        "        return ImageFinding(attack='grey', images=grey, labels=labels, label_source='none')\n"
        "seen = fedaudit.simulate({'data': {'name': 'digits'}, 'model': {'name': 'lenet'}, 'federations': [\n"
        "    {'name': 'a', 'algorithm': 'fedsgd', 'clients': 1, 'examples': 1, 'batch_size': 1}]}, progress=False)\n"
        "print(fedaudit.audit_transcript(seen, ['grey'], progress=False).result.findings[0].attack)\n"
        "try:\n    fedaudit.register(int)\nexcept TypeError as error:\n    print(error)\n"
    )
    assert told.splitlines() == ["grey", "int is neither an Attack, an Aggregator, a ClientDefence nor a Behaviour"]


# Simulate, then attack ----------------------------------------------------------------------------------------------


def without_times(result: AuditResult) -> Any:
    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(item) for key, item in value.items() if key != "timing"}
        return [strip(item) for item in value] if isinstance(value, list) else value

    return strip(result.model_dump())


@pytest.mark.slow
def test_simulate_and_attack_are_the_commands(scenario_file, command: Command, tmp_path):
    assert command("simulate", scenario_file, "--out", tmp_path / "by-command").code == 0
    seen = fedaudit.simulate(scenario_file, out=tmp_path / "t", progress=False)
    written = {file.name: file.read_bytes() for file in (tmp_path / "by-command").iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "t").iterdir()} == written
    assert not (tmp_path / "t.partial").exists()
    assert (
        command(
            "attack", tmp_path / "by-command", "--attack", "invg", "--set", "iterations=2", "--out", tmp_path / "a"
        ).code
        == 0
    )
    expected = without_times(AuditResult.load(tmp_path / "a" / "results.json"))
    for source in (seen, tmp_path / "t"):
        audit = fedaudit.audit_transcript(
            source, [ATTACK], progress=False, out=tmp_path / "b" if source is seen else None
        )
        assert without_times(audit.result) == expected
    assert without_times(AuditResult.load(tmp_path / "b" / "results.json")) == expected
    assert (tmp_path / "b" / "report.html").is_file()


def test_without_the_truth_there_are_findings_and_reasons(recorded):
    transcript = fedaudit.Transcript.load(recorded)
    recovered = fedaudit.attack(transcript, [ATTACK], seed=0, progress=False)
    assert [type(finding).__name__ for finding in recovered] == ["ImageFinding"] * 2
    assert "records" in str(fedaudit.attack(transcript, ["loss-threshold"], progress=False)[0])
    with pytest.raises(BadInput, match="ground truth"):
        fedaudit.audit_transcript(transcript, [ATTACK], fail_above={"psnr": 20}, progress=False)
    with pytest.raises(BadInput, match="ground truth"):
        fedaudit.evaluate(recovered, progress=False)


@pytest.mark.slow
def test_attack_and_evaluate_are_the_two_halves_of_an_audit_of_a_transcript(recorded, tmp_path):
    audit = fedaudit.audit_transcript(recorded, [ATTACK], progress=False)
    for found, truth in [
        (fedaudit.attack(recorded, [ATTACK], out=tmp_path / "a", progress=False), None),
        (
            fedaudit.attack(
                fedaudit.Transcript.load(recorded), [ATTACK], seed=audit.result.scenario["seed"], progress=False
            ),
            recorded / "truth.safetensors",
        ),
    ]:
        assert [type(finding).__name__ for finding in found] == ["ImageFinding"] * len(audit.result.findings)
        evaluated = fedaudit.evaluate(found, truth, out=tmp_path / "a", fail_above={"psnr": -100}, progress=False)
        assert without_times(evaluated.result)["findings"] == without_times(audit.result)["findings"]
        assert evaluated.result.summaries[0].verdict == audit.result.summaries[0].verdict
        assert evaluated.exceeded
    assert (tmp_path / "a" / "report.html").is_file()


def test_a_model_of_one_s_own_goes_through_both_steps(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    data = (torch.rand(20, 1, 8, 8), torch.arange(20) % 10)
    scenario = {"federations": [{"name": "a", "algorithm": "fedsgd", "clients": 1, "examples": 1, "batch_size": 1}]}
    seen = fedaudit.simulate(scenario, model=model, data=data, seed=3, out=tmp_path / "t", progress=False)
    in_memory = fedaudit.audit_transcript(seen, [ATTACK], progress=False)
    from_disk = fedaudit.audit_transcript(tmp_path / "t", [ATTACK], model=model, progress=False)
    assert without_times(in_memory.result) == without_times(from_disk.result)
    assert in_memory.result.findings[0].images[0].psnr > 0
    with pytest.raises(BadInput, match="user's own model"):
        fedaudit.audit_transcript(tmp_path / "t", [ATTACK], progress=False)


def test_settings_that_differ_are_one_command_all_the_same(recorded, command: Command, tmp_path):
    attacks = [ATTACK, {"name": "dlg-adam", "iterations": 1}]
    audit = fedaudit.audit_transcript(recorded, attacks, controls=False, workers=1, progress=False)
    assert [a.settings["iterations"] for a in audit.result.attacks] == [2, 1]
    told = shlex.split(audit.result.repeat.replace("TRANSCRIPT", str(recorded)).replace("DIR", str(tmp_path / "again")))
    assert command(*told[1:], "--workers", 1).code == 0
    again = AuditResult.load(tmp_path / "again" / "results.json")
    assert again.repeat == audit.result.repeat
    assert [f.images for f in again.findings] == [f.images for f in audit.result.findings]


@pytest.mark.parametrize(("chosen", "fragment"), [(None, "2 federations"), ("c", "unknown federation 'c'")])
def test_one_federation_is_simulated_and_must_be_named(command: Command, tmp_path, chosen, fragment):
    one = {"algorithm": "fedsgd", "clients": 1, "examples": 1, "batch_size": 1}
    scenario = {"data": {"name": "digits"}, "federations": [{"name": "a", **one}, {"name": "b", **one}]}
    with pytest.raises(BadInput, match=fragment):
        fedaudit.simulate(scenario, federation=chosen)


# One line each ------------------------------------------------------------------------------------------------------


def test_objects_tell_themselves_in_one_short_line(recorded):
    transcript, truth = fedaudit.Transcript.load(recorded), Truth.load(recorded / "truth.safetensors")
    audit = fedaudit.audit_transcript(recorded, [ATTACK], progress=False)
    recovered = fedaudit.attack(transcript, [ATTACK], progress=False)
    seen = fedaudit.observe(transcript, fedaudit.ThreatModel())
    dataset = fedaudit.load_dataset("digits")
    told: dict[str, list[Any]] = {
        "worst": [audit, audit.result],
        "invg": [audit.result.findings[0], recovered, recovered[0]],
        "sgd": [transcript, seen],
        "update": [transcript.rounds[0], transcript.rounds[0].updates[0], seen.messages[0], truth],
        "examples": [dataset, dataset.train, truth],
        "small": [fedaudit.load_scenario(recorded.parent / "scenario.yaml")],
    }
    for word, things in told.items():
        for thing in things:
            assert word in repr(thing).lower()
            for text in (repr(thing), str(thing)):
                assert len(text) < 300
                assert "\n" not in text
                assert "tensor(" not in text


def test_a_finding_s_own_line_is_kept():
    from dataclasses import dataclass

    @dataclass(frozen=True, kw_only=True)
    class Own(fedaudit.Finding, kind="own-line"):
        def __repr__(self) -> str:
            return "mine"

    assert repr(Own(attack="x")) == "mine"


# Results of other versions ------------------------------------------------------------------------------------------


def records(value: Any) -> list[dict[str, Any]]:
    """Return every mapping in a result that is a record, all the way down; settings and scenarios are data."""
    if isinstance(value, list):
        return [found for item in value for found in records(item)]
    if not isinstance(value, dict):
        return []
    data = ("scenario", "settings", "environment", "details")
    return [value, *(found for key, item in value.items() if key not in data for found in records(item))]


def kept(old: Any, new: Any, path: str = "") -> list[str]:
    """Return where ``new`` has another value than ``old``, or none; what it has more isn't looked at."""
    if isinstance(old, dict):
        return [place for key in old for place in kept(old[key], (new or {}).get(key), f"{path}/{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [place for a, b in zip(old, new, strict=True) for place in kept(a, b, path)]
    return [] if old == new else [path]


def test_a_result_of_the_first_version_of_schema_1_is_read(tmp_path):
    result = AuditResult.load(SAMPLE)
    assert [f.attack for f in result.findings] == ["invg", "labels"]
    read = json.loads(result.model_dump_json())
    words = {old for names in (*RESULTS.values(), *KEYS.values()) for old in names} | {"random"}
    lost = [path for path in kept(json.loads(SAMPLE.read_text()), read) if not words & {*path.split("/")}]
    assert lost == ["/schema_version", *["/summaries/verdict"] * 2]
    assert (result.schema_version, result.controls) == (3, [])
    result.save(tmp_path / "again.json")
    assert AuditResult.load(tmp_path / "again.json") == result


def test_fields_of_a_later_version_are_left_out_at_every_level(tmp_path):
    values = json.loads(SAMPLE.read_text())
    found = records(values)
    assert len(found) > 15
    for record in found:
        record["of_later"] = {"a": [1]}
    (tmp_path / "later.json").write_text(json.dumps(values))
    assert AuditResult.load(tmp_path / "later.json") == AuditResult.load(SAMPLE)


def test_what_we_make_has_no_field_too_many():
    values = json.loads(AuditResult.load(SAMPLE).model_dump_json())
    for record in records(copy.deepcopy(values)):
        record["of_later"] = 1
    AuditResult.model_validate(values)
    for i, _ in enumerate(records(values)):
        changed = copy.deepcopy(values)
        records(changed)[i]["of_later"] = 1
        with pytest.raises(ValueError, match="Extra inputs"):
            AuditResult.model_validate(changed)
    with pytest.raises(ValueError, match="Extra inputs"):
        FindingResult(**{**values["findings"][0], "of_later": 1})


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"schema_version": 4, "findings": None}, "schema version 4, and this fedaudit reads 3"),
        ({"schema_version": "1"}, "schema_version"),
        ({"findings": [{"attack": "invg"}]}, "is missing"),
        ({"summaries": 3}, "isn't an audit's result"),
    ],
)
def test_a_result_that_cannot_be_read_is_refused_in_one_line(tmp_path, change, fragment):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(json.loads(SAMPLE.read_text()) | change))
    with pytest.raises(BadInput, match=fragment) as refusal:
        AuditResult.load(path)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, "\udcff"])
def test_what_is_no_result_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadInput, match=r"results\.json") as refusal:
        AuditResult.load(path)
    assert "\n" not in str(refusal.value)
    with pytest.raises(BadInput, match="can't read"):
        AuditResult.load(tmp_path / "nowhere.json")


def test_the_command_refuses_a_federation_that_there_is_not(command: Command, tmp_path):
    refused(command("simulate", "--out", tmp_path / "t", "--federation", "c"), "unknown federation 'c'")
