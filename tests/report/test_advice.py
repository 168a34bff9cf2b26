"""Every line under "What to do" can be tried as it is printed; what is only tried gives no answer and fails nobody."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import torch
import typer
from torch import nn

import fedaudit
from fedaudit.cli import app
from fedaudit.report.advice import advice, command
from fedaudit.report.conclusion import headline
from fedaudit.results import AuditResult

FEDERATION = {"name": "a", "algorithm": "fedsgd", "clients": 2, "examples": 2, "batch_size": 1}
SCENARIO: dict[str, Any] = {
    "data": {"name": "digits"},
    "model": {"name": "lenet", "initialisation": "uniform"},
    "federations": [FEDERATION],
    "attacks": [{"name": "invg", "iterations": 150}],
}


def parsed(line: str, folder: Any) -> None:
    """Parse a printed command as the command line does, and read what it sets; nothing is run."""
    words = shlex.split(line)
    assert words[0] == "fedaudit"
    group = typer.main.get_command(app)
    name, *rest = words[1:]
    context = group.commands[name].make_context(name, rest)  # type: ignore[attr-defined]
    if name == "audit":
        fedaudit.load_scenario(folder / "scenario.yaml", context.params["settings"])


@pytest.fixture(scope="module")
def images() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.rand(40, 1, 8, 8, generator=draw), torch.arange(40) % 10


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [150, 2])
def test_every_line_for_a_scenario_or_a_transcript_is_a_command(tmp_path, iterations):
    given = {**SCENARIO, "attacks": [{"name": "invg", "iterations": iterations}]}
    made = fedaudit.audit(given, out=tmp_path, progress=False).result
    recorded = fedaudit.audit_transcript(fedaudit.simulate(given, progress=False), given["attacks"], progress=False)
    for result in (made, recorded.result):
        lines = advice(result)
        assert lines
        for one in lines:
            parsed(command(result, one.change), tmp_path)


@pytest.mark.slow
def test_every_line_for_own_parts_is_python_that_runs(tmp_path, images, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    result = fedaudit.audit(
        model=model, data=images, federations=[FEDERATION], attacks=["exact-linear"], out=tmp_path, progress=False
    ).result
    lines = [command(result, one.change) for one in advice(result)]
    assert lines
    assert "model.training.epochs=" in lines[0]  # of a deployment first
    assert "compare_defences=True" in lines[1]
    monkeypatch.chdir(tmp_path)
    done = eval(lines[1], {"fedaudit": fedaudit, "model": model, "data": images})
    assert len(done.result.federations) == 4
    for line in lines:
        compile(line, "line", "eval")


@pytest.mark.slow
def test_defences_of_sums_are_of_those_that_send_alike(tmp_path):
    few = {**SCENARIO, "threat": {"sees": "sum"}, "evaluation": {"controls": False}}
    few |= {"attacks": [{"name": "invg", "iterations": 2}]}
    done = fedaudit.audit(few, compare_defences=True, out=tmp_path, progress=False)
    assert [f.name.rpartition("-")[2] for f in done.result.federations] == ["none", "dp", "dgc", "strong"]
    assert [f.status for f in done.result.findings] == ["done"] * 4
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count(' data-label="Still leaks"') == len(re.findall(r'<td data-label="Still leaks">', page)) == 4


@pytest.mark.slow
def test_a_defence_that_is_only_tried_gives_no_answer_and_fails_nobody():
    quick = {**SCENARIO, "evaluation": {"controls": False}, "attacks": [{"name": "invg", "iterations": 30}]}
    done = fedaudit.audit(quick, compare_defences=True, fail_above={"psnr": 0.1}, progress=False)
    result: AuditResult = done.result
    assert len(result.federations) == 4
    (used,) = result.in_use()
    assert used in headline(result).tested
    only = [t.where for t in result.thresholds]
    assert only == [f"invg on {used}"]
