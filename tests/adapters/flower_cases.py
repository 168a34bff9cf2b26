"""Small Flower apps for tests, and the example app with lines added to it as docs/how-to/flower.md says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from string import Template
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
NODES = [1000, 1001, 1002]  # what three of them are called in process

PYPROJECT = """
[project]
name = "tiny"
version = "1.0.0"
[tool.flwr.app]
publisher = "me"
[tool.flwr.app.components]
serverapp = "tiny_app.server:app"
clientapp = "tiny_app.client:app"
[tool.flwr.app.config]
rounds = 2
trouble = ""
nested.rate = 0.5
"""

SERVER = """
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from tiny_app.task import net

app = ServerApp()
RESULT = {}


@app.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=context.run_config["rounds"])
    RESULT["arrays"] = result.arrays
"""

CLIENT = """
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from tiny_app.task import net, data, fit

app = ClientApp()


@app.train()
def train(msg, context):
    model = net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    me, round_ = context.node_config["partition-id"], msg.content["config"]["server-round"]
    x, y = data(me)
    if context.run_config["trouble"] == f"{round_}:{me}":
        raise RuntimeError("the disk is full")
    fit(model, x, y, context.run_config["nested.rate"])
    context.state.setdefault("mine", MetricRecord({"rounds": 0}))
    context.state["mine"]["rounds"] += 1
    metrics = MetricRecord({"num-examples": len(x), "rounds": context.state["mine"]["rounds"]})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=msg)
"""

TASK = """
import torch
from torch import nn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def data(me):
    g = torch.Generator().manual_seed(me)
    return torch.rand(2, 1, 8, 8, generator=g) * 2 - 1, torch.tensor([me % 10, 7])


def fit(model, x, y, rate):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""

# The same, written for Flower's older API.
OLD_CLIENT = """
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
import torch
from tiny_app.task import net, data, fit


class Client(NumPyClient):
    def __init__(self, me):
        self.me = me

    def fit(self, parameters, config):
        model = net()
        model.load_state_dict(dict(zip(model.state_dict(), map(torch.tensor, parameters))))
        fit(model, *data(self.me), 0.5)
        return [v.numpy() for v in model.state_dict().values()], 2, {}


app = ClientApp(client_fn=lambda context: Client(context.node_config["partition-id"]).to_client())
"""

OLD_SERVER = """
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from tiny_app.task import net


def server_fn(context):
    first = ndarrays_to_parameters([v.numpy() for v in net().state_dict().values()])
    strategy = FedAvg(fraction_evaluate=0.0, initial_parameters=first)
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=context.run_config["rounds"]))


app = ServerApp(server_fn=server_fn)
RESULT = {}
"""


def write_app(folder: Path, **changed: Any) -> Path:
    """Write the tiny app; ``changed``: of its files server, client, task and pyproject, what stands in their place."""
    files = {"server": SERVER, "client": CLIENT, "task": TASK} | {k: v for k, v in changed.items() if k != "pyproject"}
    package = folder / "tiny_app"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    (folder / "pyproject.toml").write_text(changed.get("pyproject", PYPROJECT))
    return folder


def replaced(text: str, old: str, new: str) -> str:
    """Return the text with one thing replaced, which must be there."""
    assert old in text, old
    return text.replace(old, new)


def example(folder: Path, **replacements: dict[str, str]) -> Path:
    """Copy the example app; ``replacements``: for server_app, client_app and task, old text to new."""
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, pairs in replacements.items():
        file = folder / "digits_app" / f"{name}.py"
        for old, new in pairs.items():
            file.write_text(replaced(file.read_text(), old, new))
    return folder


def audited(folder: Path, **replacements: dict[str, str]) -> Path:
    """Copy the example app with the lines of audit.patch; ``replacements``: as of :func:`example`."""
    example(folder)
    patch = (folder / "audit.patch").read_text()
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=folder, check=True, timeout=60)
    for name, pairs in replacements.items():
        file = folder / "digits_app" / f"{name}.py"
        for old, new in pairs.items():
            file.write_text(replaced(file.read_text(), old, new))
    return folder


def quickstart(folder: Path, framework: str, datasets: str) -> tuple[Path, dict[str, str]]:
    """Write Flower's own quickstart of ``framework``, of the last Flower that had its template inside.

    Args:
        folder: for it.
        framework: as Flower writes it.
        datasets: what stands in place of ``flwr_datasets``, which downloads.

    Returns:
        The app's folder, and the environment in which it is run.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), "flwr==1.24.0"]
    if subprocess.run(pip, capture_output=True, timeout=120, check=False).returncode:
        pytest.skip("flwr 1.24.0 can't be downloaded")
    name = framework.lower()
    with zipfile.ZipFile(next(folder.glob("flwr-1.24.0*.whl"))) as wheel:
        wheel.extractall(folder, [member for member in wheel.namelist() if f".{name}." in member])
    templates, app = folder / "flwr/cli/new/templates/app", folder / "app"
    (app / "quickstart").mkdir(parents=True)
    (app / "quickstart" / "__init__.py").touch()
    names = {"import_name": "quickstart", "package_name": "quickstart", "project_name": "q", "username": "me",
             "framework_str": framework}  # fmt: skip
    files = {f"code/{part}.{name}.py.tpl": f"quickstart/{part}_app.py" for part in ("client", "server")}
    files |= {f"code/task.{name}.py.tpl": "quickstart/task.py", f"pyproject.{name}.toml.tpl": "pyproject.toml"}
    for template, file in files.items():
        (app / file).write_text(Template((templates / template).read_text()).safe_substitute(names))
    stub = folder / "stub" / "flwr_datasets"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text(datasets)
    (stub / "partitioner.py").write_text(
        "class IidPartitioner:\n    def __init__(self, num_partitions):\n        self.num_partitions = num_partitions\n"
    )
    own = Path(__file__).parents[2] / "src"
    paths = [str(folder / "stub"), str(own), *filter(None, [os.environ.get("PYTHONPATH")])]
    return app, {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
