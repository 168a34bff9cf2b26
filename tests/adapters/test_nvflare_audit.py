"""A job of NVFlare's audited by one call: run by its simulator, watched, recorded and attacked; and what is refused."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.peers
pytest.importorskip("nvflare", reason="NVFlare isn't installed: pip install 'PATH_OF_THE_CLONE[nvflare]'")

from fedaudit.adapters.nvflare import audit_nvflare  # noqa: E402
from fedaudit.adapters.nvflare.audit import _copied  # noqa: E402
from fedaudit.capture.estimators import Estimator  # noqa: E402
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
        (
            "nvflare.app_opt.xgboost.histogram_based_v2.fed_executor.FedXGBHistogramExecutor",
            {},
            "gradients and hessians",
        ),
        ("nvflare.app_opt.pt.client_api_launcher_executor.PTClientAPILauncherExecutor", {}, "launch_external_process"),
        (API, {"execution_mode": "external_process"}, "launch_external_process=False"),
    ],
)
def test_what_cant_be_watched_says_what_can_be_done(executor, args, says, tmp_path):
    refused(job(tmp_path / "job", executor=executor, **args), says, tmp_path)


@pytest.mark.parametrize(
    ("assembler", "says"),
    [
        ("kmeans_assembler.KMeansAssembler", "centres and sizes of clusters"),
        ("svm_assembler.SVMAssembler", "rows that"),
    ],
)
def test_what_no_attack_asks_about_is_refused_by_the_server_that_reads_it(assembler, says, tmp_path):
    whole = job(tmp_path / "job")
    edited(whole, components=[{"id": "assembler", "path": f"nvflare.app_opt.sklearn.{assembler}", "args": {}}])
    refused(whole, says, tmp_path)


def refused(whole: Path, says: str, folder: Path) -> None:
    with pytest.raises(BadInput, match=says) as why:
        audit_nvflare(whole, out=folder / "out", **QUICK)
    assert "\n" not in str(why.value)
    assert not (folder / "out/recording").exists()


def edited(whole: Path, file: str = "server", **changes: Any) -> None:
    """Write other values into a job's configuration."""
    path = whole / f"app/config/config_fed_{file}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


LINEAR = """
import nvflare.client as flare
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import roc_auc_score

flare.init()
site, digits = int(flare.get_site_name()[-1]), load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
x, y = digits.data[order] / 16, (digits.target[order] > 4).astype(int)
own, others = slice(60 * site, 60 * site + 60), slice(60 * site + 600, 60 * site + 660)
while flare.is_running():
    received = flare.receive().params
    model = SGDClassifier(loss="log_loss", eta0=0.1, learning_rate="constant")
    if "coef" in received:
        model.coef_, model.intercept_, model.classes_ = received["coef"], received["intercept"], np.arange(2)
        print(roc_auc_score(y[others], model.decision_function(x[others])))
    else:
        model.coef_, model.intercept_ = np.zeros((1, 64)), np.zeros(1)
    for _ in range(3):
        model.partial_fit(x[own], y[own], classes=np.arange(2))
    flare.send(flare.FLModel(params={"intercept": model.intercept_, "coef": model.coef_}))
"""


@pytest.mark.slow
def test_a_job_of_scikit_learn_is_asked_for_members_and_begins_at_nothing(tmp_path):
    """In the first round settings travel in place of weights; two runs of one seed are the same."""
    whole = job(tmp_path / "job", params_exchange_format="raw")
    (whole / "app/custom/train.py").write_text(LINEAR)
    persistor = "nvflare.app_opt.sklearn.joblib_model_param_persistor.JoblibModelParamPersistor"
    edited(whole, components=[{"id": "persistor", "path": persistor, "args": {"initial_params": {"eta0": 0.1}}}])
    asked = QUICK | {"attacks": ["loss-threshold"], "attacked": None}
    done = audit_nvflare(whole, out=tmp_path / "out", **asked)
    model = Estimator("SGDClassifier", [(1, 64), (1,)], None)
    first, second = Transcript.load(tmp_path / "out/recording", model).rounds
    assert not any(value.any() for value in first.weights.values())
    for name, value in second.weights.items():
        mean = torch.stack([update.tensors[name] for update in first.updates]).mean(dim=0)
        assert bool(mean.any())
        torch.testing.assert_close(value, first.weights[name] + mean)
    assert {m.of for finding in done.result.findings for m in finding.metrics} >= {"records"}
    audit_nvflare(whole, out=tmp_path / "again", **asked)
    again, _ = Transcript.load(tmp_path / "again/recording", model).rounds
    for one, other in zip(first.updates, again.updates, strict=True):
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


LOADER = """
import xgboost
from nvflare.app_opt.xgboost.data_loader import XGBDataLoader
from sklearn.datasets import load_breast_cancer

class Loader(XGBDataLoader):
    def load_data(self):
        x, y = load_breast_cancer(return_X_y=True)
        own = slice(30 * self.rank, 30 * self.rank + 30)
        return xgboost.DMatrix(x[own], y[own]), xgboost.DMatrix(x[400:], y[400:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "messages"), [("bagging", 4), ("cyclic", 4)])
def test_a_job_of_boosted_trees_is_audited_like_an_app(mode, messages, tmp_path, monkeypatch):
    """Rows that the sites' processes trained on give the trees that they sent; in turns each message is a round."""
    pytest.importorskip("tensorboard", reason="NVFlare's xgboost needs it: pip install tensorboard")
    (tmp_path / "loader.py").write_text(LOADER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "loader", raising=False)
    loader = importlib.import_module("loader")
    from nvflare.app_opt.xgboost.recipes import XGBBaggingRecipe
    from nvflare.recipe import set_per_site_config

    recipe = XGBBaggingRecipe("trees", 2, mode, num_rounds=2, local_subsample=1.0, nthread=1)
    set_per_site_config(recipe, {f"site-{i}": {"data_loader": loader.Loader()} for i in (1, 2)})
    recipe.export(str(tmp_path / "jobs"))
    done = audit_nvflare(tmp_path / "jobs/trees", out=tmp_path / "out", **QUICK | {"attacks": ["timberstrike"]})
    (federation,) = done.result.federations
    assert federation.recording is not None
    assert federation.recording.clients == ["site-1", "site-2"]
    assert federation.recording.facts == "verified"
    assert federation.updates_observed == messages
    assert federation.rounds == (2 if mode == "bagging" else 4)
    assert federation.learning_rate == pytest.approx(0.05 if mode == "bagging" else 0.1)
    assert {finding.client for finding in done.result.findings} == {0, 1}


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
