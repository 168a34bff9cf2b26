"""``fedaudit verify``: an audit's numbers are derived again from its findings, and what was changed is named."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedaudit.attacks import Finding
from fedaudit.report.page import render_report
from fedaudit.results import AuditResult
from fedaudit.utils import fingerprint
from tests.capture.recording_cases import MEAN, STD, federation
from tests.conftest import Command, Outcome

pytestmark = pytest.mark.usefixtures("no_secret")

SCENARIO: dict[str, Any] = {
    "name": "evidence",
    "data": {"name": "digits"},
    "model": {"name": "lenet", "initialisation": "uniform"},
    "federations": [
        {"name": "one", "clients": 2, "examples": 2, "batch_size": 1},
        {"name": "two", "algorithm": "fedavg", "clients": 1, "examples": 2, "batch_size": 1, "local_steps": 2},
    ],
    "attacks": [{"name": "invg", "iterations": 5}, {"name": "r-gap"}, {"name": "labels"}],
}


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import fedaudit

    folder = tmp_path_factory.mktemp("verified") / "out"
    fedaudit.audit(SCENARIO, out=folder, fail_above={"psnr": 20}, progress=False)
    return folder


@pytest.fixture
def folder(audited: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(audited, tmp_path / "out"))


def differing(outcome: Outcome) -> list[str]:
    assert outcome.code == 2, outcome
    assert "doesn't match its findings" in outcome.err
    assert outcome.err.count("fedaudit: error:") == 1
    return [line.removeprefix("differs: ") for line in outcome.out.splitlines() if line.startswith("differs: ")]


def state(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_an_audit_follows_from_its_findings(folder: Path, command: Command) -> None:
    before = state(folder)
    outcome = command("verify", folder, "--workers", 1)
    assert outcome.code == 0, outcome
    assert "its images and its page match" in outcome.out
    assert state(folder) == before  # nothing is written


@pytest.mark.slow
def test_limits_and_pages_that_are_gone_are_not_vouched_for(folder: Path, tmp_path: Path, command: Command) -> None:
    shutil.copytree(folder, tmp_path / "a")
    rewritten(lambda values: values.update(thresholds=[]))(tmp_path / "a")
    (tmp_path / "a" / "report.html").unlink()
    outcome = command("verify", tmp_path / "a", "--workers", 1)
    assert "note: results.json holds no limits" in outcome.out
    assert "its page" not in outcome.out


def test_results_and_page_name_what_they_are_made_of(folder: Path) -> None:
    result = json.loads((folder / "results.json").read_text())
    digests = result["digests"]
    assert digests["scenario"] == hashlib.sha256((folder / "scenario.yaml").read_bytes()).hexdigest()
    assert set(digests["transcripts"]) == {"one", "two"}
    assert digests["notes"] == []
    page = (folder / "report.html").read_text()
    for digest in (digests["scenario"], digests["code"], *digests["transcripts"].values()):
        assert len(digest) == 64
        assert digest in page


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        values = json.loads((folder / "results.json").read_text())
        change(values)
        (folder / "results.json").write_text(json.dumps(values))

    return rewrite


def better(values: dict[str, Any]) -> None:
    values["summaries"][0]["psnr"]["mean"] -= 0.125


def image_gone(folder: Path) -> None:
    next((folder / "images").glob("*.png")).unlink()


def image_swapped(folder: Path) -> None:
    one, two = sorted(p for p in (folder / "images").glob("*.png") if "invg" in p.name)[:2]
    shutil.copy(one, two)


def finding_gone(folder: Path) -> None:
    for path in (folder / "findings").glob("*.safetensors"):
        if Finding.load(path, path.stem).attack == "labels":
            path.unlink()


def seed_of_scenario(folder: Path) -> None:
    values = yaml.safe_load((folder / "scenario.yaml").read_text())
    (folder / "scenario.yaml").write_text(yaml.safe_dump({**values, "seed": 5}))


RESULTS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (better, "summaries[0].psnr.mean: results.json says "),
    (
        lambda v: v["summaries"][0].update(verdict="inferred"),
        "summaries[0].verdict: results.json says 'inferred', the findings give ",
    ),
    (
        lambda v: v["thresholds"][0].update(exceeded=False, worst=1.0),
        "thresholds[0].worst: results.json says 1.0, the findings give ",
    ),
    (lambda v: v["findings"][0].update(label_accuracy=0.25), "findings[0].label_accuracy: results.json says 0.25"),
    (lambda v: v["attacks"].pop(), "attacks: results.json says 2 items, the findings give 3 items"),
    (
        lambda v: v["digests"]["transcripts"].update(one="0" * 64),
        "transcript of one: results.json names the digest 0000000000000000…, here it is ",
    ),
    (
        lambda v: v["digests"].update(scenario="0" * 64),
        "scenario: results.json names the digest 0000000000000000…",
    ),
]
FILES: list[tuple[Callable[[Path], Any], str]] = [
    (seed_of_scenario, "scenario.yaml: results.json names the digest "),
    (image_swapped, " isn't the image that the finding and the truth give"),
    (image_gone, " is missing"),
    (finding_gone, " is missing: the finding of labels on one (round 0, client 0)"),
    (
        lambda f: (f / "report.html").write_text((f / "report.html").read_text() + " "),
        "report.html",
    ),
]


@pytest.mark.slow
def test_every_changed_value_is_named(folder: Path, command: Command) -> None:
    for change, _ in RESULTS:
        rewritten(change)(folder)
    lines = differing(command("verify", folder, "--workers", 1))
    for _, words in RESULTS:
        assert any(line.startswith(words) for line in lines), (words, lines)


@pytest.mark.slow
def test_every_changed_file_is_named(folder: Path, command: Command) -> None:
    for change, _ in FILES:
        change(folder)
    lines = differing(command("verify", folder, "--workers", 1))
    for _, words in FILES:
        assert any(words in line for line in lines), (words, lines)


@pytest.mark.slow
def test_another_page_is_named(folder: Path, command: Command) -> None:
    (folder / "report.html").write_text((folder / "report.html").read_text().replace("evidence", "proof"))
    assert differing(command("verify", folder, "--workers", 1)) == [
        "report.html isn't the page that results.json and the images give"
    ]


@pytest.mark.slow
def test_the_seed_of_another_scenario_is_another_transcript(folder: Path, command: Command) -> None:
    rewritten(lambda v: v["scenario"].update(seed=7))(folder)
    lines = differing(command("verify", folder, "--workers", 1))
    assert any(line.startswith("transcript of one: ") for line in lines)
    assert any(" is missing: the finding of invg" in line for line in lines)


def test_a_changed_finding_is_refused(folder: Path, command: Command) -> None:
    path = next((folder / "findings").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"\0\0")
    outcome = command("verify", folder)
    assert outcome.code == 2
    assert "changed or damaged" in outcome.err


def test_other_code_is_refused(folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "code_version", lambda: "another")
    assert "other code" in command("verify", folder).err


def a_little(value: Any) -> Any:
    """Return a JSON document's value with all of its real numbers changed by less than rounding may."""
    if isinstance(value, dict):
        return {key: a_little(item) for key, item in value.items() if key != "timing"} | (
            {"timing": value["timing"]} if "timing" in value else {}
        )
    if isinstance(value, list):
        return [a_little(item) for item in value]
    return value * (1 + 2e-5) if isinstance(value, float) else value


def elsewhere(folder: Path) -> None:
    """Let the folder look as if another processor had made it: other keys, transcripts and last digits."""

    def change(values: dict[str, Any]) -> None:
        values["environment"].update({"native code": "winograd NEON 0123456789ab", "torch": "1.0"})
        for part in ("findings", "summaries", "controls"):
            values[part] = a_little(values[part])
        values["digests"]["transcripts"].update(one="0" * 64)

    rewritten(change)(folder)
    for number, path in enumerate(sorted((folder / "findings").glob("*.safetensors"), key=lambda p: p.stat().st_mtime)):
        finding = Finding.load(path, path.stem)
        path.unlink()
        finding.save(folder / "findings" / f"{number:032d}.safetensors", f"{number:032d}")
    result = AuditResult.load(folder / "results.json")
    (folder / "report.html").write_text(render_report(result, folder), encoding="utf-8")


@pytest.mark.slow
def test_another_processor_s_results_are_compared_within_rounding(folder: Path, command: Command) -> None:
    elsewhere(folder)
    outcome = command("verify", folder, "--workers", 1)
    assert outcome.code == 0, outcome
    assert "note: made with torch '1.0', and here it is" in outcome.out
    assert "within 0.0001 relative" in outcome.out
    rewritten(better)(folder)
    lines = differing(command("verify", folder, "--workers", 1))
    assert any(line.startswith("summaries[0].psnr.mean: results.json says ") for line in lines)


@pytest.mark.slow
def test_a_finding_made_with_other_native_code_is_found_by_its_key(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedaudit.pipeline.trials.native_code", lambda: "winograd NEON 0123456789ab")
    monkeypatch.setattr("fedaudit.pipeline.verify.native_code", lambda: "winograd NEON 0123456789ab")
    outcome = command("verify", folder, "--workers", 1)
    assert outcome.code == 0, outcome
    assert "note: made with native code " in outcome.out


def test_an_audit_in_which_every_attack_was_refused_follows_from_nothing_kept(tmp_path: Path, command: Command) -> None:
    import fedaudit

    folder = tmp_path / "out"
    fedaudit.audit({**SCENARIO, "attacks": ["dager"]}, out=folder, progress=False)
    assert not (folder / "findings").exists()
    assert command("verify", folder, "--workers", 1).code == 0
    rewritten(lambda values: values["findings"][0].update(reason="it was a Monday"))(folder)
    lines = differing(command("verify", folder, "--workers", 1))
    assert [line for line in lines if line.startswith("findings[0].reason: results.json says 'it was a Monday'")]


def test_without_findings_or_results_it_is_one_line(folder: Path, command: Command, tmp_path: Path) -> None:
    shutil.rmtree(folder / "findings")
    assert "keeps no findings" in command("verify", folder).err
    outcome = command("verify", tmp_path / "nowhere")
    assert outcome.code == 2
    assert "can't read" in outcome.err


@pytest.mark.slow
def test_an_attack_on_a_transcript_is_verified_with_it(command: Command, tmp_path: Path, recorded: Path) -> None:
    words = ["attack", recorded, "--attack", "invg", "--set", "iterations=3", "--workers", 1, "--out", tmp_path / "out"]
    assert command(*words).code == 0
    assert "name its folder with --transcript" in command("verify", tmp_path / "out").err
    outcome = command("verify", tmp_path / "out", "--transcript", recorded, "--workers", 1)
    assert outcome.code == 0, outcome
    rewritten(better)(tmp_path / "out")
    assert differing(command("verify", tmp_path / "out", "--transcript", recorded, "--workers", 1))


@pytest.mark.slow
def test_an_attack_on_a_recording_is_verified_with_its_module(command: Command, tmp_path: Path) -> None:
    federation(tmp_path / "loop", mean=MEAN, std=STD)
    own = ["--model", "tests.capture.recording_cases:Net", "--rounds", "0"]
    words = ["--attack", "invg", "--set", "iterations=3", "--no-controls", "--workers", 1, "--out", tmp_path / "out"]
    assert command("attack", tmp_path / "loop", *own, *words).code == 0
    outcome = command("verify", tmp_path / "out", "--transcript", tmp_path / "loop", *own, "--workers", 1)
    assert outcome.code == 0, outcome


def test_an_audit_of_one_s_own_model_and_data_is_verified_from_python(tmp_path: Path) -> None:
    import torch
    from torch import nn

    import fedaudit

    torch.manual_seed(0)
    own: dict[str, Any] = {
        "model": nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
        "data": (torch.rand(30, 1, 8, 8), torch.arange(30) % 3),
    }
    audits: dict[str, Any] = {"federations": [{"name": "f", "clients": 2, "examples": 2}], "attacks": ["labels"]}
    fedaudit.audit(**own, **audits, out=tmp_path / "out", progress=False)
    found = fedaudit.verify(tmp_path / "out", **own, progress=False)
    assert found.differences == []
    assert found.findings == 2
    own["model"] = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    found = fedaudit.verify(tmp_path / "out", **own, progress=False)
    assert any(line.startswith("transcript of f: ") for line in found.differences)
