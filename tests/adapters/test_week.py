"""docs/how-to/guard.md from the installation to the file, on a Flower deployment: its lines, in their order."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.flower_cases import audited
from tests.conftest import Command

pytest.importorskip("flwr")
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.peers, pytest.mark.timeout(1200)]

from fedaudit.guard.rounds import read_site  # noqa: E402 (it needs Flower)
from tests.adapters.flower_processes import deployment  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "guard.md").read_text(encoding="utf-8")
GUARD = 'Guard(on_fail="refuse")'
NOISE = '{"clip": 0.01, "noise": 20.0, "epsilon": None}'
SITE = {  # the page's line, with a budget and noise
    "flower import Guard": "flower import Guard, ClientDefenceMod",
    GUARD: f'Guard(target_epsilon=8), ClientDefenceMod("dp", {NOISE})',
}
# In the last round the first layer's neurons are all alike, as a server makes them that wants single examples.
MALICIOUS = """
    class Malicious(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            if server_round == 3:
                state = arrays.to_torch_state_dict()
                state["fc1.weight"][:] = state["fc1.weight"][0]
                arrays = ArrayRecord(state)
            return super().configure_train(server_round, arrays, config, grid)

    strategy = Malicious()
"""
AVERAGE = 'strategy = FedAvg(fraction_train=config["fraction-train"], fraction_evaluate=config["fraction-evaluate"])\n'
MODEL = ("--model", "digits_app.task:Net", "--input-shape", "1,8,8", "--mean", "0.5", "--std", "0.5")


def commands() -> list[list[str]]:
    """Return the page's ``fedaudit`` lines, in words."""
    return [shlex.split(line) for line in re.findall(r"^    fedaudit (.+)$", PAGE, re.MULTILINE)]


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two attacks, of two iterations, and no controls: what is tested is that the lines run."""
    from fedaudit import api
    from fedaudit.attacks.inversion import template

    monkeypatch.setitem(template.QUICK, "iterations", 2)
    whole = api.audit_transcript

    def quick(transcript: Path, attacks: Any = None, **options: Any) -> Any:
        return whole(transcript, attacks or ["labels", "invg"], **{**options, "controls": False})

    monkeypatch.setattr(api, "audit_transcript", quick)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "digits_app"]:
        del sys.modules[name]


@pytest.mark.usefixtures("_quick")
def test_the_week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    block, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    space: dict[str, Any] = {}
    exec(block, space)
    assert len(vars(space["app"])["_mods"]) == 1
    monkeypatch.chdir(tmp_path)
    app = audited(tmp_path / "my-app", client_app=SITE, server_app={"    " + AVERAGE: MALICIOUS.lstrip("\n")})
    names = ("berlin-site", "paris-site")

    # the federation runs, with a guard at each site and a recorder at the server
    with deployment(tmp_path / "deployment", nodes=0) as running:
        for number, name in enumerate(names):
            (tmp_path / name).mkdir()
            running.join(number, 2, folder=tmp_path / name)
        run = running.submit(app, f'final-model="{tmp_path / "final.pt"}" num-server-rounds=3')
        assert running.wait(run, 600) == "finished:completed"
        recording = running.folder / f"recording-{run}"

    # each site's page: every round, the examples that its app evaluates on held out, the altered model noticed
    lines = [read_site(tmp_path / name / "fedaudit-guard").rounds for name in names]
    for name, of_site in zip(names, lines, strict=True):
        assert [(one.index, one.done) for one in of_site] == [(0, "left"), (1, "left"), (2, "left")]
        assert [one.checks["received"].outcome for one in of_site] == ["quiet", "quiet", "alarm"]
        assert {check for check, what in of_site[0].checks.items() if what.outcome in ("quiet", "alarm")} >= {
            "received",
            "labels",
            "invg",
        }
        assert "no held-out examples" in of_site[0].checks["members"].text
        assert "no held-out examples" not in of_site[1].checks["members"].text
        page = (tmp_path / name / "fedaudit-guard" / "guard.html").read_text()
        assert "Alarms in 1 of 3 rounds (model that came in): 1 left nevertheless" in page
        assert "of 8 spent" in page

    # the ledger promises what the guards counted
    told = command("ledger", str(app), "--rounds", "3", "--json")
    (promise,) = json.loads(told.out)
    for of_site in lines:
        assert of_site[-1].epsilon == pytest.approx(promise["clients"][0]["curve"][-1][1], rel=1e-6)
        assert of_site[-1].epsilon >= promise["epsilon"]

    # the page's lines; paris audits what the server of the deployment recorded, as a clinic that aggregates
    monkeypatch.syspath_prepend(str(app))
    ledger, audit, swarm, share, join = commands()
    assert command(*ledger).code in (0, 1, None)
    for line in (audit, swarm, share):
        done = command(*line)
        assert done.code in (0, None), done
    part = ("--adversary", "aggregating-client", "--set", "threat.clients=[0]", "--attack", "labels")
    done = command("attack", str(recording), *MODEL, *part, "--out", "paris-audit")
    assert done.code in (0, None), done
    found = {path.name for path in (tmp_path / "paris-audit").glob("*-labels.safetensors")}
    assert found == {"0-1-labels.safetensors", "2-1-labels.safetensors"}  # what clinic 0 sees in its rounds
    done = command("share", "berlin-swarm", "--out", "paris")  # of the server's recording nobody has the truth
    assert done.code in (0, None), done
    done = command(*join)
    assert done.code in (0, None), done
    joined = json.loads((tmp_path / "joined" / "joined.json").read_text())
    assert [one["site"] for one in joined["sites"]] == ["berlin", "paris"]
    assert "aggregates" in (tmp_path / "berlin-swarm" / "report.html").read_text()
