"""A job of NVFlare's audited by one call: run by its simulator, watched, recorded and attacked; and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.peers
pytest.importorskip("nvflare", reason="NVFlare isn't installed: pip install 'PATH_OF_THE_CLONE[nvflare]'")

from fedaudit.adapters.nvflare import audit_nvflare  # noqa: E402
from fedaudit.adapters.nvflare.audit import _copied  # noqa: E402
from fedaudit.transcript.transcript import Transcript  # noqa: E402
from fedaudit.utils.errors import BadInput  # noqa: E402
from tests.adapters.nvflare_cases import network, snippets  # noqa: E402

QUICK: dict[str, Any] = {"attacks": ["labels"], "controls": False, "progress": False, "overwrite": True}
API = "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor"
FED_AVG = {"id": "controller", "path": "nvflare.app_common.workflows.fedavg.FedAvg", "args": {"num_clients": 2, "num_rounds": 2}}  # fmt: skip # noqa: E501
PERSISTOR = {
    "id": "persistor",
    "path": "nvflare.app_opt.pt.file_model_persistor.PTFileModelPersistor",
    "args": {"model": {"path": "net.Net", "args": {}}},
}


def job(folder: Path, *filters: dict[str, Any], executor: str = API, **args: Any) -> Path:
    """Write the job of the how-to's page as NVFlare exports it, unmarked; ``filters``: of its results."""
    config, custom = folder / "app" / "config", folder / "app" / "custom"
    config.mkdir(parents=True)
    custom.mkdir()
    for text in snippets("python")[:2]:
        name = text.splitlines()[0].removeprefix("# ")
        text = "\n".join(line for line in text.splitlines() if "adapters.nvflare" not in line)
        (custom / name).write_text(text.replace("with watch():", "if True:"))
    args = {"execution_mode": "in_process", "task_script_path": "train.py", "params_exchange_format": "pytorch"} | args
    chains = [{"tasks": ["train"], "filters": list(filters)}] * bool(filters)
    trains = [{"tasks": ["*"], "executor": {"path": executor, "args": args}}]
    client = {"format_version": 2, "executors": trains, "components": [], "task_result_filters": chains}
    server = {"format_version": 2, "workflows": [FED_AVG], "components": [PERSISTOR]}
    (config / "config_fed_client.json").write_text(json.dumps(client))
    (config / "config_fed_server.json").write_text(json.dumps(server))
    meta = {"name": "digits", "resource_spec": {}, "min_clients": 2, "deploy_map": {"app": ["@ALL"]}}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.mark.slow
def test_a_job_is_audited_by_one_call_and_its_filters_are_known(tmp_path):
    """What leaves is what is recorded: after the job's own filter, which the replay knows."""
    path = "nvflare.app_common.filters.percentile_privacy.PercentilePrivacy"
    own = {"path": path, "args": {"percentile": 50, "gamma": 1.0}}
    filtered = job(tmp_path / "job", own, params_transfer_type="DIFF")
    before = sorted(file.read_bytes() for file in filtered.rglob("*") if file.is_file())
    done = audit_nvflare(filtered, attacked=None, out=tmp_path / "out", **QUICK)
    assert sorted(file.read_bytes() for file in filtered.rglob("*") if file.is_file()) == before
    (federation,) = done.result.federations
    assert federation.recording is not None
    assert federation.recording.clients == ["site-1", "site-2"]
    assert federation.recording.facts == "verified"
    first, second = Transcript.load(tmp_path / "out/recording", network()).rounds
    for update in first.updates:
        assert update.sanitised is not None
        assert update.sanitised.name == "percentile-privacy"
        whole = torch.cat([value.flatten() for value in update.tensors.values()])
        assert float((whole == 0).float().mean()) == pytest.approx(0.5, abs=0.05)
    mean = sum(update.tensors["3.weight"] for update in first.updates) / 2
    assert torch.allclose(first.weights["3.weight"] + mean, second.weights["3.weight"], atol=1e-6)
    assert {finding.round for finding in done.result.findings} == {0, 1}


@pytest.mark.parametrize(
    ("executor", "args", "says"),
    [
        ("nvflare.app_opt.sklearn.sklearn_executor.SKLearnExecutor", {}, "no torch module but scikit-learn's: write"),
        ("nvflare.app_opt.xgboost.tree_based.executor.FedXGBTreeExecutor", {}, "boosted trees: have a Flower app"),
        ("nvflare.app_opt.pt.client_api_launcher_executor.PTClientAPILauncherExecutor", {}, "launch_external_process"),
        (API, {"execution_mode": "external_process"}, "launch_external_process=False"),
    ],
)
def test_what_cant_be_watched_says_what_can_be_done(executor, args, says, tmp_path):
    with pytest.raises(BadInput, match=says) as refused:
        audit_nvflare(job(tmp_path / "job", executor=executor, **args), out=tmp_path / "out", **QUICK)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out/recording").exists()


def test_a_job_that_encrypts_runs_without_and_readers_are_told_who_reads_what(tmp_path):
    encrypt = {"path": "nvflare.app_opt.he.model_encryptor.HEModelEncryptor", "args": {}}
    whole = job(tmp_path / "job", encrypt)
    file = whole / "app/config/config_fed_server.json"
    config = json.loads(file.read_text())
    aggregator = "nvflare.app_opt.he.intime_accumulate_model_aggregator.HEInTimeAccumulateWeightedAggregator"
    config["components"].append({"id": "aggregator", "path": aggregator, "args": {"weigh_by_local_iter": False}})
    file.write_text(json.dumps(config))
    (tmp_path / "place").mkdir()
    copied = _copied(whole, tmp_path / "place")
    assert "the server, which has no key, reads nothing" in copied.notes[0]
    assert copied.threat == {"adversary": "eavesdropper"}
    written = "".join(one.read_text() for one in copied.folder.rglob("*.json"))
    assert "app_opt.he" not in written
    assert "InTimeAccumulateWeightedAggregator" in written
    assert "app_opt.he" in file.read_text()
    shutil.rmtree(tmp_path / "place")


def test_from_the_command_line_a_job_and_an_app_dont_mix(tmp_path, command):
    done = command("audit", "--nvflare", str(tmp_path), "--flower", str(tmp_path))
    assert "--flower: not with --nvflare" in str(done)
    done = command("audit", "--nvflare", str(tmp_path))
    assert "is no NVFlare job" in str(done)
