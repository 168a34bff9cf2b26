"""An audit from Python leaves the process that asked for it as it was.

What other libraries do to a process when they are imported is theirs: here they are imported beforehand.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys

import pytest
import torch

from fedaudit.evaluation.image_metrics import ssim

AUDIT = """\
import ctypes, json, os, random, sys, warnings
import matplotlib, numpy, torch
import rich.progress, scipy.sparse, sklearn.metrics, torchmetrics.functional.image
import torch._dynamo, torch._inductor.compiler_bisector, torch.fx.experimental.proxy_tensor

torch.manual_seed(5); numpy.random.seed(6); random.seed(7)
torch.set_num_threads(2)
matplotlib.use("svg")
warnings.filterwarnings("error", message="mine")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 32, 3, padding=1)
        self.more = torch.nn.Conv2d(32, 32, 3, padding=1)
        self.fc = torch.nn.Linear(32 * 144, 10)
    def forward(self, x):
        return self.fc(torch.relu(self.more(torch.relu(self.conv(x)))).flatten(1))

def state():
    return {
        "operators": [n for n in torch._C._dispatch_get_all_op_names() if n.split("::")[0] in FOREIGN],
        "random": [hash(random.getstate()), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()],
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "warnings": [str(f) for f in warnings.filters],
        "backend": matplotlib.get_backend(),
        "rc": {k: str(v) for k, v in matplotlib.rcParams.items()},
        "environment": dict(os.environ),
        "path": sys.path[:],
        "folder": os.getcwd(),
        "hooks": [str(sys.excepthook), str(sys.displayhook)],
        "called in C": sorted({"mallopt", "prctl"} & called),
    }

called = set()
asked = ctypes.CDLL.__getattr__
ctypes.CDLL.__getattr__ = lambda library, name: called.add(name) or asked(library, name)

FOREIGN = ("fedaudit", "torchvision")
model, inputs, labels = Model(), torch.rand(40, 1, 12, 12), torch.arange(40) % 10
before = state()
import fedaudit
if __name__ == "__main__":
    done = fedaudit.audit(
        model=model, data=(inputs, labels), workers=int(sys.argv[1]), out=sys.argv[2], progress=False,
        federations=[{"name": "sgd", "clients": 2, "examples": 2, "batch_size": 1}],
        attacks=[{"name": "invg", "iterations": 25}, {"name": "agic", "iterations": 2}],
    )
    assert all(f.status == "done" for f in done.result.findings)
    after = state()
    print(json.dumps({key: [before[key], after[key]] for key in before if before[key] != after[key]}))
"""


STRANGER = """\
import torch
if not hasattr(torch.ops.torchvision, "nms"):
    raise RuntimeError("operator torchvision::nms does not exist")
"""


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_an_audit_leaves_the_process_as_it_was(workers, tmp_path):
    script = tmp_path / "own.py"
    script.write_text(AUDIT)
    done = subprocess.run(
        [sys.executable, script, str(workers), tmp_path / "out"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}


MISFIT = """\
import sys, torch
from pathlib import Path
from fedaudit.evaluation.image_metrics import lpips, lpips_missing, ssim

images = torch.load(sys.argv[1])
folder = Path(torch.hub.get_dir()) / "checkpoints"
folder.mkdir(parents=True)
(folder / "alexnet-owt-7be5be79.pth").touch()
print([ssim(*images).tolist(), lpips(*images), lpips_missing(), hasattr(torch.ops.torchvision, "nms")])
"""


@pytest.mark.slow
def test_beside_a_torchvision_that_does_not_fit_torch_lpips_is_missing_and_no_more(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(STRANGER)
    (tmp_path / "own.py").write_text(MISFIT)
    images = torch.rand(2, 3, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    torch.save(images, tmp_path / "images.pt")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, tmp_path / "own.py", tmp_path / "images.pt"],
        env={**os.environ, "PYTHONPATH": paths, "TORCH_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    structure, perceptual, reason, changed = ast.literal_eval(done.stdout)
    assert (structure, perceptual, changed) == (ssim(*images).tolist(), None, False)
    assert "fits your torch" in reason
