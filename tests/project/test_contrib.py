"""What contrib/ says, as far as it runs without Docker and GitHub: the action's own steps, the Dockerfile's files."""

from __future__ import annotations

import fnmatch
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import SCENARIO

ROOT = Path(__file__).parents[2]
CONTRIB = ROOT / "contrib"
STEPS = yaml.safe_load((CONTRIB / "github-action" / "action.yml").read_text())["runs"]["steps"]
LABELS = """\
data: {name: digits}
model: {name: logistic}
federations: [{name: fedsgd, clients: 12, examples: 12}]
attacks: [labels]
"""


def step(name: str) -> str:
    (found,) = (one["run"] for one in STEPS if one["name"] == name)
    return str(found)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "scenario", "code"),
    [
        ("fail_above: {label_accuracy: 1}", "labels.yaml", 0),
        ("fail_above: {psnr: 0.1}", "s.yaml", 1),
        ("{}", "nowhere.yaml", 2),
        ("fail_above: {psnr: 99}", "s.yaml", 3),  # two images are too few to be sure
    ],
)
def test_the_action_s_steps_end_with_fedaudit_s_exit_code(tmp_path: Path, policy: str, scenario: str, code: int):
    (tmp_path / "s.yaml").write_text(SCENARIO)
    (tmp_path / "labels.yaml").write_text(LABELS)
    (tmp_path / "a policy.yaml").write_text(policy)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "fedaudit"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m fedaudit "$@"\n')
    program.chmod(0o755)
    known = {
        **os.environ,
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "SCENARIO": scenario,
        "POLICY": "a policy.yaml",
        "OUT": "my audit",
        "DATA": "",
        "GITHUB_OUTPUT": str(tmp_path / "outputs"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
    }
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c"]  # as GitHub runs `shell: bash`
    done = subprocess.run([*shell, step("Audit")], cwd=tmp_path, env=known, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outputs = dict(line.split("=", 1) for line in (tmp_path / "outputs").read_text().splitlines())
    assert outputs["exit-code"] == str(code)
    if code != 2:
        assert outputs["sarif"] == "my audit/results.sarif"
        assert (tmp_path / outputs["sarif"]).is_file()
        assert (tmp_path / "summary").read_text() == (tmp_path / "my audit" / "summary.md").read_text()
    gate = [*shell, step("Hold it to the policy")]
    assert subprocess.run(gate, env={**os.environ, "CODE": outputs["exit-code"]}, check=False).returncode == code


def test_no_input_is_pasted_into_a_script():
    for one in STEPS:
        assert "${{" not in one.get("run", ""), "an input would be run; hand it over in env"


def test_the_workflow_may_upload_what_the_action_uploads():
    workflow = yaml.safe_load((CONTRIB / "github-action" / "example-workflow.yml").read_text())
    assert workflow["permissions"]["security-events"] == "write"
    inputs = yaml.safe_load((CONTRIB / "github-action" / "action.yml").read_text())["inputs"]
    (used,) = (s for s in workflow["jobs"]["fedaudit"]["steps"] if s["uses"].endswith("contrib/github-action"))
    assert set(used["with"]) <= set(inputs)


def test_the_dockerfile_copies_what_is_there_and_what_the_build_may_see():
    text = (CONTRIB / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    seen = [line[1:] for line in (CONTRIB / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    copied = [word for words in lines if words[0] == "COPY" and not words[1].startswith("--") for word in words[1:-1]]
    assert {"pyproject.toml", "README.md", "LICENSE", "src"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists(), name
        assert any(fnmatch.fnmatch(name, pattern) for pattern in seen), name
    assert [words[0] for words in lines].index("USER") > max(i for i, words in enumerate(lines) if words[0] == "RUN")
    assert ["USER", "65534:65534"] in lines
