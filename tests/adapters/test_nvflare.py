"""NVFlare's simulator with two sites on the job of docs/how-to/nvflare.md, from the recording to the audit."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.peers
pytest.importorskip("nvflare", reason="NVFlare isn't installed: pip install 'PATH_OF_THE_CLONE[nvflare]'")

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe  # noqa: E402

import fedaudit  # noqa: E402
from fedaudit.guard.rounds import read_site  # noqa: E402
from tests.adapters.nvflare_cases import VALIDATE, a_round, final_model, network, python, write_job  # noqa: E402


@pytest.mark.slow
def test_the_page_s_job_is_recorded_and_audited_in_the_simulator(tmp_path, monkeypatch):
    older = "model" not in inspect.signature(FedAvgRecipe.__init__).parameters  # 2.7.0
    write_job(tmp_path, job=[("model=", "initial_model=")] if older else [])
    said = python(tmp_path, "job.py")
    assert "not recorded" not in said
    logs = "".join(file.read_text() for file in (tmp_path / "simulation").rglob("log.txt"))  # 2.7 doesn't show them
    times = re.findall(r"fedaudit recorder: (site-\d, round \d): \d+ ms", logs)
    assert sorted(set(times)) == [f"site-{site}, round {index}" for site in (1, 2) for index in (0, 1)]
    start: dict[str, torch.Tensor] = {}
    for site in (1, 2):
        folder = tmp_path / "recordings" / "simulate_job" / f"site-{site}"
        for index in (0, 1):
            (message,) = json.loads((folder / f"round-{index:05d}.json").read_text())["messages"]
            assert (message["name"], message["form"], message["num_examples"]) == (f"site-{site}", "weights", 4)
            sent = load_file(folder / f"round-{index:05d}-global.safetensors")
            update = load_file(folder / message["file"])
            assert all(update[k].equal(v) for k, v in a_round(sent, site).items())
        start = sent
    both = [a_round(start, site) for site in (1, 2)]
    for name, tensor in final_model(tmp_path).items():
        assert torch.as_tensor(tensor).allclose((both[0][name] + both[1][name]) / 2, atol=1e-6)
    monkeypatch.syspath_prepend(tmp_path)
    audit = runpy.run_path(str(tmp_path / "audit.py"))["audit"]
    assert audit.result.federations[0].recording.facts == "verified"
    assert [row.attack for row in audit.result.summaries] == ["labels", "invg"]
    assert audit.result.summaries[1].verdict == "recovered"


@pytest.mark.slow
def test_what_a_site_validates_on_is_asked_who_was_in(tmp_path):
    """It validates the model that it was sent, before each training, and its script has no further line of ours."""
    from sklearn.datasets import load_digits

    older = "model" not in inspect.signature(FedAvgRecipe.__init__).parameters  # 2.7.0
    more = [
        ("4 * site : 4 * site + 4", "40 * site : 40 * site + 40"),
        ("    optimiser =", f"{VALIDATE}    optimiser ="),
    ]
    write_job(tmp_path, train=more, job=[("model=", "initial_model=")] if older else [])
    assert "not recorded" not in python(tmp_path, "job.py")
    digits = load_digits()
    for site in (1, 2):
        folder = tmp_path / "recordings" / "simulate_job" / f"site-{site}"
        kept = load_file(folder / "truth" / "candidates.safetensors")
        given = torch.tensor(digits.images[400:700], dtype=torch.float32)[:, None] / 8 - 1
        assert kept["seen/candidates/inputs"].equal(given)
        assert kept["seen/candidates/targets"].equal(torch.tensor(digits.target[400:700]))
    finished = fedaudit.audit_transcript(folder, ["loss-threshold"], module=network(), rounds=[1], progress=False)
    (result,) = finished.result.findings
    assert (result.status, result.metrics[0].of) == ("done", "records")


MONAI = Path(__file__).parents[2] / "examples" / "monai"


@pytest.mark.slow
def test_the_example_of_monai_is_recorded_and_replayed_to_the_same_bits(tmp_path, monkeypatch, command):
    pytest.importorskip("monai")
    shutil.copytree(MONAI, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    job = (tmp_path / "job.py").read_text().replace("/tmp/recordings", str(tmp_path / "recordings"))
    (tmp_path / "job.py").write_text(job.replace("/tmp/simulation", str(tmp_path / "simulation")))
    assert "not recorded" not in python(tmp_path, "job.py", timeout=250)
    monkeypatch.syspath_prepend(tmp_path)
    sites = tmp_path / "recordings" / "simulate_job"
    assert (sites / "site-2" / "truth" / "candidates.safetensors").is_file(), "what it validates on"
    words = ["attack", sites / "site-1", "--model", "monai_app.task:Net", "--attack", "dlg-adam", "--no-controls"]
    words += ["--set", "iterations=2", "--loss", "monai_app.task:criterion", "--out", tmp_path / "out"]
    try:
        done = command(*map(str, words))
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "monai_app"]:
            del sys.modules[name]
    assert done.code in (0, None), done
    assert "reconstruct training volumes" in done.out
    (federation,) = json.loads((tmp_path / "out" / "results.json").read_text())["federations"]
    assert (federation["recording"]["facts"], federation["replay_error"]) == ("verified", 0.0)


@pytest.mark.slow
def test_two_sites_from_the_guard_to_the_joined_page(tmp_path, monkeypatch, command):
    """Guards with a budget and their pages, the job's ledger, audits of the recordings by who sees a part, one page."""
    older = "model" not in inspect.signature(FedAvgRecipe.__init__).parameters  # 2.7.0
    noisy = """    guard = GuardFilter(target_epsilon=1e6)
    recipe.add_client_input_filter(guard, tasks=["train"])
    recipe.add_client_output_filter(guard, tasks=["train"])
    record ="""
    job = [("import RecorderFilter", "import GuardFilter, RecorderFilter"), ("    record =", noisy)]
    # SVTPrivacy clips what it gets at 1e-5: of whole weights nothing would be left, which the guards notice.
    job += [("from net import Net", "from net import Net\nfrom nvflare.client.config import TransferType")]
    job += [("min_clients=2,", "min_clients=2, params_transfer_type=TransferType.DIFF,")]
    job += [
        (
            "    recipe.execute",
            f"""    from nvflare.app_common.filters.svt_privacy import SVTPrivacy

    recipe.add_client_output_filter(SVTPrivacy(), tasks=["train"])  # after the recorder: what follows can be replayed
    recipe.export("{tmp_path / "exported"}")
    recipe.execute""",
        )
    ]
    write_job(
        tmp_path,
        job=job + ([("model=", "initial_model=")] if older else []),
        train=[("    optimiser =", f"{VALIDATE}    optimiser =")],
    )
    assert "not recorded" not in python(tmp_path, "job.py", timeout=500)
    (policy,) = (tmp_path / "exported").rglob("meta.json")
    told = command("ledger", str(policy.parent), "--rounds", "2", "--parameters", "5210", "--json")
    promised = json.loads(told.out)[0]["clients"][0]["curve"][-1][1]
    pages = list(tmp_path.rglob("guard.html"))
    written = [line for page in pages for line in read_site(page.parent).rounds]
    audits = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for number, name in ((1, "berlin"), (2, "paris")):
        lines = [line for line in written if line.site == f"site-{number}"]
        assert [(line.index, line.done) for line in lines] == [(0, "left"), (1, "left")]
        assert [line.checks["received"].outcome for line in lines] == ["quiet", "quiet"]
        assert lines[0].checks["invg"].outcome in ("quiet", "alarm")
        assert "no held-out examples" not in lines[1].checks["members"].text
        assert lines[1].epsilon == pytest.approx(promised, rel=1e-6)
        assert any(f"site-{number}" in page.read_text() for page in pages)
        recording = tmp_path / "recordings" / "simulate_job" / f"site-{number}"
        words = ["attack", recording, "--model", "net:Net", "--attack", "labels", "--attack", "invg", "--no-controls"]
        words += ["--set", "iterations=20", "--set", "threat.rounds=[1]", "--out", f"{name}-audit"]
        try:
            done = command(*map(str, words))
        finally:
            sys.modules.pop("net", None)
        assert done.code in (0, None), done
        audits.append(json.loads((tmp_path / f"{name}-audit" / "results.json").read_text()))
        done = command("share", f"{name}-audit", "--out", name, "--truth", str(recording / "truth"))
        assert done.code in (0, None), done
    for audit in audits:
        assert {finding["round"] for finding in audit["findings"]} == {1}, "it came late"
        assert audit["federations"][0]["recording"]["facts"] == "verified"
    done = command("join", "berlin", "paris", "--out", "joined")
    assert done.code in (0, None), done
    joined = json.loads((tmp_path / "joined" / "joined.json").read_text())
    assert [one["site"] for one in joined["sites"]] == ["berlin", "paris"]


SEVERAL_NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.rest = nn.Linear(64, 12), nn.Linear(12 + 2, 10)

    def forward(self, patient):
        seen = self.image(patient["image"].flatten(1)).relu()
        return self.rest(torch.cat([seen, patient["age and sex"]], dim=1))
"""


@pytest.mark.slow
def test_a_module_that_takes_a_dictionary_is_recorded_and_reported(tmp_path):
    patient = '{"image": inputs, "age and sex": inputs[:, 0, 3:5, 4]}'
    write_job(tmp_path, train=[("model(inputs)", f"model({patient})")])
    (tmp_path / "net.py").write_text(SEVERAL_NET)
    assert "not recorded" not in python(tmp_path, "job.py")
    names: dict[str, Any] = {}
    exec(SEVERAL_NET, names)
    folder = tmp_path / "recordings" / "simulate_job" / "site-2"
    out = tmp_path / "out"
    asked: Any = {"module": names["Net"](), "out": out, "controls": False, "progress": False}
    audit = fedaudit.audit_transcript(folder, ["labels", {"name": "invg", "iterations": 20}], **asked)
    (federation,) = audit.result.federations
    assert federation.recording is not None
    assert (federation.recording.facts, federation.replay_error) == ("verified", 0.0)
    assert [f.status for f in audit.result.findings] == ["done"] * len(audit.result.findings)
    assert "age and sex" in (out / "report.html").read_text()
    kept = load_file(folder / "truth" / "round-00001-client-00000.safetensors")
    from sklearn.datasets import load_digits

    images = torch.tensor(load_digits().images[8:12], dtype=torch.float32) / 8 - 1
    (packed,) = (value for key, value in kept.items() if key.endswith("inputs"))
    assert packed.equal(torch.cat([images[:, 3:5, 4], images.flatten(1)], dim=1))  # in the order of the names


@pytest.mark.slow
def test_a_refusal_fails_one_site_s_task_and_not_the_job(tmp_path):
    """Site 2 is guarded and never watched, which its guard doesn't let pass: the model is site 1's alone."""
    seeded = [("from torch import nn", "import torch\nfrom torch import nn")]
    seeded += [("        super()", "        torch.manual_seed(0)\n        super()")]
    write_job(tmp_path, train=[("with watch():", "if True:")], net=seeded)
    job = REFUSED_JOB.replace("SIMULATION", str(tmp_path / "simulation"))
    (tmp_path / "job.py").write_text(job, encoding="utf-8")
    said = python(tmp_path, "job.py")
    assert len(re.findall(r"fedaudit guard: site-2, round \w+: not audited, and doesn't leave: no training", said)) == 2
    torch.manual_seed(0)
    want: dict[str, torch.Tensor] = network().state_dict()
    for _ in range(2):
        want = a_round(want, 1)
    for name, tensor in final_model(tmp_path).items():
        assert torch.as_tensor(tensor).allclose(want[name], atol=1e-6)


REFUSED_JOB = """
from net import Net
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.pt.job_config.model import PTModel
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from nvflare.job_config.script_runner import ScriptRunner
from fedaudit.adapters.nvflare import GuardFilter

if __name__ == "__main__":
    job = FedJob(name="digits", min_clients=1)
    job.to_server(PTModel(Net()))
    job.to_server(FedAvg(num_clients=2, num_rounds=2, ignore_result_error=True))
    for site in ("site-1", "site-2"):
        job.to(ScriptRunner(script="train.py"), site)
    guard = GuardFilter(unaudited="refuse", on_received="refuse", agreed="net:Net")
    job.to(guard, "site-2", filter_type=FilterType.TASK_DATA, tasks=["train"])
    job.to(guard, "site-2", filter_type=FilterType.TASK_RESULT, tasks=["train"])
    job.simulator_run("SIMULATION", threads=2)
"""
