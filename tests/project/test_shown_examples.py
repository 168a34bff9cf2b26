"""The files in examples/ are those that the pages show, and they do what the pages say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedaudit
from fedaudit.attacks.inversion import template
from tests.conftest import Command

ROOT = Path(__file__).parents[2]
EXAMPLES, DOCS = ROOT / "examples", ROOT / "docs"
POLICY, STUDY = EXAMPLES / "gate" / "fedaudit.yaml", EXAMPLES / "breaching" / "study.yaml"
SHOWN = {
    "quick-start.md": ["first.yaml"],
    "tutorials/compare-defences.md": ["defences.yaml"],
    "tutorials/differential-privacy.md": ["private.yaml"],
    "tutorials/gate-ci.md": ["gate/federation.yaml", "gate/fedaudit.yaml"],
}
EXCERPTS = {"tutorials/pytorch-model.md": ("own_model.py", 3), "how-to/own-attack.md": ("own_attack.py", 4)}
MOVED = re.compile(r"iterations\": (1000|options\.iterations)|out=(\"my-audit\"|options\.out)")


def blocks(page: Path, language: str) -> list[str]:
    """The page's fenced blocks of a language, excerpts too."""
    return re.findall(rf"^```{language}\b[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_scenario_is_one(path: Path) -> None:
    if path not in (POLICY, STUDY):
        assert fedaudit.load_scenario(path).federations


@pytest.mark.parametrize("page", SHOWN)
def test_a_page_shows_the_file(page: str) -> None:
    shown = [yaml.safe_load(block) for block in blocks(DOCS / page, "yaml")]
    assert shown == [yaml.safe_load((EXAMPLES / name).read_text()) for name in SHOWN[page]]


@pytest.mark.parametrize("page", EXCERPTS)
def test_a_page_s_excerpts_stand_in_the_program(page: str) -> None:
    name, count = EXCERPTS[page]
    program = {MOVED.sub("…", line.strip()) for line in (EXAMPLES / name).read_text().splitlines()}
    lines = [
        MOVED.sub("…", line.strip())
        for block in blocks(DOCS / page, "python")[:count]
        for line in block.splitlines()
        if line.strip()
    ]
    assert len(lines) > 20
    assert [line for line in lines if line not in program] == []


def five_lines(page: Path) -> str:
    (code,) = (block for block in blocks(page, "python") if "load_digits" in block)
    return code


def test_readme_s_python_is_the_quick_start_s() -> None:
    assert five_lines(ROOT / "README.md") == five_lines(DOCS / "quick-start.md")


@pytest.mark.slow
def test_readme_s_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(template.QUICK, "iterations", 50)
    exec(five_lines(ROOT / "README.md"), {})
    promised = five_lines(ROOT / "README.md").splitlines()[-1].split("# ")[1]
    assert capsys.readouterr().out.strip() == promised
    assert (tmp_path / "digits-audit/report.html").is_file()


@pytest.mark.slow
def test_the_gate_opens_and_shuts(tmp_path: Path, command: Command) -> None:
    """As docs/tutorials/gate-ci.md tells it: kept, broken, and worse than before."""
    audit = ["audit", EXAMPLES / "gate/federation.yaml", "--policy", POLICY, "--workers", "1"]
    kept = command(*audit, "--out", tmp_path / "audit", "--write", "sarif,junit,markdown")
    assert kept.code in (0, None), kept
    assert {path.suffix for path in (tmp_path / "audit").iterdir()} >= {".sarif", ".xml", ".md", ".html"}
    assert command(*audit, "--set", "defences.client_defence=none", "--out", tmp_path / "changed").code == 1
    verdicts = [
        json.loads((tmp_path / name / "results.json").read_text())["summaries"][0]["verdict"]
        for name in ("audit", "changed")
    ]
    assert verdicts == ["not demonstrated", "recovered"]
    assert command("compare", tmp_path / "audit", tmp_path / "changed").code == 1


@pytest.mark.slow
def test_differential_privacy_costs_what_the_tutorial_says() -> None:
    result = fedaudit.audit(EXAMPLES / "private.yaml", progress=False).result
    courses: dict[str, Any] = {one.name.removeprefix("digits-"): one.history for one in result.federations}
    accuracy = {name: course.accuracy[-1] for name, course in courses.items()}
    assert accuracy["none"] > 0.9 > accuracy["little-noise"] > accuracy["much-noise"] + 0.2
    assert 40 < courses["little-noise"].epsilon_pld < 50
    assert courses["much-noise"].epsilon[-1] <= 8
    assert courses["much-noise"].stopped == 39
    verdicts = {row.federation.removeprefix("digits-"): row.verdict for row in result.summaries}
    assert (verdicts["none"], verdicts["much-noise"]) == ("inferred", "inconclusive")


@pytest.mark.slow
def test_every_defence_of_the_tutorial_is_compared() -> None:
    values = yaml.safe_load((EXAMPLES / "defences.yaml").read_text())
    values["federations"][0]["rounds"] = 2
    values["attacks"][0]["iterations"] = 2
    result = fedaudit.audit(values, progress=False).result
    assert [row.federation for row in result.summaries] == [f"digits-{one['name']}" for one in values["defences"]]


@pytest.mark.slow
def test_an_attack_of_one_s_own_is_checked_and_run(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(EXAMPLES / "own_attack.py"), "--out", str(tmp_path)]
    ran = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert ran.returncode == 0, ran.stderr
    shown = " ".join((DOCS / "how-to/own-attack.md").read_text().split())
    told = [line.split() for line in ran.stdout.splitlines()]
    assert [words[:2] for words in told] == [
        ["single", "first-layer"], ["single", "invg"], ["pairs", "first-layer"], ["pairs", "invg"],
    ]  # fmt: skip
    assert [words for words in told if "first-layer" in words and " ".join(words) not in shown] == []
    result = fedaudit.AuditResult.load(tmp_path / "results.json")
    exact = [image.mse for found in result.findings if found.attack == "first-layer" for image in found.images]
    assert len(exact) == 8
    assert max(exact) < 1e-8  # a division, in float32


PEER = """
import torch, breaching_invg, fedaudit
from fedaudit.utils.machine import own_process
own_process()
torch.set_num_threads(1)
one = {"name": "f", "algorithm": "fedsgd", "clients": 1, "examples": 1, "batch_size": 1}
model = {"name": "lenet", "initialisation": "default"}
values = {"data": {"name": "photos"}, "model": model, "federations": [one]}
fedaudit.check_attack(breaching_invg.BreachingInvG(iterations=5), values)
attack = {"name": "breaching-invg", "iterations": 300, "total_variation": 1e-4}
(row,) = fedaudit.audit({**values, "attacks": [attack]}, progress=False).result.summaries
print(row.verdict)
"""


@pytest.mark.slow
@pytest.mark.peers
def test_breaching_is_an_attack_like_any_other() -> None:
    pytest.importorskip("hydra", reason="breaching isn't there")
    folder = EXAMPLES / "breaching"
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-W", "ignore", "-c", PEER]
    ran = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert (ran.returncode, ran.stdout.splitlines()[-1:]) == (0, ["recovered"]), ran.stderr
    install = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]["fedaudit.attacks"]
    assert install == {"breaching-invg": "breaching_invg"}
    levels = yaml.safe_load(STUDY.read_text())["axes"]["attack"].values()
    assert {level["attacks"][0]["name"] for level in levels} == {"agic-plus", "breaching-invg"}
