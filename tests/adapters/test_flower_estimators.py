"""Flower apps of scikit-learn, whose arrays travel without names: recorded, and asked for labels and membership."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file

from fedaudit.utils.errors import BadInput
from tests.adapters.flower_cases import PYPROJECT, replaced, write_app

pytest.importorskip("flwr")
pytestmark = pytest.mark.peers

from fedaudit.adapters.flower import audit_flower  # noqa: E402 (it needs Flower)

QUICK: Any = {"nodes": 3, "controls": False, "progress": False}

TASK = """
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.neural_network import MLPClassifier


def data(me):
    x, y = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(y))[me::10][:120]
    return x[rows[:60]] / 16, y[rows[:60]], x[rows[60:]] / 16, y[rows[60:]]
"""
REGRESSION = """
def made():
    model = LogisticRegression(max_iter=1, warm_start=True, solver="saga")
    model.classes_, model.coef_, model.intercept_ = np.arange(10), np.zeros((10, 64)), np.zeros(10)
    return model

def parameters(model): return [model.coef_, model.intercept_]
def give(model, arrays): model.coef_, model.intercept_ = arrays
def fit(model, x, y): model.fit(x, y)
"""
STEPS = """
def made():
    model = SGDClassifier(random_state=0)
    model.partial_fit(np.zeros((10, 64)), np.arange(10), classes=np.arange(10))
    return model

def parameters(model): return [model.coef_, model.intercept_]
def give(model, arrays): model.coef_, model.intercept_ = arrays
def fit(model, x, y): model.partial_fit(x, y)
"""
NETWORK = """
def made():
    model = MLPClassifier((12,), solver="sgd", random_state=0)
    model.partial_fit(np.zeros((10, 64)), np.arange(10), classes=np.arange(10))
    return model

def parameters(model): return [part for pair in zip(model.coefs_, model.intercepts_) for part in pair]
def give(model, arrays): model.coefs_, model.intercepts_ = list(arrays[::2]), list(arrays[1::2])
def fit(model, x, y): model.partial_fit(x, y)
"""
CLIENT = """
import warnings
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.metrics import accuracy_score
from tiny_app.task import data, fit, give, made, parameters

app = ClientApp()
warnings.simplefilter("ignore")

@app.train()
def train(msg, context):
    model, (x, y, _, _) = made(), data(context.node_config["partition-id"])
    give(model, msg.content["arrays"].to_numpy_ndarrays())
    fit(model, x, y)
    content = {"arrays": ArrayRecord(parameters(model)), "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(RecordDict(content), reply_to=msg)

@app.evaluate()
def evaluate(msg, context):
    model, (_, _, x, y) = made(), data(context.node_config["partition-id"])
    give(model, msg.content["arrays"].to_numpy_ndarrays())
    right = accuracy_score(y, model.predict(x))
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": len(x), "right": right})}), reply_to=msg)
"""
SERVER = """
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from tiny_app.task import made, parameters

app = ServerApp()

@app.main()
def main(grid, context):
    FedAvg().start(grid, ArrayRecord(parameters(made())), num_rounds=context.run_config["rounds"])
"""
OLD_CLIENT = """
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from tiny_app.task import data, fit, give, made, parameters

class Client(NumPyClient):
    def __init__(self, me):
        self.me = me

    def fit(self, arrays, config):
        model, (x, y, _, _) = made(), data(self.me)
        give(model, arrays)
        fit(model, x, y)
        return parameters(model), len(x), {}

    def evaluate(self, arrays, config):
        model, (_, _, x, y) = made(), data(self.me)
        give(model, arrays)
        return 1.0, len(x), {"right": model.score(x, y)}

app = ClientApp(client_fn=lambda context: Client(context.node_config["partition-id"]).to_client())
"""
OLD_SERVER = """
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from tiny_app.task import made, parameters

def server_fn(context):
    strategy = FedAvg(initial_parameters=ndarrays_to_parameters(parameters(made())))
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2))

app = ServerApp(server_fn=server_fn)
"""


@pytest.mark.parametrize(
    ("model", "client", "server", "name"),
    [
        (REGRESSION, CLIENT, SERVER, "LogisticRegression"),
        (REGRESSION, OLD_CLIENT, OLD_SERVER, "LogisticRegression"),
        (STEPS, CLIENT, SERVER, "SGDClassifier"),
        (NETWORK, CLIENT, SERVER, "MLPClassifier"),
    ],
    ids=["regression", "the older interface", "sgd", "network"],
)
def test_an_app_of_scikit_learn_is_asked_for_labels_and_members(tmp_path, model, client, server, name):
    app = write_app(tmp_path / "app", task=TASK + model, client=client, server=server)
    attacks = ["labels", "loss-threshold", "tableak"]
    done = audit_flower(app, attacks=attacks, out=tmp_path / "out", **QUICK).result
    assert done.model.name == name
    status = {(f.attack, f.status) for f in done.findings}
    assert status == {("labels", "done"), ("loss-threshold", "done"), ("tableak", "not applicable")}
    assert any("train by another optimiser" in (f.reason or "") for f in done.findings if f.attack == "tableak")
    (membership,) = (f for f in done.findings if f.attack == "loss-threshold")
    assert {m.of for m in membership.metrics} >= {"records"}
    kept = load_file(tmp_path / "out/recording/truth/candidates.safetensors")
    assert len(kept["seen/candidates/inputs"]) == 180
    recorded = done.federations[0].recording
    assert recorded is not None
    assert recorded.facts == "unverified"


def test_what_trains_without_anything_that_is_watched_is_one_line(tmp_path):
    nothing = replaced(REGRESSION, "def fit(model, x, y): model.fit(x, y)", "def fit(model, x, y): pass")
    app = write_app(tmp_path / "app", task=TASK + nothing, client=CLIENT, server=SERVER, pyproject=PYPROJECT)
    with pytest.raises(BadInput, match="the app trains nothing that fedaudit can watch"):
        audit_flower(app, attacks=["labels"], out=tmp_path / "out", **QUICK)
