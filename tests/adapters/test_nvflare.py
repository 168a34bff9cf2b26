"""NVFlare's simulator with two sites on the job of docs/how-to/nvflare.md; the filters on their own."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

pytestmark = pytest.mark.peers
pytest.importorskip("nvflare", reason="NVFlare isn't installed: pip install 'PATH_OF_THE_CLONE[nvflare]'")

from nvflare.apis.dxo import DXO, DataKind, from_shareable  # noqa: E402
from nvflare.apis.filter import ContentBlockedException, FilterChainType, FilterContextKey  # noqa: E402
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReservedKey, ReturnCode  # noqa: E402
from nvflare.apis.fl_context import FLContext  # noqa: E402
from nvflare.apis.shareable import Shareable, make_reply  # noqa: E402
from nvflare.apis.utils.task_utils import apply_filters  # noqa: E402
from nvflare.apis.workspace import Workspace  # noqa: E402
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe  # noqa: E402
from nvflare.private.fed.app.fl_conf import create_privacy_manager  # noqa: E402

import fedaudit  # noqa: E402
import fedaudit.adapters.nvflare.site as of_site  # noqa: E402
from fedaudit.adapters.nvflare import GuardFilter, RecorderFilter, watch  # noqa: E402
from fedaudit.capture.capture import current_mode  # noqa: E402
from fedaudit.pipeline.site import read_site, site_account  # noqa: E402
from fedaudit.results.site import SiteRound  # noqa: E402
from fedaudit.utils.errors import BadInput  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "nvflare.md").read_text(encoding="utf-8")
SOURCE = str(Path(fedaudit.__file__).parents[1])


@pytest.fixture(autouse=True)
def _a_process_of_its_own():
    yield
    for evaluation in of_site._evaluations.values():
        evaluation.stop()
    for kept in (of_site._evaluations, of_site._wanted, of_site._validated):
        kept.clear()
    of_site._looked.clear()
    of_site._turn = None


def snippets(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def write_job(folder: Path, **edits: list[tuple[str, str]]) -> None:
    """Write the page's files; ``edits``: what is written otherwise, by file."""
    for text in snippets("python"):
        file = text.splitlines()[0].removeprefix("# ")
        text = text.replace("/tmp/recordings", str(folder / "recordings"))
        text = text.replace("/tmp/simulation", str(folder / "simulation"))
        for old, new in edits.get(file.removesuffix(".py"), ()):
            assert old in text
            text = text.replace(old, new)
        (folder / file).write_text(text, encoding="utf-8")


def python(folder: Path, file: str, timeout: float = 150) -> str:
    """Run a file of the job; return what it and all its processes said."""
    environment = os.environ | {"PYTHONPATH": f"{SOURCE}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, file],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def final_model(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = (folder / "simulation").rglob("FL_global_model.pt")
    saved: dict[str, torch.Tensor] = torch.load(file, weights_only=False)["model"]
    return saved


def network() -> nn.Sequential:
    """Return net.py's."""
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(512, 10))


def a_round(state: dict[str, torch.Tensor], site: int) -> dict[str, torch.Tensor]:
    """Train as train.py does, here."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs = torch.tensor(digits.images[4 * site : 4 * site + 4], dtype=torch.float32)[:, None] / 8 - 1
    model = network()
    model.load_state_dict(state)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.cross_entropy(model(inputs), torch.tensor(digits.target[4 * site : 4 * site + 4])).backward()
    optimiser.step()
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.timeout(180)
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


VALIDATE = """
    with torch.no_grad():
        guesses = model(inputs.new_tensor(digits.images[400:700])[:, None] / 8 - 1).argmax(dim=1)
        print("accuracy", (guesses == torch.tensor(digits.target[400:700])).float().mean())
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
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
@pytest.mark.timeout(300)
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
@pytest.mark.timeout(600)
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
@pytest.mark.timeout(180)
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
@pytest.mark.timeout(180)
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


# --- the filters on their own ---


STATE = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.zeros(2), "count": torch.tensor(3)}


def context(site: str = "site-1", job: str = "job-1") -> FLContext:
    made = FLContext()
    made.set_prop(ReservedKey.IDENTITY_NAME, site)
    made.set_prop(ReservedKey.RUN_NUM, job)
    return made


def shareable(data: dict[str, Any], kind: str = DataKind.WEIGHTS, index: int | None = 0) -> Shareable:
    made = DXO(kind, data).to_shareable()
    if index is not None:
        made.set_header("current_round", index)
    return made


def in_chain(made: Any, chain: str) -> Any:
    made.set_prop(FilterContextKey.CHAIN_TYPE, chain)
    return made


def pair(*arguments: Any, kind: Any = RecorderFilter, **settings: Any) -> tuple[Any, Any]:
    return (
        in_chain(kind(*arguments, **settings), FilterChainType.TASK_DATA_CHAIN),
        in_chain(kind(*arguments, **settings), FilterChainType.TASK_RESULT_CHAIN),
    )


def rounds(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("round-*.json"))]


def test_weights_and_differences_are_recorded_and_nothing_is_changed(tmp_path):
    received, leaving = pair(str(tmp_path))
    arrays = {name: tensor.numpy() for name, tensor in STATE.items()}
    for index, kind in enumerate((DataKind.WEIGHTS, DataKind.WEIGHT_DIFF)):
        came, goes = shareable(arrays, index=index), shareable({"weight": np.full((2, 3), 7.0, np.float32)}, kind, None)
        before = pickle.dumps(came), pickle.dumps(goes)
        assert received.process(came, context()) is came
        assert leaving.process(goes, context()) is goes
        assert (pickle.dumps(came), pickle.dumps(goes)) == before
    folder = tmp_path / "job-1" / "site-1"
    first, second = rounds(folder)
    assert [r["index"] for r in (first, second)] == [0, 1]
    assert [r["messages"][0]["form"] for r in (first, second)] == ["weights", "difference"]
    assert load_file(folder / second["messages"][0]["file"])["weight"].equal(torch.full((2, 3), 7.0))
    sent = load_file(folder / second["weights"])
    assert all(sent[name].equal(tensor) for name, tensor in STATE.items())


def test_sites_and_runs_have_recordings_of_their_own_and_every_skips(tmp_path):
    received, leaving = pair(str(tmp_path), every=2)
    for index in (0, 1, 2, 0):  # at last the job is run again
        for site in ("site-1", "site-2"):
            if index == 0:
                from fedaudit.adapters.nvflare import recorder

                recorder._recorders.clear()  # a process of its own
            received.process(shareable(STATE, index=index), context(site))
            leaving.process(shareable(STATE, index=index), context(site))
    found = {path.name: [r["index"] for r in rounds(path)] for path in (tmp_path / "job-1").iterdir()}
    assert found == {"site-1": [0, 2], "site-2": [0, 2], "site-1-2": [0], "site-2-2": [0]}


def test_the_recorder_fails_open_and_says_it_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    received, leaving = pair(str(tmp_path / "file"))
    other = pair(str(tmp_path / "fine"))
    with caplog.at_level(logging.WARNING, logger="fedaudit.nvflare"):
        for index in range(2):
            for came, goes in ((received, leaving), other):
                goes_out = shareable({"weight": b"encrypted"}, index=index) if came is other[0] else shareable(STATE)
                came.process(shareable(STATE, index=index), context())
                assert goes.process(goes_out, context()) is goes_out
    assert len(caplog.records) == 2
    assert "'weight' is bytes, no array" in caplog.text
    failed, odd = make_reply(ReturnCode.EXECUTION_EXCEPTION), Shareable()
    several = DXO(DataKind.COLLECTION, {"a": DXO(DataKind.WEIGHTS, STATE)}).to_shareable()
    for thing in (failed, odd, several, shareable({"a": 1.0}, DataKind.METRICS)):
        assert leaving.process(thing, context()) is thing
    with caplog.at_level(logging.WARNING, logger="fedaudit.nvflare"):
        other[1].process(shareable(STATE), context("site-9"))
    assert "add the filter to the task data, too" in caplog.text
    assert not list((tmp_path / "fine").rglob("round-*.json"))


def site_policy(folder: Path) -> Any:
    """Return the scope that NVFlare makes of the page's privacy.json."""
    (text,) = snippets("json")
    (folder / "local").mkdir()
    (folder / "startup").mkdir()
    (folder / "local" / "privacy.json").write_text(text)
    from nvflare.apis.workspace import Workspace

    manager = create_privacy_manager(Workspace(str(folder), site_name="site-1"), names_only=False)
    assert manager.get_scope("anything else") is None
    return manager.get_scope(None)


def test_the_page_s_site_policy_guards_every_job_and_runs_first(tmp_path, caplog):
    scope, seen = site_policy(tmp_path), []

    class OfTheJob(RecorderFilter):
        def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
            seen.append(shareable)
            return shareable

    guarded = context()
    guarded.set_prop(FLContextKey.SCOPE_OBJECT, scope)
    of_job = {"train" + FilterKey.DELIMITER + FilterKey.OUT: [OfTheJob(str(tmp_path))]}
    came, goes = shareable(STATE), shareable(STATE)
    assert apply_filters("task_data_filters", came, guarded, {}, "train", FilterKey.IN) is came
    for unreadable in (goes, Shareable({"a": [0.5] * 101}), DXO(DataKind.APP_DEFINED, {"a": 1}).to_shareable()):
        with pytest.raises(ContentBlockedException, match="the site's guard didn't let this update leave"):
            apply_filters("task_result_filters", unreadable, guarded, of_job, "train", FilterKey.OUT)
    assert not seen
    metrics = shareable({"accuracy": 0.5}, DataKind.METRICS)
    assert apply_filters("task_result_filters", metrics, guarded, of_job, "validate", FilterKey.OUT) is metrics
    failed = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    assert apply_filters("task_result_filters", failed, guarded, of_job, "train", FilterKey.OUT) is failed


torch.manual_seed(0)
NETWORK = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def trained(examples: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the state before and after a step that was watched."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    before = {name: tensor.clone() for name, tensor in NETWORK.state_dict().items()}
    optimiser = torch.optim.SGD(NETWORK.parameters(), lr=0.1)
    with watch():
        optimiser.zero_grad()
        inputs = torch.tensor(digits.images[:examples], dtype=torch.float32)[:, None] / 16
        nn.functional.cross_entropy(NETWORK(inputs), torch.tensor(digits.target[:examples])).backward()
        optimiser.step()
    return before, {name: tensor.clone() for name, tensor in NETWORK.state_dict().items()}


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_the_guard_blocks_what_it_could_rebuild_and_changes_nothing(kind, tmp_path, caplog):
    """One example through a fully connected layer: its gradient is the example."""
    caplog.set_level(logging.INFO, logger="fedaudit.nvflare")
    for on_fail in ("warn", "refuse"):
        settings = {
            "attacks": [{"name": "invg", "iterations": 150}],
            "on_fail": on_fail,
            "out": str(tmp_path / "reports"),
            "reports": True,
            "share": None,
        }
        received, leaving = pair(kind=GuardFilter, **settings)
        before, after = trained(1)
        sent = after if kind == DataKind.WEIGHTS else {name: after[name] - before[name] for name in after}
        goes, state = shareable(sent, kind), torch.get_rng_state()
        received.process(shareable(before), context())
        bits = pickle.dumps(goes)
        if on_fail == "warn":
            assert leaving.process(goes, context()) is goes
            assert "it leaves nevertheless" in caplog.text
        else:
            with pytest.raises(ContentBlockedException):
                leaving.process(goes, context())
            assert "it doesn't leave" in caplog.text
        assert pickle.dumps(goes) == bits
        assert torch.get_rng_state().equal(state)
    assert (tmp_path / "reports" / "job-1" / "site-1-round-0" / "report.html").is_file()


def test_a_received_model_that_looks_manipulated_is_told_of_or_blocked(caplog):
    caplog.set_level(logging.INFO, logger="fedaudit.nvflare")
    before, _ = trained(1)
    name = [n for n, tensor in before.items() if tensor.ndim == 2][-1]
    altered = {**before, name: before[name].clone()}
    altered[name][1:] = 0.0
    for policy in ("warn", "refuse", "ignore"):
        received, _ = pair(kind=GuardFilter, on_received=policy)
        came = shareable(before)
        assert received.process(came, context()) is came
        assert not caplog.text
        goes = shareable(altered)
        if policy == "refuse":
            with pytest.raises(ContentBlockedException, match="didn't let this model in"):
                received.process(goes, context())
        else:
            assert received.process(goes, context()) is goes
        assert ("suspicious: silent outputs" in caplog.text) == (policy != "ignore")
        caplog.clear()


def agreed() -> nn.Module:
    """Return the network that the sites agreed on."""
    return NETWORK


def held() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a site's examples."""
    return torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(32, dtype=torch.int64)


def test_the_agreed_network_and_own_examples_tell_more_of_a_received_model(caplog):
    caplog.set_level(logging.INFO, logger="fedaudit.nvflare")
    before, _ = trained(1)
    names = [name for name, tensor in before.items() if tensor.ndim == 1]
    wrong = {**before, names[-1]: torch.tensor([-100.0] + [0.0] * 9)}
    both = {"agreed": f"{__name__}:agreed", "examples": f"{__name__}:held"}
    cases: list[tuple[dict[str, Any], dict[str, torch.Tensor], str]] = [
        ({}, {**before, "more": torch.zeros(3)}, ""),
        (both, {**before, "more": torch.zeros(3)}, "architecture"),
        ({"agreed": agreed()}, wrong, ""),
        ({"agreed": agreed(), "examples": held()}, wrong, "loss"),
        (both, wrong, "loss"),
        (both, before, ""),
    ]
    for settings, state, says in cases:
        caplog.clear()
        received, _ = pair(kind=GuardFilter, on_received="refuse", **settings)
        came = shareable(state)
        if says:
            with pytest.raises(ContentBlockedException):
                received.process(came, context())
            assert f"suspicious: {says}" in caplog.text
        else:
            assert received.process(came, context()) is came
            assert not caplog.text
    received, _ = pair(kind=GuardFilter, on_received="refuse", **both)
    changes = {name: 0.01 * torch.randn_like(tensor) for name, tensor in wrong.items()}
    difference = shareable(changes, DataKind.WEIGHT_DIFF)
    assert received.process(difference, context()) is difference  # no model to try on examples
    with pytest.raises(BadInput, match="agreed"):
        GuardFilter(agreed="nowhere:Net")


def others() -> tuple[torch.Tensor, torch.Tensor]:
    """Return digits that no training has."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.images[100:], dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target[100:])


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_own_examples_that_an_update_tells_are_warned_of_or_blocked(kind, caplog):
    caplog.set_level(logging.INFO, logger="fedaudit.nvflare")
    settings: dict[str, Any] = {"attacks": [], "held_out": f"{__name__}:others", "share": None, "every": 2}
    for on_fail in ("warn", "refuse"):
        caplog.clear()
        received, leaving = pair(kind=GuardFilter, on_fail=on_fail, **settings)
        for index in range(2):
            before, after = trained(4)
            sent = after if kind == DataKind.WEIGHTS else {name: after[name] - before[name] for name in after}
            received.process(shareable(before, index=index), context())
            goes, state = shareable(sent, kind, index), torch.get_rng_state()
            bits = pickle.dumps(goes)
            if on_fail == "warn":
                assert leaving.process(goes, context()) is goes
            else:
                with pytest.raises(ContentBlockedException):
                    leaving.process(goes, context())
            assert pickle.dumps(goes) == bits
            assert torch.get_rng_state().equal(state)
            assert f"site-1, round {index}: which examples were trained on can be told: span has AUC" in caplog.text
    with pytest.raises(BadInput, match="give held_out="):
        GuardFilter(attacks=["loss-series"])


def test_what_the_guard_doesn_t_audit_leaves_or_not_as_the_site_says(caplog):
    caplog.set_level(logging.INFO, logger="fedaudit.nvflare")
    received, leaving = pair(kind=GuardFilter, share=None, out=None, largest=3)
    before, after = trained(4)
    received.process(shareable(before), context())
    goes = shareable(after)
    assert leaving.process(goes, context()) is goes
    assert "not audited, and leaves: the update is over 4 examples, and largest is 3" in caplog.text
    received, closed = pair(kind=GuardFilter, share=None, out=None, largest=3, on_fail="refuse")
    trained(4)
    received.process(shareable(before), context())
    with pytest.raises(ContentBlockedException):  # who refuses lets nothing leave that wasn't looked into
        closed.process(goes, context())
    received, unmeasured = pair(kind=GuardFilter, share=None, out=None, on_fail="refuse", attacks=["labels"])
    start, end = trained(1)
    received.process(shareable(start), context())
    with pytest.raises(ContentBlockedException):
        unmeasured.process(shareable(end), context())
    assert "fail_on can't be exceeded by what ran" in caplog.text
    received, leaving = pair(kind=GuardFilter, share=None, out=None, largest=3)
    trained(4)
    received.process(shareable(before), context())
    assert leaving.process(goes, context()) is goes
    received.process(shareable(before), context())
    assert leaving.process(goes, context()) is goes  # the training that was watched is another round's
    assert "not audited, and leaves: no training was seen" in caplog.text
    _, second = pair(kind=GuardFilter, share=None, out=None, unaudited="refuse", every=2)
    for index in range(4):  # whatever the server calls the round
        if index % 2:
            assert second.process(goes, context()) is goes
        else:
            with pytest.raises(ContentBlockedException):
                second.process(goes, context())
    _, strict = pair(kind=GuardFilter, share=None, out=None, unaudited="refuse", attacks=["r-gap"])
    trained(1)
    with pytest.raises(ContentBlockedException):
        strict.process(shareable(after), context())
    assert "none of the attacks can be run against it" in caplog.text
    _, strict = pair(
        kind=GuardFilter, share=None, out=None, unaudited="refuse", attacks=[{"name": "invg", "iterations": 1}]
    )
    trained(1)
    with pytest.raises(ContentBlockedException):  # what leaves isn't what was watched
        strict.process(shareable({name: tensor + 1 for name, tensor in after.items()}), context())
    assert "doesn't follow from the training that was watched" in caplog.text
    wrong_words: list[dict[str, Any]] = [{"attacks": ["invgg"]}, {"fail_on": "revealed"}, {"fail_above": {"x": 1}}]
    wrong_words += [{"on_received": "stop"}, {"on_fail": "stop"}, {"unaudited": "no"}, {"every": 0}, {"largest": 0}]
    for wrong in wrong_words:
        with pytest.raises(BadInput):
            GuardFilter(**wrong)


def as_failure(made: Shareable) -> Shareable:
    made.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    return made


def test_what_leaves_under_another_name_is_held_to_the_policy(caplog):
    """Weights of a failed task are read by whoever receives them; so are weights that are called metrics."""
    settings: dict[str, Any] = {"attacks": [{"name": "invg", "iterations": 150}], "on_fail": "refuse", "share": None}
    received, leaving = pair(kind=GuardFilter, **settings)
    before, after = trained(1)
    received.process(shareable(before), context())
    with pytest.raises(ContentBlockedException, match="didn't let this update leave"):
        leaving.process(as_failure(shareable(after)), context())
    assert rounds_of()[-1].alarms == ["invg"]  # it was attacked
    histogram = {"a": {"histogram": [float(n) for n in range(101)]}}
    weights = {name: value.numpy() for name, value in after.items()}
    for kind, data in (
        (DataKind.METRICS, weights),
        (DataKind.STATISTICS, histogram),
        (DataKind.PSI, {"items": b"x" * 1000}),
        (DataKind.APP_DEFINED, {"a": 1}),
    ):
        with pytest.raises(ContentBlockedException):
            leaving.process(shareable(data, kind), context())
        assert rounds_of()[-1].done == "refused"
        assert rounds_of()[-1].checks["result"].text == f"{kind.value}: no weights in plain sight"
    lines = len(rounds_of())
    metrics = shareable({"accuracy": np.float64(0.5), "by_class": [0.5] * 90}, DataKind.METRICS)
    bare = Shareable()  # what a task of control answers
    for passes in (metrics, as_failure(Shareable()), as_failure(shareable({"accuracy": 0.5}, DataKind.METRICS)), bare):
        assert leaving.process(passes, context()) is passes
    assert len(rounds_of()) == lines
    headed = as_failure(Shareable())
    headed.set_header("weights", weights)
    with pytest.raises(ContentBlockedException):
        leaving.process(headed, context())
    _, open_ = pair(kind=GuardFilter)
    goes = shareable(histogram, DataKind.STATISTICS)
    assert open_.process(goes, context()) is goes
    assert "not audited, and leaves: STATISTICS: no weights in plain sight" in caplog.text


def test_a_budget_stops_what_no_filter_adds_noise_to():
    """NVFlare's filters of weights pass over failures and other kinds, whatever the site says of its updates."""
    noise = {"name": "dp", "clip": 1.0, "noise": 8.0, "epsilon": None}
    received, leaving = pair(
        kind=GuardFilter, attacks=["labels"], unaudited="pass", sanitised=noise, target_epsilon=100.0
    )
    before, after = trained(1)
    for goes, done in (
        (shareable(after), "left"),
        (as_failure(shareable(after)), "stopped"),
        (shareable(after, DataKind.METRICS), "stopped"),
        (shareable({"a": DXO(DataKind.METRICS, dict(after))}, DataKind.COLLECTION), "stopped"),
    ):
        received.process(shareable(before), context())
        with contextlib.suppress(ContentBlockedException):
            leaving.process(goes, context())
        assert rounds_of()[-1].done == done


def rounds_of(folder: str = "fedaudit-guard") -> list[SiteRound]:
    return read_site(Path(folder)).rounds


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_clipping_scales_the_change_of_what_raised_an_alarm(kind):
    bound = 1e-3
    received, leaving = pair(
        kind=GuardFilter, attacks=["labels"], fail_above={"label_accuracy": 0.01}, on_fail="clip", clip_norm=bound
    )
    before, after = trained(4)
    sent = {name: (after[name] if kind == DataKind.WEIGHTS else after[name] - before[name]).numpy() for name in after}
    received.process(shareable(before), context())
    goes = shareable(sent, kind)
    bits = pickle.dumps(goes)
    left = from_shareable(leaving.process(goes, context())).data
    assert pickle.dumps(goes) == bits  # what the training made stays as it is
    assert [type(value) for value in left.values()] == [type(value) for value in sent.values()]
    begin = {name: before[name].numpy() if kind == DataKind.WEIGHTS else 0.0 for name in left}
    change = torch.cat([torch.as_tensor(left[name] - begin[name]).flatten() for name in left])
    was = torch.cat([(after[name] - before[name]).flatten() for name in left])
    assert change.norm() == pytest.approx(bound, rel=1e-2)
    assert torch.cosine_similarity(change, was, dim=0) > 0.999
    (line,) = rounds_of()
    assert (line.done, line.alarms) == ("clipped", ["labels"])
    assert line.norm == pytest.approx(float(was.norm()), rel=1e-5)


def test_a_budget_outlasts_the_process_and_stops_before_the_round_that_would_exceed_it(caplog):
    noise = {"name": "dp", "clip": 1.0, "noise": 5.0, "epsilon": None}
    account = site_account([("dp", {key: value for key, value in noise.items() if key != "name"})], 1, None)
    assert account is not None
    before, after = trained(1)
    for index in range(4):  # each with filters of its own, as a process has that begins anew
        received, leaving = pair(
            kind=GuardFilter, attacks=["labels"], unaudited="pass", sanitised=noise, target_epsilon=account.spent(2)
        )
        received.process(shareable(before, index=index), context())
        if index < 2:
            leaving.process(shareable(after, index=index), context())
        else:
            with pytest.raises(ContentBlockedException, match="privacy budget doesn't allow another update"):
                leaving.process(shareable(after, index=index), context())
    assert [one.done for one in rounds_of()] == ["left", "left", "stopped", "stopped"]
    assert [one.epsilon for one in rounds_of()] == [account.spent(1), account.spent(2), None, None]


NOISE = {"path": "nvflare.app_common.filters.svt_privacy.SVTPrivacy", "args": {"fraction": 0.2}}


def configured(folder: Path, scope: list[dict[str, Any]], filters: list[dict[str, Any]], job: str) -> FLContext:
    """Return the context of a site whose privacy.json and whose job have these filters of results."""
    for part in ("startup", "local"):
        (folder / part).mkdir(parents=True)
    workspace = Workspace(str(folder), site_name="site-1")
    policy = Path(workspace.get_site_config_dir()) / "privacy.json"
    policy.parent.mkdir(parents=True, exist_ok=True)
    scopes = [{"name": "a", "task_result_filters": scope}, {"name": "b", "task_result_filters": []}]
    policy.write_text(json.dumps({"scopes": scopes, "default_scope": "a"}))
    config = Path(workspace.get_app_config_dir(job)) / "config_fed_client.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({"task_result_filters": [{"tasks": ["train"], "filters": filters}]}))

    class Engine:
        def get_workspace(self) -> Workspace:
            return workspace

    class Scope:
        name = "a"

    here = context(job=job)
    here.set_prop(ReservedKey.ENGINE, Engine(), private=True, sticky=False)
    here.set_prop(FLContextKey.SCOPE_OBJECT, Scope())
    return here


def test_filters_around_the_guard_are_read_of_the_site_and_of_the_job(tmp_path):
    guard = {"path": "fedaudit.adapters.nvflare.GuardFilter", "args": {}}
    largest = {"path": "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy", "args": {}}
    here = configured(tmp_path, [largest, guard], [NOISE], "job-1")
    before, after = of_site.filters_around(here, "GuardFilter")
    assert [kind for kind, _ in before] == ["PercentilePrivacy"]
    assert after == [("SVTPrivacy", {"fraction": 0.2})]
    assert of_site.filters_around(context(), "GuardFilter") == ([], [])


@pytest.mark.parametrize("kind", [GuardFilter, RecorderFilter])
@pytest.mark.parametrize("by", ["the site", "the job"])
def test_whole_weights_of_which_a_filter_leaves_nothing_are_told_once_a_job(tmp_path, caplog, kind, by):
    filters: tuple[Any, Any] = ([NOISE], []) if by == "the site" else ([], [NOISE])
    words = () if kind is GuardFilter else (str(tmp_path / "recordings"),)
    before, after = trained(1)
    moved = {name: after[name] - before[name] for name in after}
    told = []
    for job, sent, form in (("a", after, DataKind.WEIGHTS), ("b", moved, DataKind.WEIGHT_DIFF)):
        here = configured(tmp_path / job, *filters, job)
        received, leaving = pair(*words, kind=kind)
        for index in range(2):
            received.process(shareable(before, index=index), here)
            leaving.process(shareable(sent, form, index=index), here)
        told += [line for line in caplog.messages if "TransferType.DIFF" in line]
        caplog.clear()
    (line,) = told
    assert line.startswith("fedaudit: a: SVTPrivacy clips each number at 1e-05 a local step: of whole weights")


def test_what_a_site_validates_on_is_held_out_for_the_guard_and_recorded_too(tmp_path):
    received, leaving = pair(kind=GuardFilter, attacks=[], share=None)
    came, left = pair(str(tmp_path / "recording"))
    for index in range(3):
        before = dict(NETWORK.state_dict())
        for one in (received, came):
            one.process(shareable(before, index=index), context())
        _, after = trained(4)
        with torch.no_grad():
            nn.functional.cross_entropy(NETWORK(others()[0]), others()[1])
        for one in (leaving, left):
            one.process(shareable(after, index=index), context())
    assert [one.checks["members"].outcome for one in rounds_of()] == 3 * ["alarm"]
    assert (tmp_path / "recording" / "job-1" / "site-1" / "truth" / "candidates.safetensors").is_file()


def test_validation_between_trainings_is_kept_once_and_the_guards_attacks_are_none(tmp_path):
    inputs, targets = torch.rand(30, 1, 8, 8), torch.arange(30) % 10
    path = tmp_path / "job-1" / "site-1" / "truth" / "candidates.safetensors"
    received, leaving = pair(str(tmp_path))
    for index in range(3):
        received.process(shareable(dict(NETWORK.state_dict()), index=index), context())
        _, after = trained(4)
        if index == 1:
            with of_site.no_validation(), torch.no_grad():  # as the guard attacks
                nn.functional.cross_entropy(NETWORK(torch.rand(2, 1, 8, 8)), targets[:2])
            with torch.no_grad():
                nn.functional.cross_entropy(NETWORK(inputs), targets)
        leaving.process(shareable(after, index=index), context())
        assert path.exists() == (index > 0)
    assert load_file(path)["seen/candidates/inputs"].equal(inputs)
    assert load_file(path)["seen/candidates/targets"].equal(targets)
    assert current_mode() is None


SITES = [("job-1", "site-1"), ("job-1", "site-2"), ("job-2", "site-1")]


def held_out(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(number)), torch.arange(20) % 10


def validate(number: int) -> None:
    inputs, targets = held_out(number)
    with torch.no_grad():
        nn.functional.cross_entropy(NETWORK(inputs), targets)


@pytest.mark.parametrize("first", [False, True])
def test_each_of_several_sites_and_jobs_in_one_process_has_what_it_validates_on(tmp_path, first):
    """They take turns, as in the simulator; they validate what they trained, or first of all what came in."""
    chains = [pair(str(tmp_path)) for _ in SITES]
    for index in range(3):
        for number, ((job, site), (received, leaving)) in enumerate(zip(SITES, chains, strict=True)):
            received.process(shareable(dict(NETWORK.state_dict()), index=index), context(site, job))
            if first:
                validate(number)
            _, after = trained(4)
            if not first:
                validate(number)
            leaving.process(shareable(after, index=index), context(site, job))
    for number, (job, site) in enumerate(SITES):
        kept = load_file(tmp_path / job / site / "truth" / "candidates.safetensors")
        inputs, targets = held_out(number)
        assert kept["seen/candidates/inputs"].equal(inputs)
        assert kept["seen/candidates/targets"].equal(targets)
    assert not of_site._validated
    assert not of_site._evaluations
    assert current_mode() is None


def test_sites_that_train_in_threads_of_their_own_have_what_they_validate_on(tmp_path):
    """As scripts do that the Client API runs in process: the filters run in another thread."""
    chains = [pair(str(tmp_path)) for _ in SITES]
    with contextlib.ExitStack() as stack:
        scripts = [stack.enter_context(ThreadPoolExecutor(1)) for _ in SITES]
        for index in range(3):
            for number, ((job, site), (received, leaving)) in enumerate(zip(SITES, chains, strict=True)):
                received.process(shareable(dict(NETWORK.state_dict()), index=index), context(site, job))
                _, after = scripts[number].submit(trained, 4).result()
                scripts[number].submit(validate, number).result()
                leaving.process(shareable(after, index=index), context(site, job))
                validate(9)  # elsewhere
        for number, (job, site) in enumerate(SITES):
            kept = load_file(tmp_path / job / site / "truth" / "candidates.safetensors")
            assert kept["seen/candidates/inputs"].equal(held_out(number)[0])
        assert not of_site._validated
        assert not any(evaluation.passes for evaluation in of_site._evaluations.values())
        for script in scripts:
            script.submit(trained, 4).result()
            assert script.submit(current_mode).result() is None
    assert not of_site._evaluations
