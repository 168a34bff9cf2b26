"""The job of docs/how-to/nvflare.md, written and run; the filters of a site, outside of NVFlare's processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from torch import nn

import fedaudit
from fedaudit.adapters.nvflare import RecorderFilter, watch
from fedaudit.guard.rounds import SiteRound, read_site

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "nvflare.md").read_text(encoding="utf-8")
SOURCE = str(Path(fedaudit.__file__).parents[1])


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


VALIDATE = """
    with torch.no_grad():
        guesses = model(inputs.new_tensor(digits.images[400:700])[:, None] / 8 - 1).argmax(dim=1)
        print("accuracy", (guesses == torch.tensor(digits.target[400:700])).float().mean())
"""


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


def others() -> tuple[torch.Tensor, torch.Tensor]:
    """Return digits that no training has."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.images[100:], dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target[100:])


def rounds_of(folder: str = "fedaudit-guard") -> list[SiteRound]:
    return read_site(Path(folder)).rounds
